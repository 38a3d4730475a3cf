"""Tries TensorFlow, DALI and its plugin in a child, because each stage may end the process.

answers = start("tfaccel.diagnostics.doctor.facts.trial", {}, seconds=120).answers()
answers.failed    # {} if everything works
"""

import ctypes
import importlib
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

# A copy from outside the wheels may be the wrong one. (CUDA's driver library has no wheel.)
_LIBRARIES = re.compile(
    r"/(lib(?:cudart|cublas\w*|cudnn\w*|cufft|cusolver|cusparse|nccl)\.so[\d.]*)"
)


def stages(arguments: Mapping) -> dict[str, Callable[[], Any]]:
    """Returns the stages in the order of a training run: all, or those that "only" names."""
    everything = {
        "TensorFlow": _tensorflow,
        "Keras": _keras,
        "devices": _devices,
        "a step": _step,
        "libraries in use": _libraries,
        "DALI": _dali,
        "DALI plugin": _plugin,
        "a batch": _batch,
        "nvJPEG": _engines,
    }
    return {name: everything[name] for name in arguments.get("only", everything)}


def _tensorflow() -> dict:
    import tensorflow as tf

    return {"version": tf.__version__}


def _keras() -> dict:
    import keras

    return {"version": keras.__version__, "backend": keras.backend.backend()}


def _devices() -> dict:
    """Finds the GPUs as a run does, after it has loaded the CUDA libraries."""
    import tensorflow as tf

    from tfaccel.runtime.devices import load_cuda_libraries

    load_cuda_libraries()
    return {"gpus": len(tf.config.list_physical_devices("GPU"))}


def _step() -> dict:
    """Runs a convolution (cuDNN), a matrix product (cuBLAS) and TensorFlow's own kernels."""
    import tensorflow as tf

    for device in tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU"):
        with tf.device(device.name):
            image = tf.nn.conv2d(tf.ones((1, 8, 8, 4)), tf.ones((3, 3, 4, 4)), 1, "SAME")
            product = tf.matmul(image[0, 0], image[0, 1], transpose_b=True)
            # Kernels of single values are those that a newer GPU refuses.
            total = float(tf.reduce_sum(product * tf.sqrt(product)))
        if not total > 0:
            raise ArithmeticError(f"{device.name} computed {total}, expected a positive sum")
    return {}


def _libraries() -> dict:
    """Returns the names and paths of the CUDA libraries that this process has loaded."""
    maps = pathlib.Path("/proc/self/maps").read_text()
    paths = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if ".so" in line}
    return {match[1]: path for path in sorted(paths) if (match := _LIBRARIES.search(path))}


def _dali() -> dict:
    import nvidia.dali

    return {"version": nvidia.dali.__version__}


def _plugin() -> dict:
    importlib.import_module("nvidia.dali.plugin.tf")  # loads the binary
    return {}


def _batch() -> dict:
    """Takes one batch from DALI through the plugin, on the CPU."""
    import nvidia.dali.plugin.tf as plugin
    import tensorflow as tf
    from nvidia.dali import fn, pipeline_def

    @pipeline_def(batch_size=2, num_threads=1, device_id=None)
    def numbers():
        return fn.random.uniform(range=(1.0, 2.0), shape=[3])

    with tf.device("/cpu:0"):
        dataset = plugin.DALIDataset(
            numbers(),
            batch_size=2,
            num_threads=1,
            device_id=None,
            output_dtypes=(tf.float32,),
            output_shapes=((2, 3),),
        )
        total = float(tf.reduce_sum(next(iter(dataset))[0]))
    if not 6 <= total <= 12:
        raise ArithmeticError(f"a batch of six numbers in 1..2 has the sum {total}")
    return {}


def _engines() -> dict:
    """Returns the number of hardware JPEG decoders of each GPU, from nvJPEG."""
    import tensorflow as tf

    num_gpus = len(tf.config.list_physical_devices("GPU"))
    if not num_gpus:
        return {}
    cuda, nvjpeg = ctypes.CDLL("libcudart.so.12"), ctypes.CDLL("libnvjpeg.so.12")
    found = {}
    for ordinal in range(num_gpus):
        handle, engines, cores = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_uint()
        cuda.cudaSetDevice(ordinal)
        backend = 3  # NVJPEG_BACKEND_HARDWARE; nvJPEG refuses it on a GPU without decoders
        if nvjpeg.nvjpegCreateEx(backend, None, None, 0, ctypes.byref(handle)) == 0:
            number, of_each = ctypes.byref(engines), ctypes.byref(cores)
            nvjpeg.nvjpegGetHardwareDecoderInfo(handle, number, of_each)
            nvjpeg.nvjpegDestroy(handle)
        found[str(ordinal)] = engines.value
    return found
