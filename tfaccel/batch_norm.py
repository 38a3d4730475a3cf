"""Batch normalization for a traced step: inputs read once, and one sum over replicas.

Takes methods of Keras's `BatchNormalization`; gives functions that stand for them at class level
while a step is traced. tfaccel/seam.py puts them there.

    BatchNormalization.call = fused(BatchNormalization.call)                    # without XLA
    BatchNormalization._moments = one_pass(BatchNormalization._moments)         # with XLA
    BatchNormalization._moments = synchronized(BatchNormalization._moments, all_reduce)
    names = convert(model)      # layers whose statistics are to be those of all replicas

Private names relied on:
  Keras 3.15: BatchNormalization._moments, BatchNormalization._reduction_axes,
    Model._flatten_layers.
"""

import functools
from collections.abc import Callable

import keras
import tensorflow as tf

from tfaccel.errors import UserError


def fused(call: Callable) -> Callable:
    """Returns what can stand for Keras's `BatchNormalization.call`: one operation where it can.

    Keras 3 has no fused batch norm outside XLA, but separate operations in float32: forward and
    backward, ResNet-50 in float16 writes over 800 MB of activations per image so, and 172 MB fused
    (outputs of the operations in the traced graph).

    Fused are inputs [batch, height, width, channels] in float16 or bfloat16, normalized over the
    last axis, without mask, renorm or synchronized statistics, whose result is of the same dtype;
    statistics, gamma and beta are float32. Everything else goes to `call`.

    Args:
      call: Keras's own `(self, inputs, training=None, mask=None)`.
    """

    @functools.wraps(call)
    def call_fused(self, inputs, training=None, mask=None):
        if not _can_fuse(self, inputs, mask):
            return call(self, inputs, training=training, mask=mask)
        moving_mean = keras.ops.cast(self.moving_mean, "float32")
        moving_variance = keras.ops.cast(self.moving_variance, "float32")
        ones, zeros = tf.ones_like(moving_mean), tf.zeros_like(moving_mean)
        is_training = bool(training and self.trainable)
        outputs, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
            x=inputs,
            scale=keras.ops.cast(self.gamma, "float32") if self.scale else ones,
            offset=keras.ops.cast(self.beta, "float32") if self.center else zeros,
            mean=moving_mean,
            variance=moving_variance,
            epsilon=self.epsilon,
            is_training=is_training,
        )
        if is_training:
            variance = _biased(variance, inputs)
            new, old = 1.0 - self.momentum, self.momentum
            self.moving_mean.assign(moving_mean * old + mean * new)
            self.moving_variance.assign(moving_variance * old + variance * new)
        return outputs

    return call_fused


def _can_fuse(layer, inputs, mask) -> bool:
    return (
        len(inputs.shape) == 4
        and layer.axis in (-1, 3)
        and keras.backend.standardize_dtype(inputs.dtype) in ("float16", "bfloat16")
        and keras.backend.standardize_dtype(inputs.dtype) == layer.compute_dtype
        and mask is None
        and not layer.renorm
        and not layer.synchronized
    )


def _biased(variance: tf.Tensor, inputs: tf.Tensor) -> tf.Tensor:
    """Returns the variance that Keras means, of the n/(n-1) times it that the operation gives."""
    n = tf.cast(tf.reduce_prod(tf.shape(inputs)[:3]), variance.dtype)
    # With n = 1 this is 0, whatever a device makes of n/(n-1); with n = 0 it is NaN, as in Keras.
    return tf.math.multiply_no_nan(variance, (n - 1) / n)


def one_pass(moments: Callable) -> Callable:
    """Returns what can stand for Keras's `BatchNormalization._moments` where XLA fuses.

    Keras's variance is of the distances from the mean, so that XLA reads the inputs once for the
    mean and once more for the variance: 1.2 of a ResNet-50 step's 35.7 ms (H200, 2026-11-22). Here
    both are sums over one read, of d = inputs - moving_mean: E[d^2] - E[d]^2 does not cancel where
    the mean is large.

    Layers of float16 or bfloat16 alone, whose inputs have 11 bits or fewer of the 24 that are
    summed. Masked, synchronized and float32 ones go to `moments`.

    Args:
      moments: Keras's own `(self, inputs, mask)`, as for `synchronized`.
    """

    @functools.wraps(moments)
    def moments_at_once(self, inputs, mask):
        is_half = self.compute_dtype in ("float16", "bfloat16")
        if mask is not None or self.synchronized or not is_half:
            return moments(self, inputs, mask)
        shift, difference = _from_moving_mean(self, inputs)
        mean = tf.reduce_mean(difference, self._reduction_axes)
        mean_of_squares = tf.reduce_mean(tf.square(difference), self._reduction_axes)
        return shift + mean, _variance(mean_of_squares, mean)

    return moments_at_once


def _from_moving_mean(layer, inputs: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the moving mean, [channels], and what the inputs differ from it."""
    shift = tf.stop_gradient(keras.ops.cast(layer.moving_mean, inputs.dtype))
    along_axis = [1] * len(inputs.shape)
    along_axis[layer.axis] = -1
    return shift, inputs - tf.reshape(shift, along_axis)


def _variance(mean_of_squares: tf.Tensor, mean: tf.Tensor) -> tf.Tensor:
    # Rounding can take a variance of 0 below it.
    return tf.maximum(mean_of_squares - tf.square(mean), 0)


def synchronized(moments: Callable, all_reduce: Callable[[tf.Tensor], tf.Tensor]) -> Callable:
    """Returns what can stand for Keras's `BatchNormalization._moments`, over all replicas' rows.

    One all-reduce of [3, channels] for each layer; Keras's own has three. Replicas may have unequal
    rows, or none; with no row on any, the mean is the moving mean and the variance 0. Layers
    without `synchronized` go to `moments`.

    The sums are of d = inputs - moving_mean (the same on every replica), so that E[d^2] - E[d]^2
    does not cancel where the mean is large; it can while the moving mean is still far from it.

    Args:
      moments: Keras's own `(self, inputs, mask)`; it returns mean and biased variance, [channels]
        in the dtype of the inputs, which Keras has cast to float32.
      all_reduce: sums over replicas; its gradient is the sum of theirs, each weighed as its loss is
        among the rows of all (`Replica.all_reduce_in_forward`).
    """

    @functools.wraps(moments)
    def moments_of_all(self, inputs, mask):
        if not self.synchronized:
            return moments(self, inputs, mask)
        shift, difference = _from_moving_mean(self, inputs)
        if mask is None:
            count = tf.size(inputs, tf.int64) // tf.size(shift, tf.int64)
            count = tf.fill(tf.shape(shift), tf.cast(count, inputs.dtype))
        else:
            # As Keras's own, whatever the axis: the mask lacks the last one.
            mask = tf.broadcast_to(tf.cast(mask, tf.bool)[..., None], tf.shape(inputs))
            difference = tf.where(mask, difference, 0)
            count = tf.reduce_sum(tf.cast(mask, inputs.dtype), self._reduction_axes)
        total = tf.reduce_sum(difference, self._reduction_axes)
        total_of_squares = tf.reduce_sum(tf.square(difference), self._reduction_axes)

        sums = all_reduce(tf.stack([total, total_of_squares, count]))
        total, total_of_squares, count = tf.unstack(sums)
        mean = tf.math.divide_no_nan(total, count)
        mean_of_squares = tf.math.divide_no_nan(total_of_squares, count)
        return shift + mean, _variance(mean_of_squares, mean)

    return moments_of_all


def convert(model: keras.Model) -> list[str]:
    """Makes every batch normalization of a model synchronized, and returns the layers' names.

    Raises:
      UserError: a layer has renorm=True; nothing is changed then.
    """
    layers = [
        each
        for each in model._flatten_layers()
        if isinstance(each, keras.layers.BatchNormalization)
    ]
    for layer in layers:
        if layer.renorm:
            raise UserError(
                f"layer '{layer.name}' has renorm=True, which is not supported with statistics "
                "over all replicas; use renorm=False, or one replica"
            )
    for layer in layers:
        layer.synchronized = True
    return [layer.name for layer in layers]
