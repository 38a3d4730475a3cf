"""What DALI made as a tensor of TensorFlow's that shares the memory, on a GPU or the CPU.

    tensor = view_of(output, Device("/gpu:0", 0))     # output: a TensorListGPU; hold it, too

Not by DALI's own `__dlpack__`: what that gives is taken back by a thread of DALI's that waits until
the GPU has done all it was given, which breaks off each CUDA graph that XLA is recording there
(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED: two H100s, 2026-11-25; DALI 2.4's examples for JAX turn such
graphs off), and keeps memory from DALI for as long as steps are queued. So the structure that
DLPack hands over is made here. It frees itself, and nothing else: whoever holds the output gives
DALI its memory back, when the tensor is no longer read.
"""

import ctypes

import numpy as np
import tensorflow as tf
from nvidia.dali.tensors import TensorListCPU, TensorListGPU

from tfaccel.runtime.devices import Device

# DLPack's numbers, of https://dmlc.github.io/dlpack/latest/c_api.html.
CPU, CUDA = 1, 2
CODES = {"i": 0, "u": 1, "f": 2, "b": 6}  # by NumPy's kind
NAME = b"dltensor"  # to which the capsule has a pointer


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
        ("strides", ctypes.c_void_p),  # none: rows lie one after another
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [
        ("tensor", _Tensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),  # is called with this structure, by any thread
    ]


_libc = ctypes.CDLL(None)
_libc.malloc.restype, _libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
_FREE = ctypes.cast(_libc.free, ctypes.c_void_p).value  # which needs not Python's lock
# A prototype of its own: what `ctypes.pythonapi` has is every library's.
_new_capsule = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)(("PyCapsule_New", ctypes.pythonapi))


def view_of(output: TensorListCPU | TensorListGPU, device: Device) -> tf.Tensor:
    """Returns a batch as a tensor [rows, ...] of the same memory.

    Args:
      output: samples of one shape, that are there already; to be held as long as the tensor, or
        what is queued with it, is to be read.
      device: where the output is, if it is on a GPU. DALI counts the GPUs that CUDA sees,
        TensorFlow those that were chosen.
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
    """Returns what DLPack hands over: the structure, with the shape behind it."""
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
