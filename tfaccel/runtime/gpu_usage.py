"""Memory in use and utilisation of this process's GPUs, as the driver tells them.

Takes the replicas' devices; gives the numbers of each GPU, or none, where the driver has none.

    usage = GpuUsage(runtime.devices)
    usage.read()    # (Usage(memory_mib=40213, memory_total_mib=143771, utilisation=0.97),)

CUDA's ordinals and NVML's indices differ where CUDA_VISIBLE_DEVICES or CUDA_DEVICE_ORDER is set, so
that each GPU is found by its UUID, which both know.
"""

import ctypes
import dataclasses
import logging
import uuid
from collections.abc import Callable, Sequence

import pynvml

from tfaccel.runtime.devices import Device

log = logging.getLogger("tfaccel")


@dataclasses.dataclass(frozen=True)
class Usage:
    """One GPU's.

    Attributes:
      memory_mib: in use, by whichever process.
      memory_total_mib: that there is.
      utilisation: 0..1, part of the last moment (up to a second) in which a kernel ran.
    """

    memory_mib: int
    memory_total_mib: int
    utilisation: float


class GpuUsage:
    """Reads the numbers as often as it is asked."""

    def __init__(self, devices: Sequence[Device], *, load: Callable = ctypes.CDLL, nvml=pynvml):
        """Finds the GPUs. Where that fails, it says so once, and there are no numbers.

        Args:
          devices: of this process's replicas; those that are no GPU have no numbers.
          load: opens a shared library by its name.
          nvml: the module that asks NVML.
        """
        self._nvml, self._handles = nvml, []
        ordinals = [each.cuda_ordinal for each in devices if each.cuda_ordinal is not None]
        if not ordinals:
            return
        try:
            uuids = cuda_uuids(ordinals, load)
            nvml.nvmlInit()
            self._handles = [nvml.nvmlDeviceGetHandleByUUID(each.encode()) for each in uuids]
            self.read()  # now, so that a GPU that tells only a part is known at the start
        except (OSError, AttributeError, nvml.NVMLError) as error:
            self._stop(error)

    def read(self) -> tuple[Usage, ...]:
        """Returns each GPU's numbers, in the order of the devices; none where there are none."""
        try:
            return tuple(map(self._read, self._handles))
        except self._nvml.NVMLError as error:
            self._stop(error)
            return ()

    def _read(self, handle) -> Usage:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        return Usage(
            memory_mib=memory.used >> 20,
            memory_total_mib=memory.total >> 20,
            utilisation=self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
        )

    def _stop(self, error: Exception) -> None:
        self._handles = []
        log.warning(
            "GPU usage: not in the logs, because the driver does not tell it (%s); a slice of a GPU"
            " (MIG) has none of its own",
            error,
        )


def cuda_uuids(ordinals: Sequence[int], load: Callable = ctypes.CDLL) -> list[str]:
    """Returns the UUID of each GPU, as NVML writes it, from the CUDA driver.

    Args:
      ordinals: what CUDA calls the GPUs.
      load: opens a shared library by its name.

    Raises:
      OSError: there is no driver, or it refuses.
      AttributeError: it is older than CUDA 11.4, and has no such function.
    """
    cuda = load("libcuda.so.1")
    _check(cuda.cuInit(0), "cuInit")
    found = []
    for ordinal in ordinals:
        device, raw = ctypes.c_int(), ctypes.create_string_buffer(16)
        _check(cuda.cuDeviceGet(ctypes.byref(device), ordinal), "cuDeviceGet")
        # Of a MIG slice, _v2 tells the slice's own UUID, where the older one tells the GPU's.
        _check(cuda.cuDeviceGetUuid_v2(raw, device), "cuDeviceGetUuid_v2")
        found.append(f"GPU-{uuid.UUID(bytes=raw.raw)}")
    return found


def _check(code: int, function: str) -> None:
    if code != 0:
        raise OSError(f"{function} returned {code}")
