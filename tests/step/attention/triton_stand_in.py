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
    query, key, value, bias, keys, *rest = arguments
    assert tuple(query.shape[1:]) == tuple(numbers[each] for each in ("rows", "heads", "size"))
    assert tuple(key.shape[1:3]) == (numbers["key_rows"], numbers["heads"] / numbers["sharing"])
    assert numbers["bias_stride"] == (key.shape[1] if bias.shape[0] > 1 else 0)
    (name,) = re.findall(r'name = "(\w+)"', text)
    output, sums = attention(query, key, value, bias, keys, numbers)
    if name == "attention_forward":
        found = [tf.cast(output, query.dtype), sums]
    else:
        gradient = rest[2] if name == "attention_of_query" else rest[1]
        shared = int(numbers["sharing"])
        inputs = [query, *(tf.repeat(each, shared, axis=2) for each in (key, value))]
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            output, _ = attention(*inputs, bias, keys, numbers)
            output = tf.cast(output, gradient.dtype)
        of_inputs = tape.gradient(output, inputs, output_gradients=gradient)
        if name == "attention_of_query":
            products = tf.cast(output, tf.float32) * tf.cast(gradient, tf.float32)
            found = [of_inputs[0], tf.transpose(tf.reduce_sum(products, -1), [0, 2, 1])]
        else:
            found = of_inputs[1:]
    for each, spec in zip(found, results, strict=True):
        assert (tuple(each.shape), each.dtype) == (tuple(spec.shape), spec.dtype)
    return found


def attention(query, key, value, bias, keys, numbers):
    """Returns the output [B, T, N, H] and the sums [B, N, T], in float32."""
    query, key, value = (tf.cast(each, tf.float32) for each in (query, key, value))
    shared = query.shape[2] // key.shape[2]
    key, value = (tf.repeat(each, shared, axis=2) for each in (key, value))
    scores = numbers["scale"] * math.log(2) * tf.einsum("btnh,bsnh->bnts", query, key)
    scores += math.log(2) * bias[:, None, None]
    if numbers["is_causal"]:
        seen = tf.linalg.band_part(tf.ones(scores.shape[2:], tf.bool), -1, 0)
        scores = tf.where(seen, scores, -float("inf"))
    sums = tf.reduce_logsumexp(scores, axis=-1)
    sums = tf.where(tf.math.is_finite(sums), sums, float("inf"))
    weights = tf.exp(tf.maximum(scores, -1e30) - sums[..., None])
    sums /= math.log(2)
    rate = numbers["drop_below"] / 2**16
    kept = dropout.keeps(Attention(query.shape, key.shape, None, 1, rate, False, None), keys)
    weights = tf.where(kept, weights * numbers["keep_scale"], 0.0)
    return tf.einsum("bnts,bsnh->btnh", weights, value), sums


def keys_of(seed, batch, heads, rows):
    """Returns the keys [B, N, 2, T] as NumPy computes them."""
    seed, pairs = seed.astype(np.uint64), np.arange(batch * heads, dtype=np.uint64)

    def stream(number):
        mixed = mix(mix((seed[:1] + np.uint64(number)) % 2**32) ^ seed[1])
        return mix(mix(mixed ^ pairs)[:, None] ^ np.arange(rows, dtype=np.uint64))

    return np.stack([stream(1), stream(2)], axis=1).reshape(batch, heads, 2, rows)


def bits_of(keys, key_rows):
    """Returns the 16 bits of each score [B, N, T, S], as the kernels' source makes them."""
    keys, column = keys.astype(np.uint64)[..., None], np.arange(key_rows, dtype=np.uint64)
    x = (keys[:, :, 0] + (column // 16 * 8 + column % 8) * 0x9E3779B9) % 2**32
    x = (x ^ (x >> np.uint64(16))) * 0x7FEB352D % 2**32
    x ^= keys[:, :, 1]
    x = (x ^ (x >> np.uint64(15))) * 0x846CA68B % 2**32
    return np.where(column & 8, (x ^ (x >> np.uint64(16))) % 2**16, x >> np.uint64(16))


def mix(x):
    x = (x ^ (x >> np.uint64(16))) * 0x7FEB352D % 2**32
    x = (x ^ (x >> np.uint64(15))) * 0x846CA68B % 2**32
    return x ^ (x >> np.uint64(16))
