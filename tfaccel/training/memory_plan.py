"""What took the memory, when it is full, and the batch that would fit.

Takes a compiled model and a method that ran out; gives an error with the plan in its place.

    model.fit = explained(model.fit, model, StepConfig())
    model.fit(train)    # OutOfMemoryError: ... use global_batch_size=1536 or less, or ...

The plan is an estimate: activations grow with the rows, all else stays. XLA asks at once for all
that a step needs; without it, all that is known is what was taken until one tensor more was too
much, so that the batch that is named may be too large. `tfaccel autobatch` tries.
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
from tfaccel.process.out_of_memory import asked_bytes, is_out_of_memory, leaves_its_cause_to_the_log
from tfaccel.runtime.devices import Device
from tfaccel.runtime.gpu_usage import GpuUsage

# Of the room for activations: pieces of it are lost between tensors of other sizes.
FRAGMENTS = 0.05
KERAS_BATCH = 32  # of arrays, where `fit` is given no batch_size


class OutOfMemoryError(RunError):
    """Memory was full; says what took it and what to do."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Where one replica's memory went, in bytes.

    Attributes:
      parameters: the model's variables.
      optimizer: its own: momenta, averages.
      gradients: 0 where nothing is trained.
      activations: what else the step needs, which grows with the rows; None where TensorFlow does
        not tell.
      others: DALI's pool, CUDA and its libraries, other processes; None where the driver does not
        tell.
      limit: of the device, or of what TensorFlow may take of it, others then left out.
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
        """Whether no more was left than is lost in pieces; False where that is not known."""
        if self.activations is None or not self.limit:
            return False
        taken = self.parameters + self.optimizer + self.gradients + self.activations
        return taken + (self.others or 0) >= (1 - FRAGMENTS) * self.limit

    def fitting_rows(self, rows: int, *, kept_gradients: bool = False) -> int | None:
        """Returns how many rows would fit at a time; None where that is not known.

        Args:
          rows: that the activations are of.
          kept_gradients: whether the sum of other parts' gradients is there as well.
        """
        if not self.activations or not self.limit:
            return None
        fixed = self.parameters + self.optimizer + self.gradients + (self.others or 0)
        fixed += self.gradients if kept_gradients else 0
        room = (self.limit - fixed) * (1 - FRAGMENTS)
        return min(rows, max(0, math.floor(rows * room / self.activations)))


def explained(method: Callable, model: keras.Model, config: StepConfig) -> Callable:
    """Returns the method, whose running out of memory comes with the plan.

    Args:
      method: of the model, as a user calls it: `fit`, `predict_on_batch` and the like.
      model: compiled.
      config: of its step.
    """
    signature = inspect.signature(method)
    trains = method.__name__ in ("fit", "train_on_batch")

    @functools.wraps(method)
    def wrapper(*args, **kwargs):
        try:
            return method(*args, **kwargs)
        except OutOfMemoryError:
            raise  # of `fit`'s `evaluate`, whose batch that one knows
        except Exception as error:  # of TensorFlow, DALI, or a sentence that quotes one
            is_said = is_out_of_memory(str(error))
            if not is_said and not leaves_its_cause_to_the_log(str(error)):
                raise
            plan = read_plan(model, str(error), trains=trains)
            if not is_said and not plan.is_full:
                raise
            arguments = signature.bind(*args, **kwargs).arguments
            raise OutOfMemoryError(
                explain(
                    plan,
                    global_batch_size=_global_batch_size(signature, arguments),
                    num_replicas=model.distribute_strategy.num_replicas_in_sync,
                    parts=config.accumulation_steps if trains else None,
                    half_precision=policy_of(model) != "float32",
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
) -> str:
    """Returns the sentence: what ran out, the ways out, and the plan.

    Args:
      plan: where memory went.
      global_batch_size: of the step that failed; None where that is not known.
      num_replicas: of all workers.
      parts: that each replica computes its rows in (accumulation_steps); None outside training.
      half_precision: whether activations are in 16 bits already.
    """
    rows = math.ceil(global_batch_size / num_replicas) if global_batch_size else None
    at_a_time = math.ceil(rows / (parts or 1)) if rows else None
    ways = [_smaller_batch(plan, global_batch_size, num_replicas, parts or 1, at_a_time)]
    if parts:
        ways.append(_more_parts(plan, rows, parts, at_a_time))
    if not half_precision:
        ways.append("precision='mixed_float16'")
    size = f" with global_batch_size={global_batch_size}" if global_batch_size else ""
    return (
        f"out of memory{size}; use {', or '.join(filter(None, ways))}; `tfaccel autobatch` finds "
        "the largest batch that fits, or with --keep-batch the parts of this one.\n"
        f"Estimated: {plan}"
    )


def _smaller_batch(plan: Plan, batch, num_replicas: int, parts: int, at_a_time) -> str:
    fitting = plan.fitting_rows(at_a_time, kept_gradients=parts > 1) if at_a_time else None
    if fitting is None:
        return "a smaller batch"
    multiple = math.lcm(8, num_replicas)
    # What failed does not fit, whatever the estimate says.
    largest = min(fitting * num_replicas * parts, batch - 1) // multiple * multiple
    if not largest:
        return "a smaller model or smaller images (a batch of 8 would hardly fit)"
    return f"global_batch_size={largest} or less"


def _more_parts(plan: Plan, rows, parts: int, at_a_time) -> str | None:
    """Returns the setting with which the same batch would fit, one part after the other."""
    if not rows:
        return f"accumulation_steps={2 * parts} or more (equal but for batch norm)"
    fitting = plan.fitting_rows(at_a_time, kept_gradients=True)
    needed = 2 * parts if fitting is None else math.ceil(rows / max(1, fitting))
    needed = max(parts + 1, needed)
    if needed > rows or fitting == 0:
        return None
    return f"the same batch with accumulation_steps={needed} or more (equal but for batch norm)"


def read_plan(model: keras.Model, text: str, *, trains: bool) -> Plan:
    """Returns where memory went, as far as this process can tell.

    Args:
      model: compiled.
      text: of the error: what was asked for in vain is part of what is needed.
      trains: whether the step has gradients.
    """
    plan = Plan(
        parameters=_num_bytes(model.variables),
        optimizer=_num_bytes(getattr(model.optimizer, "variables", ())),
        gradients=_num_bytes(model.trainable_variables) if trains else 0,
    )
    gpus = _gpus(model)
    if not gpus:
        return plan
    told = [tf.config.experimental.get_memory_info(each.name) for each in gpus]
    needed = max(max(each["peak"], each["current"] + (asked_bytes(text) or 0)) for each in told)
    fixed = plan.parameters + plan.optimizer + plan.gradients
    limit, others = _limit_and_others(gpus, [each["peak"] for each in told])
    return dataclasses.replace(plan, activations=max(0, needed - fixed), others=others, limit=limit)


def _gpus(model: keras.Model) -> list[Device]:
    """Returns this process's replicas' GPUs."""
    visible = tf.config.get_visible_devices("GPU")
    names = [each.device for each in local_replicas(model.distribute_strategy)]
    places = [int(name.rpartition(":")[2]) for name in names if "GPU:" in name.upper()]
    ordinals = [int(visible[each].name.rpartition(":")[2]) for each in places]
    return [Device(f"GPU:{each}", ordinals[at]) for at, each in enumerate(places)]


def _limit_and_others(gpus: list[Device], peaks: list[int]) -> tuple[int | None, int | None]:
    """Returns the bytes that there are, and those of them that are not TensorFlow's."""
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
    """Returns the rows of a step that a call asks for; None for those of a data set."""
    x = arguments.get("x")
    if hasattr(x, "global_batch_size"):
        return x.global_batch_size  # a Loader's
    arrays = [each for each in keras.tree.flatten(x) if getattr(each, "shape", ())]
    if not arrays:
        return None
    if "batch_size" not in signature.parameters:
        return len(arrays[0])  # of `train_on_batch` and the like
    return min(arguments.get("batch_size") or KERAS_BATCH, len(arrays[0]))


def _num_bytes(variables) -> int:
    """Returns the bytes of variables on one replica, each counted once."""
    each_once = {id(each): each for each in variables}.values()
    return sum(math.prod(each.shape) * tf.as_dtype(each.dtype).size for each in each_once)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f}"
