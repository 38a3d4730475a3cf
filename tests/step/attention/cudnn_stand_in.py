"""Computes on any device what cuDNN computes for the modules of step/attention/cudnn_calls.py."""

import re

import tensorflow as tf


def call_module(text, arguments, results):
    """Takes `call_module`'s arguments; every number is read from the module's own text."""
    scale = float(re.search(r"fmha_scale\\22: ([^,]+)", text)[1])
    is_causal = r"\22CAUSAL\22" in text
    has_bias = "fmhaScaleBias" in text
    if "Backward" not in text:
        output, sums = attention(*arguments, scale=scale, is_causal=is_causal)
        found = [tf.cast(output, results[0].dtype), sums]
    else:
        query, key, value, _, gradient, _, *bias = arguments
        assert len(bias) == has_bias
        inputs = [query, key, value, *bias]
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            output, _ = attention(*inputs, scale=scale, is_causal=is_causal)
            output = tf.cast(output, gradient.dtype)
        found = tape.gradient(output, inputs, output_gradients=gradient)[: len(results)]
    for each, spec in zip(found, results, strict=True):
        assert (tuple(each.shape), each.dtype) == (tuple(spec.shape), spec.dtype)
    return found


def attention(query, key, value, bias=None, *, scale, is_causal):
    """Returns the output [B, T, N, H] and the statistics [B, N, T], in float32."""
    query, key, value = (tf.cast(each, tf.float32) for each in (query, key, value))
    shared = query.shape[2] // key.shape[2]
    key, value = (tf.repeat(each, shared, axis=2) for each in (key, value))
    scores = scale * tf.einsum("btnh,bsnh->bnts", query, key)
    if bias is not None:
        scores += tf.cast(bias, tf.float32)
    if is_causal:
        seen = tf.linalg.band_part(tf.ones(scores.shape[2:], tf.bool), -1, 0)
        scores = tf.where(seen, scores, -float("inf"))
    output = tf.einsum("bnts,bsnh->btnh", tf.nn.softmax(scores), value)
    return output, tf.reduce_logsumexp(scores, axis=-1)
