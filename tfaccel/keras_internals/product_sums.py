"""Writes sums with matrix products so that XLA copies nothing for them.

cuBLAS can add its product to a matrix, which it overwrites. XLA of TensorFlow 2.21 uses this, but
two forms of a sum cost it a pass over the memory:

- A residual of three axes, added to a product of two. XLA takes the residual as a matrix that
  nobody else reads, and lets the product overwrite it. As the gradient needs it later, XLA copies
  it before: 24 copies of 77 MB (read and written) a step of ViT-B/16 with a batch of 128. Of two
  matrices XLA sees that the residual has another reader, and adds in the kernel that follows.
- A sum of three products, such as the gradient of what queries, keys and values are made from. XLA
  adds the second product to the first one, but not this sum to the third product.

Here such sums are of matrices, and each product is added to all that comes after it. The bytes of
the kernels beside the products and calls went from 19.9 to 19.0 GB a step of ViT-B/16, and from
20.8 to 20.2 of the GPT-2-small decoder (8 x 2,048 tokens), by TensorFlow's own XLA for an H100
without Triton's products, 2026-11-28.
"""

import functools
import math
from collections.abc import Callable, Sequence

import tensorflow as tf

_DTYPES = {tf.float16, tf.bfloat16, tf.float32}
_SAME_PRODUCT = {"Reshape", "Identity", "IdentityN", "BiasAdd"}


def as_matrices(add: Callable) -> Callable:
    """Returns a replacement of Keras's `add(x1, x2)` or of `tf.Tensor.__add__`.

    It adds a matrix product to a tensor of its shape as matrices [rows, columns], if the shape is
    known and has three or more axes, and the dtype is float16, bfloat16 or float32. All else uses
    `add`. The sum has the same bits.
    """

    @functools.wraps(add)
    def matrices_added(x1, x2):
        if not _are_alike([x1, x2]) or x1.shape.rank < 3:
            return add(x1, x2)
        if not _is_product(x1) and not _is_product(x2):
            return add(x1, x2)
        return tf.reshape(tf.raw_ops.AddV2(x=_matrix(x1), y=_matrix(x2)), x1.shape)

    return matrices_added


def one_into_the_other(add_n: Callable) -> Callable:
    """Returns a replacement of TensorFlow's `add_n(inputs, name=None)`, which sums gradients.

    A sum of three or more tensors, two or more of them matrix products, is one of matrices. It
    starts with the other tensors, and each product is added to the sum so far. All else uses
    `add_n`.
    """

    @functools.wraps(add_n)
    def summed(inputs, name=None):
        inputs = list(inputs)
        if len(inputs) < 3 or not _are_alike(inputs) or inputs[0].shape.rank < 2:
            return add_n(inputs, name=name)
        products = [each for each in inputs if _is_product(each)]
        if len(products) < 2:
            return add_n(inputs, name=name)
        others = [each for each in inputs if not _is_product(each)]
        *later, total = map(_matrix, products + others)
        for each in reversed(later):
            total = tf.raw_ops.AddV2(x=each, y=total)
        return tf.reshape(total, inputs[0].shape)

    return summed


def _are_alike(values: Sequence) -> bool:
    """Returns whether values are tensors of a traced function, of one known shape and dtype."""
    if not all(tf.is_symbolic_tensor(each) for each in values):
        return False
    first = values[0]
    return (
        first.dtype in _DTYPES
        and first.shape.is_fully_defined()
        and all((each.dtype, each.shape) == (first.dtype, first.shape) for each in values)
    )


def _is_product(values: tf.Tensor) -> bool:
    """Returns whether values are a matrix product in some shape, with or without a bias."""
    while True:
        op = values.op
        has_bias = op.type == "AddV2" and op.inputs[1].shape.rank == 1
        if op.type not in _SAME_PRODUCT and not has_bias:
            return op.type == "MatMul"
        values = op.inputs[values.value_index]


def _matrix(values: tf.Tensor) -> tf.Tensor:
    *rows, columns = values.shape
    return values if len(rows) == 1 else tf.reshape(values, [math.prod(rows), columns])
