"""Memory use and utilisation of this process's GPUs, from the driver.

    usage = GpuUsage(runtime.devices)
    usage.read()    # (Usage(memory_mib=40213, memory_total_mib=143771, utilisation=0.97),)

CUDA's ordinals and NVML's indices differ if CUDA_VISIBLE_DEVICES or CUDA_DEVICE_ORDER is set.
Therefore each GPU is found by its UUID, which both know.
"""

import ctypes
import dataclasses
import logging
import uuid
from collections.abc import Callable, Sequence

import pynvml

from tfaccel.runtime.cuda_driver import check, opened
from tfaccel.runtime.devices import Device

log = logging.getLogger("tfaccel")


@dataclasses.dataclass(frozen=True)
class Usage:
    """The numbers of one GPU.

    Attributes:
      memory_mib: memory that all processes use.
      memory_total_mib: memory that the GPU has.
      utilisation: the part of the last moment (up to a second) in which a kernel ran, 0 to 1.
    """

    memory_mib: int
    memory_total_mib: int
    utilisation: float


class GpuUsage:
    """Reads the numbers at each call of `read`."""

    def __init__(self, devices: Sequence[Device], *, load: Callable = ctypes.CDLL, nvml=pynvml):
        """Finds the GPUs. If this fails, there is one warning, and `read` returns no numbers.

        Args:
          devices: the devices of this process's replicas; the CPU has no numbers.
          load: opens a shared library by its name.
          nvml: the module that calls NVML.
        """
        self._nvml, self._handles = nvml, []
        ordinals = [each.cuda_ordinal for each in devices if each.cuda_ordinal is not None]
        if not ordinals:
            return
        try:
            uuids = cuda_uuids(ordinals, load)
            nvml.nvmlInit()
            self._handles = [nvml.nvmlDeviceGetHandleByUUID(each.encode()) for each in uuids]
            self.read()  # fails now if the GPU lacks some of the numbers
        except (OSError, AttributeError, nvml.NVMLError) as error:
            self._stop(error)

    def read(self) -> tuple[Usage, ...]:
        """Returns each GPU's numbers in the order of the devices; () if the driver fails."""
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
            "GPU usage: not logged, because the driver does not report it (%s); a MIG slice of a "
            "GPU has no numbers of its own",
            error,
        )


def cuda_uuids(ordinals: Sequence[int], load: Callable = ctypes.CDLL) -> list[str]:
    """Returns the UUID of each GPU in NVML's format, from the CUDA driver.

    Args:
      ordinals: CUDA's numbers of the GPUs.
      load: opens a shared library by its name.

    Raises:
      OSError: there is no driver, or a call fails.
      AttributeError: the driver is older than CUDA 11.4, and lacks the function.
    """
    found = []
    for ordinal in ordinals:
        cuda, device = opened(ordinal, load=load)
        raw = ctypes.create_string_buffer(16)
        # For a MIG slice, _v2 returns the slice's UUID; the older function returns the GPU's.
        check(cuda.cuDeviceGetUuid_v2(raw, device), "cuDeviceGetUuid_v2")
        found.append(f"GPU-{uuid.UUID(bytes=raw.raw)}")
    return found
