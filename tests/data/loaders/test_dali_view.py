"""DALI's memory as a tensor: values, dtypes and devices; and who keeps it."""

import ctypes
import gc

import numpy as np
import pytest
import tensorflow as tf
from nvidia.dali import fn, pipeline_def, types

from tfaccel.data.loaders import dali_view
from tfaccel.data.loaders.dali_view import view_of
from tfaccel.runtime.devices import Device

VALUES = np.arange(24).reshape(4, 3, 2)
DTYPES = {
    types.FLOAT16: tf.float16,
    types.FLOAT: tf.float32,
    types.FLOAT64: tf.float64,
    types.UINT8: tf.uint8,
    types.INT8: tf.int8,
    types.INT32: tf.int32,
    types.INT64: tf.int64,
    types.UINT64: tf.uint64,
    types.BOOL: tf.bool,
}


@pipeline_def(batch_size=4, num_threads=1)
def pipeline(device, dtype):
    values = fn.external_source(lambda: VALUES.astype(np.float32), batch=True)
    return fn.cast(values if device == "cpu" else values.gpu(), dtype=dtype)


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request):
    return request.param


def made(device, dtype):
    (output,) = pipeline(device, dtype, device_id=None if device == "cpu" else 0).run()
    return output, Device(f"/{device}:0", None if device == "cpu" else 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_dtypes_and_device(device, dtype):
    output, where = made(device, dtype)
    tensor = view_of(output, where)
    assert tensor.dtype == DTYPES[dtype]
    assert where.name[1:].upper() in tensor.device
    wanted = VALUES.astype(DTYPES[dtype].as_numpy_dtype)
    np.testing.assert_array_equal(tensor.numpy(), wanted)


def test_it_is_the_same_memory():
    output, where = made("cpu", types.FLOAT)
    tensor = view_of(output, where)
    first = ctypes.c_float.from_address(output.as_tensor().data_ptr())
    first.value = 7
    assert float(tensor[0, 0, 0]) == 7


def test_it_frees_itself_once_and_nothing_else(monkeypatch, quick_collector):
    freed = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def free(address):
        freed.append(address)
        dali_view._libc.free(ctypes.c_void_p(address))

    monkeypatch.setattr(dali_view, "_FREE", ctypes.cast(free, ctypes.c_void_p).value)
    output, where = made("cpu", types.FLOAT)
    for _ in range(100):
        view_of(output, where)
    gc.collect()
    assert len(freed) == 100
    np.testing.assert_array_equal(view_of(output, where), VALUES)
    gc.collect()
    assert len(freed) == 101


def test_a_gpu_is_counted_as_tensorflow_does(monkeypatch):
    output, _ = made("cpu", types.FLOAT)
    tensor, seen, capsule_of = output.as_tensor(), {}, dali_view._capsule

    class OnGpu:  # or so it says
        __cuda_array_interface__ = tensor.__array_interface__
        data_ptr = tensor.data_ptr

        def as_tensor(self):
            return self

    def noted(*args, **device):
        seen.update(device)
        return capsule_of(*args, device_type=dali_view.CPU, device_id=0)

    monkeypatch.setattr(dali_view, "TensorListGPU", OnGpu)
    monkeypatch.setattr(dali_view, "_capsule", noted)
    view_of(OnGpu(), Device("/gpu:1", 5))
    assert seen == {"device_type": dali_view.CUDA, "device_id": 1}


def test_the_structure_is_dlpacks():
    data = np.zeros((2, 3), np.float16)
    capsule = dali_view._capsule(
        data.ctypes.data, data.shape, data.dtype, device_type=dali_view.CUDA, device_id=5
    )
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    tensor = dali_view._Managed.from_address(pointer(capsule, b"dltensor")).tensor
    assert (tensor.device_type, tensor.device_id, tensor.ndim) == (2, 5, 2)
    assert (tensor.code, tensor.bits, tensor.lanes) == (2, 16, 1)


def test_numpy_reads_the_same_structure():
    data = np.arange(6, dtype=np.int64).reshape(2, 3)

    class Exported:
        def __dlpack__(self, **_):
            return dali_view._capsule(
                data.ctypes.data, data.shape, data.dtype, device_type=dali_view.CPU, device_id=0
            )

        def __dlpack_device__(self):
            return dali_view.CPU, 0

    np.testing.assert_array_equal(np.from_dlpack(Exported()), data)
