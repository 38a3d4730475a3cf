"""A model's variables where XLA had no memory for a step.

Takes a model; lets a step of it be compiled and called so that its variables outlive that.

    variables = Donated(model, trains=True)
    step = tf.function(variables.kept_before(step), jit_compile=True)
    with variables.given():
        step(batch)

XLA is given the memory of the variables that a step changes, to write their new values there. Where
it then finds no room for all else, it frees that memory, and TensorFlow frees it once more: a
variable has whatever is written there next, and the process aborts, when it ends at the latest
(TensorFlow 2.21, "double free" on the CPU, "Check failed: c->in_use()" on four H100s, 2026-11-26).

So what was freed is not let go of by TensorFlow again, and each variable gets memory of its own. A
step asks for the same each time, and where it finds no room the first time that it is called, that
is all that happened: the variables have their values from before, which were copied to the host for
that call alone. Later on, as where another program has taken the memory meanwhile, there is no
copy, and they become NaN: a checkpoint has them.
"""

import contextlib
import ctypes
import functools
import logging
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from tfaccel import seam
from tfaccel.out_of_memory import is_out_of_memory

log = logging.getLogger("tfaccel")


class Donated:
    """The variables that a model's step changes."""

    def __init__(self, model, *, trains: bool):
        """Takes the model, and whether its step trains: a test changes metrics alone."""
        self._model, self._trains = model, trains
        self._values = None  # by the variable's id, of its component on each replica

    def kept_before(self, step: Callable) -> Callable:
        """Returns what is to be traced in the step's place.

        It is traced when the step is called with something for the first time, before it runs.
        """
        return functools.partial(self._traced, step)

    @contextlib.contextmanager
    def given(self) -> Iterator[None]:
        """Within the context, in which the step is called once, XLA has the variables' memory."""
        self._values = None
        try:
            yield
        except tf.errors.OpError as error:
            if is_out_of_memory(str(error)):
                self._renew()
            raise
        finally:
            self._values = None

    def _traced(self, step: Callable, *arguments):
        with tf.init_scope():
            self._values = self._copied()
        return step(*arguments)

    def _variables(self) -> list:
        return seam.variables_of(self._model) if self._trains else self._model.metrics_variables

    def _copied(self) -> dict[int, list[np.ndarray]]:
        values, alike = {}, {id(each) for each in seam.state_of(self._model)}
        for variable in self._variables():
            first, *others = seam.components(variable)
            value = first.numpy()
            own = [value if id(variable) in alike else each.numpy() for each in others]
            values[id(variable)] = [value, *own]
        return values

    def _renew(self) -> None:
        """Gives each variable memory, and the value that it had, if that was kept."""
        kept = self._values or {}
        for variable in self._variables():
            components = seam.components(variable)
            values = kept.get(id(variable)) or map(_lost, components)
            for component, value in zip(components, values, strict=True):
                _never_freed(component.read_value())
                component.assign(value)
        if self._trains and not kept:
            log.error(
                "step: memory was full for a step that had run before, so that the variables which "
                "it changes are lost, and NaN now; load them again, from a checkpoint say"
            )


def _lost(component: tf.Variable) -> np.ndarray:
    """Returns NaN, or 0 where there is none, in the variable's shape."""
    return np.full(
        component.shape,
        np.nan if component.dtype.is_floating else 0,
        component.dtype.as_numpy_dtype,
    )


def _never_freed(tensor: tf.Tensor) -> None:
    """Keeps the tensor, which has a variable's memory, also where Python ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(tensor))
