"""XLA's optimization barrier, with the gradient that TensorFlow 2.21 lacks.

    held, gradient = optimization_barrier(inputs, gradient)

The gradient is registered for the operation, as TensorFlow registers its own. A function with
`tf.custom_gradient` would do, too, but has two more operations for each tensor, which Python and
TensorFlow process at each start.
"""

import contextlib

import tensorflow as tf

from tfaccel.runtime.private_names import optimization_barrier

__all__ = ["optimization_barrier"]

with contextlib.suppress(KeyError):  # another package registered the same

    @tf.RegisterGradient("XlaOptimizationBarrier")
    def _gradient(_op, *gradients):
        return gradients
