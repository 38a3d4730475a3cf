"""The learning rate of every step, computed in the graph.

`make_schedule` takes the recipe, the batch and the steps of an epoch, and returns a Keras schedule.
`describe` returns its numbers in one line. The rate is a pure function of the optimizer's count of
updates, so a resumed run continues with it. (A step that loss scaling skips does not count.)

    schedule = make_schedule(config.train, global_batch_size=1024, num_steps=1252)
    log.info("%s", describe(config.train, schedule, global_batch_size=1024, num_steps=1252))
"""

import math

import keras
import tensorflow as tf

from tfaccel.common.errors import UserError
from tfaccel.common.tables import in_figures
from tfaccel.config import TrainConfig


@keras.saving.register_keras_serializable(package="tfaccel")
class LearningRate(keras.optimizers.schedules.LearningRateSchedule):
    """A linear rise to `peak`, and a decay from it.

    There are W warm-up steps and N steps in all. While s < W, step s, counted from 0, has the rate
    peak * (s + 1) / W. So the first step already learns, and step W - 1 is the first with the full
    rate. After that:

      constant: peak.
      step: peak * decay_factor ** (number of decay_steps that are at or below s).
      cosine: peak * (1 + cos(pi * (s - W) / (N - W))) / 2.
      linear: peak * (N - s) / (N - W).

    The last two would reach 0 only at step N, after the end, because a last step with rate 0 would
    be wasted. Steps are compared and subtracted as integers, and rounded to float32 afterwards.

    Attributes:
      peak: the largest rate.
      is_constant: whether every step has the rate `peak`.
    """

    def __init__(
        self,
        *,
        peak: float,
        warmup_steps: int,
        total_steps: int,
        decay: str,
        decay_steps=(),
        decay_factor: float = 1.0,
        first_step: int = 0,
    ):
        """Takes the numbers above; steps are counted from the start of training.

        `first_step` is the step of an optimizer's first update, if other optimizers trained before.
        """
        self.first_step = first_step
        self.peak, self.decay = peak, decay
        self.warmup_steps, self.total_steps = warmup_steps, total_steps
        self.decay_steps, self.decay_factor = tuple(decay_steps), decay_factor
        self.is_constant = decay == "constant" and warmup_steps == 0

    def __call__(self, step) -> tf.Tensor:
        """Returns the rate of a step, float32.

        Args:
          step: the number of updates before it, an integer.
        """
        step = tf.cast(tf.convert_to_tensor(step), tf.int64) + self.first_step
        decayed = self._decayed(step)
        if self.warmup_steps == 0:
            return self.peak * decayed
        risen = _ratio(step + 1, self.warmup_steps)
        return self.peak * tf.where(step < self.warmup_steps, risen, decayed)

    def _decayed(self, step) -> tf.Tensor:
        if self.decay == "constant":
            return tf.ones([], tf.float32)
        if self.decay == "step":
            passed = sum((tf.cast(step >= each, tf.int32) for each in self.decay_steps), 0)
            powers = [self.decay_factor**count for count in range(len(self.decay_steps) + 1)]
            return tf.gather(tf.constant(powers, tf.float32), passed)
        left = tf.clip_by_value(self.total_steps - step, 0, self.total_steps)
        left = _ratio(left, max(self.total_steps - self.warmup_steps, 1))
        # This equals (1 + cos(pi (1 - left))) / 2, which in float32 is inexact in the last steps.
        return left if self.decay == "linear" else tf.sin(left * (math.pi / 2)) ** 2

    def get_config(self) -> dict:
        """Returns the constructor's arguments."""
        return {
            "peak": self.peak,
            "warmup_steps": self.warmup_steps,
            "total_steps": self.total_steps,
            "decay": self.decay,
            "decay_steps": list(self.decay_steps),
            "decay_factor": self.decay_factor,
            "first_step": self.first_step,
        }

    def begun_at(self, first_step: int) -> "LearningRate":
        """Returns the same schedule for an optimizer that begins at that step."""
        return LearningRate(**{**self.get_config(), "first_step": first_step})


def _ratio(steps: tf.Tensor, whole: int) -> tf.Tensor:
    return tf.cast(steps, tf.float32) / whole


def make_schedule(train: TrainConfig, *, global_batch_size: int, num_steps: int) -> LearningRate:
    """Returns the learning rate of every step, for epochs of `num_steps` steps.

    Raises:
      UserError: the rate would decay before the warm-up ends.
    """
    warmup_steps = round(train.warmup_epochs * num_steps)
    decay_steps = []
    if train.decay == "step":
        decay_steps = [round(each * num_steps) for each in train.decay_epochs]
        if decay_steps and decay_steps[0] < warmup_steps:
            raise UserError(
                f"decay_epochs={train.decay_epochs} with "
                f"warmup_epochs={in_figures(train.warmup_epochs)}: the rate would decay before "
                "the warm-up ends; choose a first decay epoch after the warm-up"
            )
    return LearningRate(
        peak=_peak(train, global_batch_size),
        warmup_steps=warmup_steps,
        total_steps=train.epochs * num_steps,
        decay=train.decay,
        decay_steps=decay_steps,
        decay_factor=train.decay_factor,
    )


def _peak(train: TrainConfig, global_batch_size: int) -> float:
    if train.base_batch_size is None:
        return float(train.learning_rate)
    return train.learning_rate * global_batch_size / train.base_batch_size


def describe(
    train: TrainConfig, schedule: LearningRate, *, global_batch_size: int, num_steps: int
) -> str:
    """Returns the numbers of the recipe's schedule in one line."""
    peak = in_figures(schedule.peak, 4)
    if train.base_batch_size is not None:
        scale = f"{global_batch_size}/{train.base_batch_size}"
        peak = f"{in_figures(train.learning_rate, 4)} x {scale} = {peak}"
    if schedule.is_constant:
        return f"learning rate: {peak}, constant"
    steps = [0, schedule.warmup_steps, *schedule.decay_steps]
    if schedule.decay in ("cosine", "linear"):
        steps.append((schedule.warmup_steps + schedule.total_steps) // 2)
    last = schedule.total_steps - 1
    steps = sorted({each for each in (*steps, last) if each <= last})
    rates = [
        f"{in_figures(schedule(each), 4)} at step {each}{_epoch(each, num_steps)}" for each in steps
    ]
    return f"learning rate: {peak}, {schedule.decay}; {', '.join(rates)}"


def _epoch(step: int, num_steps: int) -> str:
    """Returns the number of epochs before the step, if the step begins an epoch."""
    return f" (epoch {step // num_steps})" if step and step % num_steps == 0 else ""
