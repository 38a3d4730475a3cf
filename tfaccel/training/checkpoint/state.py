"""Copies the state of training from a live model to a snapshot and back.

Takes a built and compiled model and its callbacks; gives arrays by name and JSON-ready values, and
restores them. The model's part are variables: weights, seed states, batch norm's statistics, and
the optimizer with its iterations, loss scale and moving averages. Callbacks give their own state.

    arrays = variables(model) | metrics(model)
    put_variables(model, arrays); put_metrics(model, arrays)

An array's name begins with the variable's index, by which it is found again. Names of layers do not
identify it, because Keras numbers them from the start in each process.
"""

import json
import logging
import math
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfaccel.common.errors import UserError
from tfaccel.keras_internals.copies import refresh
from tfaccel.keras_internals.model_view import (
    ids_of_optimizers,
    named_optimizers,
    runs_eagerly,
    state_of,
)
from tfaccel.keras_internals.sharded_states import is_sharded
from tfaccel.keras_internals.variables import components
from tfaccel.runtime.agreement import of_workers
from tfaccel.training.checkpoint.state_dtypes import converted

log = logging.getLogger("tfaccel")

Arrays = dict[str, np.ndarray]
TRAINED = "trained"  # the name of the array that has which weights were trained

# The attributes of Keras's own callbacks that are their state.
KERAS_STATE = {
    "EarlyStopping": ("wait", "best", "best_epoch", "stopped_epoch", "best_weights"),
    "ReduceLROnPlateau": ("wait", "best", "cooldown_counter"),
    "ModelCheckpoint": ("best",),
}
KERAS_STATELESS = {"CSVLogger", "History", "LambdaCallback", "LearningRateScheduler"}
KERAS_STATELESS |= {"ProgbarLogger", "RemoteMonitor", "TensorBoard", "TerminateOnNaN"}


def variables(model: keras.Model, sharded: Arrays | None = None) -> Arrays:
    """Returns the variables that are the same on every replica, from this worker's replica 0.

    Args:
      model: built and compiled.
      sharded: from `sharded_states`; None to read the states here, which one worker alone cannot.
    """
    arrays = sharded_states(model) if sharded is None else sharded
    for index, each in enumerate(state_of(model)):
        if not is_sharded(each):
            arrays[_name("variable", index, each)] = _of_first_replica(each).numpy()
    return arrays | {TRAINED: _are_trained(model)}


def sharded_states(model: keras.Model, *, kept: bool = True) -> Arrays:
    """Returns the states of which each replica keeps a slice, whole. All workers must call it.

    Args:
      model: built and compiled.
      kept: False to take part and return nothing, so that this worker holds one state at a time.
    """
    strategy, arrays = model.distribute_strategy, {}
    for index, each in enumerate(state_of(model)):
        if is_sharded(each):
            whole = each.gathered(strategy)
            if kept:
                arrays[_name("variable", index, each)] = whole.numpy()
    return arrays


def num_bytes(model: keras.Model) -> int:
    """Returns the bytes of `variables(model)`, without copying them."""
    return bytes_of(state_of(model))


def bytes_of(variables: Iterable[keras.Variable]) -> int:
    """Returns the bytes of variables on one replica. Each variable counts once."""
    each_once = {id(each): each for each in variables}.values()
    return sum(math.prod(each.shape) * tf.as_dtype(each.dtype).size for each in each_once)


def put_variables(
    model: keras.Model, arrays: Arrays, *, keep: str | None = None, anew: bool = False
) -> None:
    """Assigns the arrays to the variables of every local replica.

    Args:
      model: built and compiled like the model that was saved.
      arrays: from `variables`. Optimizer states that are kept in another dtype are converted.
      keep: the name of a variable that is not assigned; None to assign all.
      anew: whether the model now trains other weights, so that the optimizer stays as it is built.

    Raises:
      UserError: the arrays are of another model or optimizer.
    """
    if not anew:
        _check_trained(model, arrays)
    ours, theirs = state_of(model), _of("variable", arrays)
    if anew:  # optimizers' variables are the last ones
        of_optimizers = ids_of_optimizers(model)
        ours = [each for each in ours if id(each) not in of_optimizers]
        theirs = dict(list(theirs.items())[: len(ours)])
    else:
        theirs = converted(model, theirs)
    if len(ours) != len(theirs):
        raise UserError(
            f"the checkpoint has {len(theirs)} variables, but this model and its optimizer have "
            f"{len(ours)}; build the same model and optimizer as before, with the same weights "
            f"trainable{_not_built(model)}"
        )
    for variable, (name, array) in zip(ours, theirs.items(), strict=True):
        _check_alike(variable, name, array)
    for variable, array in zip(ours, theirs.values(), strict=True):
        if variable.name == keep:
            continue
        if is_sharded(variable):
            variable.put(array)
            continue
        for component in components(variable):
            component.assign(array)
    refresh(model)


def _not_built(model: keras.Model) -> str:
    """Returns the end of a message, if the first step is yet to make optimizers' variables."""
    names = [name for name, each in named_optimizers(model).items() if not each.built]
    if not names or not runs_eagerly(model):
        return ""
    return (
        ". The step is not traced with run_eagerly, so these optimizers are not built before the "
        f"first step: {', '.join(names)}; resume without run_eagerly, or call "
        "optimizer.build(weights) of each in the model's compile"
    )


def _are_trained(model: keras.Model) -> np.ndarray:
    """Returns 1 for each weight that is trained and 0 for each other, in their order."""
    return np.array([each.trainable for each in model.weights], np.uint8)


def _check_trained(model: keras.Model, arrays: Arrays) -> None:
    """Raises UserError if other weights were trained: the optimizer's variables belong to these."""
    before, now = arrays.get(TRAINED), _are_trained(model)
    if before is None or before.shape != now.shape or (before == now).all():
        return  # an older checkpoint does not know, and another model is refused later
    num = int((before != now).sum())
    first = model.weights[int(np.argmax(before != now))]
    was, is_ = ("frozen", "trained") if first.trainable else ("trained", "frozen")
    raise UserError(
        f"the checkpoint was made while {num} of {len(now)} weights had another `trainable`: "
        f"{first.path} was {was} and is {is_} now; set `trainable` as before, or give each `fit` "
        "with another `trainable` a folder of its own"
    )


def metrics(model: keras.Model) -> Arrays:
    """Returns the metrics' variables, summed over all replicas. All workers must call it."""
    counted = [
        sum(each.numpy().astype(np.float64) for each in components(variable))
        for variable in model.metrics_variables
    ]
    flat = np.concatenate([np.zeros(0), *map(np.ravel, counted)])
    flat = of_workers(flat, model.distribute_strategy).sum(axis=0)
    parts = np.split(flat, np.cumsum([each.size for each in counted], dtype=int))
    return {
        _name("metric", index, variable): part.reshape(variable.shape)
        for index, (variable, part) in enumerate(zip(model.metrics_variables, parts, strict=False))
    }


def metrics_in(arrays: Arrays) -> Arrays:
    """Returns the arrays of metrics."""
    return _of("metric", arrays)


def with_metrics(arrays: Arrays, counted: Arrays) -> Arrays:
    """Returns the arrays with their metrics replaced by `counted`."""
    return {name: arrays[name] for name in arrays if not name.startswith("metric/")} | counted


def put_metrics(model: keras.Model, arrays: Arrays, *, is_chief: bool) -> None:
    """Assigns the metrics to the chief's replica 0, and zeros to all other replicas."""
    for variable, array in zip(
        model.metrics_variables, _of("metric", arrays).values(), strict=True
    ):
        first, *others = components(variable)
        held = array if is_chief else np.zeros_like(array)  # a state may be infinite
        first.assign(held.astype(first.dtype.as_numpy_dtype))
        for each in others:
            each.assign(np.zeros_like(each.numpy()))


def of_callbacks(callbacks: list) -> tuple[list[dict[str, Any]], Arrays]:
    """Returns the state of each callback that has one, JSON-ready, and its arrays by name."""
    states, arrays = [], {}
    for index, callback in enumerate(_with_state(callbacks)):
        state = {}
        for key, value in _state_of(callback).items():
            if isinstance(value, list) and any(isinstance(each, np.ndarray) for each in value):
                arrays |= {
                    f"callback/{index:05d}/{key}/{place:05d}": np.array(each)  # a copy
                    for place, each in enumerate(value)
                }
                value = {"arrays": len(value)}
            state[key] = value.item() if isinstance(value, np.generic) else value
        states.append({"class": type(callback).__name__, "state": state})
        _check_json(states[-1])
    return states, arrays


def _check_json(of_callback: dict) -> None:
    """Raises UserError for a value that JSON cannot hold."""
    for key, value in of_callback["state"].items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"get_state() of {of_callback['class']} returned a value for {key!r} that cannot "
                f"be saved ({error}); return numbers, text, lists and dicts of these, or a list of "
                "NumPy arrays only"
            ) from error


def put_callbacks(callbacks: list, states: list[dict[str, Any]], arrays: Arrays) -> None:
    """Restores the states of the callbacks that have one.

    Raises:
      UserError: their classes, or the order of these, differ from the saved ones.
    """
    callbacks = _with_state(callbacks)
    ours = [type(each).__name__ for each in callbacks]
    theirs = [each["class"] for each in states]
    if ours != theirs:
        raise UserError(
            f"the checkpoint was made with the callbacks {', '.join(theirs)}, but received "
            f"{', '.join(ours)}; give the same callbacks in the same order"
        )
    for index, (callback, each) in enumerate(zip(callbacks, states, strict=True)):
        state = dict(each["state"])
        for key, value in state.items():
            if isinstance(value, dict) and set(value) == {"arrays"}:
                prefix = f"callback/{index:05d}/{key}/"
                state[key] = [arrays[name] for name in sorted(arrays) if name.startswith(prefix)]
        if hasattr(callback, "set_state"):
            callback.set_state(state)
        else:
            vars(callback).update(state)


def warn_of_forgetful(callbacks: list) -> None:
    """Warns of callbacks that lose their state when a run resumes, because they cannot give it."""
    unknown = [
        type(each).__name__
        for each in callbacks
        if not hasattr(each, "get_state")
        and type(each).__name__ not in KERAS_STATELESS | KERAS_STATE.keys()
        and not type(each).__module__.startswith("tfaccel.")
    ]
    if unknown:
        log.warning(
            "checkpoint: no checkpoint has the state of %s; if it counts something, give it "
            "get_state() and set_state(state) for numbers, text and lists of arrays",
            ", ".join(unknown),
        )


def _with_state(callbacks: list) -> list:
    """Returns the callbacks that have a state."""
    return [
        each
        for each in callbacks
        if hasattr(each, "get_state") or KERAS_STATE.get(type(each).__name__)
    ]


def _state_of(callback) -> dict[str, Any]:
    if hasattr(callback, "get_state"):
        return callback.get_state()
    names = KERAS_STATE.get(type(callback).__name__, ())
    return {name: getattr(callback, name) for name in names if hasattr(callback, name)}


def _name(kind: str, index: int, variable) -> str:
    return f"{kind}/{index:05d}/{variable.path}"


def _of(kind: str, arrays: Arrays) -> Arrays:
    """Returns the arrays of a kind, in the order of their indices."""
    return {name: arrays[name] for name in sorted(arrays) if name.startswith(f"{kind}/")}


def _check_alike(variable, name: str, array: np.ndarray) -> None:
    own = _of_first_replica(variable)
    shape = tuple(variable.shape)  # of a sharded state the whole one
    if shape != array.shape or own.dtype.as_numpy_dtype != array.dtype.type:
        raise UserError(
            f"{name} of the checkpoint is {array.dtype.name} {list(array.shape)}, but "
            f"{variable.path} of this model is {own.dtype.name} {list(shape)}; build the "
            "same model and optimizer as before"
        )


def _of_first_replica(variable):
    return components(variable)[0]
