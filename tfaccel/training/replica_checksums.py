"""Whether all replicas, of all workers, hold the same variables, bit for bit.

Takes a Keras model, built when it is first looked at; names the first variable that differs.
Metrics are left out: they count each replica's own rows.

    audit = Audit(model)
    audit.make_equal()                    # at the start: replica 0's values everywhere
    audit.check(when="at step 1000")      # raises where a replica has left the others
"""

import functools
import logging

import keras
import numpy as np
import tensorflow as tf

from tfaccel.common.errors import RunError
from tfaccel.keras_internals.model_view import state_of
from tfaccel.keras_internals.replica import Replica, local_replicas
from tfaccel.keras_internals.variables import components, is_distributed
from tfaccel.runtime import collectives

log = logging.getLogger("tfaccel")


class ReplicasDifferError(RunError):
    """A replica's variables are no longer the others'."""


class Audit:
    """Compares checksums of a model's and its optimizer's variables over all replicas."""

    def __init__(self, model: keras.Model):
        """Takes a compiled model; its variables may come later."""
        self._model = model

    def check(self, *, when: str) -> None:
        """Compares every variable. Every worker must call it.

        Args:
          when: for the message, e.g. "at step 1000".

        Raises:
          ReplicasDifferError: naming the first variable, and the first replica, that differs.
        """
        found = self._first_difference()
        if found is not None:
            variable, replica = found
            raise ReplicasDifferError(
                f"replica {replica} differs from replica 0 in {variable.path} {when}: they no "
                "longer train one model; go back to a checkpoint from before, and look for what "
                "changes this variable outside the optimizer"
            )

    def make_equal(self) -> None:
        """Gives all replicas the values of replica 0 where they differ, and says so.

        Every worker must call it.
        """
        found = self._first_difference()
        if found is not None:
            variable, replica = found
            log.warning(
                "weights: replica %d differs from replica 0 in %s (did it load another file?); all "
                "go on with those of replica 0",
                replica,
                variable.path,
            )
            self._broadcast()

    def _broadcast(self) -> None:
        """Assigns replica 0's values on every replica."""
        # One at a time, in 9 ms each (three replicas on two CPU cores, 2026-11-21): all at once
        # would be quicker, but hold several copies of the whole model.
        for variable in self._variables:
            with self._model.distribute_strategy.scope():
                value = collectives.broadcast(variable)
            for component in components(variable):
                component.assign(value)

    def _first_difference(self):
        """Returns (Keras variable, replica index) of the first difference, or None."""
        sums = self._checksums()
        differs = sums != sums[:1]
        if not differs.any():
            return None
        column = int(np.argmax(differs.any(axis=0)))
        return self._variables[column], int(np.argmax(differs[:, column]))

    @functools.cached_property
    def _variables(self) -> list:
        # One that no strategy distributes is not several.
        return [each for each in state_of(self._model) if is_distributed(each)]

    @functools.cached_property
    def _replicas(self) -> list[Replica]:
        return local_replicas(self._model.distribute_strategy)

    def _checksums(self) -> np.ndarray:
        """Returns the checksums of all variables on all replicas, [replicas, variables] int64."""
        own = []
        for replica in self._replicas:
            with tf.device(replica.device):
                mine = [components(each)[replica.local_index] for each in self._variables]
                own.append(_checksums(mine))
        if self._replicas[0].num_replicas == len(self._replicas):
            return np.stack([each.numpy() for each in own])
        return self._gather(own).numpy()

    @functools.cached_property
    def _gather(self):
        """A function from the checksums of this process's replicas to those of all."""

        @tf.function(autograph=False)
        def gather(own):
            gathered = []
            for replica, sums in zip(self._replicas, own, strict=True):
                with tf.device(replica.device):
                    gathered.append(replica.all_gather(sums[tf.newaxis]))
            return gathered[0]

        return gather


# XLA compiles a program for each size. So variables are filled up with zeros to one of these sizes,
# and so many of them are one tensor: there are few programs, which all models share. Only larger
# variables have a program for each of their own sizes, as a copy of them costs memory.
_ROWS_OF_SIZE = {4**5: 32, 4**6: 16, 4**7: 8, 4**8: 4, 4**9: 2, 4**10: 1}  # values: rows
_FLAT = [-1]


def _checksums(variables: list) -> tf.Tensor:
    """Returns the checksum of each variable of one replica, [variables] int64.

    By raw operations, one by one: to trace them would take longer than all looks of most runs.
    """
    waiting, order, sums = {}, [], []

    def look(key) -> None:
        dtype, size = key
        indices, rows = zip(*waiting.pop(key), strict=True)
        missing = _ROWS_OF_SIZE[size] - len(rows)
        zeros = [tf.zeros(size, dtype)] * missing
        order.extend(indices)
        sums.append(_program(size, dtype)(tf.raw_ops.Pack(values=[*rows, *zeros]))[: len(rows)])

    for index, variable in enumerate(variables):
        value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
        value = tf.raw_ops.Reshape(tensor=value, shape=_FLAT)
        length = value.shape[0]
        size = next((each for each in _ROWS_OF_SIZE if length <= each), None)
        if size is None:
            order.append(index)
            sums.append(_program(length, value.dtype)(value[tf.newaxis]))
            continue
        row = tf.raw_ops.Pad(input=value, paddings=[[0, size - length]])
        key = value.dtype, size
        waiting.setdefault(key, []).append((index, row))
        if len(waiting[key]) == _ROWS_OF_SIZE[size]:
            look(key)
    for key in list(waiting):
        look(key)
    return tf.gather(tf.concat(sums, axis=0), np.argsort(order))


@functools.cache
def _program(num_values: int, dtype: tf.DType):
    """Returns `_checksum_of_rows` for rows of so many values, compiled by XLA."""
    # A `partial` of its own, or TensorFlow warns of one function that is traced too often.
    function = functools.partial(_checksum_of_rows)
    spec = tf.TensorSpec((_ROWS_OF_SIZE.get(num_values, 1), num_values), dtype)
    return tf.function(function, autograph=False, jit_compile=True, input_signature=[spec])


def _checksum_of_rows(values: tf.Tensor) -> tf.Tensor:
    """Returns sums of the bits of [rows, values], each mixed with its place: [rows] int64.

    They wrap around.
    """
    if values.dtype.is_bool:
        values = tf.cast(values, tf.int32)
    bits = tf.cast(tf.bitcast(values, f"int{8 * values.dtype.size}"), tf.int64)
    # Squared, or a last bit up here and down there could cancel (2**64 / golden ratio mixes).
    mixed = bits + tf.range(bits.shape[1], dtype=tf.int64) * -7046029254386353131
    return tf.reduce_sum(mixed * mixed, axis=1)
