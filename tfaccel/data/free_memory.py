"""How much memory images may take now, on this machine and on a replica's GPU.

free_bytes(Device("/gpu:0", 0))
"""

import os
import pathlib

import psutil
import pynvml
import tensorflow as tf

from tfaccel.runtime import Device


def free_bytes(device: Device, num_local: int = 1) -> int:
    """Returns the bytes that may be taken for images: on the host, and on the replica's GPU.

    Args:
      device: of the replica.
      num_local: processes that share the host's.
    """
    on_host = min([psutil.virtual_memory().available, *cgroup_rooms()]) // num_local
    if device.cuda_ordinal is None:
        return on_host
    pynvml.nvmlInit()
    try:
        name = nvml_name(device.cuda_ordinal, os.environ.get("CUDA_VISIBLE_DEVICES"))
        by = pynvml.nvmlDeviceGetHandleByIndex
        by = pynvml.nvmlDeviceGetHandleByUUID if isinstance(name, str) else by
        free = pynvml.nvmlDeviceGetMemoryInfo(by(name)).free
    finally:
        pynvml.nvmlShutdown()
    return min(on_host, free, _limit_bytes(device) or free)


def cgroup_rooms(
    groups: pathlib.Path = pathlib.Path("/proc/self/cgroup"),
    root: pathlib.Path = pathlib.Path("/sys/fs/cgroup"),
) -> list[int]:
    """Returns the bytes left below each memory limit that a container or a scheduler set.

    Of what a group uses, pages of files make way and count as free, but for those of /dev/shm and
    other tmpfs. The names are those of the Linux kernel's admin-guide/cgroup-v2.rst and
    cgroup-v1/memory.rst.

    Args:
      groups: the file that names this process's groups: "0::/path" in version 2, "4:memory:/path"
        in version 1.
      root: the folder of groups. A container may see its own in the place of all.
    """
    rooms = []
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, kind, path = line.split(":", 2)
        if kind and "memory" not in kind.split(","):
            continue
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_shmem")
        names = names if kind else ("memory.max", "memory.current", "file", "shmem")
        own = pathlib.PurePath(path.lstrip("/"))
        for folder in dict.fromkeys(root / kind / each for each in (own, *own.parents, "")):
            room = _room(folder, *names)
            rooms += [] if room is None else [room]
    return rooms


def _room(folder: pathlib.Path, limit: str, used: str, cache: str, shared: str) -> int | None:
    try:
        allowed, taken = ((folder / name).read_text().strip() for name in (limit, used))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:  # no such group here, or the kernel's root, which has no limit
        return None
    pages = int(stat.get(cache, 0)) - int(stat.get(shared, 0))
    return None if allowed == "max" else max(0, int(allowed) - int(taken) + pages)


def nvml_name(cuda_ordinal: int, cuda_visible_devices: str | None) -> int | str:
    """Returns what NVML calls a GPU, an index or a UUID, by its place among those CUDA sees."""
    if not cuda_visible_devices:
        return cuda_ordinal
    name = cuda_visible_devices.split(",")[cuda_ordinal].strip()
    return int(name) if name.isdigit() else name


def _limit_bytes(device: Device) -> int | None:
    """Returns the limit that `memory` in RuntimeConfig sets on TensorFlow's part of a GPU."""
    gpus = tf.config.get_visible_devices("GPU")
    place = int(device.name.rpartition(":")[2])
    limits = tf.config.get_logical_device_configuration(gpus[place]) if place < len(gpus) else None
    limit = limits[0].memory_limit if limits else None
    return None if limit is None else int(limit) << 20
