"""The compute capability of the GPUs that a step runs on."""

from collections.abc import Sequence

import tensorflow as tf

LEAST_CAPABILITY = (8, 0)  # of a GPU for which kernels are chosen: Ampere, the first with bfloat16


def capability_for_kernels(devices: Sequence[str]) -> tuple[int, int] | None:
    """Returns the least compute capability of devices, such as (9, 0).

    Returns None if one is no GPU, or one for which no kernels are chosen.

    Args:
      devices: TensorFlow's names of devices in this process.
    """
    found = [_capability(each) for each in devices]
    return None if None in found or min(found) < LEAST_CAPABILITY else min(found)


def _capability(device: str) -> tuple[int, int] | None:
    spec = tf.DeviceSpec.from_string(device)
    if spec.device_type != "GPU":
        return None
    gpu = tf.config.get_visible_devices("GPU")[spec.device_index]
    return tf.config.experimental.get_device_details(gpu).get("compute_capability")
