"""Adds columns of zeros to a wide matrix, up to a multiple of eight, for products on GPUs.

A vocabulary is often no multiple of eight: GPT-2 has 50,257 tokens. Then the rows of the logits
start at odd places of the memory, and cuBLAS has only slow kernels for the product and for both its
gradients (NVIDIA's guide to matrix products: multiples of 16 bytes). XLA adds zeros to float16
products (xla/service/gpu/transforms/cublas_pad_for_gemms.cc), but not to bfloat16. PyTorch's
compiler adds them to both.
"""

import functools
from collections.abc import Callable

import keras
import tensorflow as tf

MULTIPLE_OF_COLUMNS = 8
# From this number on, the quicker product saves more than the slice costs. What reads the slice
# reads rows that do not start at multiples of 16 bytes.
_MANY_COLUMNS = 4096

_WHOLE = "_tfaccel_whole"  # of a cut product: the product with all columns
_SAME_VALUES = {"Cast", "Reshape", "Identity"}


def in_eights(matmul: Callable) -> Callable:
    """Returns a replacement of Keras's `matmul(x1, x2)` that adds columns of zeros to x2.

    It cuts their columns off the product again. It applies to float16 and bfloat16, if x2 has a
    known shape [rows, columns], 4,096 or more columns, and no multiple of eight. All else uses
    `matmul`.
    """

    @functools.wraps(matmul)
    def product(x1, x2):
        if not isinstance(x2, tf.Tensor | keras.Variable) or not _are_many(x2.shape):
            return matmul(x1, x2)
        x2 = tf.convert_to_tensor(x2)  # of a variable: in the layer's dtype
        if x2.dtype not in (tf.float16, tf.bfloat16) or getattr(x1, "dtype", None) != x2.dtype:
            return matmul(x1, x2)
        columns = x2.shape[1]
        wide = matmul(x1, tf.pad(x2, [[0, 0], [0, -columns % MULTIPLE_OF_COLUMNS]]))
        cut = wide[..., :columns]
        setattr(cut, _WHOLE, wide)
        return cut

    return product


def with_padding(x: tf.Tensor) -> tf.Tensor:
    """Returns the product from which x was cut, [..., more columns] of its dtype; else x.

    The columns beyond those of x are padding. x may be the cut product in another dtype or shape,
    if its last axis is the same.
    """
    found, columns = x, x.shape[-1]
    while getattr(found, _WHOLE, None) is None:
        op = getattr(found, "op", None)  # eager tensors have none
        if op is None or op.type not in _SAME_VALUES or op.inputs[0].shape.rank is None:
            return x
        found = op.inputs[0]
        if not found.dtype.is_floating or found.shape[-1] != columns:
            return x
    return getattr(found, _WHOLE)


def _are_many(shape) -> bool:
    """Returns whether a product by a matrix of this shape gains by more columns."""
    shape = tf.TensorShape(shape)
    if shape.rank != 2 or not shape.is_fully_defined():
        return False
    return shape[1] >= _MANY_COLUMNS and shape[1] % MULTIPLE_OF_COLUMNS != 0
