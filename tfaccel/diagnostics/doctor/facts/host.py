"""The machine around the GPUs: cores, memory, limits, the cache folder, GPUDirect Storage.

read_host(os.environ).cores    # the number of cores that this process may use
"""

import dataclasses
import json
import math
import os
import pathlib
import resource
import shutil
import sys
from collections.abc import Mapping, Sequence
from ctypes.util import find_library

import psutil

from tfaccel.diagnostics.doctor.facts.files import text
from tfaccel.process.cache_folder import cache_folder
from tfaccel.process.cgroups import cpu_quota, memory_rooms

CUFILE = "libcufile.so.0"
NVIDIA_FS = "/proc/driver/nvidia-fs/stats"


@dataclasses.dataclass(frozen=True)
class Host:
    """The facts about the host.

    Attributes:
      cores: the number of cores that this process may run on.
      cpu_quota: the number of cores that a container may keep busy, e.g. 2.5; None if unlimited.
      memory_total: bytes.
      memory_available: bytes that are available without swapping.
      memory_room: bytes left below the limit of a container or a scheduler; None if unlimited.
      shm_total: bytes of /dev/shm; 0 if it does not exist.
      shm_free: the free bytes of /dev/shm.
      open_files: how many files a process may open.
      open_files_hard: the number to which a process may raise open_files itself.
      cache: tfaccel's cache folder.
      cache_free: the free bytes on its disk.
      cache_writable: whether the cache folder, or its nearest existing parent, is writable.
      gpus_on_bus: the number of NVIDIA cards on the PCI bus, with or without a driver.
      cufile: the path or the name of the library of GPUDirect Storage; None if it is missing.
      nvidia_fs: whether the kernel module of GPUDirect Storage is loaded.
      keras_backend: the backend in Keras's settings file; None if the file names no backend.
    """

    cores: int
    cpu_quota: float | None
    memory_total: int
    memory_available: int
    memory_room: int | None
    shm_total: int
    shm_free: int
    open_files: int
    open_files_hard: int
    cache: pathlib.Path
    cache_free: int
    cache_writable: bool
    gpus_on_bus: int
    cufile: str | None
    nvidia_fs: bool
    keras_backend: str | None


def read_host(environment: Mapping[str, str]) -> Host:
    """Reads the facts from the kernel and from files."""
    memory = psutil.virtual_memory()
    shm = pathlib.Path("/dev/shm")
    shm_usage = shutil.disk_usage(shm) if shm.is_dir() else None
    soft, hard = (
        math.inf if each == resource.RLIM_INFINITY else each
        for each in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    cache = cache_folder("")
    # Path.is_dir would raise if this user may not enter a parent folder.
    existing = next(each for each in (cache, *cache.parents) if os.path.isdir(each))
    return Host(
        cores=len(os.sched_getaffinity(0)),
        cpu_quota=cpu_quota(),
        memory_total=memory.total,
        memory_available=memory.available,
        memory_room=min(memory_rooms(), default=None),
        shm_total=shm_usage.total if shm_usage else 0,
        shm_free=shm_usage.free if shm_usage else 0,
        open_files=soft,
        open_files_hard=hard,
        cache=cache,
        cache_free=shutil.disk_usage(existing).free,
        cache_writable=os.access(existing, os.W_OK),
        gpus_on_bus=_gpus_on_bus(),
        cufile=_cufile(),
        nvidia_fs=os.path.exists(NVIDIA_FS),
        keras_backend=_keras_backend(environment),
    )


def _gpus_on_bus(devices: pathlib.Path = pathlib.Path("/sys/bus/pci/devices")) -> int:
    """Counts NVIDIA's (0x10de) display and 3D controllers (class 0x03)."""
    folders = devices.iterdir() if devices.is_dir() else ()
    return sum(
        text(each / "vendor") == "0x10de" and text(each / "class").startswith("0x03")
        for each in folders
    )


def _cufile(path: Sequence[str] | None = None) -> str | None:
    """Finds libcufile in the wheel nvidia-cufile-cu12 or in the system, without loading it."""
    folders = sys.path if path is None else path
    wheels = (os.path.join(each, "nvidia/cufile/lib", CUFILE) for each in folders)
    return next(filter(os.path.exists, wheels), None) or find_library("cufile")


def _keras_backend(environment: Mapping[str, str]) -> str | None:
    home = pathlib.Path(environment.get("KERAS_HOME") or "~/.keras").expanduser()
    try:
        return json.loads(text(home / "keras.json")).get("backend")
    except (ValueError, AttributeError):
        return None  # no such file, or no such settings
