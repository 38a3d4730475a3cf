"""Attention with its gradient by cuDNN's flash kernels, in a function that XLA compiles.

The scores [B, N, T, S] are never kept: memory grows with T + S instead of T * S, and no time is
spent on writing and reading them. With a mask that is not only causal, and with a bias, one
[B, 1, T, S] or [1, N, T, S] of two bytes a value is kept, which layers with one mask share.
"""

import functools
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfaccel.keras_internals.call_module import call_module
from tfaccel.step.attention import cudnn_calls, masks
from tfaccel.step.attention.cudnn_calls import Attention

# What a score gets that the mask takes out. The lowest numbers would overflow inside cuDNN, which
# subtracts two of them (JAX 0.7.2 uses the same two).
OUT_OF_MASK = {tf.bfloat16: -(2.0**41), tf.float16: -(2.0**15)}


def flash_attention(
    query: tf.Tensor,
    key: tf.Tensor,
    value: tf.Tensor,
    *,
    plain: Callable,
    scale: float,
    is_causal: bool = False,
    mask: tf.Tensor | None = None,
    bias: tf.Tensor | None = None,
) -> tf.Tensor:
    """Returns softmax(scale * query x key + bias, masked) x value, [B, T, N, H].

    A row of the query that sees no row of the key gets the mean of the value's rows, as in Keras.

    Args:
      query: [B, T, N, H], float16 or bfloat16. All shapes are known when the function is traced.
      key: [B, S, K, H], of the same dtype. N is a multiple of K: N / K heads share one of the key.
      value: [B, S, K, H], of the same dtype.
      plain: the same attention without cuDNN, for gradients of gradients: a function of (query,
        key, value, bias, scale=..., is_causal=...).
      scale: what the products of query and key are multiplied by.
      is_causal: whether row t of the query sees the rows 0 to t of the key only.
      mask: [B or 1, N or 1, T or 1, S] bool: True where a row of the query sees one of the key.
      bias: [B or 1, N or 1, T or 1, S] of the same dtype: it is added to the scores. It has a
        gradient if it has, with the mask, the shape [1, N, T or 1, S].
    """
    rows, key_rows = query.shape[1], key.shape[1]
    sees = None
    if mask is not None:
        is_part_causal, rest = masks.causal_and_rest(mask, rows=rows, key_rows=key_rows)
        is_causal |= is_part_causal
        mask = functools.reduce(tf.logical_and, rest) if rest else None
    if mask is not None:
        sees = _sees_a_row(mask, rows if is_causal else None)
        masked = tf.where(
            mask, tf.zeros([], query.dtype), tf.constant(OUT_OF_MASK[query.dtype], query.dtype)
        )
        bias = masked if bias is None else bias + masked
    if bias is not None:
        bias = tf.broadcast_to(bias, [*bias.shape[:2], rows, key_rows])
    output = _with_even_rows(query, key, value, bias, plain=plain, scale=scale, is_causal=is_causal)
    if sees is None:
        return output
    mean = tf.reduce_mean(value, axis=1, keepdims=True)
    return tf.where(sees, output, tf.repeat(mean, query.shape[2] // key.shape[2], axis=2))


def _sees_a_row(mask: tf.Tensor, causal_rows: int | None) -> tf.Tensor:
    """Returns [B or 1, T or 1, N or 1, 1] bool: whether a row of the query sees one of the key.

    Args:
      mask: [B or 1, N or 1, T or 1, S] bool.
      causal_rows: T, if row t sees the rows 0 to t of the key at most; else None.
    """
    if causal_rows is not None:
        triangle = tf.linalg.band_part(tf.ones([causal_rows, mask.shape[-1]], tf.bool), -1, 0)
        mask = mask & triangle
    return tf.transpose(tf.reduce_any(mask, axis=-1, keepdims=True), [0, 2, 1, 3])


def _with_even_rows(query, key, value, bias, *, plain, scale, is_causal) -> tf.Tensor:
    """Returns the attention. With a bias, cuDNN's gradient takes even numbers of rows only."""
    rows, key_rows = query.shape[1], key.shape[1]
    if bias is not None and (rows % 2 or key_rows % 2):
        # No other row sees the rows that are added to the key.
        unseen = float(OUT_OF_MASK[bias.dtype])
        query = _padded(query, {1: rows % 2})
        key, value = (_padded(each, {1: key_rows % 2}) for each in (key, value))
        bias = _padded(bias, {2: rows % 2})
        bias = _padded(bias, {3: key_rows % 2}, constant_values=unseen)
    of = Attention(
        query=tuple(query.shape),
        key=tuple(key.shape),
        dtype=query.dtype,
        scale=scale,
        is_causal=is_causal,
        bias=None if bias is None else tuple(bias.shape),
    )
    plain = functools.partial(plain, scale=scale, is_causal=is_causal)
    operands = [query, key, value] if bias is None else [query, key, value, bias]
    return _differentiable(of, plain)(*operands)[:, :rows]


def _padded(tensor: tf.Tensor, more: dict[int, int], **settings) -> tf.Tensor:
    return tf.pad(tensor, [[0, more.get(axis, 0)] for axis in range(4)], **settings)


def _differentiable(of: Attention, plain: Callable) -> Callable:
    """Returns the attention as a function of (query, key, value[, bias])."""
    statistics = tf.TensorSpec(of.statistics, tf.float32)
    output = tf.TensorSpec(of.query, of.dtype)

    @tf.custom_gradient
    def attend(*operands):
        text = cudnn_calls.forward(of)
        found, sums = call_module(text, operands, [output, statistics])

        def backward(gradient):
            # The two results are constants for the gradient's own gradient, which `plain` gives.
            return _gradients(of, plain, tf.stop_gradient(found), tf.stop_gradient(sums))(
                gradient, *operands
            )

        return found, backward

    return attend


def _gradients(of: Attention, plain: Callable, found, sums) -> Callable:
    """Returns the gradients as a function of (the output's gradient, query, key, value[, bias])."""
    specs = [tf.TensorSpec(each, of.dtype) for each in (of.query, of.key, of.key)]
    if of.has_gradient_of_bias:
        specs.append(tf.TensorSpec(of.bias, of.dtype))

    @tf.custom_gradient
    def gradients(gradient, query, key, value, *bias):
        given = [query, key, value, sums, gradient, found, *bias]
        own = call_module(cudnn_calls.backward(of), given, specs)
        own += [tf.zeros_like(each) for each in bias[len(own) - 3 :]]

        def backward(*of_gradients):
            operands = [gradient, query, key, value, *bias]
            return _by_plain(plain, operands, of_gradients)

        return own, backward

    return gradients


def _by_plain(plain: Callable, operands: Sequence, of_gradients: Sequence) -> list:
    """Returns the gradients of the plain attention's gradients: slow, and rarely asked for."""
    with tf.GradientTape() as outer:
        outer.watch(operands)
        gradient, *inputs = operands
        with tf.GradientTape() as inner:
            inner.watch(inputs)
            output = plain(*inputs)
        first = inner.gradient(output, inputs, output_gradients=gradient)
    return outer.gradient(first, operands, output_gradients=list(of_gradients))
