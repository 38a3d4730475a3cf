"""A matrix product of many columns, whose number is no multiple of eight, in steps for GPUs.

A vocabulary often has such a number: 50,257 in GPT-2. Then the rows of the logits start at odd
places of the memory, and cuBLAS has only slow kernels for the product and for both its gradients
(NVIDIA's guide to matrix products: multiples of 16 bytes). XLA adds zeros to float16 products
(xla/service/gpu/transforms/cublas_pad_for_gemms.cc), but not to bfloat16. PyTorch's compiler adds
them to both.
"""

import functools
from collections.abc import Callable

import keras
import tensorflow as tf

MULTIPLE_OF_COLUMNS = 8
# From this number on, a product takes long enough that reading the logits without their last
# columns, in places that no longer start at multiples of 16 bytes, costs less.
_MANY_COLUMNS = 4096


def in_eights(matmul: Callable) -> Callable:
    """Returns a replacement of Keras's `matmul(x1, x2)` that adds columns of zeros to x2.

    It takes them off the product again. It applies to float16 and bfloat16, and to an x2 of 4,096
    or more columns, whose shape [rows, columns] is known.
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
        return wide[..., :columns]

    return product


def _are_many(shape) -> bool:
    """Returns whether a product by a matrix of this shape gains by more columns."""
    shape = tf.TensorShape(shape)
    if shape.rank != 2 or not shape.is_fully_defined():
        return False
    return shape[1] >= _MANY_COLUMNS and shape[1] % MULTIPLE_OF_COLUMNS != 0
