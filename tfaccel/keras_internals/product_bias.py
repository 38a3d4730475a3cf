"""The bias of a matrix product, whose gradient a kernel of another function may have computed.

A kernel that computes the gradient of a sum such as x + bias can sum it over the rows in the same
pass: this is the bias's gradient. But TensorFlow asks for the two gradients one after the other, in
two functions. So the kernel's function hands the sums on as an attribute of the first gradient
(`with_sums`), and `with_bias` reads it. If something else uses x + bias too, TensorFlow adds up its
gradients in a new tensor. That tensor has no attribute, and `with_bias` sums it over the rows.
"""

import functools
from collections.abc import Callable

import tensorflow as tf

from tfaccel.keras_internals.tape_gradient import on_tapes

_TERMS = "_tfaccel_terms"  # of a sum: x and the bias
_SUMS = "_tfaccel_sums_of_rows"  # of a gradient
_HALF = (tf.float16, tf.bfloat16)
_PRODUCTS = {"MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "Conv2D"}
_SAME_VALUES = ("Reshape", "Identity")
_RESHAPES = {*_SAME_VALUES, "Squeeze", "ExpandDims"}


def added(bias_add: Callable) -> Callable:
    """Returns a replacement of `tf.nn.bias_add`, which adds biases to products by `with_bias`.

    It does so in float16 and bfloat16, in a traced function, if the last axis has the bias and the
    shapes are known. All else uses `bias_add`.
    """

    @functools.wraps(bias_add)
    def biased(value, bias, data_format=None, name=None):
        is_last = data_format in (None, "NHWC", "N...C")
        if not is_last or not _is_product(value):
            return bias_add(value, bias, data_format, name)
        return with_bias(value, tf.convert_to_tensor(bias, value.dtype))  # Keras 3.15: its variable

    return biased


def with_bias(x: tf.Tensor, bias: tf.Tensor) -> tf.Tensor:
    """Returns x + bias, of which `terms_of` returns both.

    Args:
      x: [..., columns].
      bias: [columns], of the same dtype.
    """

    @on_tapes
    def add(x, bias):
        def backward(gradient):
            sums = _sums_of(gradient)
            if sums is None:
                sums = tf.raw_ops.BiasAddGrad(out_backprop=gradient)
            return gradient, sums

        return tf.raw_ops.BiasAdd(value=x, bias=bias), backward

    total = add(x, bias)
    setattr(total, _TERMS, (x, bias))
    return total


def terms_of(total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor] | None:
    """Returns x and the bias of what `with_bias` returned; None for other tensors."""
    return getattr(total, _TERMS, None)


def terms_behind(tensor: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor] | None:
    """Returns `terms_of` a tensor, or of what it was reshaped from."""
    return _behind(tensor, _TERMS)


def with_sums(gradient: tf.Tensor, sums: tf.Tensor) -> tf.Tensor:
    """Returns the gradient of a sum, with which the gradient of its bias is handed on.

    Args:
      gradient: of the sum, in any shape.
      sums: [columns], the gradient summed over all axes but the sum's last one, of its dtype.
    """
    setattr(gradient, _SUMS, sums)
    return gradient


def _sums_of(gradient: tf.Tensor) -> tf.Tensor | None:
    """Returns the sums that came with a gradient, or with what it was reshaped from."""
    sums = _behind(gradient, _SUMS)
    return sums if sums is not None and sums.shape == gradient.shape[-1:] else None


def _behind(tensor: tf.Tensor, name: str):
    """Returns an attribute of a tensor, or of what it was reshaped from; None if none has it."""
    while (found := getattr(tensor, name, None)) is None and tensor.op.type in _SAME_VALUES:
        tensor = tensor.op.inputs[0]
    return found


def _is_product(x) -> bool:
    """Returns whether x is a product, which XLA joins with nothing, of a known shape."""
    if not tf.is_symbolic_tensor(x) or x.dtype not in _HALF or not x.shape.is_fully_defined():
        return False
    of = x.op
    while of.type in _RESHAPES:
        of = of.inputs[0].op
    return of.type in _PRODUCTS
