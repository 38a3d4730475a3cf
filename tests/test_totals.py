"""How a replica's totals lie in vectors: they come back, and XLA finds them as it likes them."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from tfaccel.step import totals as totals_lib
from tfaccel.step.totals import Layout, Totals

SHAPES = ((5, 4), (4,), (4, 3), (3,))  # of the gradients, from the first layer to the last
FILTERS = ((3, 2, 4, 5), (1, 1, 5, 6), (2, 3, 2, 4, 3))  # of them the second has windows of a pixel


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


def assert_same(own, wanted):
    for each, other in zip(*map(tf.nest.flatten, (own, wanted)), strict=True):
        assert each.dtype == other.dtype
        np.testing.assert_array_equal(each, other)


@pytest.mark.parametrize("gradients_as", [None, "float16"])
def test_totals_come_back(totals, gradients_as):
    layout = Layout(totals, gradients_as=gradients_as, in_xla=False)
    same, _ = layout.unpack(layout.pack(totals))
    assert_same(same.tensors(), totals.tensors())


def test_there_is_a_vector_for_each_dtype(totals):
    vectors = Layout(totals, gradients_as="float16", in_xla=False).pack(totals)
    # Whole numbers travel as float64.
    assert {each.dtype.name: each.shape[0] for each in vectors} == {
        "float16": 39,
        "float32": 8,
        "float64": 2,
    }


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
    layout = Layout(totals, gradients_as=gradients_as, in_xla=False)
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
    layout = Layout(totals, gradients_as="float16", in_xla=False)
    _, spans = layout.unpack(layout.pack(totals))
    assert [(each.indices, each.values.dtype.name) for each in spans] == [
        ([0, 1], "float32"),
        ([2], "float16"),
        ([3], "float32"),
    ]


@pytest.fixture
def with_filters(totals):
    rng = np.random.default_rng(1)
    filters = [tf.constant(rng.integers(0, 100, shape), tf.float32) for shape in FILTERS]
    return dataclasses.replace(totals, gradients=[*totals.gradients, *filters])


@pytest.mark.parametrize("gradients_as", [None, "float16"])
def test_all_come_back_where_xla_compiles_both_ways(with_filters, gradients_as):
    layout = Layout(with_filters, gradients_as=gradients_as, in_xla=True)

    @tf.function(jit_compile=True, autograph=False)
    def there_and_back(totals):
        same, spans = layout.unpack(layout.pack(with_filters.with_tensors(totals)))
        return same.tensors(), [each.values for each in spans]

    same, spans = there_and_back(with_filters.tensors())
    assert_same(same, with_filters.tensors())
    sums = [float(tf.reduce_sum(each)) for each in (*spans, *with_filters.gradients)]
    assert sum(sums[: len(spans)]) == sum(sums[len(spans) :])


def test_filters_travel_as_cudnn_writes_their_gradients(with_filters):
    # Their last axis is the first. XLA turned ResNet-50's around, there and back, in 0.17 ms.
    wanted = [with_filters.gradients[4 + index] for index in range(3)]
    wanted[0] = tf.transpose(wanted[0], [3, 0, 1, 2])
    wanted[2] = tf.transpose(wanted[2], [4, 0, 1, 2, 3])
    (vector,) = (
        each
        for each in Layout(with_filters, gradients_as=None, in_xla=True).pack(with_filters)
        if each.dtype == tf.float32
    )
    flat = tf.concat([tf.reshape(each, [-1]) for each in wanted], axis=0)
    np.testing.assert_array_equal(vector[-flat.shape[0] :], flat)


@pytest.mark.parametrize(("in_xla", "barriers"), [(True, 5), (False, 0)])
def test_each_matrix_is_cut_out_of_a_vector_of_its_own(with_filters, in_xla, barriers):
    # Or XLA updates several in one kernel, beside where they are, and then copies them.
    layout = Layout(with_filters, gradients_as=None, in_xla=in_xla)

    @tf.function(autograph=False)
    def unpack(vectors):
        return layout.unpack(vectors)[0].tensors()

    graph = unpack.get_concrete_function(layout.pack(with_filters)).graph
    own = [each for each in graph.get_operations() if each.type == "XlaOptimizationBarrier"]
    assert len({each.inputs[0].ref() for each in own}) == len(own) == barriers
