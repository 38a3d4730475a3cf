"""The gradients' all-reduce alone: as many bytes as a step sends, by the step's own collective."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled

from tfaccel.config import StepConfig
from tfaccel.keras_internals.replica import Replica
from tfaccel.step.gradient_sum import GradientSum, sizes_by_dtype
from tfaccel.step.totals import Layout

X, Y = np.zeros((4, 3), np.float32), np.zeros((4, 1), np.float32)


def network():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])  # 4 weights


def trained(*, allreduce_dtype="own", xla=False):
    config = StepConfig(allreduce_dtype=allreduce_dtype)
    model = compiled(network, 2, optimizer="sgd", loss="mse", xla=xla, config=config)
    model.fit(X, Y, batch_size=4, verbose=0)
    return model


def test_the_values_of_both_replicas_are_summed():
    alone = GradientSum(trained(), gradients_as=None)
    assert (alone.num_replicas, alone.num_bytes) == (2, 4 * 4)
    for _ in range(2):  # the buffers stay as they are
        (first,), (second,) = alone.run(3)
        for each in (first, second):
            np.testing.assert_array_equal(each, np.full(4, 2.0, np.float32))


@pytest.mark.parametrize("gradients_as", [None, "float16", "bfloat16"])
def test_it_sends_what_a_step_sends(gradients_as, monkeypatch):
    """A step's vector also has the loss, the metrics and the rows, which are a few numbers."""
    packed, pack = [], Layout.pack
    monkeypatch.setattr(
        Layout, "pack", lambda self, totals: packed.append(pack(self, totals)) or packed[-1]
    )
    model = trained(allreduce_dtype=gradients_as or "own")
    sizes = sizes_by_dtype(model.trainable_variables, gradients_as=gradients_as)
    (dtype,) = sizes
    of_step = {each.dtype: each.shape[0] for each in packed[0]}
    assert dtype == tf.as_dtype(gradients_as or "float32")
    assert 4 == sizes[dtype] <= of_step[dtype] < 4 + 10
    (sums,) = GradientSum(model, gradients_as=gradients_as).run(1)[0]
    assert sums.dtype == dtype


def test_gradients_of_two_dtypes_are_two_vectors():
    variables = [
        keras.Variable(np.zeros((2, 3)), dtype="float16"),
        keras.Variable(np.zeros(5), dtype="float32"),
        keras.Variable(np.zeros(()), dtype="float16"),
    ]
    assert sizes_by_dtype(variables, gradients_as=None) == {tf.float16: 7, tf.float32: 5}
    assert sizes_by_dtype(variables, gradients_as="float16") == {tf.float16: 12}


@pytest.mark.parametrize("in_xla", [False, True])
def test_the_collective_is_the_one_of_the_step(in_xla, request, monkeypatch):
    if in_xla:
        request.getfixturevalue("in_one_function")
    called, names = [], ("all_reduce", "all_reduce_in_xla")
    for name in names:
        method = getattr(Replica, name)

        def counted(self, value, method=method, name=name):
            called.append(name)
            return method(self, value)

        monkeypatch.setattr(Replica, name, counted)
    model = trained(xla=in_xla)
    of_step = set(called)
    called.clear()
    GradientSum(model, gradients_as=None).run(1)
    assert set(called) == of_step
    assert ("all_reduce_in_xla" in of_step) == in_xla
