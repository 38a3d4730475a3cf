"""What decides the rest of a run, between a live model and a snapshot.

Takes a compiled model, built, and its callbacks; gives arrays by name and JSON-ready values, and
puts them back. Weights, seed states, batch norm's statistics, the optimizer with its iterations,
loss scale and moving averages are variables; what callbacks count is theirs to tell.

    arrays = variables(model) | metrics(model)
    put_variables(model, arrays); put_metrics(model, arrays)

Names begin with a variable's place, by which it is found again: Keras numbers layers' names anew in
each process.
"""

import json
import logging
from typing import Any

import keras
import numpy as np

from tfaccel.common.errors import UserError
from tfaccel.keras_internals.copies import refresh
from tfaccel.keras_internals.model_view import state_of
from tfaccel.keras_internals.variables import components
from tfaccel.runtime.agreement import of_workers

log = logging.getLogger("tfaccel")

Arrays = dict[str, np.ndarray]

# Of Keras's own callbacks, what they count, if anything.
KERAS_STATE = {
    "EarlyStopping": ("wait", "best", "best_epoch", "stopped_epoch", "best_weights"),
    "ReduceLROnPlateau": ("wait", "best", "cooldown_counter"),
    "ModelCheckpoint": ("best",),
    **dict.fromkeys(
        ("CSVLogger", "History", "LambdaCallback", "LearningRateScheduler", "ProgbarLogger"), ()
    ),
    **dict.fromkeys(("TensorBoard", "TerminateOnNaN", "RemoteMonitor"), ()),
}


def variables(model: keras.Model) -> Arrays:
    """Returns what must be the same on every replica, as replica 0 of this worker has it."""
    return {
        _name("variable", index, each): _of_first_replica(each).numpy()
        for index, each in enumerate(state_of(model))
    }


def num_bytes(model: keras.Model) -> int:
    """Returns how many bytes those are, without a copy of them."""
    return _bytes_of(state_of(model))


def weight_bytes(model: keras.Model) -> int:
    """Returns how many of these are the model's weights; the optimizer has most of the others."""
    return _bytes_of(model.weights)


def _bytes_of(variables: list) -> int:
    own = map(_of_first_replica, variables)
    return sum(each.shape.num_elements() * each.dtype.size for each in own)


def put_variables(model: keras.Model, arrays: Arrays, *, keep: str | None = None) -> None:
    """Assigns them on every local replica.

    Args:
      model: built and compiled as it was.
      arrays: from `variables`.
      keep: the name of a variable that stays as it is; None for none.

    Raises:
      UserError: the arrays are of another model or optimizer.
    """
    ours, theirs = state_of(model), _of("variable", arrays)
    if len(ours) != len(theirs):
        raise UserError(
            f"the checkpoint has {len(theirs)} variables, this model and its optimizer "
            f"{len(ours)}; build the model and the optimizer as they were"
        )
    for variable, (name, array) in zip(ours, theirs.items(), strict=True):
        _check_alike(variable, name, array)
    for variable, array in zip(ours, theirs.values(), strict=True):
        if variable.name == keep:
            continue
        for component in components(variable):
            component.assign(array)
    refresh(model)


def metrics(model: keras.Model) -> Arrays:
    """Returns the sums over all replicas of what the metrics have counted. All workers call it."""
    counted = [
        sum(each.numpy().astype(np.float64) for each in components(variable))
        for variable in model.metrics_variables
    ]
    flat = np.concatenate([each.ravel() for each in counted]) if counted else np.zeros(0)
    flat = of_workers(flat, model.distribute_strategy).sum(axis=0)
    ends = np.cumsum([each.size for each in counted])[:-1]
    parts = np.split(flat, ends) if counted else []
    return {
        _name("metric", index, variable): part.reshape(each.shape)
        for index, (variable, each, part) in enumerate(
            zip(model.metrics_variables, counted, parts, strict=True)
        )
    }


def metrics_in(arrays: Arrays) -> Arrays:
    """Returns the arrays that are of metrics."""
    return _of("metric", arrays)


def with_metrics(arrays: Arrays, counted: Arrays) -> Arrays:
    """Returns the arrays with these metrics in place of theirs."""
    return {name: arrays[name] for name in arrays if not name.startswith("metric/")} | counted


def put_metrics(model: keras.Model, arrays: Arrays, *, is_chief: bool) -> None:
    """Gives the sums to replica 0 of all workers, and nothing to the others."""
    for variable, array in zip(
        model.metrics_variables, _of("metric", arrays).values(), strict=True
    ):
        first, *others = components(variable)
        first.assign((array if is_chief else 0 * array).astype(first.dtype.as_numpy_dtype))
        for each in others:
            each.assign(np.zeros_like(each.numpy()))


def of_callbacks(callbacks: list) -> tuple[list[dict[str, Any]], Arrays]:
    """Returns the state of each callback that has one, JSON-ready, and its arrays by name."""
    states, arrays = [], {}
    for index, callback in enumerate(_counting(callbacks)):
        state = {}
        for key, value in _state_of(callback).items():
            if _is_arrays(value):
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
    """Raises UserError for what JSON has not."""
    for key, value in of_callback["state"].items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"get_state() of {of_callback['class']} returned {key!r}: {error}; return numbers, "
                "text, lists and dicts of them, or a list of NumPy arrays alone"
            ) from error


def put_callbacks(callbacks: list, states: list[dict[str, Any]], arrays: Arrays) -> None:
    """Sets the states on those that have one, of the same classes in the same order.

    Raises:
      UserError: there are others.
    """
    callbacks = _counting(callbacks)
    ours = [type(each).__name__ for each in callbacks]
    theirs = [each["class"] for each in states]
    if ours != theirs:
        raise UserError(
            f"the checkpoint was made with the callbacks {', '.join(theirs)}; received "
            f"{', '.join(ours)}: give the same, in the same order"
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
    """Says which callbacks begin anew on a resume, because nothing tells what they count."""
    unknown = [
        type(each).__name__
        for each in callbacks
        if not hasattr(each, "get_state")
        and type(each).__name__ not in KERAS_STATE
        and not type(each).__module__.startswith("tfaccel.")
    ]
    if unknown:
        log.warning(
            "checkpoint: %s will begin anew on a resume; give it get_state() and set_state(state), "
            "of numbers, text and lists of arrays, if it counts something",
            ", ".join(unknown),
        )


def _counting(callbacks: list) -> list:
    """Returns those that have a state."""
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


def _is_arrays(value) -> bool:
    return isinstance(value, list) and any(isinstance(each, np.ndarray) for each in value)


def _name(kind: str, index: int, variable) -> str:
    return f"{kind}/{index:05d}/{variable.path}"


def _of(kind: str, arrays: Arrays) -> Arrays:
    """Returns the arrays of a kind, in order of their places."""
    return {name: arrays[name] for name in sorted(arrays) if name.startswith(f"{kind}/")}


def _check_alike(variable, name: str, array: np.ndarray) -> None:
    own = _of_first_replica(variable)
    if tuple(own.shape) != array.shape or own.dtype.as_numpy_dtype != array.dtype.type:
        raise UserError(
            f"{name} of the checkpoint is {array.dtype.name} {list(array.shape)}, but "
            f"{variable.path} of this model is {own.dtype.name} {own.shape.as_list()}; build the "
            "model and the optimizer as they were"
        )


def _of_first_replica(variable):
    return components(variable)[0]
