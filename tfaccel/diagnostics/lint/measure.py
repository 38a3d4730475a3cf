"""Times the steps of several models in turn, on this machine.

Takes models with the same inputs; returns how long each step took, forward and backward.

    before, after = spreads([model, wider], facts, num_steps=30)
    print(before.median_s)

The optimizer is not timed: its work is the same, except for the few weights of the padding. A
forward pass changes variables such as batch norm's statistics and seeds; they are restored.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfaccel.common.errors import UserError
from tfaccel.common.tables import in_figures
from tfaccel.diagnostics.lint.facts import Data, Facts
from tfaccel.diagnostics.lint.words import shape_text
from tfaccel.keras_internals.layers import forget_losses
from tfaccel.keras_internals.variables import components

BUDGET_S = 20.0  # for the compilation and the steps of two models
LEAST_STEPS = 3


@dataclasses.dataclass(frozen=True)
class Spread:
    """The median and the quartiles of step times, in seconds, and the number of steps."""

    median_s: float
    first_s: float
    third_s: float
    num_steps: int = 0

    @classmethod
    def of(cls, times_s: Sequence[float]) -> "Spread":
        """Returns the spread of some times."""
        first, median, third = np.percentile(times_s, (25, 50, 75)).tolist()
        return cls(median, first, third, len(times_s))

    def __str__(self):
        """Returns the median, and the range of the middle half of the steps."""
        first, third = 1000 * self.first_s, 1000 * self.third_s
        return (
            f"{in_figures(1000 * self.median_s)} ms (half of the steps {in_figures(first)} to "
            f"{in_figures(third)})"
        )

    def is_below(self, other: "Spread") -> bool:
        """Returns whether the upper quartile is below the lower quartile of `other`."""
        return self.third_s < other.first_s


def spreads(models: Sequence[keras.Model], facts: Facts, *, num_steps: int) -> list[Spread]:
    """Times a step of each model, in turn, with inputs of the first model.

    Args:
      models: functional or sequential models with the same inputs.
      facts: the data's shapes and batch size, and whether steps are compiled.
      num_steps: how many steps of each model are timed.

    Raises:
      UserError: a size of the inputs is not known, or an input is text.
    """
    times = step_times(
        models,
        _specs(models[0], facts.data),
        rows=facts.rows or 32,
        xla=facts.step.compiles,
        num_steps=num_steps,
    )
    return [Spread.of(each) for each in times]


def step_times(
    models: Sequence[keras.Model],
    specs: Sequence[tf.TensorSpec],
    *,
    rows: int,
    xla: bool,
    num_steps: int = 30,
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[float]]:
    """Returns the seconds of each step of each model. The models take turns.

    Args:
      models: functional or sequential models with the same inputs.
      specs: the specs of these inputs with known sizes; their batch size is ignored.
      rows: the rows of a batch of random numbers.
      xla: whether XLA compiles the steps.
      num_steps: the steps of each model, at most.
      budget_s: the time limit for everything, including compilation. At least three steps of each
        model are timed anyway, because fewer would tell nothing.
      clock: returns the time in seconds.

    Raises:
      UserError: an input is text, so no random numbers can be made for it.
    """
    inputs = [_random((rows, *each.shape[1:]), each.dtype) for each in specs]
    is_sequential = isinstance(models[0], keras.Sequential)
    given = inputs[0] if is_sequential else tf.nest.pack_sequence_as(models[0].input, inputs)
    kept = [part for each in models for one in each.variables for part in components(one)]
    before = [part.numpy() for part in kept]
    began = clock()
    try:
        steps = [_step(each, given, xla=xla) for each in models]
        for step in steps:  # compiles, and warms up
            step(), step()
        times = [[] for _ in steps]
        while len(times[0]) < num_steps and (
            len(times[0]) < LEAST_STEPS or clock() - began < budget_s
        ):
            for step_times_s, step in zip(times, steps, strict=True):
                start = clock()
                step()
                step_times_s.append(clock() - start)
    finally:
        for variable, value in zip(kept, before, strict=True):
            variable.assign(value)
        for each in models:
            forget_losses(each)  # they belong to the traced graph
    return times


def shortened(spread: Spread, *, num_steps: int) -> str:
    """Returns a sentence that says that fewer steps were timed than asked for; "" if not so."""
    if spread.num_steps >= num_steps:
        return ""
    return (
        f" Only {spread.num_steps} steps of each were timed, not {num_steps}, because the time "
        f"limit is {in_figures(BUDGET_S)} s, including compilation."
    )


def _specs(model: keras.Model, data: Data) -> list[tf.TensorSpec]:
    """Returns the specs of the model's inputs. Sizes that the model leaves open come from the data.

    Raises:
      UserError: neither the model nor the data tells a size.
    """
    shapes = [tuple(each.shape[1:]) for each in model.inputs]
    given = data.inputs if list(map(len, data.inputs)) == list(map(len, shapes)) else shapes
    known = [
        tuple(other if size is None else size for size, other in zip(*pair, strict=True))
        for pair in zip(shapes, given, strict=True)
    ]
    if any(None in each for each in known):
        raise UserError(
            f"{model.name} takes {' and '.join(map(shape_text, known))}, but a step is timed with "
            "known sizes; pass lint a dataset in which all examples have the same size"
        )
    return [
        tf.TensorSpec((None, *shape), each.dtype)
        for shape, each in zip(known, model.inputs, strict=True)
    ]


def device() -> str:
    """Returns the device that runs the steps, in words."""
    return "the GPU" if tf.config.list_logical_devices("GPU") else "the CPU"


def _random(shape: tuple, dtype: tf.DType) -> tf.Tensor:
    if dtype == tf.string:
        raise UserError(
            "an input is text, but steps are timed with random numbers; turn the text into numbers "
            "in the data's `map`, and let the model take the numbers"
        )
    if dtype.is_integer:
        return tf.zeros(shape, dtype)
    return tf.cast(tf.random.stateless_uniform(shape, seed=(0, 0)), dtype)


def _step(model: keras.Model, inputs, *, xla: bool) -> Callable[[], None]:
    variables = [each.value for each in model.trainable_variables]

    @tf.function(autograph=False, jit_compile=xla)
    def compute(inputs):
        with tf.GradientTape() as tape:
            outputs = tf.nest.flatten(model(inputs, training=True))
            loss = tf.add_n(
                [tf.reduce_mean(tf.square(tf.cast(each, tf.float32))) for each in outputs]
            )
        gradients = tape.gradient(loss, variables, unconnected_gradients="zero")
        # One number that depends on all gradients, so that all are computed and little is copied.
        return tf.add_n([loss, *(tf.reduce_sum(tf.cast(each, tf.float32)) for each in gradients)])

    traced = compute.get_concrete_function(inputs)
    return lambda: traced(inputs).numpy()  # waits for the device
