"""TensorFlow, DALI and its plugin, tried: what a child does, each step of which may be its end.

told = start("tfaccel.diagnostics.doctor.facts.trial", {}, seconds=120).told()
told.failed    # {} if all of it works
"""

import ctypes
import importlib
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

# Of which a copy from elsewhere than the wheels may be the wrong one. CUDA's driver is no wheel.
_LIBRARIES = re.compile(
    r"/(lib(?:cudart|cublas\w*|cudnn\w*|cufft|cusolver|cusparse|nccl)\.so[\d.]*)"
)


def stages(arguments: Mapping) -> dict[str, Callable[[], Any]]:
    """Returns what is tried, in the order in which a training run would.

    Args:
      arguments: "only" names some of the stages; all by default.
    """
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
    """Finds GPUs as a run does: the CUDA libraries first."""
    import tensorflow as tf

    from tfaccel.runtime.devices import load_cuda_libraries

    load_cuda_libraries()
    return {"gpus": len(tf.config.list_physical_devices("GPU"))}


def _step() -> dict:
    """A convolution and a product of matrices on each device: cuDNN and cuBLAS."""
    import tensorflow as tf

    for device in tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU"):
        with tf.device(device.name):
            image = tf.nn.conv2d(tf.ones((1, 8, 8, 4)), tf.ones((3, 3, 4, 4)), 1, "SAME")
            total = float(
                tf.reduce_sum(tf.linalg.matmul(image[0, 0], image[0, 1], transpose_b=True))
            )
        if not total > 0:
            raise ArithmeticError(f"{device.name} computed {total}, expected a positive sum")
    return {}


def _libraries() -> dict:
    """Returns the paths of the CUDA libraries in this process's memory, by their names."""
    maps = pathlib.Path("/proc/self/maps").read_text()
    paths = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if ".so" in line}
    return {match[1]: path for path in sorted(paths) if (match := _LIBRARIES.search(path))}


def _dali() -> dict:
    import nvidia.dali

    return {"version": nvidia.dali.__version__}


def _plugin() -> dict:
    importlib.import_module("nvidia.dali.plugin.tf")  # which loads the binary
    return {}


def _batch() -> dict:
    """One batch of DALI's through the plugin, on the CPU, as TensorFlow takes it."""
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
    """Returns each GPU's number of hardware JPEG decoders, as nvJPEG tells it."""
    import tensorflow as tf

    num_gpus = len(tf.config.list_physical_devices("GPU"))
    if not num_gpus:
        return {}
    cuda, nvjpeg = ctypes.CDLL("libcudart.so.12"), ctypes.CDLL("libnvjpeg.so.12")
    found = {}
    for ordinal in range(num_gpus):
        handle, engines, cores = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_uint()
        cuda.cudaSetDevice(ordinal)
        backend = 3  # NVJPEG_BACKEND_HARDWARE, which is refused where there is none
        if nvjpeg.nvjpegCreateEx(backend, None, None, 0, ctypes.byref(handle)) == 0:
            number, of_each = ctypes.byref(engines), ctypes.byref(cores)
            nvjpeg.nvjpegGetHardwareDecoderInfo(handle, number, of_each)
            nvjpeg.nvjpegDestroy(handle)
        found[str(ordinal)] = engines.value
    return found
