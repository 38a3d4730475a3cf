"""Quantization to 8 bits against a slow search, and the errors that the paper names."""

import numpy as np
import pytest
import tensorflow as tf

from tfaccel.step.states.blockwise import (
    BLOCK,
    _neighbours,
    code_book,
    dequantized,
    num_blocks,
    quantized,
)

SIGNS = pytest.mark.parametrize("is_signed", [True, False])


def slowly(values, *, is_signed):
    """The code of each value, by a search of the whole book, and the largest of each block."""
    book = code_book(is_signed=is_signed).astype(np.float64)
    codes, largest = [], []
    for start in range(0, len(values), BLOCK):
        block = values[start : start + BLOCK].astype(np.float64)
        largest.append(block[np.abs(block).argmax()])
        units = block / (largest[-1] or 1)
        nearest = np.abs(units[:, np.newaxis] - book).argmin(axis=1)
        if not is_signed:
            nearest = np.where(units > 0, np.maximum(nearest, 1), nearest)
        codes += [*nearest]
    return np.array(codes), np.array(largest)


def numbers(num, *, is_signed, seed=0):
    """Values of many sizes, as gradients have: from 1e-8 to 1e3."""
    draw = np.random.default_rng(seed)
    values = draw.normal(size=num) * 10 ** draw.uniform(-5, 0, num) * 10.0 ** draw.integers(-3, 3)
    return (values if is_signed else values**2).astype("float32")


@SIGNS
def test_the_book_is_that_of_the_paper(is_signed):
    book = code_book(is_signed=is_signed)
    assert book.shape == (256,)
    assert np.all(np.diff(book) > 0)
    assert book[-1] == 1
    assert 0 in book
    tops = book[book >= 0.1]  # 64 or 128 numbers in the largest decade, and 1
    assert len(tops) == (65 if is_signed else 129)
    assert tops[0] == pytest.approx(0.1 + 0.9 / (128 if is_signed else 256))
    assert np.min(np.abs(book[book != 0])) == pytest.approx(5.5e-7 if is_signed else 3.25e-7)


@SIGNS
def test_each_code_of_the_book_comes_back(is_signed):
    """Blocks that hold each number of the book, times any scale, are stored without an error."""
    scales = np.float32([1.0, 3.7e-5, 2.0**20])
    values = tf.constant((scales[:, np.newaxis] * code_book(is_signed=is_signed)).ravel())

    @tf.function(jit_compile=True, autograph=False)
    def in_xla(values):
        return quantized(values, is_signed=is_signed)

    for store in (in_xla, in_xla.python_function):
        codes, absmax = store(values)
        np.testing.assert_array_equal(codes, np.tile(np.arange(256), 3))
        np.testing.assert_array_equal(absmax, scales)
        np.testing.assert_array_equal(dequantized(codes, absmax, is_signed=is_signed), values)


@SIGNS
@pytest.mark.parametrize("size", [1, 256, 257, 3000])
def test_codes_are_those_of_a_slow_search(is_signed, size):
    values = numbers(size, is_signed=is_signed)
    codes, absmax = quantized(tf.constant(values), is_signed=is_signed)
    wanted, largest = slowly(values, is_signed=is_signed)
    assert codes.shape == (size,)
    assert absmax.shape == (num_blocks(size),)
    np.testing.assert_array_equal(absmax, largest.astype("float32"))
    # A value half way between two numbers may go to either, by float32's rounding.
    assert np.abs(codes.numpy().astype(int) - wanted).max() <= 1
    assert np.mean(codes.numpy() != wanted) < 0.002


@pytest.mark.parametrize(
    ("draw", "is_signed", "absolute", "relative"),
    [
        ("normal", True, 0.011, 0.018),
        ("random", True, 0.0035, 0.015),
        ("random", False, 0.00175, 0.012),
    ],
)
def test_the_errors_are_those_of_bitsandbytes(draw, is_signed, absolute, relative):
    """The limits of its test_dynamic_blockwise_quantization, for the same numbers."""
    values = getattr(np.random.default_rng(0), draw)(size=256 * 500).astype("float32")
    stored = quantized(tf.constant(values), is_signed=is_signed)
    error = np.abs(dequantized(*stored, is_signed=is_signed) - values)
    assert absolute / 3 < np.mean(error) < absolute
    assert np.mean(error / (np.abs(values) + 1e-8)) < relative
    largest = np.repeat(np.abs(stored[1]), BLOCK)
    assert np.max(error / largest) <= (0.9 / 64 if is_signed else 0.9 / 128) / 2 + 1e-6


@SIGNS
def test_a_bucket_has_two_neighbours_at_most(is_signed):
    """The next bucket begins at the same number or at the next one."""
    places, means = _neighbours(is_signed=is_signed)
    assert set(np.diff(places)) == {0, 1}
    assert places[0] == 0
    assert len(means) == places[-1] + 1 == (129 if is_signed else 256)


def test_what_is_stored_twice_stays_the_same():
    values = tf.constant(-np.abs(numbers(1000, is_signed=True)))  # the largest values are negative
    stored = quantized(values, is_signed=True)
    found = dequantized(*stored, is_signed=True)
    assert np.all(stored[1] < 0)
    np.testing.assert_array_equal(np.min(found[:BLOCK]), np.min(values[:BLOCK]))
    again = quantized(found, is_signed=True)
    np.testing.assert_array_equal(dequantized(*again, is_signed=True), found)


def test_a_part_of_a_vector_is_as_in_the_whole():
    values = numbers(4 * BLOCK + 10, is_signed=True)
    codes, absmax = quantized(tf.constant(values), is_signed=True)
    own, largest = quantized(tf.constant(values[2 * BLOCK :]), is_signed=True)
    np.testing.assert_array_equal(own, codes[2 * BLOCK :])
    np.testing.assert_array_equal(largest, absmax[2:])


def test_a_second_moment_above_zero_stays_above_zero():
    values = np.zeros(BLOCK, "float32")
    values[:3] = 1.0, 1e-12, 0.0
    found = dequantized(*quantized(tf.constant(values), is_signed=False), is_signed=False).numpy()
    assert found[0] == 1
    assert found[1] == code_book(is_signed=False)[1] > 0
    assert np.all(found[2:] == 0)


def test_zeros_stay_zeros():
    codes, absmax = quantized(tf.zeros(300), is_signed=True)
    assert np.all(dequantized(codes, absmax, is_signed=True) == 0)
    fresh = dequantized(tf.zeros(300, tf.uint8), tf.zeros(2), is_signed=True)  # a new variable
    assert np.all(fresh == 0)
