"""Names of traced functions that are equal in every process, so that XLA's cache finds them.

`alike` takes a `tf.function` and returns the function to call in its place.

    step = alike(tf.function(step, jit_compile=True), own_numbers())

XLA's cache compares the text of a function. TensorFlow names a function, and each branch in it,
with a count of all tensors that the process has made. One more batch from a loader's thread,
weights from a checkpoint or another data set changed these names, and XLA compiled the step again.
`alike` replaces the count: its numbers depend only on the order in which the process compiles its
models and traces the parts of a step.

Private names relied on:
  TensorFlow 2.21: python.eager.polymorphic_function.concrete_function._inference_name,
    _forward_name, _backward_name; python.ops.control_flow_util_v2.unique_fn_name,
    unique_grad_fn_name. Each ends a name with a number.
"""

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator

from tensorflow.python.eager.polymorphic_function import concrete_function
from tensorflow.python.ops import control_flow_util_v2

NUMBERS_OF_EACH = 10**10  # more than the tensors that a process makes
NAMERS = (
    (concrete_function, "_inference_name"),
    (concrete_function, "_forward_name"),
    (concrete_function, "_backward_name"),
    (control_flow_util_v2, "unique_fn_name"),
    (control_flow_util_v2, "unique_grad_fn_name"),
)

_order = itertools.count(1)
_thread = threading.local()  # has `numbers` while the thread calls a function made by `alike`


def own_numbers() -> Iterator[int]:
    """Returns an endless sequence of numbers that no other name in this process ends with."""
    return itertools.count(next(_order) * NUMBERS_OF_EACH)


def alike(function: Callable, numbers: Iterator[int]) -> "Alike":
    """Returns `function`; the names of whatever a call traces end with these numbers."""
    _install()
    return Alike(function, numbers)


class Alike:
    """A function with numbers of its own for the names of what it traces: see `alike`."""

    def __init__(self, function: Callable, numbers: Iterator[int]):
        """Takes a `tf.function`, or what is called and traced like one."""
        self.__wrapped__, self._numbers = function, numbers

    def __call__(self, *arguments):
        """Calls the function."""
        with using(self._numbers):
            return self.__wrapped__(*arguments)

    def get_concrete_function(self, *arguments):
        """Traces the function, as that of a `tf.function` does."""
        with using(self._numbers):
            return self.__wrapped__.get_concrete_function(*arguments)


def numbers_in_use() -> Iterator[int] | None:
    """Returns the numbers with which names in this thread end now; None for TensorFlow's own."""
    return getattr(_thread, "numbers", None)


@contextlib.contextmanager
def using(numbers: Iterator[int] | None) -> Iterator[None]:
    """Within the context, names in this thread end with these numbers."""
    before = numbers_in_use()
    _thread.numbers = numbers
    try:
        yield
    finally:
        _thread.numbers = before


@functools.cache  # once for a process
def _install() -> None:
    for module, name in NAMERS:
        setattr(module, name, _numbered(getattr(module, name)))


def _numbered(make_name: Callable) -> Callable:
    @functools.wraps(make_name)
    def make_own(*arguments):
        name, numbers = make_name(*arguments), numbers_in_use()
        return name if numbers is None else f"{name.rpartition('_')[0]}_{next(numbers)}"

    return make_own
