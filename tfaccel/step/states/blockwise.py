"""Quantizes float32 vectors to 8 bits in blocks, as Dettmers et al. do (2022, arXiv:2110.02861).

A vector is cut into blocks of 256 values. Of each block there is the value of the largest size, in
float32, and of each value the place of its nearest number in a code book, after a division by that
one. The code book is "dynamic": half of its numbers lie between 0.1 and 1, a quarter between 0.01
and 0.1, and so on down to 1e-7. So large values keep about two digits, and small values keep their
size. A vector takes 1.016 bytes for each value.

    codes, absmax = quantized(values, is_signed=True)          # values: [n] float32
    values = dequantized(codes, absmax, is_signed=True)

The functions take any flat vector. A part of a vector that begins at a multiple of `BLOCK` is
quantized as it is in the whole vector.
"""

import functools
import math

import numpy as np
import tensorflow as tf

BLOCK = 256  # of bitsandbytes' optimizers from 0.45 on; the paper has 2,048


def quantized(values: tf.Tensor, *, is_signed: bool) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the codes of values, [n] uint8, and the largest of each block, [blocks] float32.

    Two things differ from bitsandbytes. The largest value has its sign. So it is always stored
    exactly, and what is stored twice stays the same. (The code book has 1 and not -1, so
    bitsandbytes makes a negative largest value 0.7% smaller each time.) And a second moment above 0
    never becomes 0, because a gradient is divided by its root. (An update by Adam could be up to 32
    times too large.)

    Args:
      values: [n] float32, finite. The last block may have fewer values.
      is_signed: whether values may be negative, as those of a second moment may not.
    """
    blocks = _in_blocks(values)
    highest, lowest = tf.reduce_max(blocks, axis=1), tf.reduce_min(blocks, axis=1)
    absmax = tf.where(highest >= -lowest, highest, lowest)
    unit = tf.where(tf.equal(absmax, 0), tf.ones_like(absmax), absmax)
    codes = _nearest(blocks / unit[:, tf.newaxis], is_signed=is_signed)
    if not is_signed:
        codes = tf.where(blocks > 0, tf.maximum(codes, 1), codes)
    flat = tf.reshape(codes, [-1])[: values.shape[0]]
    return tf.cast(flat, tf.uint8), absmax


def dequantized(codes: tf.Tensor, absmax: tf.Tensor, *, is_signed: bool) -> tf.Tensor:
    """Returns the values of `quantized`, [n] float32."""
    units = tf.gather(tf.constant(code_book(is_signed=is_signed)), tf.cast(codes, tf.int32))
    values = _in_blocks(units) * absmax[:, tf.newaxis]
    return tf.reshape(values, [-1])[: codes.shape[0]]


def num_blocks(num_values: int) -> int:
    """Returns the number of blocks of a vector."""
    return math.ceil(num_values / BLOCK)


@functools.cache
def code_book(*, is_signed: bool) -> np.ndarray:
    """Returns the numbers that codes stand for, [256] float32, rising, from -1 or 0 to 1.

    The source is `create_dynamic_map` of bitsandbytes/functional.py, and section 2.2 of the paper.
    """
    numbers = [0.0, 1.0]
    for decade in range(7):
        edges = np.linspace(0.1, 1, 2 ** (decade if is_signed else decade + 1) + 1)
        means = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)
        numbers += [*means, *-means] if is_signed else [*means]
    return np.sort(np.array(numbers)).astype(np.float32)


def _nearest(units: tf.Tensor, *, is_signed: bool) -> tf.Tensor:
    """Returns the place of the nearest number in the code book, int32, for values from -1 to 1.

    The upper 16 bits of a float32 leave a choice of two neighbours, and a comparison with their
    mean decides. (By a binary search, a step of two dense layers of 1,024 took 272 ms and not 130,
    with XLA on two busy CPU cores, 2026-11-30. XLA's own `tf.searchsorted` compares each value with
    each number.)
    """
    candidates, means = _neighbours(is_signed=is_signed)
    sizes = tf.abs(units)
    upper = tf.bitwise.right_shift(tf.bitcast(sizes, tf.uint32), tf.constant(16, tf.uint32))
    bucket = tf.clip_by_value(tf.cast(upper, tf.int32) - _FIRST, 0, len(candidates) - 1)
    place = tf.gather(tf.constant(candidates), bucket)
    place += tf.cast(sizes > tf.gather(tf.constant(means), place), tf.int32)
    if not is_signed:
        return place
    zero = 127  # the place of 0. There is no -1, so its place is that of the next number.
    return tf.where(units < 0, zero - tf.minimum(place, zero), zero + place)


_FIRST = int(np.float32(2.0**-23).view(np.uint32) >> 16)  # below it, 0 is the nearest
_LAST = int(np.float32(1).view(np.uint32) >> 16)


@functools.cache
def _neighbours(*, is_signed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tables of `_nearest`, for the numbers of the code book from 0 on.

    The first has the place of the number nearest to the smallest float32 of each bucket. The second
    has the mean of each number and the next, and infinity after the last.
    """
    book = code_book(is_signed=is_signed).astype(np.float64)
    book = book[book >= 0]
    means = ((book[:-1] + book[1:]) / 2).astype(np.float32)
    smallest = (np.arange(_FIRST, _LAST + 1, dtype=np.uint32) << 16).view(np.float32)
    places = np.searchsorted(means, smallest).astype(np.int32)
    return places, np.append(means, np.float32(np.inf))


def _in_blocks(values: tf.Tensor) -> tf.Tensor:
    """Returns a vector as [blocks, BLOCK], filled up with zeros."""
    lacking = -values.shape[0] % BLOCK
    filled = tf.pad(values, [[0, lacking]]) if lacking else values
    return tf.reshape(filled, [-1, BLOCK])
