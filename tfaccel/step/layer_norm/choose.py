"""Decides which kernels compute the layer normalizations of a traced step, and says so."""

import math

import tensorflow as tf

from tfaccel.keras_internals.product_sums import computed, sum_of
from tfaccel.step import triton_calls
from tfaccel.step.layer_norm import calls
from tfaccel.step.layer_norm.norm import normalized, normalized_sum
from tfaccel.step.own_kernels import OwnKernels


class LayerNorms(OwnKernels):
    """Computes the layer normalizations of a model's steps, some by tfaccel's kernels."""

    what = "layer normalizations"

    def __call__(
        self, x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor, epsilon: float
    ) -> tf.Tensor | None:
        """Returns a layer normalization over the last axis; None if the kernels do not take it.

        Args:
          x: [..., columns].
          gamma: [columns], float32.
          beta: [columns], float32.
          epsilon: what is added to the variance.
        """
        if self.are_off or not _is_taken(x):
            return None
        self.say_used()
        added = sum_of(x)
        if added is None or added.total is not None or not added.is_recorded:
            return normalized(computed(x), gamma, beta, epsilon=epsilon)
        total, found = normalized_sum(added.x, added.terms, gamma, beta, epsilon=epsilon)
        added.total = total
        return found


def _is_taken(x) -> bool:
    if not tf.is_symbolic_tensor(x) or x.dtype not in triton_calls.TYPES:
        return False
    if not x.shape.is_fully_defined() or x.shape[-1] % calls.MULTIPLE_OF_COLUMNS:
        return False
    *rows, columns = x.shape
    return 0 < columns <= calls.MOST_COLUMNS and 0 < math.prod(rows) <= triton_calls.LARGEST
