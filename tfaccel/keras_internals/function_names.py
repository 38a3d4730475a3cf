"""Names of traced functions that are the same in each process: XLA's cache asks for the same text.

Takes a `tf.function`; gives what to call in its place.

    step = alike(tf.function(step, jit_compile=True), own_numbers())

TensorFlow names a function, and each branch in it, by a count of all tensors that the process has
made. So one more batch from a loader's thread, weights from a checkpoint, or another data set made
other names, and the step was compiled anew. Here names have numbers of their own, by which model a
process compiles first, and what it traces first of a step.

Private names relied on:
  TensorFlow 2.21: python.eager.polymorphic_function.concrete_function._inference_name,
    _forward_name, _backward_name; python.ops.control_flow_util_v2.unique_fn_name,
    unique_grad_fn_name. Each ends a name with a number.
"""

import functools
import itertools
import threading
from collections.abc import Callable, Iterator

from tensorflow.python.eager.polymorphic_function import concrete_function
from tensorflow.python.ops import control_flow_util_v2

NUMBERS_OF_EACH = 10**10  # more than a process makes tensors
NAMERS = (
    (concrete_function, "_inference_name"),
    (concrete_function, "_forward_name"),
    (concrete_function, "_backward_name"),
    (control_flow_util_v2, "unique_fn_name"),
    (control_flow_util_v2, "unique_grad_fn_name"),
)

_order = itertools.count(1)
_thread = threading.local()  # its `numbers`, while it calls such a function


def own_numbers() -> Iterator[int]:
    """Returns numbers that nothing else in this process is named by."""
    return itertools.count(next(_order) * NUMBERS_OF_EACH)


def alike(function: Callable, numbers: Iterator[int]) -> Callable:
    """Returns the function; what is traced by a call of it has names with these numbers."""
    _install()

    def call(*arguments):
        before = getattr(_thread, "numbers", None)
        _thread.numbers = numbers
        try:
            return function(*arguments)
        finally:
            _thread.numbers = before

    call.__wrapped__ = function
    return call


@functools.cache  # once for a process
def _install() -> None:
    for module, name in NAMERS:
        setattr(module, name, _numbered(getattr(module, name)))


def _numbered(make_name: Callable) -> Callable:
    @functools.wraps(make_name)
    def make_own(*arguments):
        name, numbers = make_name(*arguments), getattr(_thread, "numbers", None)
        return name if numbers is None else f"{name.rpartition('_')[0]}_{next(numbers)}"

    return make_own
