"""How a replica's totals lie in vectors: they come back, and the largest gradients lie last."""

import numpy as np
import pytest
import tensorflow as tf

from tfaccel.step import totals as totals_lib
from tfaccel.step.totals import Layout, Totals

SHAPES = ((5, 4), (4,), (4, 3), (3,))  # of the gradients, from the first layer to the last


@pytest.fixture
def totals():
    rng = np.random.default_rng(0)

    def some(*shape, dtype="float32"):
        return tf.constant(rng.integers(0, 100, shape), dtype)

    return Totals(
        rows=some(),
        gradients=[some(*shape) for shape in SHAPES],
        changes=[some(4), some(2, dtype="int32")],
        logs={"loss": some()},
        metrics=[some()],
        metrics_before=[some()],
        gradients_of=[],
        changes_of=[],
    )


@pytest.mark.parametrize("gradients_as", [None, "float16"])
def test_totals_come_back(totals, gradients_as):
    layout = Layout(totals, gradients_as=gradients_as)
    same = layout.unpack(layout.pack(totals))
    pairs = zip(*map(tf.nest.flatten, (same.tensors(), totals.tensors())), strict=True)
    for own, wanted in pairs:
        assert own.dtype == wanted.dtype
        np.testing.assert_array_equal(own, wanted)


def test_there_is_a_vector_for_each_dtype(totals):
    vectors = Layout(totals, gradients_as="float16").pack(totals)
    # Whole numbers travel as float64.
    assert {each.dtype.name: each.shape[0] for each in vectors} == {
        "float16": 39,
        "float32": 8,
        "float64": 2,
    }


@pytest.mark.parametrize("gradients_as", [None, "float16"])
def test_the_gradients_that_xla_joins_last_are_the_largest(totals, monkeypatch, gradients_as):
    monkeypatch.setattr(totals_lib, "_JOINED_AT_ONCE", 1)
    totals.gradients = [tf.fill(shape, float(index)) for index, shape in enumerate(SHAPES)]
    vector, *_ = Layout(totals, gradients_as=gradients_as).pack(totals)
    wanted = [1.0] * 4 + [2.0] * 12 + [3.0] * 3 + [0.0] * 20
    assert vector.numpy().tolist()[-len(wanted) :] == wanted


@pytest.mark.parametrize("gradients_as", [None, "float16"])
def test_runs_hold_all_gradients_in_order(totals, monkeypatch, gradients_as):
    monkeypatch.setattr(totals_lib, "_JOINED_AT_ONCE", 1)
    layout = Layout(totals, gradients_as=gradients_as)
    runs = layout.unpack(layout.pack(totals)).runs
    assert [each.indices for each in runs] == [[1, 2, 3], [0]]
    for run in runs:
        flat = [tf.reshape(totals.gradients[index], [-1]) for index in run.indices]
        assert run.sizes == [each.shape[0] for each in flat]
        assert run.values.dtype == tf.float32
        np.testing.assert_array_equal(run.values, tf.concat(flat, axis=0))


def test_each_run_has_one_dtype(totals):
    totals.gradients[2] = tf.cast(totals.gradients[2], tf.float16)
    layout = Layout(totals, gradients_as="float16")
    runs = layout.unpack(layout.pack(totals)).runs
    assert [(each.indices, each.values.dtype.name) for each in runs] == [
        ([3], "float32"),  # the smallest, of more than are joined last
        ([0, 1], "float32"),
        ([2], "float16"),
    ]
