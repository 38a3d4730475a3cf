"""Reads how much memory this machine and a replica's GPU have.

free_bytes(Device("/gpu:0", 0))     # free for images
all_bytes(Device("/gpu:0", 0))      # free and used
mib(2**30)                          # "1,024 MiB"
"""

import os

import psutil
import pynvml
import tensorflow as tf

from tfaccel.process.cgroups import memory_rooms
from tfaccel.runtime.devices import Device


def free_bytes(device: Device, num_local: int = 1) -> int:
    """Returns the bytes that images may take, which the host and the replica's GPU both have free.

    Args:
      device: the replica's device.
      num_local: number of processes that share the host's memory.
    """
    on_host = min([psutil.virtual_memory().available, *memory_rooms()]) // num_local
    if device.cuda_ordinal is None:
        return on_host
    free = _gpu_memory(device).free
    return min(on_host, free, _limit_bytes(device) or free)


def all_bytes(device: Device) -> int:
    """Returns the total bytes of a replica's device: of its GPU, or of the host."""
    if device.cuda_ordinal is None:
        return min([psutil.virtual_memory().total, *memory_rooms()])
    return _gpu_memory(device).total


def _gpu_memory(device: Device):
    """Returns NVML's counts for the GPU: .free and .total, in bytes."""
    pynvml.nvmlInit()
    try:
        name = nvml_name(device.cuda_ordinal, os.environ.get("CUDA_VISIBLE_DEVICES"))
        by = pynvml.nvmlDeviceGetHandleByIndex
        by = pynvml.nvmlDeviceGetHandleByUUID if isinstance(name, str) else by
        return pynvml.nvmlDeviceGetMemoryInfo(by(name))
    finally:
        pynvml.nvmlShutdown()


def nvml_name(cuda_ordinal: int, cuda_visible_devices: str | None) -> int | str:
    """Returns NVML's name of a GPU, an index or a UUID, from the GPU's ordinal in CUDA."""
    if not cuda_visible_devices:
        return cuda_ordinal
    name = cuda_visible_devices.split(",")[cuda_ordinal].strip()
    return int(name) if name.isdigit() else name


def _limit_bytes(device: Device) -> int | None:
    """Returns the limit on TensorFlow's share of a GPU that RuntimeConfig's `memory` sets."""
    gpus = tf.config.get_visible_devices("GPU")
    place = int(device.name.rpartition(":")[2])
    limits = tf.config.get_logical_device_configuration(gpus[place]) if place < len(gpus) else None
    limit = limits[0].memory_limit if limits else None
    return None if limit is None else int(limit) << 20


def mib(num_bytes: int) -> str:
    """Returns a text for an amount of memory: "1,024 MiB"."""
    return f"{num_bytes / 2**20:,.0f} MiB"
