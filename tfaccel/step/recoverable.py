"""A compiled step whose variables survive a call for which XLA runs out of memory.

    step = Recoverable(functools.partial(tf.function, jit_compile=True), step, model)
    step(batch)

TensorFlow gives XLA the memory of the variables that a step changes, and XLA writes the new values
there. If XLA then has too little memory for the rest, it frees that memory, and TensorFlow frees it
a second time. The variable then shows whatever is written there next, and the process aborts when
it ends, or earlier (TensorFlow 2.21, "double free" on the CPU, "Check failed: c->in_use()" on four
H100s, 2026-11-26).

`Recoverable` prevents the second free and gives each variable new memory with a value:

  - If the first call with a batch of this shape runs out of memory, each variable gets its old
    value. This is the usual case, because a step needs the same memory in each call. For the first
    call the values are copied to the host, if the host has room.
  - In a later call there is no copy. Each variable that the step changes becomes NaN, or 0 if its
    type has no NaN, and an error is logged.

If a step has several XLA functions, `Recoverable` assumes that XLA freed every variable that the
step changes. The old memory of a variable that XLA did not free stays taken until the process ends.
Other failures of an execution, such as an interrupted collective or a CUDA error, are not handled.
"""

import ctypes
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfaccel.data.free_memory import free_bytes, mib
from tfaccel.keras_internals.model_view import state_of
from tfaccel.keras_internals.replica import local_replicas
from tfaccel.keras_internals.sharded_states import is_sharded
from tfaccel.keras_internals.traced import assigned_in
from tfaccel.keras_internals.variables import components
from tfaccel.process.out_of_memory import is_of_xla
from tfaccel.runtime.devices import Device

log = logging.getLogger("tfaccel")

HOST = Device("/cpu:0", None)
SHARE = 0.5  # the part of the host's free memory that copies may take
# This has its own prototype, because every library shares the prototypes of `ctypes.pythonapi`.
_keep_for_ever = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))


class _Variable(NamedTuple):
    """One replica's variable, as the trace of a step captures it."""

    handle: tf.Tensor
    dtype: tf.DType

    def read(self) -> tf.Tensor:
        """Returns a tensor that shares the variable's memory."""
        with tf.device(self.handle.device):
            return tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype)

    def let_go(self) -> tf.Tensor:
        """Returns that tensor, and ensures that nothing frees it, even when Python ends."""
        with tf.device(self.handle.device):
            tf.raw_ops.DisableCopyOnRead(resource=self.handle)
        tensor = self.read()
        _keep_for_ever(tensor)
        return tensor

    def assign(self, value: np.ndarray) -> None:
        with tf.device(self.handle.device):
            tf.raw_ops.AssignVariableOp(resource=self.handle, value=tf.constant(value, self.dtype))


class Recoverable:
    """A compiled step that is called like the step itself."""

    def __init__(self, compile_: Callable, step: Callable, model):
        """Takes a function that makes a `tf.function` of a step, the step, and the step's model."""
        self._compile, self._step, self._model = compile_, step, model
        self._now = None  # the variables that this call changes, if this call is traced
        self._kept = {}  # the values of those variables, if the host has room
        self._is_prepared = False  # traced, but not called yet
        self._make()

    def __call__(self, *arguments):
        """Calls the step.

        Raises:
          tf.errors.OpError: whatever the step raises.
        """
        if self._is_prepared:
            self._is_prepared, self._now = False, dict(self._changed)
            self._kept = _copied(self._now, self._model)
        try:
            return self._function(*arguments)
        except tf.errors.OpError as error:
            lacked_memory, is_first = is_of_xla(str(error)), self._now is not None
            if lacked_memory:
                _renew(self._now if is_first else self._changed, self._kept)
            if lacked_memory or is_first:
                self._make()  # the next call is traced again, and copies the values
            raise
        finally:
            self._now, self._kept = None, {}

    def get_concrete_function(self, *arguments):
        """Traces the step for a later call, and returns the `ConcreteFunction`.

        The variables may change until then: their values are copied when the step is called.
        """
        try:
            traced = self._function.get_concrete_function(*arguments)
        finally:
            self._now, self._kept = None, {}
        self._is_prepared = True
        return traced

    def experimental_get_tracing_count(self) -> int:
        """Returns how often the step was traced, as `tf.function` does."""
        return self._function.experimental_get_tracing_count()

    def _make(self) -> None:
        # A new partial each time: given one method, TensorFlow would count the traces of all steps
        # together and warn that it is traced too often.
        self._function = self._compile(functools.partial(self._traced))
        self._changed = {}  # each variable that any trace of it changes, by the handle's id

    def _traced(self, *arguments):
        """Traces the step. Then the variables that it changes are known, and it has not run yet."""
        outputs = self._step(*arguments)
        if tf.executing_eagerly():  # as tf.config.run_functions_eagerly asks
            return outputs
        graph = tf.compat.v1.get_default_graph()
        with tf.init_scope():
            self._now = {id(each.handle): each for each in _changed_in(graph)}
            self._kept = _copied(self._now, self._model)
        self._changed |= self._now
        return outputs


def restorer(function: Callable, arguments: Sequence, model) -> Callable[[], None]:
    """Returns what gives the variables that a `tf.function` changes the values that they have now.

    The values are on the host. If it has no room, the returned function does nothing.
    """
    graph = function.get_concrete_function(*arguments).graph
    changed = {id(each.handle): each for each in _changed_in(graph)}
    kept = _copied(changed, model)

    def restore() -> None:
        for key, value in kept.items():
            changed[key].assign(value)

    return restore


def keep_memory_of(handles: Iterable[tuple[tf.Tensor, tf.DType]]) -> None:
    """Ensures that nothing frees variables' memory a second time, after XLA ran out of memory.

    Args:
      handles: the handle and dtype of each variable, which nothing uses any more.
    """
    for handle, dtype in handles:
        _Variable(handle, dtype).let_go()


def _changed_in(graph) -> Iterator[_Variable]:
    """Yields the variables that a traced function may assign and that already have a value."""
    for handle, dtype in assigned_in(graph):
        # A variable made by the first trace has no value; the function is traced again at once.
        if tf.raw_ops.VarIsInitializedOp(resource=handle):
            yield _Variable(handle, dtype)


def _copied(variables: dict[int, _Variable], model) -> dict[int, np.ndarray]:
    """Returns the variables' values on the host, or {} if the host has too little room."""
    same = {  # between steps a variable has the same value on each replica
        id(each.handle): id(variable)
        for variable in state_of(model)
        for each in (() if is_sharded(variable) else components(variable))
    }
    tensors = {same.get(key, key): each.read() for key, each in variables.items()}
    needed = sum(each.shape.num_elements() * each.dtype.size for each in tensors.values())
    replicas = local_replicas(model.distribute_strategy)
    num_processes = replicas[0].num_replicas // len(replicas)  # at most these share the host
    if needed > SHARE * free_bytes(HOST, num_processes):
        log.info(
            "step: if it runs out of memory, the model's variables will be lost, because a copy "
            "of them would take %s of the host",
            mib(needed),
        )
        return {}
    values = {key: each.numpy() for key, each in tensors.items()}
    return {key: values[same.get(key, key)] for key in variables}


def _renew(variables: dict[int, _Variable], kept: dict[int, np.ndarray]) -> None:
    """Gives each variable new memory, with the value that was kept, if there is one."""
    old = {key: each.let_go() for key, each in variables.items()}
    lost = not variables.keys() <= kept.keys()
    for key, each in variables.items():
        try:
            each.assign(kept[key] if key in kept else _no_value(old[key]))
        except tf.errors.OpError:  # no memory is left for this one; a smaller one may still fit
            lost = True
    if lost:
        log.error(
            "step: memory ran out, and the variables that the step changes lost their values (they "
            "are NaN, or 0); load them again, for example from a checkpoint"
        )


def _no_value(like: tf.Tensor) -> np.ndarray:
    return np.full(like.shape, np.nan if like.dtype.is_floating else 0, like.dtype.as_numpy_dtype)
