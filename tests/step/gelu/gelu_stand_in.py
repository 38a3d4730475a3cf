"""Computes on any device what the GPU computes for modules of step/gelu/calls.py."""

import re

import tensorflow as tf

COUNTS = ("rows", "columns", "column_blocks", "turns")


def call_module(text, arguments, results):
    """Takes `call_module`'s arguments; every number is read from the module's own text."""
    found = re.findall(r"%arg\d+ = arith.constant (\S+) : [if]32\\0A", text)
    numbers = dict(zip(COUNTS, map(int, found), strict=False))
    factors = [float(each) for each in found[len(COUNTS) :]]
    is_tanh = factors[2:] == [0.0] * 5  # the text with tanh uses two
    (name,) = re.findall(r'name = "(\w+)"', text)
    (programs,) = map(int, re.findall(r"grid_x = (\d+)", text))
    x, bias, *gradient = arguments
    assert tuple(x.shape) == (numbers["rows"], numbers["columns"])
    row_blocks, rest = divmod(programs, numbers["column_blocks"])
    assert not rest
    total = tf.cast(x, tf.float32) + tf.cast(bias, tf.float32)
    with tf.GradientTape() as tape:
        tape.watch(total)
        output = gelu(total, factors)
    if name == "gelu_forward":
        returned = [tf.cast(output, x.dtype)]
    else:
        of_x = tf.cast(gradient[0], tf.float32)
        of_x *= tape.gradient(output, total) if is_tanh else slope(total, factors)
        rows = tf.pad(of_x, [[0, -numbers["rows"] % row_blocks], [0, 0]])
        sums = tf.reduce_sum(tf.reshape(rows, [row_blocks, -1, numbers["columns"]]), axis=1)
        returned = [tf.cast(of_x, x.dtype), sums]
    for each, spec in zip(returned, results, strict=True):
        assert (tuple(each.shape), each.dtype) == (tuple(spec.shape), spec.dtype)
    return returned


def gelu(x, factors):
    """Returns x / (1 + 2^(x p(x^2)))."""
    return x * share(x, factors)


def share(x, factors):
    """Returns gelu(x) / x."""
    exponent = x * tf.math.polyval(factors[::-1], x * x)
    return tf.sigmoid(-exponent * tf.math.log(2.0))


def slope(x, factors):
    """Returns gelu'(x) of the form with erf, as the kernel computes it."""
    density = tf.exp(-0.5 * x * x) * 0.3989422804014327
    return share(x, factors) + x * density
