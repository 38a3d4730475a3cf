"""Copies tensors from a device to the host without waiting in the device's driver.

    to_host = make_to_host(tensor.device)
    numbers = to_host({"loss": loss, "codes": codes})     # waits only for earlier work

In eager mode, as in `tensor.numpy()`, TensorFlow waits in the driver until the device has finished
all its work, including work that was queued after the tensor. In a tf.function, the copy is queued
behind the earlier work, and its end is an event, which TensorFlow polls anyway.
"""

import functools
from collections.abc import Callable

import tensorflow as tf


def make_to_host(device: str) -> Callable:
    """Returns a function that copies a nest of tensors, or of None, to the host.

    Args:
      device: the device of the tensors; with several workers, a device of this worker.
    """
    spec = tf.DeviceSpec.from_string(device)
    return _to(spec.replace(device_type="CPU", device_index=0).to_string())


@functools.cache  # TensorFlow warns if each `fit` or GPU traces it again
def _to(host: str) -> Callable:
    @tf.function(autograph=False)
    def to_host(tensors):
        with tf.device(host):
            return tf.nest.map_structure(
                lambda each: None if each is None else tf.identity(each), tensors
            )

    return to_host
