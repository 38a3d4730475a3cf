"""Whether a change helps, on this machine: models' steps, timed in turn.

Takes models of the same inputs; gives how long each step took, forward and backward.

    before, after = spreads([model, wider], facts, num_steps=30)
    print(before.median_s)

The optimizer's part is left out: it is the same but for the padding's few weights. What a forward
pass changes of a model's variables, as batch norm's statistics and seeds, is put back.
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
from tfaccel.diagnostics.lint.words import shown
from tfaccel.keras_internals.layers import forget_losses
from tfaccel.keras_internals.variables import components

BUDGET_S = 20.0  # for the steps of two models and their compilation
LEAST_STEPS = 3


@dataclasses.dataclass(frozen=True)
class Spread:
    """Median and quartiles of some times, in seconds, and of how many steps they are."""

    median_s: float
    first_s: float
    third_s: float
    num_steps: int = 0

    @classmethod
    def of(cls, times_s: Sequence[float]) -> "Spread":
        """Returns those of some times."""
        first, median, third = np.percentile(times_s, (25, 50, 75)).tolist()
        return cls(median, first, third, len(times_s))

    def __str__(self):
        """Returns the median, and between which times half of them are."""
        first, third = 1000 * self.first_s, 1000 * self.third_s
        return (
            f"{in_figures(1000 * self.median_s)} ms (half of the steps {in_figures(first)} to "
            f"{in_figures(third)})"
        )

    def is_below(self, other: "Spread") -> bool:
        """Whether most of these times are less than most of the others."""
        return self.third_s < other.first_s


def spreads(models: Sequence[keras.Model], facts: Facts, *, num_steps: int) -> list[Spread]:
    """Returns how long a step of each model takes, in turn, by what is known of the first.

    Args:
      models: functional or sequential, of the same inputs.
      facts: of the data's shapes and batch, and whether steps are compiled.
      num_steps: of each that are timed.

    Raises:
      UserError: nobody says a size of the inputs, or they are text.
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
    """Returns seconds of each step of each model, which take turns.

    Args:
      models: functional or sequential, of the same inputs.
      specs: of these inputs, all sizes known; their batch is not looked at.
      rows: in a batch, of random numbers.
      xla: whether steps are compiled.
      num_steps: of each model, at most.
      budget_s: for all of it, compilation included, after which it ends; but three steps of each
        are timed in any case, or nothing could be said.
      clock: gives the time in seconds.

    Raises:
      UserError: an input is text, of which there are no random numbers.
    """
    inputs = [_random((rows, *each.shape[1:]), each.dtype) for each in specs]
    is_one = isinstance(models[0], keras.Sequential)
    given = inputs[0] if is_one else tf.nest.pack_sequence_as(models[0].input, inputs)
    kept = [one for each in models for of in each.variables for one in components(of)]
    before = [one.numpy() for one in kept]
    began = clock()
    try:
        steps = [_step(each, given, xla=xla) for each in models]
        for step in steps:  # compiles, and warms up
            step(), step()
        times = [[] for _ in steps]
        while len(times[0]) < num_steps and (
            len(times[0]) < LEAST_STEPS or clock() - began < budget_s
        ):
            for taken, step in zip(times, steps, strict=True):
                start = clock()
                step()
                taken.append(clock() - start)
    finally:
        for variable, value in zip(kept, before, strict=True):
            variable.assign(value)
        for each in models:
            forget_losses(each)  # of the graph that was traced
    return times


def shortened(spread: Spread, *, num_steps: int) -> str:
    """Returns a sentence of its own where fewer steps were timed than were asked for; else ""."""
    if spread.num_steps >= num_steps:
        return ""
    return (
        f" {spread.num_steps} steps of each were timed, not {num_steps}: there are "
        f"{in_figures(BUDGET_S)} s for that, compilation included."
    )


def _specs(model: keras.Model, data: Data) -> list[tf.TensorSpec]:
    """Returns what the model takes; sizes that it leaves open are the data's.

    Raises:
      UserError: neither says a size.
    """
    shapes = [tuple(each.shape[1:]) for each in model.inputs]
    given = data.inputs if list(map(len, data.inputs)) == list(map(len, shapes)) else shapes
    known = [
        tuple(other if size is None else size for size, other in zip(*pair, strict=True))
        for pair in zip(shapes, given, strict=True)
    ]
    if any(None in each for each in known):
        raise UserError(
            f"{model.name} takes {' and '.join(map(shown, known))}, and a step is timed with whole "
            "shapes; give lint a dataset in which all examples are of one size"
        )
    return [
        tf.TensorSpec((None, *shape), each.dtype)
        for shape, each in zip(known, model.inputs, strict=True)
    ]


def device() -> str:
    """Returns where steps are timed, in words."""
    return "the GPU" if tf.config.list_logical_devices("GPU") else "the CPU"


def _random(shape: tuple, dtype: tf.DType) -> tf.Tensor:
    if dtype == tf.string:
        raise UserError(
            "an input is text, and steps are timed with random numbers; make numbers of the text "
            "in the data's `map`, and let the model take those"
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
        # One number that needs all of them, so that none is left out and little is copied.
        return tf.add_n([loss, *(tf.reduce_sum(tf.cast(each, tf.float32)) for each in gradients)])

    traced = compute.get_concrete_function(inputs)
    return lambda: traced(inputs).numpy()  # waits for the device
