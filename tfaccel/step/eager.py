"""Steps that run as Python, one operation after the other, for looking inside with a debugger.

    replicas = met_by_lanes(replicas)
    results = in_lanes(model, replicas, [functools.partial(step, part) for part in parts])

Keras's `run_eagerly=True` asks for it. The same code as in a compiled step runs, with the same
result, but every tensor has a value: `print`, `.numpy()` and `breakpoint()` work in `train_step`.
Each replica of this process is a lane (tfaccel/step/lockstep.py): replica 0 runs until it needs a
sum over replicas, then replica 1, and so on. In the sum they meet.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from tfaccel.common.errors import UserError
from tfaccel.common.run_log import summary
from tfaccel.keras_internals.one_replica import own_losses
from tfaccel.keras_internals.replica import Replica
from tfaccel.keras_internals.variables import are_shapes_asked
from tfaccel.step import lockstep

log = logging.getLogger("tfaccel")


def met_by_lanes(replicas: Sequence[Replica]) -> list[Replica]:
    """Returns the replicas of this process with collectives for `in_lanes`."""
    launchers = [each.launcher for each in replicas]
    across = None if replicas[0].num_replicas == len(replicas) else _Across(launchers)
    return [
        each.like(launcher=_Launcher(across, each.num_replicas), reduces_in_xla=False)
        for each in replicas
    ]


def in_lanes(model, replicas: Sequence[Replica], functions: Sequence[Callable]) -> list:
    """Runs each replica's function on its device, as a lane, and returns the results.

    Args:
      model: the model of the step.
      replicas: all replicas of this process, from `met_by_lanes`.
      functions: one for each replica, without arguments.

    Raises:
      UserError: the replicas do not make the same collectives.
      BaseException: whatever a function raises.
    """

    def of(replica: Replica, function: Callable) -> Callable:
        def run(lane: lockstep.Lane):
            replica.launcher.lane = lane
            with own_losses(model), tf.device(replica.device):
                return function()

        return run

    return lockstep.run(
        [of(*each) for each in zip(replicas, functions, strict=True)],
        names=[f"replica {each.index}" for each in replicas],
    )


def say() -> None:
    """Logs how the step runs."""
    summary(
        "step: Python, one operation after the other, because run_eagerly asks for it; that is "
        "slow, and for looking inside with a debugger"
    )


def as_tensors(batch):
    """Returns a batch with tensors in place of arrays, as a traced step gets it."""
    return tf.nest.map_structure(
        lambda each: tf.constant(each) if isinstance(each, np.ndarray) else each, batch
    )


@contextlib.contextmanager
def said_once(said: set[str]) -> Iterator[None]:
    """Within the context, a message that was logged before is not logged again.

    A compiled step says what it has to say when it is traced; this one runs its Python each time.

    Args:
      said: the messages so far.
    """

    own = threading.get_ident()

    def is_new(record: logging.LogRecord) -> bool:
        if record.thread != own and not record.threadName.startswith(lockstep.THREAD):
            return True  # of another part of the program
        message = record.getMessage()
        is_known = message in said
        said.add(message)
        return not is_known

    log.addFilter(is_new)
    try:
        yield
    finally:
        log.removeFilter(is_new)


class _Launcher:
    """A replica's collectives, in place of TensorFlow's launcher: the lanes' values, put together.

    Attributes:
      lane: that the replica runs in.
    """

    lane: lockstep.Lane | None = None

    def __init__(self, across: "_Across | None", num_replicas: int):
        """Takes the collectives over several processes; None for a single one."""
        self._across, self._num_replicas = across, num_replicas

    def all_reduce(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the sum of all replicas' values."""
        if are_shapes_asked():
            return tf.identity(value)
        values = self._meet("all_reduce", value, like=lambda each: (each.dtype, each.shape))
        if self._across is None:
            return tf.add_n(values)
        return self._shared(lambda: self._across.all_reduce(values))

    def all_gather(self, value: tf.Tensor, axis: int) -> tf.Tensor:
        """Returns the replicas' values, concatenated along an axis."""
        if are_shapes_asked():
            return tf.concat([value] * self._num_replicas, axis)
        values = self._meet("all_gather", value, like=lambda each: (each.dtype, each.shape.rank))
        if self._across is None:
            return tf.concat(values, axis)
        return self._shared(lambda: self._across.all_gather(values, axis))

    def _meet(self, kind: str, value: tf.Tensor, *, like: Callable) -> list[tf.Tensor]:
        value = tf.convert_to_tensor(value)
        met = self.lane.meet((self.lane.name, kind, like(value), value))
        name, own, own_spec, _ = met[0]
        for other, others, spec, _ in met:
            if (others, spec) != (own, own_spec):
                raise UserError(
                    f"{name} makes the collective {_in_words(own, own_spec)} where {other} makes "
                    f"{_in_words(others, spec)}; every replica must make the same collectives in "
                    "the same order"
                )
        return [each for *_, each in met]

    def _shared(self, make: Callable[[], list]) -> tf.Tensor:
        """Returns this replica's of the results that the first lane makes for all."""
        is_first = self.lane.index == 0
        return self.lane.meet(make() if is_first else None)[0][self.lane.index]


def _in_words(kind: str, spec: tuple) -> str:
    dtype, shape = spec
    return f"{kind} of {dtype.name} {shape}"


class _Across:
    """TensorFlow's collectives over the replicas of all processes.

    Those of one process must be started together, so they are traced into one function.
    """

    def __init__(self, launchers: Sequence):
        self._launchers, self._functions = launchers, {}

    def all_reduce(self, values: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns for each value of this process the sum over all replicas."""
        return self._run("all_reduce", values, lambda launcher, each: launcher.all_reduce(each))

    def all_gather(self, values: list[tf.Tensor], axis: int) -> list[tf.Tensor]:
        """Returns for each value of this process those of all replicas, concatenated."""
        gather = lambda launcher, each: launcher.all_gather(each, axis)  # noqa: E731
        return self._run(("all_gather", axis), values, gather)

    def _run(self, kind, values: list[tf.Tensor], collective: Callable) -> list[tf.Tensor]:
        specs = [tf.TensorSpec(each.shape, each.dtype) for each in values]
        key = kind, tuple((each.dtype, tuple(each.shape)) for each in specs)
        if key not in self._functions:

            def together(*each):
                return [collective(*own) for own in zip(self._launchers, each, strict=True)]

            # As a concrete function, it is a graph although tf.config may ask for Python.
            function = tf.function(together, autograph=False)
            self._functions[key] = function.get_concrete_function(*specs)
        with tf.init_scope():  # no tape records it; a sum's gradient is the caller's matter
            return self._functions[key](*values)
