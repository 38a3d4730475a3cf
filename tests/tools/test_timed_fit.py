"""What an arm of tools/bench.py says of its GPUs, of which TensorFlow tells it here, and steps."""

import itertools
import types

import keras
import pytest
import tensorflow as tf
from conftest import compiled
from loaded_tool import TOOLS

from tfaccel.training.callbacks import ahead


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


def network():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])


def fitted(timed_fit, monkeypatch, *, epoch_steps, steps_per_execution=1):
    """A stretch of an arm whose clock goes on by 1 s whenever it is looked at."""
    model = compiled(
        network, 1, optimizer="sgd", loss="mse", xla=False, steps_per_execution=steps_per_execution
    )
    x = tf.zeros((epoch_steps, 3))
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(1)
    settings = {"drop": 2, "steps": 5, "step_times": True, "started": 0}
    sizes = {"epoch_steps": epoch_steps, "images_per_epoch": epoch_steps}
    arm = timed_fit.fit_arm(model, data, settings, **sizes)
    clock = types.SimpleNamespace(perf_counter=map(float, itertools.count()).__next__)
    monkeypatch.setattr(timed_fit, "time", clock)
    return arm.stretch()


def test_step_times_are_of_executions_in_the_midst_of_epochs(timed_fit, monkeypatch):
    found = fitted(timed_fit, monkeypatch, epoch_steps=7)
    assert found["step_seconds"] == [1.0] * 6  # 3 of each of two epochs
    assert found["timed_steps"] == 14


def test_step_times_are_taken_while_the_device_goes_on(timed_fit):
    model = compiled(network, 1, optimizer="sgd", loss="mse", xla=False)
    assert ahead.can_be_ahead(model, [timed_fit.StepTimes(1)])


def test_epochs_too_short_for_step_times_are_refused(timed_fit, monkeypatch):
    with pytest.raises(
        ValueError, match=r"an epoch of 3 execution\(s\) is too short; .* at least 5 executions"
    ):
        fitted(timed_fit, monkeypatch, epoch_steps=6, steps_per_execution=2)
