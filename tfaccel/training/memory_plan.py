"""Where a replica's memory goes: what is known of it, in bytes.

    plan = read_plan(model, str(error), trains=True)    # after an out-of-memory error
    plan.fitting_rows(256)                              # how many rows would fit

The plan is an estimate: activations grow with the rows, and the rest stays the same. XLA allocates
all the memory of a step at once. Without XLA, the need of the whole step is unknown: memory ran out
somewhere in the step. Then the number of rows that fit may be too large.
"""

import dataclasses
import math

import keras
import tensorflow as tf

from tfaccel.keras_internals.replica import local_replicas
from tfaccel.keras_internals.sharded_states import is_elementwise, is_sharded, num_bytes_of_states
from tfaccel.process.out_of_memory import asked_bytes
from tfaccel.runtime.devices import Device
from tfaccel.runtime.gpu_usage import GpuUsage
from tfaccel.training.checkpoint.state import bytes_of

# The part of the memory for activations that is lost to fragmentation.
FRAGMENTS = 0.05


@dataclasses.dataclass(frozen=True)
class Plan:
    """Where one replica's memory went, in bytes.

    Attributes:
      parameters: the model's variables.
      optimizer: the optimizer's variables, such as momenta and averages; with sharded states also
        the slice of the weights that a replica updates.
      gradients: 0 if nothing is trained.
      activations: the rest of the step's memory, which grows with the rows; None if TensorFlow
        does not report it.
      batches: the batches on the device; None if they are among the activations.
      others: DALI's pool, CUDA and its libraries, other processes; None if the driver does not
        report it.
      limit: of the device; or, with `others` None, of TensorFlow's part of the device.
    """

    parameters: int
    optimizer: int
    gradients: int
    activations: int | None = None
    batches: int | None = None
    others: int | None = None
    limit: int | None = None

    def __str__(self):
        """Returns "parameters 98, optimizer 196, ... of 143,771 MiB on each replica"."""
        parts = {
            "parameters": self.parameters,
            "optimizer": self.optimizer,
            "gradients": self.gradients,
            "activations": self.activations,
            "batches": self.batches,
            "DALI, CUDA and others": self.others,
        }
        said = ", ".join(f"{name} {_mib(each)}" for name, each in parts.items() if each is not None)
        return f"{said}{f' of {_mib(self.limit)}' if self.limit else ''} MiB on each replica"

    @property
    def is_full(self) -> bool:
        """True if all memory but the fragments was taken; False if not, or if that is unknown."""
        if self.activations is None or not self.limit:
            return False
        return self.total >= (1 - FRAGMENTS) * self.limit

    @property
    def fixed(self) -> int:
        """The bytes that do not grow with the rows."""
        known = self.parameters + self.optimizer + self.gradients
        return known + (self.batches or 0) + (self.others or 0)

    @property
    def total(self) -> int:
        """The bytes that are needed, as far as they are known."""
        return self.fixed + (self.activations or 0)

    @property
    def room(self) -> int | None:
        """The bytes that are left for activations and fragments; None if the limit is unknown."""
        return max(0, self.limit - self.fixed) if self.limit else None

    def fitting_rows(self, rows: int, *, kept_gradients: bool = False) -> int | None:
        """Returns how many rows would fit at a time; None if that is not known.

        Args:
          rows: the number of rows of `activations`.
          kept_gradients: whether memory must also hold the sum of the gradients of earlier parts.
        """
        if not self.activations or not self.limit:
            return None
        kept = self.gradients if kept_gradients else 0
        room = (self.limit - self.fixed - kept) * (1 - FRAGMENTS)
        return min(rows, max(0, math.floor(rows * room / self.activations)))


def saved_by_slices(model: keras.Model, plan: Plan) -> int:
    """Returns the bytes that a replica would save with sharded states of the compiled optimizer."""
    num_replicas, optimizer = model.distribute_strategy.num_replicas_in_sync, model.optimizer
    is_possible = optimizer is not None and is_elementwise(optimizer)
    if num_replicas == 1 or not is_possible or any(map(is_sharded, optimizer.variables)):
        return 0
    return saved_of(plan.optimizer, bytes_of(model.trainable_variables), num_replicas)


def saved_of(optimizer: int, weights: int, num_replicas: int) -> int:
    """Returns the same of bytes of states and weights: a replica also keeps a slice of weights."""
    return max(0, (optimizer * (num_replicas - 1) - weights) // num_replicas)


def read_plan(model: keras.Model, text: str, *, trains: bool) -> Plan:
    """Returns where memory went, as far as this process knows.

    The error's text names the allocation that failed, which is part of the memory that is needed.
    """
    plan = Plan(
        parameters=bytes_of(model.variables),
        optimizer=num_bytes_of_states(model.optimizer),
        gradients=bytes_of(model.trainable_variables) if trains else 0,
    )
    gpus = gpus_of(model)
    if not gpus:
        return plan
    infos = [tf.config.experimental.get_memory_info(each.name) for each in gpus]
    needed = max(max(each["peak"], each["current"] + (asked_bytes(text) or 0)) for each in infos)
    fixed = plan.parameters + plan.optimizer + plan.gradients
    limit, others = limit_and_others(gpus, [each["peak"] for each in infos])
    return dataclasses.replace(plan, activations=max(0, needed - fixed), others=others, limit=limit)


def gpus_of(model: keras.Model) -> list[Device]:
    """Returns the GPUs of this process's replicas."""
    visible = tf.config.get_visible_devices("GPU")
    names = [each.device for each in local_replicas(model.distribute_strategy)]
    places = [int(name.rpartition(":")[2]) for name in names if "GPU:" in name.upper()]
    ordinals = [int(visible[each].name.rpartition(":")[2]) for each in places]
    return [Device(f"GPU:{each}", ordinals[at]) for at, each in enumerate(places)]


def limit_and_others(gpus: list[Device], peaks: list[int]) -> tuple[int | None, int | None]:
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


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f}"
