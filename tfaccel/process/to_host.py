"""Tensors of a device to the host, without a thread that waits in the device's driver.

    to_host = make_to_host(tensor.device)
    numbers = to_host({"loss": loss, "codes": codes})     # waits, for what was queued before

Eagerly, as by `tensor.numpy()`, TensorFlow first waits in the driver until the device is done with
everything, also with what was queued after the tensor was. Within a function the copy is queued
behind what the device has to do by then, and its end is an event that TensorFlow looks for anyway.
"""

import functools
from collections.abc import Callable

import tensorflow as tf


def make_to_host(device: str) -> Callable:
    """Returns the function of a nest of tensors, or None, that gives their copies on the host.

    Args:
      device: of the tensors, as one of them says; of several workers, this one's.
    """
    spec = tf.DeviceSpec.from_string(device)
    return _to(spec.replace(device_type="CPU", device_index=0).to_string())


@functools.cache  # traced anew by each `fit`, or for each GPU, it would be warned of by TensorFlow
def _to(host: str) -> Callable:
    @tf.function(autograph=False)
    def to_host(tensors):
        with tf.device(host):
            return tf.nest.map_structure(
                lambda each: None if each is None else tf.identity(each), tensors
            )

    return to_host
