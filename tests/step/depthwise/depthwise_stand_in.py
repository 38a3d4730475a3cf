"""Computes on any device what the GPU computes for modules of step/depthwise/calls.py."""

import re

import numpy as np
import tensorflow as tf

NUMBERS = ("in_h", "in_w", "out_h", "out_w", "channels", "pad_h", "pad_w")


def call_module(text, arguments, results):
    """Takes `call_module`'s arguments; every number is read from the module's own text."""
    found = [int(each) for each in re.findall(r"%arg\d+ = arith.constant (\S+) : i32\\0A", text)]
    in_h, in_w, out_h, out_w, channels, pad_h, pad_w = found[: len(NUMBERS)]
    strips, w_blocks, c_blocks, *own = found[len(NUMBERS) :]
    (name,) = re.findall(r'name = "(\w+)"', text)
    (programs,) = map(int, re.findall(r"grid_x = (\d+)", text))
    x, other = (tf.cast(each, tf.float32) for each in arguments)
    images = x.shape[0]
    assert tuple(x.shape[1:]) == (in_h, in_w, channels)
    if name == "depthwise_forward":
        first, step = own
        assert programs == images * strips * w_blocks * c_blocks
        flat = tf.reshape(other, [-1, channels])
        count = flat.shape[0]
        kernel = tf.gather(flat, [first + i * step for i in range(count)])
        window = round(count**0.5)
        kernel = tf.reshape(kernel, [window, window, channels, 1])
        output = tf.nn.depthwise_conv2d(padded(x, pad_h, pad_w), kernel, [1] * 4, "VALID")
        assert tuple(output.shape[1:3]) == (out_h, out_w)
        returned = tf.cast(output, arguments[0].dtype)
    else:
        turns, items = own
        assert items == images * strips * w_blocks
        parts, rest = divmod(programs, c_blocks)
        assert not rest
        assert parts * turns >= items > (parts - 1) * turns
        window = in_h + 2 * pad_h - out_h + 1
        x = padded(x, pad_h, pad_w)
        gradient = tf.stack(
            [
                tf.reduce_sum(x[:, i : i + out_h, j : j + out_w] * other, axis=[0, 1, 2])
                for i in range(window)
                for j in range(window)
            ]
        )
        gradient = tf.reshape(gradient, [1, window, window, channels])
        returned = tf.pad(gradient, [[0, parts - 1], *[[0, 0]] * 3])
    (spec,) = results
    assert (tuple(returned.shape), returned.dtype) == (tuple(spec.shape), spec.dtype)
    return [returned]


def padded(x, height, width):
    """Returns x with zeros around it."""
    return tf.pad(x, np.array([[0, 0], [height] * 2, [width] * 2, [0, 0]]))
