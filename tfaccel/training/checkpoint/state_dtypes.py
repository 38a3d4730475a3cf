"""Converts the optimizer states of a checkpoint, if the model keeps them in another dtype now.

    arrays = converted(model, arrays)       # from float32, bfloat16 or 8 bits to any of these

Each state is decoded to float32 and encoded again, with rounding to the nearest. A checkpoint has
the states as they were kept: with 8 bits, two arrays for each state, whose names tell what they are
(tfaccel/step/states/codecs.py).
"""

from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfaccel.common.run_log import summary
from tfaccel.common.tables import counted
from tfaccel.keras_internals.model_view import state_of
from tfaccel.keras_internals.optimizer_states import State, states_of
from tfaccel.step.states.codecs import BFLOAT16, CODECS, EIGHT_BIT, FLOAT32, Part

Arrays = dict[str, np.ndarray]


class _Saved(NamedTuple):
    """What a checkpoint has of one variable, or of one state that has several arrays."""

    arrays: Arrays
    kept_as: str


def converted(model: keras.Model, arrays: Arrays) -> Arrays:
    """Returns the arrays of variables, with optimizer states as the model keeps them.

    Arrays that do not fit the model are returned as they are, so that the caller's checks find
    them.

    Args:
      model: built and compiled.
      arrays: of the variables `state_of(model)` of the model that was saved, in their order.
    """
    states = states_of(model)
    of_parts = {id(part): each for each in states for part in each.parts}
    ours = [of_parts.get(id(each), each) for each in state_of(model)]
    ours = list({id(each): each for each in ours}.values())
    saved = _saved(arrays)
    if len(ours) != len(saved):
        return arrays
    found, changes = [], []
    for own, each in zip(ours, saved, strict=True):
        if isinstance(own, State) and _differs(own, each):
            changes.append((each.kept_as, _name_of(own)))
            each = _Saved(_converted(own, each), _name_of(own))
        found += each.arrays.items()
    if not changes:
        return arrays
    before, now = (", ".join(sorted(set(names))) for names in zip(*changes, strict=True))
    number = counted(len(changes), "optimizer state")
    summary("checkpoint: %s saved as %s, converted to %s (step.state_dtype)", number, before, now)
    # The names begin with an index, by which the arrays are in order.
    paths = [name.split("/", 2)[2] for name, _ in found]
    return {
        f"variable/{index:05d}/{path}": array
        for index, (path, (_, array)) in enumerate(zip(paths, found, strict=True))
    }


def _saved(arrays: Arrays) -> list[_Saved]:
    """Returns the arrays of a checkpoint, those of one state together."""
    found = []
    for name, array in arrays.items():
        if found and found[-1].kept_as == EIGHT_BIT and len(found[-1].arrays) == 1:
            found[-1].arrays[name] = array
            continue
        is_codes = array.dtype == np.uint8 and name.endswith(("_signed_codes", "_unsigned_codes"))
        kept_as = EIGHT_BIT if is_codes else array.dtype.name
        found.append(_Saved({name: array}, kept_as))
    return found


def _name_of(state: State) -> str:
    return FLOAT32 if state.codec is None else state.codec.name


def _differs(state: State, saved: _Saved) -> bool:
    if saved.kept_as not in (FLOAT32, BFLOAT16, EIGHT_BIT) or saved.kept_as == _name_of(state):
        return False
    size = next(iter(saved.arrays.values())).size
    return size == tf.TensorShape(state.shape).num_elements()


def _converted(state: State, saved: _Saved) -> Arrays:
    """Returns the arrays of a state as it is kept now."""
    is_signed, stored = state.is_signed, list(saved.arrays.values())
    with tf.device("/cpu:0"):
        if saved.kept_as == FLOAT32:
            values = tf.constant(stored[0])
        else:
            values = CODECS[saved.kept_as].decode(stored, state.shape, is_signed=is_signed)
        values = tf.reshape(values, state.shape)
        if state.codec is None:
            parts, encoded = [Part("", state.shape, FLOAT32)], [values]
        else:
            parts = state.codec.parts(state.shape, is_signed=is_signed)
            encoded = state.codec.encode(values, is_signed=is_signed, bits=None)
    prefix = f"variable/00000/{state.path}"
    return {prefix + part.suffix: each.numpy() for part, each in zip(parts, encoded, strict=True)}
