"""How XLA describes a GPU beside a choice of kernels, and which GPUs have the same kernels.

    described(0)        # "CUDA: 9.0, Cores: 132, GPU clock: 1.98 GHz, Memory bandwidth: ..."
    is_sibling(own, other)

XLA of TensorFlow 2.21 also adds cuDNN's version, which the files of choices have for themselves.
"""

import ctypes
import logging
import re
from collections.abc import Callable

from tfaccel.runtime.cuda_driver import check, opened

log = logging.getLogger("tfaccel")

# Attributes of the CUDA driver (CUdevice_attribute in cuda.h).
CLOCK_KHZ, CORES, MEMORY_CLOCK_KHZ, BUS_BITS, L2_BYTES, MAJOR, MINOR = 13, 16, 36, 37, 38, 75, 76
_ALL = (CLOCK_KHZ, CORES, MEMORY_CLOCK_KHZ, BUS_BITS, L2_BYTES, MAJOR, MINOR)
KIND = re.compile(r"CUDA: [\d.]+, Cores: \d+,")


def described(ordinal: int, load: Callable = ctypes.CDLL) -> str | None:
    """Returns XLA's description of a GPU without cuDNN's version; None if the driver tells none.

    The figures are those of XLA's autotune_cache_key.cc and cuda_executor.cc.

    Args:
      ordinal: CUDA's number of the GPU.
      load: opens a shared library by its name.
    """
    try:
        cuda, device = opened(ordinal, load=load)
        numbers = {each: _attribute(cuda, device, each) for each in _ALL}
    except (OSError, AttributeError) as error:
        log.info("autotuning: the driver does not describe GPU %d (%s)", ordinal, error)
        return None
    # Each clock of the memory moves data twice.
    bytes_per_s = 2 * 1000 * numbers[MEMORY_CLOCK_KHZ] * (numbers[BUS_BITS] // 8)
    return (
        f"CUDA: {numbers[MAJOR]}.{numbers[MINOR]}, Cores: {numbers[CORES]}, "
        f"GPU clock: {numbers[CLOCK_KHZ] / 1e6:.6g} GHz, "
        f"Memory bandwidth: {round(bytes_per_s / 1e9)} GB/s, "
        f"L2 cache: {numbers[L2_BYTES] / 2**20:.6g} MB"
    )


def _attribute(cuda, device: ctypes.c_int, number: int) -> int:
    value = ctypes.c_int()
    check(cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device), "cuDeviceGetAttribute")
    return value.value


def is_sibling(own: str, other: str) -> bool:
    """Returns whether two descriptions are of GPUs of one architecture with as many cores.

    An H100 SXM, an H200 and a GH200 are siblings: they differ in their memory.
    """
    found = [KIND.match(each) for each in (own, other)]
    return all(found) and found[0][0] == found[1][0]
