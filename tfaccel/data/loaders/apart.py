"""Parts of a computation that XLA keeps apart, also where a larger program has all of them.

    @apart
    def smoothed(pixels): ...

Called by itself, a part is a program of its own. In a step that makes its batches, all parts are in
the step's program. There XLA would join them into few kernels, and compute cheap values anew for
each reader: a level that is interpolated for a move, for each of the 256 levels it is compared
with. So each part ends with a barrier. Its result is written to memory, and the kernels are those
of the programs by themselves.
"""

import functools
from collections.abc import Callable

import tensorflow as tf

from tfaccel.runtime.private_names import optimization_barrier


def apart(function: Callable) -> Callable:
    """Returns a function that XLA compiles, and whose result, a tensor, it writes to memory."""

    @functools.wraps(function)
    def written(*args, **kwargs):
        return optimization_barrier(function(*args, **kwargs))[0]

    return tf.function(written, jit_compile=True, autograph=False)
