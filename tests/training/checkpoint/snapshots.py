"""Small snapshots that tell their step in every value."""

import logging

import ml_dtypes
import numpy as np

from tfaccel.training.checkpoint.store import Snapshot, Store


def snapshot(step, *, num_bytes=400):
    """A state after `step`, of several dtypes."""
    random = np.random.default_rng(step)
    arrays = {
        "model/0": random.standard_normal(num_bytes // 4).astype(np.float32),
        "model/1": random.standard_normal(3).astype(ml_dtypes.bfloat16),
        "optimizer/0": np.array(step, np.int64),
        "seeds/0": random.integers(0, 2**32, 2, np.uint32),
    }
    return Snapshot(arrays, {"step": step, "epoch": 1, "history": {"loss": [0.5, float(step)]}})


def assert_same(received, expected):
    """Fails unless both are the same, bit for bit."""
    assert received.state == expected.state
    assert received.arrays.keys() == expected.arrays.keys()
    for name, array in expected.arrays.items():
        other = received.arrays[name]
        assert (other.dtype, other.shape) == (array.dtype, array.shape), name
        assert other.tobytes() == array.tobytes(), name


def make_store(folder, **changed):
    """A store in a folder that may not be there."""
    return Store(folder, **{"keep_last": 3, "keep_best": 0, "largest_is_best": True, **changed})


def names(folder):
    """What lies in a folder."""
    return sorted(each.name for each in folder.iterdir())


def warnings(caplog):
    """What was warned of."""
    return [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
