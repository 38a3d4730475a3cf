"""Batches of several lengths: each shape is built once, which is said, and trains right."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled
from keras import layers, ops
from programs import text

from tfaccel.config import StepConfig
from tfaccel.keras_internals.function_names import alike, own_numbers
from tfaccel.step.shapes import Shapes

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Traced(layers.Layer):
    """The mean over time; counts how often it is traced in a function."""

    times = 0

    def call(self, x):
        if not isinstance(x, keras.KerasTensor):
            Traced.times += 1
        return ops.mean(x, axis=1)


def made():
    keras.utils.set_random_seed(7)
    return text.recurrent(Traced())


def model_of(num_replicas, *, xla=False, **settings):
    optimizer = keras.optimizers.SGD(0.1)
    return compiled(made, num_replicas, optimizer=optimizer, loss=LOSS, xla=xla, **settings)


def of_lengths(*lengths, rows=4):
    """Batches of these lengths."""

    def batches():
        for length in lengths:
            yield np.full((rows, length), length % 10), np.arange(rows) % 2

    spec = tf.TensorSpec((None, None), tf.int64), tf.TensorSpec((None,), tf.int64)
    return tf.data.Dataset.from_generator(batches, output_signature=spec)


def said(caplog, words="built again"):
    return [each for each in caplog.records if words in each.getMessage()]


@pytest.mark.parametrize(
    ("num_replicas", "xla"),
    [
        pytest.param(1, False, marks=pytest.mark.slow),
        pytest.param(1, True, marks=pytest.mark.slow),
        (2, False),
        pytest.param(2, True, marks=pytest.mark.slow),
        pytest.param(3, False, marks=pytest.mark.slow),
    ],
)
def test_each_length_is_built_once(caplog, num_replicas, xla):
    model = model_of(num_replicas, xla=xla)
    data = of_lengths(4, 8, 4, 8, 12, 8)
    Traced.times = 0
    with caplog.at_level("INFO", "tfaccel"):
        model.fit(data, epochs=1, verbose=0)
        after_one_epoch = Traced.times
        assert after_one_epoch >= 3 * num_replicas
        model.fit(data, epochs=2, verbose=0)
        model.fit(of_lengths(12, 4), epochs=1, verbose=0)
    assert Traced.times == after_one_epoch  # no length was built again
    words = [each.getMessage() for each in said(caplog)]
    assert [each.partition("; ")[2] for each in words] == [
        "2 shapes so far, each built once",
        "3 shapes so far, each built once",
    ]
    assert "shapes (4, 8), (4,)" in words[0]  # of all replicas together
    assert all(each.levelname == "SUMMARY" for each in said(caplog))


@pytest.mark.slow
def test_a_last_batch_of_fewer_rows_is_said_with_the_cure(caplog):
    model = model_of(2)
    with caplog.at_level("INFO", "tfaccel"):
        model.fit(of_lengths(4), verbose=0)
        model.fit(of_lengths(4, rows=3), verbose=0)
    (one,) = said(caplog)
    assert one.getMessage().endswith("once; to save this, drop the last batch of an epoch")


def test_shapes_without_end_are_warned_of(caplog):
    step = alike(tf.function(lambda batches: batches, autograph=False), own_numbers())
    shapes = Shapes("step")
    with caplog.at_level("INFO", "tfaccel"):
        for length in [*range(1, 19), *range(1, 19)]:
            batches = [(tf.zeros((2, length)), tf.zeros(2)), (tf.zeros((1, length)), tf.zeros(1))]
            with shapes.watched(step, batches):
                step(batches)
    levels = [each.levelname for each in said(caplog)]
    assert levels == [*["SUMMARY"] * 7, *["WARNING"] * 5]  # the 9th, 10th, 11th, 13th and 17th
    warning = said(caplog)[-1].getMessage()
    assert "shapes (3, 17), (3,), the 17th new shape; each costs this once: pad batches" in warning


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("xla", [False, True])
def test_several_steps_at_a_time_may_have_several_lengths(num_replicas, xla):
    stock = made()
    stock.compile(keras.optimizers.SGD(0.1), LOSS, steps_per_execution=1)
    stock.jit_compile = False
    wanted = stock.fit(text.classified(), epochs=2, verbose=0).history["loss"]
    model = model_of(num_replicas, xla=xla, steps_per_execution=3)
    loss = model.fit(text.classified(), epochs=2, verbose=0).history["loss"]
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    for value, expected in zip(model.get_weights(), stock.get_weights(), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_evaluation_and_prediction_take_several_lengths(num_replicas):
    model = model_of(num_replicas, metrics=["accuracy"])
    stock = made()
    stock.compile(loss=LOSS, metrics=["accuracy"])
    stock.jit_compile = False
    data = text.classified()
    wanted = stock.evaluate(data, verbose=0, return_dict=True)
    for name, value in model.evaluate(data, verbose=0, return_dict=True).items():
        np.testing.assert_allclose(value, wanted[name], rtol=1e-5)
    x = data.map(lambda words, _: words)
    np.testing.assert_allclose(
        model.predict(x, verbose=0), stock.predict(x, verbose=0), rtol=1e-4, atol=1e-6
    )


@pytest.mark.slow
def test_parts_of_a_bucketed_batch_are_accumulated():
    stock = made()
    stock.compile(keras.optimizers.SGD(0.1), LOSS)
    stock.jit_compile = False
    wanted = stock.fit(text.classified(), epochs=2, verbose=0).history["loss"]
    model = model_of(2, config=StepConfig(accumulation_steps=2))
    loss = model.fit(text.classified(), epochs=2, verbose=0).history["loss"]
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
