"""A step whose variables outlive a call for which XLA has no memory.

Takes what traces the step; gives it compiled.

    step = Recoverable(functools.partial(tf.function, jit_compile=True), step, model)
    step(batch)

XLA is given the memory of the variables that a step changes, to write their new values there. Where
it then finds no room for all else, it frees that memory, and TensorFlow frees it once more: a
variable has whatever is written there next, and the process aborts, when it ends at the latest
(TensorFlow 2.21, "double free" on the CPU, "Check failed: c->in_use()" on four H100s, 2026-11-26).

Here TensorFlow does not free it again, and each variable gets memory of its own, and a value: the
one that it had, where XLA had no memory when the step was first called with such a batch. So it is
most often, as a step asks for the same each time. For that call they are copied to the host, where
that has room. Later on there is no copy, and what the step changes becomes NaN, or 0 where the type
has none; that is said.

Where a step has several XLA functions, all that it changes is taken to be freed: the old memory of
a variable that was not stays taken until the process ends. What else ends an execution, as a sum
that is broken off or CUDA's own errors, is not dealt with.
"""

import ctypes
import functools
import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfaccel.data.free_memory import free_bytes, mib
from tfaccel.keras_internals.model_view import state_of
from tfaccel.keras_internals.replica import local_replicas
from tfaccel.keras_internals.traced import assigned_in
from tfaccel.keras_internals.variables import components
from tfaccel.process.out_of_memory import is_of_xla
from tfaccel.runtime.devices import Device

log = logging.getLogger("tfaccel")

HOST = Device("/cpu:0", None)
SHARE = 0.5  # of the host's free memory, which copies may take
# A prototype of its own: what `ctypes.pythonapi` has is every library's.
_keep_for_ever = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))


class _Variable(NamedTuple):
    """One replica's variable, as a traced step has it."""

    handle: tf.Tensor
    dtype: tf.DType

    def read(self) -> tf.Tensor:
        """Returns a tensor that has the variable's own memory."""
        with tf.device(self.handle.device):
            return tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype)

    def let_go(self) -> tf.Tensor:
        """Returns that tensor, which is then never freed, not even where Python ends."""
        with tf.device(self.handle.device):
            tf.raw_ops.DisableCopyOnRead(resource=self.handle)
        tensor = self.read()
        _keep_for_ever(tensor)
        return tensor

    def assign(self, value: np.ndarray) -> None:
        with tf.device(self.handle.device):
            tf.raw_ops.AssignVariableOp(resource=self.handle, value=tf.constant(value, self.dtype))


class Recoverable:
    """A compiled step, as a function of what it is called with."""

    def __init__(self, compile_: Callable, step: Callable, model):
        """Takes what makes a `tf.function` of a step, the step, and the model whose it is."""
        self._compile, self._step, self._model = compile_, step, model
        self._now = None  # what the trace of this call changes, where it is traced
        self._kept = {}  # the values of that, where the host has room
        self._make()

    def __call__(self, *arguments):
        """Calls the step.

        Raises:
          tf.errors.OpError: whatever the step raises.
        """
        try:
            return self._function(*arguments)
        except tf.errors.OpError as error:
            lacked_memory, is_first = is_of_xla(str(error)), self._now is not None
            if lacked_memory:
                _renew(self._now if is_first else self._changed, self._kept)
            if lacked_memory or is_first:
                self._make()  # what is called next is traced again, and its values kept
            raise
        finally:
            self._now, self._kept = None, {}

    def experimental_get_tracing_count(self) -> int:
        """Returns how often it was traced, as `tf.function` does."""
        return self._function.experimental_get_tracing_count()

    def _make(self) -> None:
        # Not the method itself: TensorFlow would take all steps for one that is traced too often.
        self._function = self._compile(functools.partial(self._traced))
        self._changed = {}  # by the handle's id, each variable that any trace of it changes

    def _traced(self, *arguments):
        """Traces the step: what it changes is known then, and it has not run yet."""
        outputs = self._step(*arguments)
        if tf.executing_eagerly():  # as tf.config.run_functions_eagerly asks
            return outputs
        graph = tf.compat.v1.get_default_graph()
        with tf.init_scope():
            self._now = {id(each.handle): each for each in _changed_in(graph)}
            self._kept = _copied(self._now, self._model)
        self._changed |= self._now
        return outputs


def _changed_in(graph) -> Iterator[_Variable]:
    """Yields the variables that a traced function may assign, and that have a value."""
    for handle, dtype in assigned_in(graph):
        # One that is made as a function is first traced has none; it is traced again at once.
        if tf.raw_ops.VarIsInitializedOp(resource=handle):
            yield _Variable(handle, dtype)


def _copied(variables: dict[int, _Variable], model) -> dict[int, np.ndarray]:
    """Returns the variables' values on the host; nothing where they would fill it."""
    same = {  # on each replica, between steps
        id(each.handle): id(variable)
        for variable in state_of(model)
        for each in components(variable)
    }
    tensors = {same.get(key, key): each.read() for key, each in variables.items()}
    needed = sum(each.shape.num_elements() * each.dtype.size for each in tensors.values())
    replicas = local_replicas(model.distribute_strategy)
    num_processes = replicas[0].num_replicas // len(replicas)  # no more than these share the host
    if needed > SHARE * free_bytes(HOST, num_processes):
        log.info(
            "step: should memory be too small for it, variables will be lost: a copy would take %s "
            "of the host",
            mib(needed),
        )
        return {}
    values = {key: each.numpy() for key, each in tensors.items()}
    return {key: values[same.get(key, key)] for key in variables}


def _renew(variables: dict[int, _Variable], kept: dict[int, np.ndarray]) -> None:
    """Gives each variable memory, and the value that it had, if that was kept."""
    old = {key: each.let_go() for key, each in variables.items()}
    lost = not variables.keys() <= kept.keys()
    for key, each in variables.items():
        try:
            each.assign(kept[key] if key in kept else _no_value(old[key]))
        except tf.errors.OpError:  # no memory is left for it, but may be for others
            lost = True
    if lost:
        log.error(
            "step: memory was full, and what the step changes is lost (NaN now, or 0): load it "
            "again, from a checkpoint say"
        )


def _no_value(like: tf.Tensor) -> np.ndarray:
    return np.full(like.shape, np.nan if like.dtype.is_floating else 0, like.dtype.as_numpy_dtype)
