"""Says before the first step how much memory it will need, and what to do if that is too much.

    watch(model, StepConfig())       # when the model is compiled
    model.fit(train)
    # memory: about 9,371 of 81,559 MiB on each replica, with XLA: parameters 98, optimizer 98, ...
    forecast_of(model)               # the same as a text, once the step has been traced

The forecast comes from the shapes of the traced step (step/memory), before XLA compiles it, which
takes a minute or more. XLA's own figure would come later than the error that it is to prevent:
TensorFlow 2.21 gives it away only after a compilation, and `experimental_get_compiler_ir` compiles
a program of its own.
"""

import dataclasses
import logging
import weakref

import keras
import tensorflow as tf

from tfaccel.config import StepConfig
from tfaccel.keras_internals.sharded_states import num_bytes_of_states
from tfaccel.step.memory.need import Need
from tfaccel.training.checkpoint.state import bytes_of
from tfaccel.training.memory_errors import situation_of
from tfaccel.training.memory_plan import Plan, gpus_of, limit_and_others
from tfaccel.training.memory_ways import in_words

log = logging.getLogger("tfaccel")

_forecasts: "weakref.WeakKeyDictionary[keras.Model, Forecast]" = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class Forecast:
    """The memory of a training step on one replica.

    Attributes:
      plan: where it goes; its activations are None if the trace did not tell their sizes.
      xla: whether XLA compiles the step.
      unknown: which size is not known.
    """

    plan: Plan
    xla: bool
    unknown: str = ""

    def __str__(self):
        """Returns "about 9,371 of 81,559 MiB on each replica, with XLA: parameters 98, ..."."""
        if self.unknown:
            return f"not known, because the trace does not tell all sizes ({self.unknown})"
        how = "with XLA" if self.xla else "without XLA"
        limit = f" of {self.plan.limit >> 20:,}" if self.plan.limit else ""
        parts = str(dataclasses.replace(self.plan, limit=None))
        return (
            f"about {self.plan.total / 2**20:,.0f}{limit} MiB on each replica, {how}: "
            f"{parts.removesuffix(' MiB on each replica')}"
        )


def watch(model: keras.Model, config: StepConfig) -> None:
    """Lets the forecast be logged when the compiled model's training step has been traced."""
    _forecasts.pop(model, None)
    known, said = weakref.ref(model), set()

    def tell(need: Need) -> None:
        model = known()
        if model is None:
            return
        with tf.init_scope():
            forecast = forecast_for(model, need)
        _forecasts[model] = forecast
        if str(forecast) not in said:
            said.add(str(forecast))
            log.info("memory: %s", forecast)
            _warn(model, config, forecast, need.rows)

    model.train_function.when_traced(tell)


def forecast_of(model: keras.Model) -> Forecast | None:
    """Returns the forecast of the training step that was traced last; None before the first."""
    return _forecasts.get(model)


def forecast_for(model: keras.Model, need: Need) -> Forecast:
    """Returns the forecast for a step.

    On a GPU the variables and the first batches are already there, so that what TensorFlow holds
    and what DALI and others hold is read, and not estimated.
    """
    parameters, optimizer = bytes_of(model.variables), num_bytes_of_states(model.optimizer)
    batches, limit, others = need.batches, None, None
    gpus = gpus_of(model)
    if gpus:
        infos = [tf.config.experimental.get_memory_info(each.name) for each in gpus]
        held = max(each["current"] for each in infos)
        batches = max(batches, held - parameters - optimizer)
        limit, others = limit_and_others(gpus, [each["peak"] for each in infos])
    step = need.step
    gradients = min(bytes_of(model.trainable_variables), step or 0)
    plan = Plan(
        parameters,
        optimizer,
        gradients,
        activations=None if step is None else step - gradients,
        batches=batches,
        others=others,
        limit=limit,
    )
    return Forecast(plan, need.xla, need.unknown)


def _warn(model: keras.Model, config: StepConfig, forecast: Forecast, rows: int | None) -> None:
    plan = forecast.plan
    if forecast.unknown or not plan.limit or plan.total <= plan.limit:
        return
    size = rows * model.distribute_strategy.num_replicas_in_sync if rows else None
    situation = situation_of(model, config, plan, global_batch_size=size)
    log.warning(
        "memory: the step will probably not fit: it needs about %s of %s MiB; use %s",
        f"{plan.total / 2**20:,.0f}",
        f"{plan.limit >> 20:,}",
        in_words(situation),
    )
