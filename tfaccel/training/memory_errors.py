"""Explains an out-of-memory error: what took the memory, and what would fit at which price.

Takes a compiled model and a method that may run out of memory; gives an error with proposals.

    model.fit = explained(model.fit, model, StepConfig())
    model.fit(train)    # OutOfMemoryError: ... use accumulation_steps=2 or more (...), or ...

The prices are estimates; `tfaccel autobatch` measures them.
"""

import functools
import inspect
from collections.abc import Callable

import keras

from tfaccel.common.errors import RunError
from tfaccel.config import StepConfig
from tfaccel.keras_internals.float32_layers import policy_of
from tfaccel.process.out_of_memory import is_out_of_memory, leaves_its_cause_to_the_log
from tfaccel.step.states.choose import may_pack
from tfaccel.training.memory_plan import Plan, read_plan, saved_by_slices
from tfaccel.training.memory_ways import Situation, in_words

KERAS_BATCH = 32  # Keras's batch size for arrays if `fit` has no batch_size


class OutOfMemoryError(RunError):
    """Memory was full. The message tells what took it and what to do."""


def explained(method: Callable, model: keras.Model, config: StepConfig) -> Callable:
    """Returns the method, which raises OutOfMemoryError with a plan if memory is full.

    The method is one that users call: `fit`, `predict_on_batch` and so on.
    """
    signature = inspect.signature(method)
    trains = method.__name__ in ("fit", "train_on_batch")

    @functools.wraps(method)
    def wrapper(*args, **kwargs):
        try:
            return method(*args, **kwargs)
        except OutOfMemoryError:
            raise  # from `evaluate` within `fit`: it names the right batch
        except Exception as error:  # from TensorFlow or DALI, or a message that quotes theirs
            is_named = is_out_of_memory(str(error))
            if not is_named and not leaves_its_cause_to_the_log(str(error)):
                raise
            plan = read_plan(model, str(error), trains=trains)
            if not is_named and not plan.is_full:
                raise
            arguments = signature.bind(*args, **kwargs).arguments
            size = _global_batch_size(signature, arguments)
            situation = situation_of(model, config, plan, global_batch_size=size, trains=trains)
            raise OutOfMemoryError(explain(situation)) from error

    return wrapper


def situation_of(
    model: keras.Model,
    config: StepConfig,
    plan: Plan,
    *,
    global_batch_size: int | None,
    trains: bool = True,
) -> Situation:
    """Returns the situation of a compiled model's step.

    Args:
      model: the model.
      config: of its step.
      plan: where memory goes.
      global_batch_size: of the step; None if it is not known.
      trains: whether the step trains.
    """
    return Situation(
        plan,
        global_batch_size,
        num_replicas=model.distribute_strategy.num_replicas_in_sync,
        step=config,
        trains=trains,
        half_precision=policy_of(model) != "float32",
        saved_by_slices=saved_by_slices(model, plan) if trains else 0,
        packs_states=(trains and config.state_dtype == "float32" and may_pack(model)),
    )


def explain(situation: Situation) -> str:
    """Returns the message: the batch that did not fit, what to do, and the plan."""
    batch = situation.global_batch_size
    size = f" with global_batch_size={batch}" if batch else ""
    measures = "`tfaccel autobatch` finds the largest batch that fits"
    if situation.trains:
        measures += ", or, with --keep-batch, the cheapest way to keep this batch, and its price"
    return (
        f"out of memory{size}; use {in_words(situation)}; {measures}.\nEstimated: {situation.plan}"
    )


def _global_batch_size(signature: inspect.Signature, arguments: dict) -> int | None:
    """Returns the global batch size of a call; None if its input is a data set."""
    x = arguments.get("x")
    if hasattr(x, "global_batch_size"):
        return x.global_batch_size  # a Loader's
    arrays = [each for each in keras.tree.flatten(x) if getattr(each, "shape", ())]
    if not arrays:
        return None
    if "batch_size" not in signature.parameters:
        return len(arrays[0])  # in `train_on_batch` and so on
    return min(arguments.get("batch_size") or KERAS_BATCH, len(arrays[0]))
