"""The loss scales of a model's optimizers in float16, for steps of the model's own.

In float16 a gradient below 6e-8 becomes 0. So `give_scales` gives each optimizer of the model a
loss scale of its own. A step that calls `optimizer.scale_loss` takes gradients of a scaled loss, as
in Keras, and the optimizer divides them. Most steps of one's own do not call it. `unscaled` scales
for them:

    step = unscaled(model, model.train_step)

While such a step runs, `tape.gradient` with respect to weights scales: the gradient begins with the
scale of the optimizer that has the weights, and is divided by it in float32 at the end. So the
step's own code gets true gradients, and may clip them, for example. If float16 overflows, they are
infinite. The optimizer then skips the update and halves its scale, and no other optimizer does.

`Overflows` tells the logs which optimizers skipped their updates.
"""

import contextlib
import functools
import operator
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfaccel.keras_internals.model_view import named_optimizers
from tfaccel.keras_internals.optimizers import weights_of
from tfaccel.keras_internals.patching import patched, with_entry
from tfaccel.keras_internals.row_operations import noticing
from tfaccel.keras_internals.variables import value_of

SCALE, SKIPPED = "loss_scale", "skipped_steps"  # logs; other optimizers add "/" and a name


def is_log(name: str) -> bool:
    """Returns whether a log is one of `Overflows.logs`."""
    return name.partition("/")[0] in (SCALE, SKIPPED)


def is_skipped(name: str) -> bool:
    """Returns whether a log is a number of skipped steps."""
    return name.partition("/")[0] == SKIPPED


def scale_of(optimizer):
    """Returns the loss scale of an optimizer, a number or a float32 scalar; None without one."""
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer.loss_scale_factor
    return value_of(optimizer.dynamic_scale) if optimizer.built else optimizer.initial_scale


def unscaled(model, step: Callable) -> Callable:
    """Returns a training step of the model's own, whose gradients are true ones in float16, too."""

    @functools.wraps(step)
    def run(*args, **kwargs):
        all_ = list(named_optimizers(model).values())
        optimizers = [each for each in all_ if scale_of(each) is not None]
        if not optimizers:
            return step(*args, **kwargs)
        by_step = set()  # the ids of the optimizers whose loss the step scales
        with contextlib.ExitStack() as contexts:
            own = functools.partial(_gradient, all_, by_step, tf.GradientTape.gradient)
            gradient = lambda tape, *args, **kwargs: own(tape, *args, **kwargs)  # noqa: E731
            contexts.enter_context(patched(tf.GradientTape, "gradient", gradient))
            for each in optimizers:
                methods = {"scale_loss": _scale_loss, "apply": _apply}
                for name, method in methods.items():  # past Keras's tracking of attributes
                    wrapped = functools.partial(method, each, by_step, getattr(each, name))
                    contexts.enter_context(with_entry(each.__dict__, name, wrapped))
            return step(*args, **kwargs)

    return run


def _scale_loss(optimizer, by_step: set[int], own: Callable, loss):
    by_step.add(id(optimizer))
    return own(loss)


def _apply(optimizer, by_step: set[int], own: Callable, grads, trainable_variables=None):
    """Applies gradients. The optimizer divides by its scale, so true ones are multiplied by it."""
    if id(optimizer) not in by_step:
        with noticing(on=False):
            grads = [_times(each, scale_of(optimizer)) for each in grads]
    return own(grads, trainable_variables)


def _gradient(
    optimizers: Sequence,
    by_step: set[int],
    own: Callable,
    tape,
    target,
    sources,
    output_gradients=None,
    unconnected_gradients=tf.UnconnectedGradients.NONE,
):
    """Returns true gradients; those of weights were scaled on their way."""
    owners = _owners(optimizers, sources)
    scales = [scale_of(each) for each in owners]
    has_none = any(each is None for each in scales)
    if not owners or has_none or by_step.intersection(map(id, owners)):
        return own(tape, target, sources, output_gradients, unconnected_gradients)
    with noticing(on=False):
        # Of weights of several optimizers there is one loss, so the smallest scale has to do. One
        # without a scale could not skip an overflow, so its loss is not scaled.
        scale = functools.reduce(tf.minimum, [tf.cast(each, tf.float32) for each in scales])
        targets, given = tf.nest.flatten(target), tf.nest.flatten(output_gradients)
        given = given if output_gradients is not None else [None] * len(targets)
        seeds = [_seed(*each, scale) for each in zip(targets, given, strict=True)]
    found = own(tape, target, sources, seeds, unconnected_gradients)
    with noticing(on=False):
        flat = [_times(each, 1 / scale) for each in tf.nest.flatten(found)]
        return tf.nest.pack_sequence_as(found, flat)


def _owners(optimizers: Sequence, sources) -> list:
    """Returns the optimizers that train the sources: all that may, if that is not known yet."""
    asked = {id(each) for each in tf.nest.flatten(sources) if isinstance(each, keras.Variable)}
    owned = {id(each): {id(own) for own in weights_of(each)} for each in optimizers}
    owners = [each for each in optimizers if asked & owned[id(each)]]
    unknown = [each for each in optimizers if not owned[id(each)]]
    return owners or ((unknown or list(optimizers)) if asked else [])


def _seed(target, given, scale: tf.Tensor):
    if not isinstance(target, tf.Tensor) or not target.dtype.is_floating:
        return given
    seed = tf.ones_like(target) if given is None else given
    return seed * tf.cast(scale, target.dtype)


def _times(gradient, factor):
    """Returns a gradient, or `tf.IndexedSlices`, or None, times a number, in float32."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = _times(gradient.values, factor)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    gradient = tf.convert_to_tensor(gradient)
    dtype = tf.float64 if gradient.dtype == tf.float64 else tf.float32
    return tf.cast(tf.cast(gradient, dtype) * tf.cast(factor, dtype), gradient.dtype)


class Overflows:
    """Which updates of a step were skipped because float16 overflowed."""

    def __init__(self):
        """Starts with none."""
        self._found = {}  # by the id of the optimizer

    def add(self, optimizer, found: tf.Tensor) -> None:
        """Adds whether an update of an optimizer was skipped."""
        self._found.setdefault(id(optimizer), []).append(found)

    def all(self) -> list[tf.Tensor]:
        """Returns whether each update was skipped."""
        return [found for each in self._found.values() for found in each]

    def logs(self, model) -> dict[str, tf.Tensor]:
        """Returns the dynamic scale of each optimizer, and whether it skipped an update."""
        logs = {}
        for name, optimizer in named_optimizers(model).items():
            is_scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
            if not is_scaled or not optimizer.built:
                continue
            suffix = "" if optimizer is model.optimizer else f"/{name}"
            skipped = self._found.get(id(optimizer), [tf.constant(False)])
            logs[SCALE + suffix] = tf.identity(value_of(optimizer.dynamic_scale))
            # A function returns int32 through the CPU, and each step would wait for the GPU.
            logs[SKIPPED + suffix] = tf.cast(functools.reduce(operator.or_, skipped), tf.int64)
        return logs
