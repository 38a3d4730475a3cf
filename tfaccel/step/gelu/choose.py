"""Decides which kernels compute the GELUs of a traced step, and says so."""

import functools
from collections.abc import Callable

import tensorflow as tf

from tfaccel.keras_internals.gelu import gelu
from tfaccel.step import triton_calls
from tfaccel.step.gelu.calls import MULTIPLE_OF_COLUMNS
from tfaccel.step.gelu.gelu import bias_gelu, with_bias
from tfaccel.step.own_kernels import OwnKernels

# XLA joins a GELU with what computes its input, unless that is one of these. Then tfaccel's kernel,
# which XLA joins with nothing, reads no more than XLA's.
PRODUCTS = {"MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "Conv2D"}
_TERMS = "_tfaccel_terms"  # of a sum: what was added
RESHAPES = {"Reshape", "Identity", "Squeeze", "ExpandDims"}


class Gelus(OwnKernels):
    """Computes the GELUs of a model's steps, some by tfaccel's kernels.

    The kernels compute the bias of a matrix product and the GELU after it. XLA computes the others.
    """

    what = "GELUs and the biases before them"

    def with_bias(self, add: Callable) -> Callable:
        """Returns a replacement of `tf.nn.bias_add`, after which a GELU may have a kernel."""

        @functools.wraps(add)
        def added(value, bias, data_format=None, name=None):
            is_last = data_format in (None, "NHWC", "N...C")
            if self.are_off or not is_last or not _is_taken(value):
                return add(value, bias, data_format, name)
            bias = tf.convert_to_tensor(bias, value.dtype)  # Keras gives its variable
            total = with_bias(value, bias)
            setattr(total, _TERMS, (value, bias))
            return total

        return added

    def __call__(self, x, approximate: bool = True) -> tf.Tensor:
        """Returns `keras.ops.gelu`."""
        terms = None if self.are_off else getattr(x, _TERMS, None)
        if terms is None:
            return gelu(x, approximate)
        self.say_used()
        return bias_gelu(x, *terms, approximate=approximate)


def _is_taken(x) -> bool:
    """Returns whether the kernels take x, and x is of a product, which XLA joins with nothing."""
    if not tf.is_symbolic_tensor(x) or x.dtype not in triton_calls.TYPES:
        return False
    if not x.shape.is_fully_defined() or x.shape[-1] % MULTIPLE_OF_COLUMNS:
        return False
    of = x.op
    while of.type in RESHAPES:
        of = of.inputs[0].op
    return of.type in PRODUCTS and 0 < x.shape.num_elements() <= triton_calls.LARGEST
