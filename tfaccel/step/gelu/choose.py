"""Decides which kernels compute the GELUs of a traced step, and says so."""

import tensorflow as tf

from tfaccel.keras_internals.gelu import gelu
from tfaccel.keras_internals.product_bias import terms_of
from tfaccel.step import triton_calls
from tfaccel.step.gelu.calls import MULTIPLE_OF_COLUMNS
from tfaccel.step.gelu.gelu import bias_gelu
from tfaccel.step.own_kernels import OwnKernels


class Gelus(OwnKernels):
    """Computes the GELUs of a model's steps, some by tfaccel's kernels.

    The kernels compute the bias of a matrix product and the GELU after it. XLA computes the others.
    """

    what = "GELUs and the biases before them"

    def __call__(self, x, approximate: bool = True) -> tf.Tensor:
        """Returns `keras.ops.gelu`."""
        terms = None if self.are_off else terms_of(x)
        if terms is None or not _is_taken(x):
            return gelu(x, approximate)
        self.say_used()
        return bias_gelu(x, *terms, approximate=approximate)


def _is_taken(x) -> bool:
    """Returns whether the kernels take a product and its bias.

    XLA joins a GELU with what computes its input, unless that is a product. After a product,
    tfaccel's kernel, which XLA joins with nothing, reads no more than XLA's.
    """
    is_known = x.dtype in triton_calls.TYPES and x.shape.is_fully_defined()
    if not is_known or x.shape[-1] % MULTIPLE_OF_COLUMNS:
        return False
    return 0 < x.shape.num_elements() <= triton_calls.LARGEST
