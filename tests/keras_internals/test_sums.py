"""Two sums in one reduction of XLA, against those of numpy, with their gradients."""

import numpy as np
import pytest
import tensorflow as tf

from tfaccel.keras_internals.sums import sums_at_once, sums_in_turn

WAYS = {"at once": sums_at_once, "in turn": sums_in_turn}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("shape", "axes"),
    [((5, 4, 3, 2), (0, 1, 2)), ((5, 4, 3, 2), (0, 2, 3)), ((70, 3), (0,)), ((1, 1), (0,))],
)
def test_sums_and_gradients(way, shape, axes):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, *shape)).astype("f4")

    @tf.function(jit_compile=True, autograph=False)
    def run(a, b):
        with tf.GradientTape() as outer:
            outer.watch([a, b])
            with tf.GradientTape() as inner:
                inner.watch([a, b])
                of_a, of_b = WAYS[way](a, tf.square(b), axes)
                y = tf.reduce_sum(of_a * of_b)
            first = inner.gradient(y, [a, b])
            total = tf.reduce_sum(first[0] * b)
        return of_a, of_b, *first, *outer.gradient(total, [a, b], unconnected_gradients="zero")

    sums = a.sum(axes, keepdims=True), (b**2).sum(axes, keepdims=True)
    # y is the sum of of_a * of_b over the channels, and `total` that of of_b * the sum of b.
    sum_b = b.sum(axes, keepdims=True)
    wanted = [
        *(np.squeeze(each, axes) for each in sums),
        np.broadcast_to(sums[1], shape),
        2 * b * sums[0],
        np.zeros(shape),
        2 * b * sum_b + sums[1],
    ]
    for ours, theirs in zip(run(a, b), wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
