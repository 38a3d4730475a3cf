"""Keras's `EinsumDense` as one matrix product, for a step that XLA compiles.

TensorFlow's gradient of an einsum such as "abc,cde->abde" first makes a kernel's gradient for each
example of the batch, and then adds them. In a ViT-B/16 with a batch of 128, it wrote 7.2 GB for the
48 projections and read them again. These products and sums took 6.1 of 43.2 ms a step (H200,
2026-11-28).
"""

import functools
import math
import re
from collections.abc import Callable

import keras
import tensorflow as tf


def as_product(call: Callable) -> Callable:
    """Returns a replacement of `EinsumDense.call`: (self, inputs, training=None)."""

    @functools.wraps(call)
    def product(self, inputs, training=None):
        num_summed = _num_summed(self.equation)
        inputs = tf.convert_to_tensor(inputs)
        if num_summed is None or inputs.shape.rank is None:
            return call(self, inputs, training=training)
        kernel = keras.ops.convert_to_tensor(self.kernel)
        size = math.prod(kernel.shape[:num_summed])
        outputs_shape = kernel.shape[num_summed:]
        flat = tf.matmul(
            tf.reshape(inputs, [-1, size]), tf.reshape(kernel, [size, math.prod(outputs_shape)])
        )
        bias = None if self.bias is None else keras.ops.convert_to_tensor(self.bias)
        if bias is not None and bias.shape == outputs_shape:
            # On the flat product, where the bias is a part of XLA's product.
            flat, bias = tf.nn.bias_add(flat, tf.reshape(bias, [-1])), None
        before = keras.ops.shape(inputs)[: inputs.shape.rank - num_summed]
        outputs = tf.reshape(flat, [*before, *outputs_shape])
        if bias is not None:
            outputs += bias
        return outputs if self.activation is None else self.activation(outputs)

    return product


@functools.cache
def _num_summed(equation: str) -> int | None:
    """Returns over how many axes an equation sums, if it is a product of two matrices; or None.

    It is one if the axes summed over are the last of the inputs and the first of the kernel, and no
    other axis is in both.
    """
    if not (found := re.fullmatch(r"([a-zA-Z]+),([a-zA-Z]+)->([a-zA-Z]+)", equation)):
        return None
    inputs, kernel, outputs = found.groups()
    num = sum(each not in outputs for each in inputs)
    is_product = (
        num > 0
        and inputs[-num:] == kernel[:num]
        and outputs == inputs[:-num] + kernel[num:]
        and len(set(outputs)) == len(outputs)
    )
    return num if is_product else None
