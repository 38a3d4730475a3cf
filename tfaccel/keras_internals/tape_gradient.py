"""Gives a function of tensors a gradient of its own, with fewer operations than TensorFlow does.

    @on_tapes
    def doubled(x):
        return 2 * x, lambda of_result: 2 * of_result

`tf.custom_gradient` wraps the arguments and results of a traced function in identities, and its
gradient gets zeros for all arguments, which the identities pass on. That was 22 operations for each
batch norm, a sixth of a ResNet-50's step, which Python and TensorFlow process at each start. And it
searches all operations before a tensor that the function uses and does not get as an argument.
"""

import functools
from collections.abc import Callable

from tensorflow.python.eager import record


def on_tapes(function: Callable) -> Callable:
    """Returns a replacement of `tf.custom_gradient(function)` that only tapes know of.

    In a branch or a loop of a traced function, whose gradient TensorFlow makes of its operations,
    the gradient is that of the function's operations. So these need gradients, which are equal.

    Args:
      function: takes tensors, and returns a new tensor or a tuple of new ones, and a function that
        returns the gradients of the arguments, or None, for the gradients of the results.
    """

    @functools.wraps(function)
    def call(*arguments):
        with record.stop_recording():
            results, gradient = function(*arguments)

        def gradients(*of_results):
            found = gradient(*of_results)
            return list(found) if isinstance(found, (tuple, list)) else [found]

        flat = list(results) if isinstance(results, tuple) else [results]
        record.record_operation(function.__name__, flat, list(arguments), gradients)
        return results

    return call
