"""What an arm of tools/bench.py says of its own GPUs, of which TensorFlow tells it here."""

import pathlib

import pytest
import tensorflow as tf

TOOLS = pathlib.Path(__file__).parents[2] / "tools"


@pytest.fixture
def timed_fit(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    from bench_arms import timed_fit

    return timed_fit


def physical(*peaks_mib):
    """GPUs of this process as TensorFlow lists them, and what it answers when asked for a peak."""
    listed = [
        tf.config.PhysicalDevice(f"/physical_device:GPU:{index}", "GPU")
        for index in range(len(peaks_mib))
    ]

    def memory_info(name):
        index = int(name.removeprefix("GPU:"))
        if index >= len(peaks_mib):
            raise ValueError(f"No matching devices found for '{name}'")
        return {"current": 0, "peak": peaks_mib[index] << 20}

    return listed, memory_info


@pytest.mark.parametrize(
    ("peaks", "num_workers", "most"), [((7,), 2, 7), ((7, 9), 1, 9), ((), 1, None)]
)
def test_peak_memory_is_of_this_process_not_of_other_workers(
    timed_fit, monkeypatch, peaks, num_workers, most
):
    """Under a MultiWorkerMirroredStrategy TensorFlow's logical devices are those of all workers."""
    own, memory_info = physical(*peaks)
    logical = [
        tf.config.LogicalDevice(f"/job:worker/replica:0/task:{task}/device:GPU:{index}", "GPU")
        for task in range(num_workers)
        for index in range(len(own))
    ]
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: own)
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: logical)
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", memory_info)
    assert timed_fit.peak_memory_mib() == most
