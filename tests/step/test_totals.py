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


@pytest.mark.parametrize("gradients_as", [None, "float16", "bfloat16"])
def test_totals_come_back(totals, gradients_as):
    layout = Layout(totals, gradients_as=gradients_as)
    same, _ = layout.unpack(layout.pack(totals))
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
def test_buckets_begin_with_the_last_layers(totals, gradients_as):
    size = 2 if gradients_as else 4
    layout = Layout(totals, gradients_as=gradients_as, bucket_bytes=17 * size)
    vectors = layout.pack(totals)
    dtype = gradients_as or "float32"
    own = [each for each in vectors if each.dtype == dtype]
    # 20, 4, 12 and 3 values: the first one is larger than a bucket.
    others = 0 if gradients_as else 8
    assert [each.shape[0] for each in own] == [15, 4, 20 + others]
    flat = [tf.reshape(each, [-1]) for each in totals.gradients]
    np.testing.assert_array_equal(own[0], tf.cast(tf.concat(flat[2:], 0), dtype))
    same, spans = layout.unpack(vectors)
    for each, wanted in zip(*map(tf.nest.flatten, (same.tensors(), totals.tensors())), strict=True):
        np.testing.assert_array_equal(each, wanted)
    assert sorted(index for span in spans for index in span.indices) == [0, 1, 2, 3]
    for span in spans:
        wanted = tf.concat([flat[each] for each in span.indices], 0)
        np.testing.assert_array_equal(span.values, wanted)


def test_gradients_that_fit_in_a_bucket_are_in_one_vector(totals):
    whole = Layout(totals, gradients_as=None).pack(totals)
    for each, wanted in zip(
        Layout(totals, gradients_as=None, bucket_bytes=39 * 4).pack(totals), whole, strict=True
    ):
        np.testing.assert_array_equal(each, wanted)


# Of 9 float32 tensors, or of the 4 gradients alone, by how many XLA joins at once.
@pytest.mark.parametrize(
    ("gradients_as", "at_once", "wanted"),
    [
        (None, 128, [[0, 1, 2, 3]]),
        (None, 9, [[0, 1, 2, 3]]),
        (None, 8, [[1, 2, 3], [0]]),  # eight, and those with the one that is left
        (None, 7, [[1, 3], [0, 2]]),
        (None, 5, [[0, 1, 2, 3]]),  # four are left
        (None, 3, [[0, 1, 2, 3]]),  # none is
        ("float16", 4, [[0, 1, 2, 3]]),
        ("float16", 3, [[1, 2, 3], [0]]),
    ],
)
def test_what_xla_leaves_to_the_end_are_the_largest_gradients(
    totals, monkeypatch, gradients_as, at_once, wanted
):
    monkeypatch.setattr(totals_lib, "_JOINED_AT_ONCE", at_once)
    layout = Layout(totals, gradients_as=gradients_as)
    vectors = layout.pack(totals)
    _, spans = layout.unpack(vectors)
    assert [each.indices for each in spans] == wanted
    for span in spans:
        flat = [tf.reshape(totals.gradients[index], [-1]) for index in span.indices]
        assert span.sizes == [each.shape[0] for each in flat]
        assert span.values.dtype == tf.float32
        np.testing.assert_array_equal(span.values, tf.concat(flat, axis=0))
    num_values = sum(each.values.shape[0] for each in spans)
    np.testing.assert_array_equal(  # and they lie at the end
        tf.cast(vectors[0][-num_values:], tf.float32), tf.concat([e.values for e in spans], axis=0)
    )


def test_each_span_has_one_dtype(totals):
    totals.gradients[2] = tf.cast(totals.gradients[2], tf.float16)
    layout = Layout(totals, gradients_as="float16")
    _, spans = layout.unpack(layout.pack(totals))
    assert [(each.indices, each.values.dtype.name) for each in spans] == [
        ([0, 1], "float32"),
        ([2], "float16"),
        ([3], "float32"),
    ]
