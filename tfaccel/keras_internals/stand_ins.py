"""Runs a traced function on stand-ins of its variables: XLA compiles it, and nothing else changes.

    copies = StandIns(function.get_concrete_function(*arguments))
    copies.run(arguments)              # in any thread; takes as long as XLA compiles
    function(*arguments)               # runs at once

TensorFlow keeps a program by the function's name and the shapes of its inputs, the variables'
included. So the program of the stand-ins is that of the variables, which no thread waits for
meanwhile. The stand-ins hold zeros, and take the memory of the variables once more.

Private names relied on: TensorFlow 2.21: ConcreteFunction._inference_function, and its
call_with_captures.
"""

from collections.abc import Sequence

import tensorflow as tf


class HasOtherStateError(Exception):
    """A function has state that is no variable, such as a table, and would change it."""


class StandIns:
    """Variables of zeros in place of those that a traced function reads and writes."""

    def __init__(self, function):
        """Makes a stand-in for each variable on its device, and keeps the function.

        Args:
          function: a `tf.types.experimental.ConcreteFunction`.

        Raises:
          HasOtherStateError: the function has state that is no variable.
          tf.errors.ResourceExhaustedError: a device has no room for them.
        """
        variables = {id(each.handle): each for each in function.variables}
        self._function, self._variables, self._captures = function, [], []
        for each in function.captured_inputs:
            if each.dtype != tf.resource:
                self._captures.append(each)
                continue
            if id(each) not in variables:
                raise HasOtherStateError("the step has state that is no variable, such as a table")
            variable = variables[id(each)]
            with tf.device(variable.device):
                zeros = tf.zeros(variable.shape, variable.dtype)
                self._variables.append(tf.Variable(zeros, trainable=False))
            self._captures.append(self._variables[-1].handle)

    @property
    def handles(self) -> list[tuple[tf.Tensor, tf.DType]]:
        """The handle and dtype of each stand-in."""
        return [(each.handle, each.dtype) for each in self._variables]

    def run(self, arguments: Sequence) -> None:
        """Runs the function once on the stand-ins, and drops its outputs.

        Raises:
          tf.errors.OpError: whatever the function raises.
        """
        inner = self._function._inference_function
        inner.call_with_captures(tuple(arguments), {}, self._captures)
