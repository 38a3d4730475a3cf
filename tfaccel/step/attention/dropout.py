"""Attention with dropout and its gradient by Triton kernels, in a function that XLA compiles.

Neither the scores [B, N, T, S] nor which of them are dropped is kept. The gradient draws the same
scores again, from the place of each and two numbers of its row, as `keeps` does on any device.
"""

import functools
import math

import numpy as np
import tensorflow as tf

from tfaccel.keras_internals import hashed_bits
from tfaccel.keras_internals.call_module import call_module
from tfaccel.keras_internals.hashed_bits import WEYL, bits_at, mixed
from tfaccel.step import triton_calls
from tfaccel.step.attention import dropout_calls, masks
from tfaccel.step.attention.dropout_calls import Attention

# Of a head: larger ones do not fit into a processor's memory.
LARGEST_HEAD, MULTIPLE_OF_HEAD = 128, 8


def dropout_attention(
    query: tf.Tensor,
    key: tf.Tensor,
    value: tf.Tensor,
    *,
    rate: float,
    seed: tf.Tensor,
    scale: float,
    is_causal: bool = False,
    mask: tf.Tensor | None = None,
) -> tf.Tensor:
    """Returns dropout(softmax(scale * query x key, masked)) x value, [B, T, N, H].

    A row of the query that sees no row of the key gets zeros, as in Keras's layers with dropout.

    Args:
      query: [B, T, N, H], float16 or bfloat16. All shapes are known when the function is traced.
      key: [B, S, K, H], of the same dtype. N is a multiple of K: N / K heads share one of the key.
      value: [B, S, K, H], of the same dtype.
      rate: the share of the scores that is dropped, from 0 to below 1.
      seed: [2] integers.
      scale: what the products of query and key are multiplied by.
      is_causal: whether row t of the query sees the rows 0 to t of the key only.
      mask: as in `parts_of`, which must not return None for it.
    """
    rows, key_rows = query.shape[1], key.shape[1]
    is_part_causal, of_query, of_key = parts_of(mask, rows=rows, key_rows=key_rows)
    is_causal |= is_part_causal
    bias = tf.zeros([1, key_rows])
    if of_key is not None:
        bias = tf.where(of_key[:, 0, 0], 0.0, -float("inf"))
    of = Attention(
        query=tuple(query.shape),
        key=tuple(key.shape),
        dtype=query.dtype,
        scale=scale,
        rate=rate,
        is_causal=is_causal,
        bias=tuple(bias.shape),
    )
    keys = keys_of(of, tf.cast(seed, tf.uint32))
    output = attend(of, query, key, value, bias, keys)
    if of_query is None:
        return output
    return tf.where(tf.reshape(of_query, [-1, rows, 1, 1]), output, 0)


def parts_of(
    mask: tf.Tensor | None, *, rows: int, key_rows: int
) -> tuple[bool, tf.Tensor | None, tf.Tensor | None] | None:
    """Returns a mask's parts: whether it is causal, the query's rows, and the key's rows.

    Args:
      mask: [B or 1, N or 1, T or 1, S] bool: True where a row of the query sees one of the key.
      rows: T.
      key_rows: S.

    Returns:
      Whether row t of the query sees the rows 0 to t of the key only; which rows of the query see
      any, [B or 1, 1, T, 1] bool; and which rows of the key are seen, [B or 1, 1, 1, S] bool. Each
      of both is None if it takes out nothing. Returns None if the mask has other parts.
    """
    if mask is None:
        return False, None, None
    is_causal, rest = masks.causal_and_rest(mask, rows=rows, key_rows=key_rows)
    of_query, of_key = [], []
    for each in rest:
        if each.shape[1] != 1 or 1 not in each.shape[2:]:
            return None
        (of_key if each.shape[2] == 1 else of_query).append(each)
    joined = [
        functools.reduce(tf.logical_and, each) if each else None for each in (of_query, of_key)
    ]
    if joined[1] is not None:
        joined[1] = tf.broadcast_to(joined[1], [joined[1].shape[0], 1, 1, key_rows])
    return is_causal, *joined


def why_not(query: tf.Tensor, key: tf.Tensor, mask: tf.Tensor | None) -> str | None:
    """Returns why the kernels do not take these; None if they do. See `dropout_attention`."""
    rows, heads, size = query.shape[1:]
    if size > LARGEST_HEAD or size % MULTIPLE_OF_HEAD:
        return (
            f"its heads have {size} values, which is no multiple of {MULTIPLE_OF_HEAD} up to "
            f"{LARGEST_HEAD}"
        )
    if max(rows, key.shape[1]) * heads * size > triton_calls.LARGEST:
        return f"an example has more than {triton_calls.LARGEST} values"
    if parts_of(mask, rows=rows, key_rows=key.shape[1]) is None:
        return "its mask is neither causal nor the padding of the tokens"
    return None


def keys_of(of: Attention, seed: tf.Tensor) -> tf.Tensor:
    """Returns two random numbers for each row of each head, [B, N, 2, T] uint32.

    Args:
      of: the attention.
      seed: [2] uint32.
    """
    batch, rows, heads, _ = of.query
    pairs = tf.cast(tf.range(batch * heads), tf.uint32)
    keys = mixed(hashed_bits.keys_of(seed) ^ pairs[:, None])
    keys = mixed(keys[..., None] ^ tf.cast(tf.range(rows), tf.uint32))
    return tf.reshape(keys, of.keys)


def keeps(of: Attention, keys: tf.Tensor) -> tf.Tensor:
    """Returns which scores the kernels keep, [B, N, T, S] bool; their source has the same lines.

    Each score gets 16 bits, by its row's keys and its column. It is dropped where they are below
    `of.drop_below`.

    Args:
      of: the attention.
      keys: [B, N, 2, T] uint32.
    """
    columns = np.arange(of.key[1], dtype=np.uint32)
    pairs = columns // 16 * 8 + columns % 8  # two columns share 32 bits
    first, second = (each[..., None] for each in tf.unstack(keys, axis=2))
    bits = bits_at(first + pairs * WEYL, second)
    upper = tf.bitwise.right_shift(bits, tf.constant(16, tf.uint32))
    bits = tf.where(columns & 8 == 0, upper, bits & np.uint32(2**16 - 1))
    return bits >= tf.constant(of.drop_below, tf.uint32)


def plain(of: Attention, query, key, value, bias, keys) -> tf.Tensor:
    """Returns what the kernels compute, by TensorFlow's operations in the arguments' dtype.

    The keys and the bias are those of the kernels; see `dropout_calls`.
    """
    shared = of.query[2] // of.key[2]
    key, value = (tf.repeat(each, shared, axis=2) for each in (key, value))
    scores = tf.cast(of.scale, query.dtype) * tf.einsum("btnh,bsnh->bnts", query, key)
    scores += tf.cast(bias * math.log(2), scores.dtype)[:, None, None]
    if of.is_causal:
        seen = tf.linalg.band_part(tf.ones(scores.shape[2:], tf.bool), -1, 0)
        scores = tf.where(seen, scores, scores.dtype.min)
    weights = tf.nn.softmax(scores)
    weights = tf.where(keeps(of, keys), weights / of.kept, 0)
    return tf.einsum("bnts,bsnh->btnh", weights, value)


def attend(of: Attention, query, key, value, bias, keys) -> tf.Tensor:
    """Returns the output [B, T, N, H] by the kernels, with a gradient.

    A row of the query that sees no row of the key gets zeros.

    Args:
      of: the attention.
      query: [B, T, N, H] float16 or bfloat16.
      key: [B, S, K, H], of the same dtype.
      value: [B, S, K, H], of the same dtype.
      bias: [B or 1, S] float32, without a gradient, which is added to the scores times log2(e).
        Minus infinity takes a row of the key out.
      keys: [B, N, 2, T] uint32, as `keys_of` draws them.
    """

    @tf.custom_gradient
    def run(query, key, value):
        output, sums = call_module(
            dropout_calls.forward(of),
            [query, key, value, bias, keys],
            [tf.TensorSpec(of.query, of.dtype), tf.TensorSpec(of.sums, tf.float32)],
        )

        def backward(gradient):
            # The results are constants for the gradient's own gradient, which `plain` gives.
            kept = tf.stop_gradient(output), tf.stop_gradient(sums)
            return _gradients(of, bias, keys, *kept)(gradient, query, key, value)

        return output, backward

    return run(query, key, value)


def _gradients(of: Attention, bias, keys, output, sums):
    """Returns the gradients as a function of (the output's gradient, query, key, value)."""

    @tf.custom_gradient
    def gradients(gradient, query, key, value):
        given = [query, key, value, bias, keys]
        spec, of_sums = tf.TensorSpec(of.query, of.dtype), tf.TensorSpec(of.sums, tf.float32)
        of_query, products = call_module(
            dropout_calls.of_query(of), [*given, output, sums, gradient], [spec, of_sums]
        )
        spec = tf.TensorSpec(of.gradient_of_key, of.dtype)
        parts = call_module(
            dropout_calls.of_key(of), [*given, sums, gradient, products], [spec, spec]
        )
        own = [of_query, *(_shared(of, each) for each in parts)]

        def backward(*of_gradients):
            operands = [gradient, query, key, value]
            with tf.GradientTape() as outer:
                outer.watch(operands)
                with tf.GradientTape() as inner:
                    inner.watch(operands[1:])
                    found = plain(of, *operands[1:], bias, keys)
                first = inner.gradient(found, operands[1:], output_gradients=operands[0])
            return outer.gradient(first, operands, output_gradients=list(of_gradients))

        return own, backward

    return gradients


def _shared(of: Attention, gradient: tf.Tensor) -> tf.Tensor:
    """Returns [B, S, K, H]: the sum of the gradients [B, S, N, H] of heads that share one."""
    batch, rows, heads, size = of.key
    if heads == of.query[2]:
        return gradient
    parts = tf.reshape(gradient, [batch, rows, heads, of.query[2] // heads, size])
    return tf.cast(tf.reduce_sum(tf.cast(parts, tf.float32), axis=3), of.dtype)
