import pytest

from tfaccel.runtime.xla_device import described, is_sibling

H200 = {13: 1_980_000, 16: 132, 36: 3_201_000, 37: 6016, 38: 60 << 20, 75: 9, 76: 0}
A100 = {13: 1_410_000, 16: 108, 36: 1_215_000, 37: 5120, 38: 40 << 20, 75: 8, 76: 0}


class Driver:
    def __init__(self, attributes, failing=""):
        self.attributes, self.failing = attributes, failing

    def cuInit(self, flags):  # noqa: N802
        return self.failing == "cuInit"

    def cuDeviceGet(self, device, ordinal):  # noqa: N802
        device._obj.value = ordinal
        return 0

    def cuDeviceGetAttribute(self, value, number, device):  # noqa: N802
        value._obj.value = self.attributes[number]
        return 0


# The strings are from a file that XLA wrote on an H200, and from XLA's own tests.
@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        (H200, "Cores: 132, GPU clock: 1.98 GHz, Memory bandwidth: 4814 GB/s, L2 cache: 60 MB"),
        (A100, "Cores: 108, GPU clock: 1.41 GHz, Memory bandwidth: 1555 GB/s, L2 cache: 40 MB"),
    ],
)
def test_a_gpu_is_described_as_by_xla(attributes, expected):
    words = described(0, load=lambda _: Driver(attributes))
    assert words == f"CUDA: {attributes[75]}.0, {expected}"


def test_a_driver_that_fails_is_said(caplog):
    caplog.set_level("INFO", "tfaccel")
    assert described(1, load=lambda _: Driver(H200, failing="cuInit")) is None
    assert "the driver does not describe GPU 1 (cuInit returned 1)" in caplog.text

    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    assert described(0, load=missing) is None


def test_gpus_of_one_architecture_with_as_many_cores_are_siblings():
    own = "CUDA: 9.0, Cores: 132, GPU clock: 1.98 GHz, Memory bandwidth: 3352 GB/s"
    assert is_sibling(own, own.replace("3352", "4814"))
    assert not is_sibling(own, own.replace("132", "114"))
    assert not is_sibling(own, own.replace("9.0", "10.0"))
    assert not is_sibling(own, "ROCM: gfx90a, Cores: 132,")
