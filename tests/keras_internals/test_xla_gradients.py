"""The gradients that are registered for XLA's operations, against those of plain operations."""

import numpy as np
import tensorflow as tf
from outputs_and_gradients import with_gradients

from tfaccel.keras_internals.xla_gradients import optimization_barrier


def test_a_barrier_has_gradients_of_every_order():
    x = tf.constant([0.5, -2.0, 3.0])

    def run(barrier):
        def cubes(x):
            a, b = barrier(x, 2 * x)
            return a**2 * b

        return tf.function(lambda x: with_gradients(cubes, x), jit_compile=True, autograph=False)(x)

    for ours, wanted in zip(run(optimization_barrier), run(lambda *each: each), strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=1e-6)
