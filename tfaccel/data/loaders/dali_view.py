"""Makes a TensorFlow tensor that shares the memory of DALI's output, on a GPU or the CPU.

    tensor = view_of(output, Device("/gpu:0", 0))     # output: a TensorListGPU; keep it, too

DALI's own `__dlpack__` is not used. DALI frees its result in a thread that waits until the GPU has
finished all its work. This breaks off each CUDA graph that XLA is recording there
(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED: two H100s, 2026-11-25; DALI 2.4's examples for JAX turn such
graphs off), and keeps memory from DALI for as long as steps are queued. So this module makes
DLPack's structure itself. The structure frees only itself. The owner of the output returns the
memory to DALI when the tensor is no longer read.
"""

import ctypes

import numpy as np
import tensorflow as tf
from nvidia.dali.tensors import TensorListCPU, TensorListGPU

from tfaccel.runtime.devices import Device

# DLPack's constants, from https://dmlc.github.io/dlpack/latest/c_api.html.
CPU, CUDA = 1, 2
CODES = {"i": 0, "u": 1, "f": 2, "b": 6}  # by NumPy's kind of dtype
NAME = b"dltensor"  # the capsule's name; the capsule keeps a pointer to it


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),  # null: the data is contiguous
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [
        ("tensor", _Tensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),  # is called with this structure, in any thread
    ]


_libc = ctypes.CDLL(None)
_libc.malloc.restype, _libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
_FREE = ctypes.cast(_libc.free, ctypes.c_void_p).value  # does not need Python's lock
# This module has its own prototype, because all libraries share those of `ctypes.pythonapi`.
_new_capsule = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)(("PyCapsule_New", ctypes.pythonapi))


def view_of(output: TensorListCPU | TensorListGPU, device: Device) -> tf.Tensor:
    """Returns a batch as a tensor [rows, ...] in the same memory.

    Args:
      output: finished samples of one shape. Keep it as long as the tensor, or work that is queued
        with it, is to be read.
      device: the device of an output on a GPU. DALI numbers the GPUs that CUDA sees, and TensorFlow
        those that were chosen.
    """
    tensor = output.as_tensor()
    on_gpu = isinstance(output, TensorListGPU)
    interface = tensor.__cuda_array_interface__ if on_gpu else tensor.__array_interface__
    capsule = _capsule(
        tensor.data_ptr(),
        interface["shape"],
        np.dtype(interface["typestr"]),
        device_type=CUDA if on_gpu else CPU,
        device_id=int(device.name.rpartition(":")[2]) if on_gpu else 0,
    )
    return tf.experimental.dlpack.from_dlpack(capsule)


def _capsule(data: int, shape: tuple, dtype: np.dtype, *, device_type: int, device_id: int):
    """Returns DLPack's capsule: the structure, and the shape in the memory behind it."""
    address = _libc.malloc(ctypes.sizeof(_Managed) + ctypes.sizeof(ctypes.c_int64) * len(shape))
    lengths = address + ctypes.sizeof(_Managed)
    (ctypes.c_int64 * len(shape)).from_address(lengths)[:] = shape
    managed = _Managed.from_address(address)
    managed.tensor = _Tensor(
        data=data,
        device_type=device_type,
        device_id=device_id,
        ndim=len(shape),
        code=CODES[dtype.kind],
        bits=8 * dtype.itemsize,
        lanes=1,
        shape=lengths,
        strides=None,
        byte_offset=0,
    )
    managed.manager_ctx, managed.deleter = None, _FREE
    return _new_capsule(address, NAME, None)
