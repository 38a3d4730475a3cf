"""Attention with dropout and its gradient by Triton kernels, in a function that XLA compiles.

Neither the scores [B, N, T, S] nor which of them are dropped is kept. The gradient draws the same
scores again, from the seed and the place of each score, as `keeps` below does on any device.
"""

import numpy as np
import tensorflow as tf

from tfaccel.keras_internals.call_module import call_module
from tfaccel.step.attention import dropout_calls
from tfaccel.step.attention.dropout_calls import Attention


def keeps(of: Attention, seed: tf.Tensor) -> tf.Tensor:
    """Returns which scores the kernels keep, [B, N, T, S] bool.

    Each score gets 32 bits of a hash of the seed, the head, the row and the column. It is dropped
    where they are below `of.drop_below`. The kernels' source has the same lines.

    Args:
      of: the attention.
      seed: [2] uint32.
    """
    batch, rows, heads, _ = of.query
    pairs = tf.range(batch * heads)

    def keys(count: int, stream: int) -> tf.Tensor:
        mixed = _mix(_mix(seed[0] + tf.constant(stream, tf.uint32)) ^ seed[1])
        mixed = _mix(mixed ^ tf.cast(pairs, tf.uint32))
        return _mix(mixed[:, None] ^ tf.cast(tf.range(count), tf.uint32))

    first, second, column = keys(rows, 1), keys(rows, 2), keys(of.key[1], 3)
    bits = _shifted(first[:, :, None] + column[:, None], 16) * _FIRST
    bits = _shifted(bits ^ second[:, :, None], 15) * _SECOND
    kept = bits >= tf.constant(of.drop_below, tf.uint32)
    return tf.reshape(kept, [batch, heads, rows, of.key[1]])


# Constants of lowbias32 (Chris Wellons, "Prospecting for Hash Functions"), public domain.
_FIRST, _SECOND = (np.uint32(each) for each in (0x7FEB352D, 0x846CA68B))


def _mix(x: tf.Tensor) -> tf.Tensor:
    return _shifted(_shifted(_shifted(x, 16) * _FIRST, 15) * _SECOND, 16)


def _shifted(x: tf.Tensor, bits: int) -> tf.Tensor:
    return x ^ tf.bitwise.right_shift(x, tf.constant(bits, tf.uint32))


def plain(of: Attention, query, key, value, bias, seed) -> tf.Tensor:
    """Returns what the kernels compute, by TensorFlow's operations in the arguments' dtype.

    The seed and the bias are those of the kernels; see `dropout_calls`.
    """
    shared = of.query[2] // of.key[2]
    key, value = (tf.repeat(each, shared, axis=2) for each in (key, value))
    scores = tf.cast(of.scale, query.dtype) * tf.einsum("btnh,bsnh->bnts", query, key)
    scores += tf.cast(bias, scores.dtype)[:, None, None]
    if of.is_causal:
        seen = tf.linalg.band_part(tf.ones(scores.shape[2:], tf.bool), -1, 0)
        scores = tf.where(seen, scores, scores.dtype.min)
    weights = tf.nn.softmax(scores)
    weights = tf.where(keeps(of, seed), weights / (1 - of.rate), 0)
    return tf.einsum("bnts,bsnh->btnh", weights, value)


def attend(of: Attention, query, key, value, bias, seed) -> tf.Tensor:
    """Returns the output [B, T, N, H] by the kernels, with a gradient.

    A row of the query that sees no row of the key gets zeros.

    Args:
      of: the attention.
      query: [B, T, N, H] float16 or bfloat16.
      key: [B, S, K, H], of the same dtype.
      value: [B, S, K, H], of the same dtype.
      bias: [B or 1, S] float32, without a gradient. Minus infinity takes a row of the key out.
      seed: [2] uint32.
    """

    @tf.custom_gradient
    def run(query, key, value):
        output, sums = call_module(
            dropout_calls.forward(of),
            [query, key, value, bias, seed],
            [tf.TensorSpec(of.query, of.dtype), tf.TensorSpec(of.sums, tf.float32)],
        )

        def backward(gradient):
            # The results are constants for the gradient's own gradient, which `plain` gives.
            kept = tf.stop_gradient(output), tf.stop_gradient(sums)
            return _gradients(of, bias, seed, *kept)(gradient, query, key, value)

        return output, backward

    return run(query, key, value)


def _gradients(of: Attention, bias, seed, output, sums):
    """Returns the gradients as a function of (the output's gradient, query, key, value)."""

    @tf.custom_gradient
    def gradients(gradient, query, key, value):
        given = [query, key, value, bias, seed]
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
                    found = plain(of, *operands[1:], bias, seed)
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
