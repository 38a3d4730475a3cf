"""How a replica's totals lie in vectors: they come back, and what is large lies last."""

import numpy as np
import pytest
import tensorflow as tf

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


def test_the_larger_a_tensor_the_later_it_lies(totals):
    totals.gradients = [tf.fill(shape, float(index)) for index, shape in enumerate(SHAPES)]
    vector, *_ = Layout(totals, gradients_as="float16").pack(totals)
    assert vector.numpy().tolist() == [3.0] * 3 + [1.0] * 4 + [2.0] * 12 + [0.0] * 20
