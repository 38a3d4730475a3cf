"""The states of stateful recurrent layers, of which each replica uses the rows of its own batch.

A layer with `stateful=True` has a state with one row for each row of the global batch. Every
replica holds all rows. While a step is traced for a replica, the layer sees only that replica's
rows; the changes of all replicas are then summed, so that all hold the same state again.

    note_cut(model, [3, 2])                           # the rows of each replica
    with as_replica(model, replica), own_rows(model, replica, 3):
        model.train_step(batch)
"""

import contextlib
import itertools
import weakref
from collections.abc import Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfaccel.common.errors import UserError
from tfaccel.keras_internals.layers import layers_of
from tfaccel.keras_internals.replica import Replica, local_batches
from tfaccel.keras_internals.variables import components
from tfaccel.runtime.agreement import of_workers

_CUTS = weakref.WeakKeyDictionary()  # from a model to the first row of each replica, and the last


def stateful_layers(model) -> list:
    """Returns the recurrent layers that keep their state from batch to batch, and have one."""
    return [
        each
        for each in layers_of(model)
        if isinstance(each, keras.layers.RNN) and each.stateful and each.states is not None
    ]


def states_of(model) -> list:
    """Returns the Keras variables of the states. Keras does not count them as the model's."""
    return [each for layer in stateful_layers(model) for each in keras.tree.flatten(layer.states)]


def local_batches_alike(model, strategy: tf.distribute.Strategy, batch, num_local: int) -> list:
    """Returns `local_batches`. If the model has states, the workers compare their rows first.

    Otherwise one worker would raise the error of `note_cut`, and the others would wait for it.

    Raises:
      UserError: The model has states, and not every replica of all workers has as many rows.
    """
    batches = local_batches(strategy, batch, num_local)
    if strategy.num_replicas_in_sync > num_local and states_of(model):
        rows = [tf.nest.flatten(each)[0].shape[0] for each in batches]
        counts = of_workers(np.array(rows), strategy).reshape(-1).tolist()
        _check_alike(counts)
    return batches


def _check_alike(counts: Sequence[int]) -> None:
    if len(set(counts)) > 1:
        raise UserError(
            f"the replicas have {list(counts)} rows of a batch; with a stateful recurrent "
            "layer on several workers, all replicas must have the same number: use a batch "
            "size that the number of replicas divides"
        )


def note_cut(model, counts: Sequence[int], *, num_replicas: int) -> None:
    """Notes how many rows of a batch each replica of this process has.

    Raises:
      UserError: The model has states, and other rows than they have, or than it had before.
    """
    states = states_of(model)
    if not states:
        return
    rows, expected = sum(counts), states[0].shape[0]
    if num_replicas > len(counts):  # other processes have as many
        _check_alike(counts)
        rows = counts[0] * num_replicas
        counts = [counts[0]] * num_replicas
    if rows != expected or 0 in counts:
        raise UserError(
            f"a batch has {rows} rows, {list(counts)} by replica, but the state of a stateful "
            f"recurrent layer has {expected}; give keras.Input the rows of all replicas "
            "(batch_shape=(rows, ...)), at least one for each, and use only full batches"
        )
    cut = list(itertools.accumulate(counts, initial=0))
    if _CUTS.setdefault(model, cut) != cut:
        raise UserError(
            f"the rows of a batch are cut at {cut} for the replicas, but were cut at "
            f"{_CUTS[model]} before; with a stateful recurrent layer, use a batch size that the "
            "number of replicas divides"
        )


def note_equal_cut(model, *, num_replicas: int) -> None:
    """Does the same for batches that are made in the step: all replicas have as many rows."""
    for state in states_of(model)[:1]:
        rows = state.shape[0]
        if rows % num_replicas:
            raise UserError(
                f"the state of a stateful recurrent layer has {rows} rows, which {num_replicas} "
                "replicas cannot share equally; use a batch size that the number of replicas "
                "divides"
            )
        note_cut(model, [rows // num_replicas] * num_replicas, num_replicas=num_replicas)


@contextlib.contextmanager
def own_rows(model, replica: Replica, rows: int) -> Iterator[None]:
    """Within `as_replica`, the layers see and assign the rows of this replica only.

    Raises:
      UserError: The rows are not those of the replica.
    """
    if replica.num_replicas == 1 or not stateful_layers(model):
        yield
        return
    start, stop = _CUTS[model][replica.index : replica.index + 2]
    if rows != stop - start:
        raise UserError(
            f"a batch or a part of a batch has {rows} rows on a replica, but the state of a "
            f"stateful recurrent layer has {stop - start} for it; use accumulation_steps=1, and "
            "give keras.Input the rows of all replicas (batch_shape=(rows, ...))"
        )
    with _seeing(model, start, stop):
        yield


@contextlib.contextmanager
def any_rows(model, specs) -> Iterator[None]:
    """Within the context, the layers take a batch of these specs, which nothing computes."""
    sizes = [each.shape[0] for each in tf.nest.flatten(specs) if each is not None and each.shape]
    states = states_of(model)
    if not states or not sizes or sizes[0] in (None, states[0].shape[0]):
        yield
        return
    with _seeing(model, 0, sizes[0]):
        yield


@contextlib.contextmanager
def _seeing(model, start: int, stop: int) -> Iterator[None]:
    layers = stateful_layers(model)
    kept = [(each, each.states, each._expected_batch_size) for each in layers]
    try:
        for each in layers:
            each.__dict__["states"] = keras.tree.map_structure(
                lambda state: _Rows(state, start, stop), each.states
            )
            each.__dict__["_expected_batch_size"] = stop - start
        yield
    finally:
        for each, states, expected in kept:
            each.__dict__["states"] = states
            each.__dict__["_expected_batch_size"] = expected


class _Rows:
    """Some rows of a state, which read and assign like a Keras variable."""

    def __init__(self, state, start: int, stop: int):
        self._state, self._start, self._stop = state, start, stop
        # Totals adds up the changes: those of other rows than a replica's own are 0.
        state._aggregation = "sum"

    @property
    def value(self) -> tf.Tensor:
        whole = tf.convert_to_tensor(self._state)
        missing = self._stop - whole.shape[0]
        if missing > 0:  # in a trace that never runs, of more rows than a state has
            return tf.pad(whole, [[0, missing], *[[0, 0]] * (whole.shape.rank - 1)])
        return whole[self._start : self._stop]

    @property
    def shape(self) -> tf.TensorShape:
        return self.value.shape

    def assign(self, value) -> None:
        before = tf.convert_to_tensor(self._state)
        value = tf.cast(value, before.dtype)
        self._state.assign(tf.concat([before[: self._start], value, before[self._stop :]], 0))

    def __tf_tensor__(self, dtype=None, name=None) -> tf.Tensor:
        value = self.value
        return value if dtype is None else tf.cast(value, dtype)


def share(model, replicas: Sequence[Replica]) -> None:
    """Gives every replica of this process the rows that each replica has assigned to its states.

    Prediction needs it, because it sums nothing. Call it in a `tf.function`, outside XLA.
    """
    if replicas[0].num_replicas == 1:
        return
    for state in states_of(model):
        parts = []
        for replica, own in zip(replicas, components(state), strict=True):
            start, stop = _CUTS[model][replica.index : replica.index + 2]
            with tf.device(replica.device):
                parts.append(own.read_value()[start:stop])
                if replica.num_replicas > len(replicas):
                    parts[-1] = replica.all_gather(parts[-1])
        whole = parts[0] if replicas[0].num_replicas > len(replicas) else tf.concat(parts, 0)
        for replica, own in zip(replicas, components(state), strict=True):
            with tf.device(replica.device):
                own.assign(whole)
