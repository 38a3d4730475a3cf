"""Checks that every replica of every worker holds the same variables, bit for bit.

Takes a compiled Keras model, which must be built at the first check; names the first variable that
differs. Metrics are not checked, because each replica's metrics count only that replica's rows. Nor
are sharded states of optimizers, because each replica has another slice of them.

    audit = Audit(model)
    audit.make_equal()                    # at the start: gives all replicas replica 0's values
    audit.check(when="at step 1000")      # raises ReplicasDifferError if a replica differs
"""

import functools
import logging

import keras
import numpy as np
import tensorflow as tf

from tfaccel.common.errors import RunError
from tfaccel.keras_internals.model_view import state_of
from tfaccel.keras_internals.replica import Replica, local_replicas
from tfaccel.keras_internals.sharded_states import is_sharded
from tfaccel.keras_internals.variables import components, is_distributed
from tfaccel.runtime import collectives

log = logging.getLogger("tfaccel")


class ReplicasDifferError(RunError):
    """A replica and replica 0 have different values of a variable."""


class Audit:
    """Compares checksums of a model's and its optimizer's variables across all replicas."""

    def __init__(self, model: keras.Model):
        """Takes a compiled model, which need not be built yet."""
        self._model = model

    def check(self, *, when: str) -> None:
        """Compares every variable. Every worker must call it.

        Raises:
          ReplicasDifferError: a replica differs; names the first such variable and replica.
        """
        found = self._first_difference()
        if found is not None:
            variable, replica = found
            raise ReplicasDifferError(
                f"replica {replica} and replica 0 have different values of {variable.path} {when}, "
                "so the replicas train different models; restore an earlier checkpoint, and find "
                "the code that changes this variable outside the optimizer"
            )

    def make_equal(self) -> None:
        """Gives all replicas the values of replica 0, and logs a warning, if they differ.

        Every worker must call it.
        """
        found = self._first_difference()
        if found is not None:
            variable, replica = found
            log.warning(
                "weights: replica %d and replica 0 have different values of %s (did they load "
                "different files?); all replicas continue with the values of replica 0",
                *(replica, variable.path),
            )
            self._broadcast()

    def _broadcast(self) -> None:
        """Assigns replica 0's values on every replica."""
        # One variable at a time takes 9 ms each (three replicas on two CPU cores, 2026-11-21). All
        # at once would be faster, but would hold several copies of the whole model.
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
        # A variable that no strategy distributes has one value only. Of a sharded one, each replica
        # has another slice, and no other replica has it, too.
        found = filter(is_distributed, state_of(self._model))
        return [each for each in found if not is_sharded(each)]

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
        """A function from the checksums of this process's replicas to those of all replicas."""

        def gather(own):
            gathered = []
            for replica, sums in zip(self._replicas, own, strict=True):
                with tf.device(replica.device):
                    gathered.append(replica.all_gather(sums[tf.newaxis]))
            return gathered[0]

        # A `partial`, because TensorFlow counts the traces of all models by the code of a function,
        # and warns of the fifth.
        return tf.function(functools.partial(gather), autograph=False)


# XLA compiles a program for each size. So each variable is padded with zeros to one of these sizes,
# and becomes a row of a tensor with a fixed number of rows. All models share these few programs. A
# larger variable is not copied, to save memory, so each larger size has its own program.
_ROWS_OF_SIZE = {4**5: 32, 4**6: 16, 4**7: 8, 4**8: 4, 4**9: 2, 4**10: 1}  # values: rows
_FLAT = [-1]


def _checksums(variables: list) -> tf.Tensor:
    """Returns the checksum of each variable of one replica, [variables] int64.

    It runs raw operations one by one, because tracing them takes longer than all the checks of most
    runs.
    """
    waiting, order, sums = {}, [], []

    def add_sums(key) -> None:
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
            add_sums(key)
    for key in list(waiting):
        add_sums(key)
    return tf.gather(tf.concat(sums, axis=0), np.argsort(order))


@functools.cache
def _program(num_values: int, dtype: tf.DType):
    """Returns `_checksum_of_rows` for rows of `num_values` values, compiled by XLA."""
    # A new `partial` each time, because TensorFlow warns if one function is traced often.
    function = functools.partial(_checksum_of_rows)
    spec = tf.TensorSpec((_ROWS_OF_SIZE.get(num_values, 1), num_values), dtype)
    return tf.function(function, autograph=False, jit_compile=True, input_signature=[spec])


def _checksum_of_rows(values: tf.Tensor) -> tf.Tensor:
    """Returns a checksum of each row of [rows, values]: [rows] int64.

    It sums the values' bits, each mixed with the value's index. The sums wrap around.
    """
    if values.dtype.is_bool:
        values = tf.cast(values, tf.int32)
    bits = tf.cast(tf.bitcast(values, f"int{8 * values.dtype.size}"), tf.int64)
    # Squared, because otherwise two values that change by one bit, one up and one down, could
    # cancel each other. The factor is 2**64 / golden ratio, which mixes well.
    mixed = bits + tf.range(bits.shape[1], dtype=tf.int64) * -7046029254386353131
    return tf.reduce_sum(mixed * mixed, axis=1)
