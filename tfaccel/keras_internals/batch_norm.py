"""Batch normalization for a traced step: it reads inputs once, and sums once over the replicas.

Takes methods of Keras's `BatchNormalization`; gives functions that replace them in the class while
a step is traced. tfaccel/keras_internals/layer_paths.py puts them there.

    BatchNormalization.call = unbiased(BatchNormalization.call)
    BatchNormalization.call = fused(BatchNormalization.call)                    # without XLA
    BatchNormalization.call = one_pass(BatchNormalization.call)                 # with XLA
    BatchNormalization._moments = synchronized(BatchNormalization._moments, all_reduce)
    names = convert(model)      # makes the layers use the statistics of all replicas

The replacements of `call` have one more parameter: `bias`, [channels] float32. The inputs should
have this bias but do not, because the normalization subtracts the mean anyway. The moving mean
includes the bias.
"""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping

import keras
import tensorflow as tf
from tensorflow.python.eager import record

from tfaccel.common.errors import UserError
from tfaccel.keras_internals.float32_layers import HALVES
from tfaccel.keras_internals.layers import layers_of
from tfaccel.keras_internals.lowered_once import rsqrt
from tfaccel.keras_internals.sums import sums_at_once, sums_in_turn
from tfaccel.keras_internals.tape_gradient import on_tapes
from tfaccel.keras_internals.written import sum_written, written, written_together

_converted = weakref.WeakSet()  # layers that `convert` has made synchronized


def unbiased(call: Callable) -> Callable:
    """Returns a replacement of Keras's `BatchNormalization.call` that accepts a `bias`.

    Args:
      call: Keras's own `(self, inputs, training=None, mask=None)`.
    """

    @functools.wraps(call)
    def call_unbiased(self, inputs, training=None, mask=None, bias=None):
        if bias is None:
            return call(self, inputs, training=training, mask=mask)
        self.moving_mean.assign(keras.ops.subtract(self.moving_mean, bias))
        outputs = call(self, inputs, training=training, mask=mask)
        self.moving_mean.assign(keras.ops.add(self.moving_mean, bias))
        return outputs

    return call_unbiased


def fused(call: Callable) -> Callable:
    """Returns a replacement of `BatchNormalization.call` that is one operation where possible.

    Keras 3 has no fused batch norm outside XLA. It uses separate operations in float32. With them,
    forward and backward of ResNet-50 in float16 write over 800 MB of activations for each image;
    with the fused operation they write 172 MB (outputs of the operations in the traced graph).

    It fuses inputs [batch, height, width, channels] in float16 or bfloat16 that are normalized over
    the last axis, without mask, renorm or synchronized statistics, if the result has the same
    dtype. The statistics, gamma and beta are float32. All other cases use `call`.

    Args:
      call: The result of `unbiased`.
    """

    @functools.wraps(call)
    def call_fused(self, inputs, training=None, mask=None, bias=None):
        if not _can_fuse(self, inputs, mask):
            return call(self, inputs, training=training, mask=mask, bias=bias)
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
            mean = mean if bias is None else mean + bias
            new, old = 1.0 - self.momentum, self.momentum
            self.moving_mean.assign(moving_mean * old + mean * new)
            self.moving_variance.assign(moving_variance * old + variance * new)
        return outputs

    return call_fused


def _can_fuse(layer, inputs, mask) -> bool:
    return (
        len(inputs.shape) == 4
        and layer.axis in (-1, 3)
        and keras.backend.standardize_dtype(inputs.dtype) == layer.compute_dtype
        and _is_plain(layer, inputs, mask)
    )


def _is_plain(layer, inputs, mask) -> bool:
    """Returns whether the layer takes the mean and variance of all inputs, in half precision."""
    return (
        keras.backend.standardize_dtype(inputs.dtype) in HALVES
        and mask is None
        and not layer.renorm
        and not layer.synchronized
        and has_keras_moments(layer)
    )


def has_keras_moments(layer) -> bool:
    """Returns whether the layer computes its mean and variance as Keras does."""
    return type(layer)._moments is keras.layers.BatchNormalization._moments


def _biased(variance: tf.Tensor, inputs: tf.Tensor) -> tf.Tensor:
    """Returns the biased variance that Keras uses; the operation's is n/(n-1) times as large."""
    n = tf.cast(tf.reduce_prod(tf.shape(inputs)[:3]), variance.dtype)
    # With n = 1 the result is 0, even if n/(n-1) is infinite; with n = 0 it is NaN, as in Keras.
    return tf.math.multiply_no_nan(variance, (n - 1) / n)


def one_pass(
    call: Callable,
    concatenations: Mapping | None = None,
    rectified: dict | None = None,
    *,
    on_gpu: bool = False,
) -> Callable:
    """Returns a replacement of `BatchNormalization.call` that reads the inputs once, for XLA.

    Keras computes the variance from the distances to the mean. So XLA reads the inputs once for the
    mean and once more for the variance, which takes 1.2 of the 35.7 ms of a ResNet-50 step (H200,
    2026-11-22). Here both are sums over one read of d = inputs - moving_mean. E[d^2] - E[d]^2 loses
    no digits where the mean is large. This also saves 70 of the 300 operations of each layer of
    ResNet-50, forward and backward, which Python, TensorFlow and XLA process at each start.

    It applies only in training, to inputs in float16 or bfloat16: they have 11 bits or fewer, and
    the sums have 24. Inputs in float32, inputs with a mask, and layers that are synchronized,
    renormalize or have their own moments use `call`.

    The mean and variance of a concatenation are those of its parts, each computed once. A layer of
    a DenseNet normalizes the outputs of all layers before it, which the layer before normalized,
    too. In a DenseNet-121 of 128 x 224 x 224 this saves 2.4 of 43.5 GB a step, and a seventh of
    XLA's time for its code (tools/results/LOG.md).

    Args:
      call: The result of `unbiased`.
      concatenations: a `Concatenation` for the reference of each concatenated tensor, which
        tfaccel/keras_internals/written.py fills.
      rectified: gets, for the reference of each output in a traced function, a function that
        returns the ReLU of the output: see `_normalized`.
      on_gpu: Whether the traced function runs on a GPU.
    """
    concatenations = {} if concatenations is None else concatenations
    sums = sums_at_once if on_gpu else sums_in_turn
    moments = _Moments(concatenations, sums)

    @functools.wraps(call)
    def call_at_once(self, inputs, training=None, mask=None, bias=None):
        if not (training and self.trainable and _is_plain(self, inputs, mask)):
            return call(self, inputs, training=training, mask=mask, bias=bias)
        moving_mean, moving_variance, gamma, beta = (
            each if each is None else tf.cast(tf.convert_to_tensor(each), tf.float32)
            for each in (self.moving_mean, self.moving_variance, self.gamma, self.beta)
        )
        shift = moving_mean if bias is None else moving_mean - bias
        mean, variance = moments.around(self, inputs, shift)

        # The mean of the inputs with their bias is moving_mean + mean.
        new, old = 1.0 - self.momentum, self.momentum
        self.moving_mean.assign(moving_mean + mean * new)
        self.moving_variance.assign(moving_variance * old + variance * new)

        known = concatenations.get(inputs.ref())
        is_written = known is None or known.num_arrays == 1
        settings = {"sums": sums, "is_written": is_written, "passed": (passed := _Passed())}
        given = self, inputs, shift + mean, variance, gamma, beta
        outputs = _normalized(*given, **settings)
        if rectified is not None and tf.is_symbolic_tensor(outputs):
            rectified[outputs.ref()] = functools.partial(_rectified, outputs, passed)
        return outputs

    return call_at_once


class _Moments:
    """The mean and variance of tensors and of the parts of concatenations, each computed once."""

    def __init__(self, concatenations: Mapping, sums: Callable):
        """Takes what `one_pass` is given, and a function of sums.py."""
        self._concatenations, self._sums, self._known = concatenations, sums, {}

    def around(self, layer, inputs: tf.Tensor, shift: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the mean of inputs - shift, and the variance, both [channels] float32."""
        other, mean, variance = self._of(layer, inputs, shift)
        return (mean if other is shift else mean + (other - shift)), variance

    def _of(self, layer, inputs, shift) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns a shift, the mean of inputs - shift, and the variance.

        It is the shift of the layer that was the first to read the values.
        """
        # A gradient of gradients would miss moments from within a tape's `stop_recording`.
        is_recorded = record.should_record_backprop([inputs])
        graph, axis = tf.compat.v1.get_default_graph(), layer.axis % len(inputs.shape)
        key = inputs.ref(), axis, graph, is_recorded
        if key in self._known:
            return self._known[key]
        if parts := self._parts(inputs, axis):
            shifts = tf.split(shift, [part.shape[axis] for part in parts])
            each = [self._of(layer, *part) for part in zip(parts, shifts, strict=True)]
            # XLA alone would look for each number among all parts, in each reader.
            whole = written(tf.concat([tf.stack(moments) for moments in each], axis=1))
            found = tuple(tf.unstack(whole))
        else:
            difference = tf.cast(inputs, tf.float32) - _along_axis(layer, shift, inputs)
            sums = self._sums(difference, tf.square(difference), layer._reduction_axes)
            mean, of_squares = (each / _num_values(inputs, shift) for each in sums)
            found = shift, mean, _variance(of_squares, mean)
        if tf.is_symbolic_tensor(inputs):
            self._known[key] = found
        return found

    def _parts(self, inputs, axis: int) -> list[tf.Tensor]:
        """Returns the tensors that were concatenated along the axis; [] if there are none."""
        found = self._concatenations.get(inputs.ref())
        return found.parts if found and found.axis == axis else []


@dataclasses.dataclass(eq=False)
class _Passed:
    """What the gradient of a ReLU passes to that of the norm before it.

    Attributes:
      masked: the gradient of the ReLU's inputs; None if there is none yet.
      of_relu: the gradient of its outputs.
    """

    masked: tf.Tensor | None = None
    of_relu: tf.Tensor | None = None


def _rectified(outputs: tf.Tensor, passed: _Passed) -> tf.Tensor:
    """Returns the ReLU of the outputs of a norm, whose gradient tells the norm's what it masks."""

    @on_tapes
    def relu(outputs):
        def gradient(of_relu):
            passed.of_relu = sum_written(of_relu)
            passed.masked = tf.where(outputs > 0, passed.of_relu, 0)
            return passed.masked

        # TensorFlow 2.21 takes 5 ms to translate a Relu or ReluGrad for XLA, and 0.1 ms for these.
        return tf.maximum(outputs, 0), gradient

    return relu(outputs)


def _normalized(
    layer, inputs, mean, variance, gamma, beta, *, sums, is_written: bool, passed: _Passed
) -> tf.Tensor:
    """Returns the normalized inputs in the layer's compute dtype.

    Their gradient is that of a batch norm, in its closed form. It has fewer operations than what
    TensorFlow makes of the mean and the variance: 1,100 of 14,800 less in a step of ResNet-50. The
    gradient also has a gradient, for which the mean and the variance depend on the inputs.

    Before a ReLU, the gradient computes the mask of the ReLU anew from the inputs, which it reads
    anyway: once for its sums, and once for the gradient of the inputs. XLA alone writes the mask or
    the masked gradient, wherever it expects that this is quicker. In a DenseNet-121 of 128 x 224 x
    224 these were 3.4 of 42.9 GB a step (tools/gpu_program.py).

    Args:
      layer: a `BatchNormalization`.
      inputs: in half precision.
      mean, variance: those of the inputs, [channels] float32.
      gamma, beta: [channels] float32, or None.
      sums: a function of sums.py.
      is_written: whether the inputs are in memory, and not computed by each of their readers.
      passed: what the gradient of the ReLU that reads the outputs will pass, if there is one.
    """
    given = [each for each in (gamma, beta) if each is not None]
    inverse = rsqrt(variance + layer.epsilon)
    factor = inverse if gamma is None else inverse * gamma

    def along(values):
        return _along_axis(layer, values, inputs)

    def centered(inputs, mean):
        return tf.cast(inputs, tf.float32) - along(mean)

    def outputs_of(distance, factor):
        outputs = distance * along(factor)
        return tf.cast(outputs if beta is None else outputs + along(beta), layer.compute_dtype)

    @on_tapes
    def normalized(inputs, *_):
        outputs = outputs_of(centered(inputs, mean), factor)

        def gradient(of_outputs):
            # Another reader of the outputs, as a second ReLU, adds to what the first passed.
            is_rectified = passed.masked is not None and of_outputs is passed.masked
            of_outputs = passed.of_relu if is_rectified else of_outputs
            is_apart = is_rectified and is_written

            def read(inputs, of_outputs):
                distance = centered(inputs, mean)
                if is_rectified:
                    of_outputs = tf.where(outputs_of(distance, factor) > 0, of_outputs, 0)
                return distance * along(inverse), tf.cast(of_outputs, tf.float32)

            held = inputs, of_outputs
            values, of_normalized = read(*(written_together(*held) if is_apart else held))
            of_both = sums(of_normalized, of_normalized * values, layer._reduction_axes)
            if is_apart:
                *held, of_beta, of_gamma = written_together(*held, *of_both)
                values, of_normalized = read(*held)
            else:
                of_beta, of_gamma = of_both
            means = (along(of_beta) + values * along(of_gamma)) / _num_values(inputs, mean)
            of_inputs = tf.cast((of_normalized - means) * along(factor), inputs.dtype)
            of_given = [(gamma, of_gamma), (beta, of_beta)]
            of_weights = (each for weight, each in of_given if weight is not None)
            return of_inputs, *of_weights

        return outputs, gradient

    return normalized(inputs, *given)


def _num_values(inputs: tf.Tensor, of_channels: tf.Tensor) -> float | tf.Tensor:
    """Returns how many values of each channel the inputs have, float32."""
    if inputs.shape.is_fully_defined():
        return float(inputs.shape.num_elements() // of_channels.shape[0])
    return tf.cast(tf.size(inputs) // of_channels.shape[0], tf.float32)


def _along_axis(layer, values: tf.Tensor, inputs: tf.Tensor) -> tf.Tensor:
    """Returns [channels] in the shape that broadcasts over the inputs."""
    rank = len(inputs.shape)
    if layer.axis in (-1, rank - 1):
        return values
    along_axis = [1] * rank
    along_axis[layer.axis] = -1
    return tf.reshape(values, along_axis)


def _variance(mean_of_squares: tf.Tensor, mean: tf.Tensor) -> tf.Tensor:
    # Rounding can make a variance of 0 negative.
    return tf.maximum(mean_of_squares - tf.square(mean), 0)


def synchronized(moments: Callable, all_reduce: Callable[[tf.Tensor], tf.Tensor]) -> Callable:
    """Returns a replacement of `BatchNormalization._moments` that uses the rows of all replicas.

    It makes one all-reduce of [3, channels] for each layer; Keras's own makes three. Replicas may
    have different numbers of rows, or none. If no replica has a row, the mean is the moving mean
    and the variance is 0. Layers without `synchronized` use `moments`.

    The sums are of d = inputs - moving_mean, and the moving mean is the same on every replica. So
    E[d^2] - E[d]^2 loses no digits where the mean is large. It can lose digits while the moving
    mean is still far from the mean.

    Args:
      moments: Keras's own `(self, inputs, mask)`. It returns the mean and the biased variance,
        [channels] in the dtype of the inputs, which Keras has cast to float32.
      all_reduce: A function that sums over replicas. Its gradient is the sum of their gradients,
        each weighted as its loss is among the rows of all replicas
        (`Replica.all_reduce_in_forward`).
    """

    @functools.wraps(moments)
    def moments_of_all(self, inputs, mask):
        if not self.synchronized:
            return moments(self, inputs, mask)
        shift = tf.stop_gradient(keras.ops.cast(self.moving_mean, inputs.dtype))
        difference = inputs - _along_axis(self, shift, inputs)
        if mask is None:
            count = tf.size(inputs, tf.int64) // tf.size(shift, tf.int64)
            count = tf.fill(tf.shape(shift), tf.cast(count, inputs.dtype))
        else:
            # The mask lacks the last axis, whatever the axis of the layer is, as in Keras.
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
    """Makes every batch normalization of a model synchronized, and returns the names of the layers.

    Raises:
      UserError: A layer has renorm=True. No layer is changed then.
    """
    layers = [
        each for each in layers_of(model) if isinstance(each, keras.layers.BatchNormalization)
    ]
    for layer in layers:
        if layer.renorm:
            raise UserError(
                f"layer '{layer.name}' has renorm=True, which does not work with statistics over "
                "all replicas; use renorm=False, or one replica"
            )
    for layer in layers:
        if not layer.synchronized:
            layer.synchronized = True
            _converted.add(layer)
    return [layer.name for layer in layers]


def convert_back(model: keras.Model) -> None:
    """Undoes what `convert` did in an earlier compilation."""
    for layer in _converted.intersection(layers_of(model)):
        layer.synchronized = False
        _converted.discard(layer)
