import psutil
import pytest

from tfaccel.data.free_memory import free_bytes, nvml_name
from tfaccel.runtime.devices import Device


def test_what_is_free_here_is_shared_by_the_workers_of_the_machine():
    cpu = Device("/cpu:0", None)
    assert 0 < free_bytes(cpu) <= psutil.virtual_memory().total
    assert free_bytes(cpu, 4) < 0.3 * free_bytes(cpu)


@pytest.mark.parametrize(
    ("visible", "name"),
    [(None, 1), ("", 1), ("3,2", 2), ("GPU-a, GPU-b", "GPU-b"), ("0,MIG-x", "MIG-x")],
)
def test_what_nvml_calls_a_gpu(visible, name):
    assert nvml_name(1, visible) == name
