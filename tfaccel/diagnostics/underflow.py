"""`tfaccel.gradient_underflow`: what float16 loses of a model's gradients, by layer and loss scale.

Takes a compiled model and a batch; gives a table, and leaves the model as it is.

    print(tfaccel.gradient_underflow(model, (x, y)))

A gradient below float16's smallest number, 2**-24, becomes 0, on its way back through the layers
too; loss scaling keeps it above (Micikevicius et al., Mixed Precision Training, 2018, section 3.2).
"""

import dataclasses
import math
from collections.abc import Sequence

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

COMMON_SCALES = (1.0, 128.0, 2.0**15)  # none, Apex's usual static one, Keras's first dynamic one


@dataclasses.dataclass(frozen=True)
class LayerUnderflow:
    """What is lost of one layer's gradients.

    Attributes:
      name: of the layer, or its path where layers are nested.
      num_elements: of its weights that are trained.
      lost: for each loss scale, the share (0..1) of the elements that are not 0 in float32 but are
        in the model's own arithmetic; None where one is infinite or NaN.
    """

    name: str
    num_elements: int
    lost: tuple[float | None, ...]


@dataclasses.dataclass(frozen=True, repr=False)
class Underflow(Report):
    """What is lost of a model's gradients at each loss scale.

    Attributes:
      model: its name.
      loss_scales: that were tried.
      layers: those with weights that are trained, in order.
      whole: all of them together.
    """

    model: str
    loss_scales: tuple[float, ...]
    layers: tuple[LayerUnderflow, ...]
    whole: LayerUnderflow

    def parts(self):
        """Returns the layers' shares."""
        yield f"gradient underflow: {self.model}, by loss scale"
        heads = ("share of gradients lost at", *map(in_figures, self.loss_scales))
        rows = [(each.name, *map(_share, each.lost)) for each in (*self.layers, self.whole)]
        yield Grid(heads, rows, right=range(1, len(heads)))


def gradient_underflow(
    model: keras.Model, batch: tuple, *, loss_scales: Sequence[float] | None = None
) -> Underflow:
    """Returns which share of each layer's gradients the model's half precision makes 0.

    The gradients of one batch, computed twice by copies of the model: in its own arithmetic with
    the loss times each scale, and in float32.

    Args:
      model: compiled, with a loss; of the policy mixed_float16, float16 or mixed_bfloat16.
      batch: (x, y) or (x, y, weight), as `fit` takes them or as a loader's iterator gives them; of
        several replicas' batches the first one's is taken.
      loss_scales: to try; by default 1, 128, 2**15, and the one that training is at.

    Raises:
      UserError: the model is not compiled, computes in float32, or cannot be made again from its
        config; or a scale is no number above 0.
    """
    if not getattr(model, "loss", None):
        raise UserError("gradient_underflow of a model without a loss; compile it with one first")
    if all(each.compute_dtype == "float32" for each in layers_of(model)):
        raise UserError(
            f"gradient_underflow of {model.name}, which computes in float32 and loses nothing; "
            "expected a policy as mixed_float16 (tfaccel.setup(precision=...))"
        )
    scales = _checked(loss_scales) if loss_scales is not None else _usual(model.optimizer)
    batch = tf.nest.map_structure(_first_replicas, keras.utils.unpack_x_y_sample_weight(batch))
    exact = _nonzero(_like(model, in_float32(model)), batch, 1.0)
    own = _like(model, without_training_state(model))
    found = [_nonzero(own, batch, each) for each in scales]
    *layers, whole = _by_layer(model, exact, found)
    return Underflow(model.name, scales, tuple(layers), whole)


def _checked(loss_scales) -> tuple[float, ...]:
    if not isinstance(loss_scales, Sequence) or not loss_scales:
        raise UserError(f"loss_scales={loss_scales!r}; expected a list of numbers above 0")
    for each in loss_scales:
        check_number("loss_scales", each, above=0)
    return tuple(map(float, loss_scales))


def _usual(optimizer) -> tuple[float, ...]:
    """Returns the common scales and the optimizer's, which may be dynamic or static."""
    own = []
    for each in optimizers_of(optimizer):
        if isinstance(each, keras.optimizers.LossScaleOptimizer):
            own.append(each.dynamic_scale if each.built else each.initial_scale)
        elif each.loss_scale_factor:
            own.append(each.loss_scale_factor)
    return tuple(sorted({*COMMON_SCALES, *map(float, own)}))


def _first_replicas(value):
    if isinstance(value, tf.distribute.DistributedValues):
        return value.values[0]
    return None if value is None else tf.convert_to_tensor(value)


def _like(model: keras.Model, copy: keras.Model) -> keras.Model:
    """Returns a copy of the model with its loss."""
    copy.compile(loss=model.loss, loss_weights=loss_weights_of(model))
    return copy


def _nonzero(model: keras.Model, batch: tuple, scale: float) -> list[int | None]:
    """Returns how many elements of each weight's gradient are not 0; None where one is infinite."""

    @tf.function(autograph=False)
    def count():
        x, y, weight = batch
        with tf.GradientTape() as tape:
            answers = model(x, training=True)
            loss = model.compute_loss(x, y, answers, weight) * scale
        gradients = tape.gradient(
            loss, model.trainable_variables, unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        gradients = [tf.convert_to_tensor(each) for each in gradients]
        numbers = [tf.math.count_nonzero(each) for each in gradients]
        return numbers, [tf.reduce_all(tf.math.is_finite(each)) for each in gradients]

    counted = zip(*(np.array(each) for each in count()), strict=True)
    return [int(number) if finite else None for number, finite in counted]


def _by_layer(model: keras.Model, exact: list, found: list[list]) -> list[LayerUnderflow]:
    """Returns layers, then all, given the weights' numbers in float32 and at each scale."""
    variables, members = model.trainable_variables, {}
    for index, each in enumerate(variables):
        layer, _, _ = each.path.removeprefix(f"{model.name}/").rpartition("/")
        members.setdefault(layer, []).append(index)
    members["all layers"] = range(len(variables))
    return [
        LayerUnderflow(
            name,
            sum(math.prod(variables[each].shape) for each in own),
            tuple(_lost([exact[i] for i in own], [at[i] for i in own]) for at in found),
        )
        for name, own in members.items()
    ]


def _lost(exact: list[int | None], found: list[int | None]) -> float | None:
    """Returns the share that became 0. (Dropout differs, so that it is one of numbers alone.)"""
    if None in found or None in exact:
        return None
    return max(0.0, 1 - sum(found) / sum(exact)) if sum(exact) else 0.0


def _share(lost: float | None) -> str:
    return "overflow" if lost is None else f"{lost:.2%}"
