"""`tfaccel.gradient_underflow`: how much of a model's gradients float16 loses, for each layer.

Takes a compiled model and a batch; returns a table, and does not change the model.

    print(tfaccel.gradient_underflow(model, (x, y)))

A gradient below float16's smallest number, 2**-24, becomes 0, also on its way back through the
layers. Loss scaling prevents this (Micikevicius et al., Mixed Precision Training, 2018, sec. 3.2).
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfaccel.common.checks import check_number
from tfaccel.common.errors import UserError
from tfaccel.common.report import Grid, Report
from tfaccel.common.tables import in_figures
from tfaccel.keras_internals.copies import in_float32, without_training_state
from tfaccel.keras_internals.layers import layers_of
from tfaccel.keras_internals.model_view import loss_weights_of, optimizers_of
from tfaccel.keras_internals.variables import components

COMMON_SCALES = (1.0, 128.0, 2.0**15)  # none; Apex's usual static one; Keras's initial dynamic one


@dataclasses.dataclass(frozen=True)
class LayerUnderflow:
    """The lost share of one layer's gradients.

    Attributes:
      name: the layer's name, or its path if layers are nested.
      num_elements: the number of elements of its trainable weights.
      lost: for each loss scale, the share (0..1) of the elements that are 0 in the model's dtype
        but not in float32; None if an element is infinite or NaN.
    """

    name: str
    num_elements: int
    lost: tuple[float | None, ...]


@dataclasses.dataclass(frozen=True, repr=False)
class Underflow(Report):
    """The lost share of a model's gradients at each loss scale.

    Attributes:
      model: the model's name.
      loss_scales: the loss scales.
      layers: the layers with trainable weights, in order.
      whole: all layers together.
    """

    model: str
    loss_scales: tuple[float, ...]
    layers: tuple[LayerUnderflow, ...]
    whole: LayerUnderflow

    def parts(self):
        """Yields the table of the layers' lost shares."""
        yield f"gradient underflow: {self.model}, by loss scale"
        heads = ("share of gradients lost at", *map(in_figures, self.loss_scales))
        rows = [(each.name, *map(_percent, each.lost)) for each in (*self.layers, self.whole)]
        yield Grid(heads, rows, right=range(1, len(heads)))


def gradient_underflow(
    model: keras.Model, batch: tuple, *, loss_scales: Sequence[float] | None = None
) -> Underflow:
    """Returns the share of each layer's gradients that becomes 0 in the model's half precision.

    Two copies of the model compute the gradients of one batch: one copy in the model's dtype, with
    the loss times each loss scale, and one copy in float32.

    Args:
      model: a compiled model with a loss, with the policy mixed_float16, float16 or mixed_bfloat16.
      batch: (x, y) or (x, y, weight), as `fit` takes it or as a loader's iterator gives it. If it
        holds the batches of several replicas, the first replica's batch is used.
      loss_scales: the loss scales to try; by default 1, 128, 2**15 and the current one.

    Raises:
      UserError: the model is not compiled, computes in float32, or cannot be created from its
        config; or a loss scale is not a number above 0.
    """
    if not getattr(model, "loss", None):
        raise UserError("gradient_underflow needs a model with a loss; compile the model with one")
    if all(each.compute_dtype == "float32" for each in layers_of(model)):
        raise UserError(
            f"gradient_underflow needs half precision, but {model.name} computes in float32, which "
            "loses nothing; use mixed_float16 (tfaccel.setup(precision=...))"
        )
    if loss_scales is None:
        scales = _default_scales(model.optimizer)
    else:
        scales = _checked_scales(loss_scales)
    batch = tf.nest.map_structure(on_first_replica, keras.utils.unpack_x_y_sample_weight(batch))
    exact = _nonzero(compiled_like(model, in_float32(model)), batch, 1.0)
    own = compiled_like(model, without_training_state(model))
    found = [_nonzero(own, batch, each) for each in scales]
    *layers, whole = (
        LayerUnderflow(
            name,
            num_elements,
            tuple(_lost([exact[i] for i in members], [at[i] for i in members]) for at in found),
        )
        for name, num_elements, members in by_layer(model)
    )
    return Underflow(model.name, scales, tuple(layers), whole)


def _checked_scales(loss_scales) -> tuple[float, ...]:
    if not isinstance(loss_scales, Sequence) or not loss_scales:
        raise UserError(f"loss_scales={loss_scales!r}; expected a list of numbers above 0")
    for each in loss_scales:
        check_number("loss_scales", each, above=0)
    return tuple(map(float, loss_scales))


def _default_scales(optimizer) -> tuple[float, ...]:
    """Returns the common loss scales and the optimizer's, which may be dynamic or static."""
    own = [scale for each in optimizers_of(optimizer) if (scale := scale_of(each)) is not None]
    return tuple(sorted({*COMMON_SCALES, *own}))


def scale_of(optimizer) -> float | None:
    """Returns the loss scale of one optimizer, dynamic or static; None if it has none."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        if optimizer.built:
            return float(components(optimizer.dynamic_scale)[0].numpy())
        return float(optimizer.initial_scale)
    return float(optimizer.loss_scale_factor) if optimizer.loss_scale_factor else None


def on_first_replica(value):
    """Returns the first replica's tensor of a value of a batch; None for None."""
    if isinstance(value, tf.distribute.DistributedValues):
        return value.values[0]
    return None if value is None else tf.convert_to_tensor(value)


def compiled_like(model: keras.Model, copy: keras.Model) -> keras.Model:
    """Compiles a copy with the model's loss."""
    copy.compile(loss=model.loss, loss_weights=loss_weights_of(model))
    return copy


def _nonzero(model: keras.Model, batch: tuple, scale: float) -> list[int | None]:
    """Returns how many elements of each gradient are not 0; None for an infinite or NaN element."""

    @tf.function(autograph=False)
    def count():
        x, y, weight = batch
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            loss = model.compute_loss(x, y, outputs, weight) * scale
        gradients = tape.gradient(
            loss, model.trainable_variables, unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        gradients = [tf.convert_to_tensor(each) for each in gradients]
        numbers = [tf.math.count_nonzero(each) for each in gradients]
        return numbers, [tf.reduce_all(tf.math.is_finite(each)) for each in gradients]

    counted = zip(*(np.array(each) for each in count()), strict=True)
    return [int(number) if finite else None for number, finite in counted]


def by_layer(model: keras.Model) -> Iterator[tuple[str, int, Sequence[int]]]:
    """Yields the trainable weights of each layer, then of all layers together.

    Each is the layer's name, or its path if layers are nested; its number of elements; and the
    indices of its weights in `model.trainable_variables`.
    """
    variables, members = model.trainable_variables, {}
    for index, each in enumerate(variables):
        layer, _, _ = each.path.removeprefix(f"{model.name}/").rpartition("/")
        members.setdefault(layer, []).append(index)
    members["all layers"] = range(len(variables))
    for name, own in members.items():
        yield name, sum(math.prod(variables[each].shape) for each in own), own


def _lost(exact: list[int | None], found: list[int | None]) -> float | None:
    """Returns the share that became 0. It compares only counts, because dropout masks differ."""
    if None in found or None in exact:
        return None
    return max(0.0, 1 - sum(found) / sum(exact)) if sum(exact) else 0.0


def _percent(lost: float | None) -> str:
    return "overflow" if lost is None else f"{lost:.2%}"
