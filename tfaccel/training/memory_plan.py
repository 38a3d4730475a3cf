"""Explains an out-of-memory error: what took the memory, and which batch would fit.

Takes a compiled model and a method that may run out of memory; gives an error with a plan.

    model.fit = explained(model.fit, model, StepConfig())
    model.fit(train)    # OutOfMemoryError: ... use global_batch_size=1536 or less, or ...

The plan is an estimate: activations grow with the rows, and the rest stays the same. XLA allocates
all the memory of a step at once. Without XLA, the need of the whole step is unknown: memory ran out
somewhere in the step. Then the suggested batch may be too large. `tfaccel autobatch` tries batches
until one fits.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable

import keras
import tensorflow as tf

from tfaccel.common.errors import RunError
from tfaccel.config import StepConfig
from tfaccel.keras_internals.float32_layers import policy_of
from tfaccel.keras_internals.replica import local_replicas
from tfaccel.keras_internals.sharded_states import is_elementwise, is_sharded, num_bytes_held
from tfaccel.process.out_of_memory import asked_bytes, is_out_of_memory, leaves_its_cause_to_the_log
from tfaccel.runtime.devices import Device
from tfaccel.runtime.gpu_usage import GpuUsage
from tfaccel.training.checkpoint.state import bytes_of

# The part of the memory for activations that is lost to fragmentation.
FRAGMENTS = 0.05
KERAS_BATCH = 32  # Keras's batch size for arrays if `fit` has no batch_size


class OutOfMemoryError(RunError):
    """Memory was full. The message tells what took it and what to do."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Where one replica's memory went, in bytes.

    Attributes:
      parameters: the model's variables.
      optimizer: the optimizer's variables, such as momenta and averages.
      gradients: 0 if nothing is trained.
      activations: the rest of the step's memory, which grows with the rows; None if TensorFlow
        does not report it.
      others: DALI's pool, CUDA and its libraries, other processes; None if the driver does not
        report it.
      limit: of the device; or, with `others` None, of TensorFlow's part of the device.
    """

    parameters: int
    optimizer: int
    gradients: int
    activations: int | None = None
    others: int | None = None
    limit: int | None = None

    def __str__(self):
        """Returns "parameters 98, optimizer 196, ... of 143,771 MiB on each replica"."""
        parts = {
            "parameters": self.parameters,
            "optimizer": self.optimizer,
            "gradients": self.gradients,
            "activations": self.activations,
            "DALI, CUDA and others": self.others,
        }
        said = ", ".join(f"{name} {_mib(each)}" for name, each in parts.items() if each is not None)
        return f"{said}{f' of {_mib(self.limit)}' if self.limit else ''} MiB on each replica"

    @property
    def is_full(self) -> bool:
        """True if all memory but the fragments was taken; False if not, or if that is unknown."""
        if self.activations is None or not self.limit:
            return False
        taken = self.parameters + self.optimizer + self.gradients + self.activations
        return taken + (self.others or 0) >= (1 - FRAGMENTS) * self.limit

    def fitting_rows(self, rows: int, *, kept_gradients: bool = False) -> int | None:
        """Returns how many rows would fit at a time; None if that is not known.

        Args:
          rows: the number of rows of `activations`.
          kept_gradients: whether memory must also hold the sum of the gradients of earlier parts.
        """
        if not self.activations or not self.limit:
            return None
        fixed = self.parameters + self.optimizer + self.gradients + (self.others or 0)
        fixed += self.gradients if kept_gradients else 0
        room = (self.limit - fixed) * (1 - FRAGMENTS)
        return min(rows, max(0, math.floor(rows * room / self.activations)))


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
            raise OutOfMemoryError(
                explain(
                    plan,
                    global_batch_size=_global_batch_size(signature, arguments),
                    num_replicas=model.distribute_strategy.num_replicas_in_sync,
                    parts=config.accumulation_steps if trains else None,
                    half_precision=policy_of(model) != "float32",
                    recomputes=config.remat is not None,
                    saved_by_slices=saved_by_slices(model, plan) if trains else 0,
                )
            ) from error

    return wrapper


def explain(
    plan: Plan,
    *,
    global_batch_size: int | None,
    num_replicas: int,
    parts: int | None,
    half_precision: bool,
    recomputes: bool,
    saved_by_slices: int = 0,
) -> str:
    """Returns the message: the batch that did not fit, what to do, and the plan.

    Args:
      plan: where memory went.
      global_batch_size: of the step that failed; None if that is not known.
      num_replicas: of all workers.
      parts: in which each replica computes its rows (accumulation_steps); None outside training.
      half_precision: whether activations have 16 bits already.
      recomputes: whether the backward pass computes activations again (StepConfig.remat).
      saved_by_slices: the bytes that StepConfig.shard_states would save; 0 if it cannot.
    """
    rows = math.ceil(global_batch_size / num_replicas) if global_batch_size else None
    at_a_time = math.ceil(rows / (parts or 1)) if rows else None
    ways = [_smaller_batch(plan, global_batch_size, num_replicas, parts or 1, at_a_time)]
    if parts:
        ways.append(_more_parts(plan, rows, parts, at_a_time))
        if not recomputes:
            ways.append("remat='blocks' (the same result; a step takes up to a third longer)")
    if _mib(saved_by_slices) != "0":
        ways.append(
            f"shard_states=True (the same result; saves {_mib(saved_by_slices)} MiB of optimizer "
            "states on each replica)"
        )
    if not half_precision:
        ways.append("precision='mixed_float16'")
    size = f" with global_batch_size={global_batch_size}" if global_batch_size else ""
    return (
        f"out of memory{size}; use {', or '.join(filter(None, ways))}; `tfaccel autobatch` finds "
        "the largest batch that fits, or, with --keep-batch, the accumulation_steps for this "
        f"batch.\nEstimated: {plan}"
    )


def saved_by_slices(model: keras.Model, plan: Plan) -> int:
    """Returns the bytes that a replica would save with sharded states of the compiled optimizer."""
    num_replicas, optimizer = model.distribute_strategy.num_replicas_in_sync, model.optimizer
    is_possible = optimizer is not None and is_elementwise(optimizer)
    if num_replicas == 1 or not is_possible or any(map(is_sharded, optimizer.variables)):
        return 0
    saved = plan.optimizer * (num_replicas - 1) - bytes_of(model.trainable_variables)
    return max(0, saved // num_replicas)


def _smaller_batch(plan: Plan, batch, num_replicas: int, parts: int, at_a_time) -> str:
    fitting = plan.fitting_rows(at_a_time, kept_gradients=parts > 1) if at_a_time else None
    if fitting is None:
        return "a smaller batch"
    multiple = math.lcm(8, num_replicas)
    # Less than the batch that failed, whatever the estimate is.
    largest = min(fitting * num_replicas * parts, batch - 1) // multiple * multiple
    if not largest:
        return f"a smaller model or smaller images (even a batch of {multiple} may not fit)"
    return f"global_batch_size={largest} or less"


def _more_parts(plan: Plan, rows, parts: int, at_a_time) -> str | None:
    """Returns the accumulation_steps with which the same batch would fit; None if there is none."""
    if not rows:
        return f"accumulation_steps={2 * parts} or more (the same result, except for batch norm)"
    fitting = plan.fitting_rows(at_a_time, kept_gradients=True)
    needed = 2 * parts if fitting is None else math.ceil(rows / max(1, fitting))
    needed = max(parts + 1, needed)
    if needed > rows or fitting == 0:
        return None
    return (
        f"the same batch with accumulation_steps={needed} or more (the same result, except for "
        "batch norm)"
    )


def read_plan(model: keras.Model, text: str, *, trains: bool) -> Plan:
    """Returns where memory went, as far as this process knows.

    The error's text names the allocation that failed, which is part of the memory that is needed.
    """
    plan = Plan(
        parameters=bytes_of(model.variables),
        optimizer=num_bytes_held(getattr(model.optimizer, "variables", ())),
        gradients=bytes_of(model.trainable_variables) if trains else 0,
    )
    gpus = _gpus(model)
    if not gpus:
        return plan
    infos = [tf.config.experimental.get_memory_info(each.name) for each in gpus]
    needed = max(max(each["peak"], each["current"] + (asked_bytes(text) or 0)) for each in infos)
    fixed = plan.parameters + plan.optimizer + plan.gradients
    limit, others = _limit_and_others(gpus, [each["peak"] for each in infos])
    return dataclasses.replace(plan, activations=max(0, needed - fixed), others=others, limit=limit)


def _gpus(model: keras.Model) -> list[Device]:
    """Returns the GPUs of this process's replicas."""
    visible = tf.config.get_visible_devices("GPU")
    names = [each.device for each in local_replicas(model.distribute_strategy)]
    places = [int(name.rpartition(":")[2]) for name in names if "GPU:" in name.upper()]
    ordinals = [int(visible[each].name.rpartition(":")[2]) for each in places]
    return [Device(f"GPU:{each}", ordinals[at]) for at, each in enumerate(places)]


def _limit_and_others(gpus: list[Device], peaks: list[int]) -> tuple[int | None, int | None]:
    """Returns the bytes of the device, and how many of them TensorFlow does not use."""
    visible = tf.config.get_visible_devices("GPU")
    first = int(gpus[0].name.rpartition(":")[2])
    logical = tf.config.get_logical_device_configuration(visible[first])
    if logical and logical[0].memory_limit:
        return int(logical[0].memory_limit) << 20, None
    usages = GpuUsage(gpus).read()
    if not usages:
        return None, None
    others = [(each.memory_mib << 20) - peak for each, peak in zip(usages, peaks, strict=True)]
    return min(each.memory_total_mib for each in usages) << 20, max(0, *others)


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


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f}"
