"""Computes on any device what the GPU computes for modules of step/attention/dropout_calls.py."""

import math
import re

import numpy as np
import tensorflow as tf

from tfaccel.step.attention import dropout
from tfaccel.step.attention.dropout_calls import Attention

SCALARS = (
    "rows", "key_rows", "heads", "sharing", "size", "bias_stride", "num_blocks", "is_causal",
    "drop_below", "scale", "keep_scale",
)  # fmt: skip


def constants_of(text):
    """Returns the numbers of a module's kernel by name, from the text alone."""
    found = re.findall(r"%arg\d+ = arith.constant (\S+) : [if]32\\0A", text)
    return dict(zip(SCALARS, map(float, found), strict=True))


def call_module(text, arguments, results):
    """Takes `call_module`'s arguments; every number is read from the module's own text."""
    numbers = constants_of(text)
    query, key, value, bias, seed, *rest = arguments
    assert tuple(query.shape[1:]) == tuple(numbers[each] for each in ("rows", "heads", "size"))
    assert tuple(key.shape[1:3]) == (numbers["key_rows"], numbers["heads"] / numbers["sharing"])
    assert numbers["bias_stride"] == (key.shape[1] if bias.shape[0] > 1 else 0)
    (name,) = re.findall(r'name = "(\w+)"', text)
    output, sums = attention(query, key, value, bias, seed, numbers)
    if name == "forward":
        found = [tf.cast(output, query.dtype), sums]
    else:
        gradient = rest[2] if name == "gradient_of_query" else rest[1]
        shared = int(numbers["sharing"])
        inputs = [query, *(tf.repeat(each, shared, axis=2) for each in (key, value))]
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            output, _ = attention(*inputs, bias, seed, numbers)
            output = tf.cast(output, gradient.dtype)
        of_inputs = tape.gradient(output, inputs, output_gradients=gradient)
        if name == "gradient_of_query":
            products = tf.cast(output, tf.float32) * tf.cast(gradient, tf.float32)
            found = [of_inputs[0], tf.transpose(tf.reduce_sum(products, -1), [0, 2, 1])]
        else:
            found = of_inputs[1:]
    for each, spec in zip(found, results, strict=True):
        assert (tuple(each.shape), each.dtype) == (tuple(spec.shape), spec.dtype)
    return found


def attention(query, key, value, bias, seed, numbers):
    """Returns the output [B, T, N, H] and the sums [B, N, T], in float32."""
    query, key, value = (tf.cast(each, tf.float32) for each in (query, key, value))
    shared = query.shape[2] // key.shape[2]
    key, value = (tf.repeat(each, shared, axis=2) for each in (key, value))
    scores = numbers["scale"] * math.log(2) * tf.einsum("btnh,bsnh->bnts", query, key)
    scores += bias[:, None, None]
    if numbers["is_causal"]:
        seen = tf.linalg.band_part(tf.ones(scores.shape[2:], tf.bool), -1, 0)
        scores = tf.where(seen, scores, -float("inf"))
    sums = tf.reduce_logsumexp(scores, axis=-1)
    sums = tf.where(tf.math.is_finite(sums), sums, float("inf"))
    weights = tf.exp(tf.maximum(scores, -1e30) - sums[..., None])
    rate = numbers["drop_below"] % 2**32 / 2**32
    kept = dropout.keeps(Attention(query.shape, key.shape, None, 1, rate, False, None), seed)
    weights = tf.where(kept, weights * numbers["keep_scale"], 0.0)
    return tf.einsum("bnts,bsnh->btnh", weights, value), sums


def bits_of(seed, batch, heads, rows, key_rows):
    """Returns the 32 bits of each score [B, N, T, S], as the kernels draw them."""
    seed, pairs = seed.astype(np.uint64), np.arange(batch * heads)

    def keys(count, stream):
        mixed = mix(mix((seed[:1] + stream) % 2**32) ^ seed[1])
        mixed = mix(mixed ^ pairs.astype(np.uint64))
        return mix(mixed[:, None] ^ np.arange(count, dtype=np.uint64))

    x = (keys(rows, 1)[:, :, None] + keys(key_rows, 3)[:, None]) % 2**32
    x = (x ^ (x >> np.uint64(16))) * 0x7FEB352D % 2**32
    x ^= keys(rows, 2)[:, :, None]
    x = (x ^ (x >> np.uint64(15))) * 0x846CA68B % 2**32
    return x.astype(np.uint32).reshape(batch, heads, rows, key_rows)


def mix(x):
    x = (x ^ (x >> np.uint64(16))) * 0x7FEB352D % 2**32
    x = (x ^ (x >> np.uint64(15))) * 0x846CA68B % 2**32
    return x ^ (x >> np.uint64(16))
