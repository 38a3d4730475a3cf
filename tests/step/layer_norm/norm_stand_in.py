"""Computes on any device what the GPU computes for modules of step/layer_norm/calls.py."""

import re

import tensorflow as tf


def call_module(text, arguments, results):
    """Takes `call_module`'s arguments; every number is read from the module's own text."""
    found = re.findall(r"%arg\d+ = arith.constant (\S+) : [if]32\\0A", text)
    rows, columns, number = int(found[0]), int(found[1]), float(found[3])
    per_column = float(found[2])
    (name,) = re.findall(r'name = "(\w+)"', text)
    (programs,) = map(int, re.findall(r"grid_x = (\d+)", text))
    (block_rows,) = map(int, re.findall(r"%block_r = arith.constant (\d+) : i32", text))
    is_of_sum, first = "of_sum" in name, []
    if name.endswith("forward"):
        assert programs == -(-rows // block_rows)
        *terms, gamma, beta = arguments
        wide = sum(tf.cast(each, tf.float32) for each in terms)
        if is_of_sum:
            first = [tf.cast(wide, terms[0].dtype)]
            wide = tf.cast(first[0], tf.float32)
        assert tuple(wide.shape) == (rows, columns)
        mean = tf.reduce_sum(wide, 1) * per_column
        centered = wide - mean[:, None]
        scale = tf.math.rsqrt(tf.reduce_sum(centered**2, 1) * per_column + number)
        found = tf.cast(centered * scale[:, None] * gamma + beta, terms[0].dtype)
        returned = [*first, found, mean, scale]
    else:
        x, gamma, *of_total, gradient, mean, scale = arguments
        of_program = int(number) * block_rows
        assert programs == -(-rows // of_program)
        g, unit = tf.cast(gradient, tf.float32), tf.cast(x, tf.float32)
        unit = (unit - mean[:, None]) * scale[:, None]
        own = g * gamma
        of_unit = tf.reduce_sum(own * unit, 1) * per_column
        of_mean = tf.reduce_sum(own, 1) * per_column
        of_x = (own - of_mean[:, None] - unit * of_unit[:, None]) * scale[:, None]
        summed = [g * unit, g]
        if is_of_sum:
            of_x += tf.cast(of_total[0], tf.float32)
            summed.append(of_x)

        def parts(values):
            filled = tf.pad(values, [[0, programs * of_program - rows], [0, 0]])
            return tf.reduce_sum(tf.reshape(filled, [programs, of_program, columns]), 1)

        returned = [tf.cast(of_x, x.dtype), tf.stack([*map(parts, summed)], axis=1)]
    for each, spec in zip(returned, results, strict=True):
        assert (tuple(each.shape), each.dtype) == (tuple(spec.shape), spec.dtype)
    return returned
