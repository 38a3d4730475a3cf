"""Dropout by a hash of a seed and places, as XLA compiles it."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src import backend

from tfaccel.keras_internals.dropout import hashed, keeps
from tfaccel.keras_internals.layer_paths import layer_paths

SHAPES = [(2048, 512), (64, 32, 768), (64, 6, 6, 256), (500_000,)]


def kept(shape, rate=0.5, seed=(3, 7)):
    """Which values are kept, as 0 and 1."""
    compiled = tf.function(keeps, autograph=False, jit_compile=True)
    return compiled(shape, tf.constant(seed), rate).numpy().astype(float)


def compiled(layer, x):
    """What a layer makes of ones in a training step for a GPU, and its gradient."""

    @tf.function(autograph=False, jit_compile=True)
    def step():
        with layer_paths(xla=True, on_gpu=True, all_reduce=None), tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
        return y, tape.gradient(y, x)

    return [tf.cast(each, tf.float32).numpy() for each in step()]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rate", [0.004, 0.1, 0.5, 0.9])
def test_the_rate_is_dropped(shape, rate):
    found = kept(shape, rate)
    deviation = np.sqrt(rate * (1 - rate) / found.size)
    assert found.shape == shape
    assert abs(1 - found.mean() - rate) < 4 * deviation


@pytest.mark.parametrize("shape", SHAPES)
def test_neighbours_and_seeds_are_independent(shape):
    found = kept(shape)
    deviation = 1 / np.sqrt(found.size)  # of the mean of a product of two values of +1 and -1
    signs = 2 * found - 1
    for axis in range(len(shape)):
        for distance in (1, 2, 3):
            near = np.roll(signs, distance, axis)
            assert abs((signs * near).mean()) < 5 * deviation, (axis, distance)
    for seed in [(3, 8), (4, 7), (7, 3), (-3, 7)]:
        other = 2 * kept(shape, seed=seed) - 1
        assert abs((signs * other).mean()) < 5 * deviation, seed


def test_each_row_and_column_is_another():
    found = kept((512, 512))
    assert len(np.unique(found, axis=0)) == len(np.unique(found, axis=1)) == 512


def test_sizes_that_are_not_known_change_nothing():
    @tf.function(autograph=False, jit_compile=True)
    def traced(x, seed):
        return keeps(tf.unstack(tf.shape(x)), seed, 0.3)

    spec = tf.TensorSpec((None, None, 16))
    dynamic = traced.get_concrete_function(spec, tf.TensorSpec((2,), tf.int32))
    found = dynamic(tf.ones((9, 5, 16)), tf.constant([3, 7])).numpy()
    np.testing.assert_array_equal(found, kept((9, 5, 16), 0.3))


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_kept_values_are_scaled_and_have_the_gradient(policy):
    layer = keras.layers.Dropout(0.1, seed=5, dtype=policy)
    x = tf.ones((512, 64), keras.dtype_policies.get(policy).compute_dtype)
    y, gradient = compiled(layer, x)
    scale = tf.cast(tf.cast(1 / 0.9, x.dtype), tf.float32).numpy()
    assert set(np.unique(y)) == {0, scale}
    np.testing.assert_array_equal(y, gradient)
    again, _ = compiled(layer, x)  # the layer's seed has moved on
    assert 0.1 < (y != again).mean() < 0.26


@pytest.mark.parametrize(
    ("layer", "shape", "alike"),
    [
        (keras.layers.SpatialDropout2D(0.5, seed=1), (32, 4, 5, 64), (1, 2)),
        (keras.layers.Dropout(0.5, noise_shape=(None, 1, 16), seed=1), (64, 7, 16), (1,)),
    ],
)
def test_axes_of_size_1_are_dropped_as_one(layer, shape, alike):
    y, _ = compiled(layer, tf.ones(shape))
    np.testing.assert_array_equal(y, np.broadcast_to(y.max(alike, keepdims=True), shape))
    assert 0.4 < (y == 0).mean() < 0.6


@pytest.mark.parametrize(("rate", "value"), [(0.0, 1), (1.0, 0)])
def test_all_or_nothing(rate, value):
    dropout = hashed(backend.random.dropout)
    found = dropout(tf.ones((4, 8)), rate, seed=3)
    np.testing.assert_array_equal(found, np.full((4, 8), value, np.float32))


def test_keras_draws_as_before_without_it():
    """On a CPU, and without XLA, the numbers are TensorFlow's."""
    x = tf.ones((16, 16))
    layers = [keras.layers.Dropout(0.5, seed=3) for _ in range(2)]
    with layer_paths(xla=True, on_gpu=False, all_reduce=None):
        found = layers[0](x, training=True)
    np.testing.assert_array_equal(found, layers[1](x, training=True))
