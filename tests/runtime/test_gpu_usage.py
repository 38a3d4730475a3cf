import ctypes
import logging
import types
import uuid

import pytest
import tensorflow as tf

from tfaccel.runtime.devices import Device
from tfaccel.runtime.gpu_usage import GpuUsage, Usage, cuda_uuids

UUIDS = [uuid.UUID(int=1000 + index) for index in range(3)]
DEVICES = [Device("/gpu:0", 0), Device("/gpu:1", 2)]


class Cuda:
    """A driver that sees three GPUs."""

    def __init__(self, refuses=None):
        self._refuses = refuses

    def _code(self, function):
        return 100 if function == self._refuses else 0

    def cuInit(self, flags):  # noqa: N802
        return self._code("cuInit")

    def cuDeviceGet(self, device, ordinal):  # noqa: N802
        ctypes.cast(device, ctypes.POINTER(ctypes.c_int))[0] = 10 + ordinal
        return self._code("cuDeviceGet")

    def cuDeviceGetUuid_v2(self, raw, device):  # noqa: N802
        raw.raw = UUIDS[device.value - 10].bytes
        return self._code("cuDeviceGetUuid_v2")


class Nvml:
    """NVML of a machine that numbers its GPUs the other way round, and has one more."""

    class NVMLError(Exception):
        pass

    def __init__(self, uuids=UUIDS, utilisation=True):
        self._known = {f"GPU-{each}".encode(): index for index, each in enumerate(reversed(uuids))}
        self._utilisation = utilisation
        self.is_lost = False

    def nvmlInit(self):  # noqa: N802
        pass

    def nvmlDeviceGetHandleByUUID(self, name):  # noqa: N802
        if name not in self._known:
            raise self.NVMLError("Not Found")
        return self._known[name]

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        if self.is_lost:
            raise self.NVMLError("GPU is lost")
        return types.SimpleNamespace(used=(handle + 1) * 100 * 2**20, total=2**30)

    def nvmlDeviceGetUtilizationRates(self, handle):  # noqa: N802
        if not self._utilisation:
            raise self.NVMLError("Not Supported")
        return types.SimpleNamespace(gpu=90 + handle)


def test_gpus_are_found_by_what_both_libraries_know():
    usage = GpuUsage(DEVICES, load=lambda _: Cuda(), nvml=Nvml())
    # CUDA's GPU 0 is NVML's 2, CUDA's 2 is NVML's 0.
    assert usage.read() == (Usage(300, 1024, 0.92), Usage(100, 1024, 0.90))


def test_the_cpu_needs_no_library():
    usage = GpuUsage([Device("/cpu:0", None)], load=None, nvml=None)
    assert usage.read() == ()


def missing(name):
    raise OSError(f"{name}: cannot open shared object file")


@pytest.mark.parametrize(
    ("load", "nvml", "why"),
    [
        (missing, Nvml(), "libcuda.so.1: cannot open"),
        (lambda _: Cuda(refuses="cuInit"), Nvml(), "cuInit returned 100"),
        (lambda _: Cuda(refuses="cuDeviceGet"), Nvml(), "cuDeviceGet returned 100"),
        (lambda _: types.SimpleNamespace(cuInit=lambda _: 0), Nvml(), "cuDeviceGet"),
        (lambda _: Cuda(), Nvml(uuids=[]), "Not Found"),  # as of a slice of a GPU
        (lambda _: Cuda(), Nvml(utilisation=False), "Not Supported"),
    ],
)
def test_what_cannot_be_told_is_said_once(load, nvml, why, caplog):
    usage = GpuUsage(DEVICES, load=load, nvml=nvml)
    assert usage.read() == usage.read() == ()
    assert len(caplog.records) == 1
    assert why in caplog.text


def test_a_gpu_that_is_lost_later_is_said_once(caplog):
    nvml = Nvml()
    usage = GpuUsage(DEVICES, load=lambda _: Cuda(), nvml=nvml)
    assert len(usage.read()) == 2
    nvml.is_lost = True
    assert usage.read() == usage.read() == ()
    assert [each.levelno for each in caplog.records] == [logging.WARNING]


@pytest.mark.gpu
def test_memory_grows_as_tensorflows_does():
    device = Device("/gpu:0", 0)
    usage = GpuUsage([device])
    with tf.device(device.name):
        small = tf.zeros(1)  # the context and its libraries take memory of their own
    before, ours = usage.read()[0], tf.config.experimental.get_memory_info("GPU:0")["current"]
    with tf.device(device.name):
        large = tf.zeros(2**30, tf.float32) + small
    after = usage.read()[0]
    grown = tf.config.experimental.get_memory_info("GPU:0")["current"] - ours
    assert grown >= 4 * 2**30
    assert after.memory_mib - before.memory_mib >= 4096  # TensorFlow takes it in larger pieces
    assert after.memory_total_mib == before.memory_total_mib > after.memory_mib
    assert 0 <= after.utilisation <= 1
    del large


@pytest.mark.gpu
def test_uuids_are_of_the_gpus_that_cuda_shows():
    num_gpus = len(tf.config.list_physical_devices("GPU"))
    assert len(set(cuda_uuids(range(num_gpus)))) == num_gpus
    with pytest.raises(OSError, match="cuDeviceGet"):
        cuda_uuids([num_gpus])
