"""Asks the CUDA driver about a GPU, without a context on it.

cuda, device = opened(0, load=ctypes.CDLL)
check(cuda.cuDeviceGetUuid_v2(raw, device), "cuDeviceGetUuid_v2")
"""

import ctypes
from collections.abc import Callable


def opened(ordinal: int, *, load: Callable) -> tuple[ctypes.CDLL, ctypes.c_int]:
    """Returns the driver and its handle of a GPU.

    Args:
      ordinal: CUDA's number of the GPU.
      load: opens a shared library by its name.

    Raises:
      OSError: there is no driver, or a call fails.
    """
    cuda, device = load("libcuda.so.1"), ctypes.c_int()
    check(cuda.cuInit(0), "cuInit")
    check(cuda.cuDeviceGet(ctypes.byref(device), ordinal), "cuDeviceGet")
    return cuda, device


def check(code: int, function: str) -> None:
    """Raises OSError if a function of the driver returned an error."""
    if code != 0:
        raise OSError(f"{function} returned {int(code)}")
