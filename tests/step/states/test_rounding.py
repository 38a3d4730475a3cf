"""Rounding to bfloat16 at random: its bits, its mean, and the small updates that it keeps."""

import numpy as np
import pytest
import tensorflow as tf

from tfaccel.step.states.rounding import random_bits, to_bfloat16


def bits_of(num=20_000, **settings):
    return random_bits(num, **{"key": (3, 5, 7)} | settings).numpy()


def test_bits_are_those_of_the_key_alone():
    compiled = tf.function(lambda step: random_bits(1000, key=(3, step, 7)), jit_compile=True)
    own = bits_of(1000)
    np.testing.assert_array_equal(own, compiled(tf.constant(5, tf.int64)))
    np.testing.assert_array_equal(own, bits_of(2000)[:1000])
    np.testing.assert_array_equal(bits_of(700, first=300), own[300:])
    for other in ((4, 5, 7), (3, 6, 7), (3, 5, 8), (5, 3, 7)):
        assert np.mean(bits_of(1000, key=other) == own) < 0.01


def test_bits_are_uniform_and_independent():
    """16 bits of 20,000 values; of 200 steps in a row; and of neighbours."""
    uniform = lambda bits: (bits >> 16) / 2**16  # noqa: E731
    rows = np.stack([uniform(bits_of(200, key=(0, step, 1))) for step in range(200)])
    for draws in (uniform(bits_of()), rows[:, 7]):
        assert abs(draws.mean() - 0.5) < 4 / np.sqrt(12 * len(draws))
    counts = np.histogram(uniform(bits_of()), 64, (0, 1))[0]
    assert np.sum((counts - 20_000 / 64) ** 2 / (20_000 / 64)) < 110  # chi-square, 63 degrees
    for one, other in ((rows[1:], rows[:-1]), (rows[:, 1:], rows[:, :-1])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.02


@pytest.mark.parametrize("value", [1.001, -1.001, 3.1e-30, 0.999, 1e30])
def test_the_mean_is_exact_and_each_value_a_neighbour(value):
    values = tf.fill([20_000], np.float32(value))
    rounded = tf.cast(to_bfloat16(values, tf.constant(bits_of())), tf.float32).numpy()
    below, above = np.unique(rounded)
    assert below < np.float32(value) < above
    gap = float(above) - float(below)
    share = (np.float64(np.float32(value)) - float(below)) / gap
    assert abs(np.mean(rounded == above) - share) < 4 * np.sqrt(share * (1 - share) / 20_000) + 2e-5


def test_numbers_of_bfloat16_stay_and_so_do_infinity_and_nan():
    values = tf.constant([0.0, -0.0, 1.5, -(2.0**-100), np.inf, -np.inf, np.nan], tf.float32)
    for bits in (0, 2**32 - 1):
        rounded = to_bfloat16(values, tf.fill([7], tf.constant(bits, tf.uint32)))
        np.testing.assert_array_equal(tf.cast(rounded, tf.float32), values)


def moved(rounded):
    """A second moment after 3,000 updates by beta_2 = 0.999, which should fall from 1 to 0.05."""

    @tf.function
    def run():
        moments = tf.ones(1000, tf.bfloat16)
        for step in tf.range(3000):
            values = tf.cast(moments, tf.float32)
            moments = rounded(values + 0.001 * (0.0 - values), step)
        return tf.cast(moments, tf.float32)

    return run().numpy()


def test_a_second_moment_stalls_to_the_nearest_and_moves_at_random():
    nearest = moved(lambda values, step: tf.cast(values, tf.bfloat16))
    at_random = moved(lambda values, step: to_bfloat16(values, random_bits(1000, key=(0, step))))
    wanted = 0.999**3000  # 0.0497
    assert np.all(nearest > 0.99)
    assert at_random.mean() == pytest.approx(wanted, rel=0.02)
    assert np.all((at_random > wanted / 2) & (at_random < 2 * wanted))
