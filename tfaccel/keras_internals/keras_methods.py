"""Wraps Keras's own `fit`, `evaluate` and `predict` for one model.

The import replaces these methods of `keras.Model`, once, by ones that look for a wrapper first.
"""

import functools
import types
import weakref
from collections.abc import Callable

import keras

from tfaccel.common.errors import UserError
from tfaccel.common.run_log import summary
from tfaccel.runtime.strategy import latest

AROUND = "_tfaccel_around"  # the wrappers of a model, in its __dict__


def around_keras(model, name: str, wrap: Callable) -> None:
    """Wraps Keras's own method `name` for one model.

    A model may define its own `fit`, with any arguments, and may call Keras's `fit` as often as it
    likes. So the wrapper runs where Keras's own method is entered, because its arguments are known.

    Args:
      model: The Keras model.
      name: A method of `keras.Model`: "fit", "evaluate", "predict" or one of "..._on_batch".
      wrap: A function from Keras's method, bound to the model, to the function that replaces it.
    """
    method = types.MethodType(_KERAS_METHODS[name], model)
    vars(model).setdefault(AROUND, {})[name] = wrap(method)  # Keras does not track it


def _with_around(name: str, keras_own: Callable) -> Callable:
    """Returns the method that replaces Keras's own: it looks for a wrapper of the model first."""

    @functools.wraps(keras_own)
    def method(model, *args, **kwargs):
        around = vars(model).get(AROUND, {}).get(name)
        if model.train_function is None:  # `run.compile` sets one
            _check_function(model, name)
        if around is None:
            return keras_own(model, *args, **kwargs)
        return around(*args, **kwargs)

    return method


def num_local(strategy) -> int:
    """Returns the number of replicas of this process."""
    return len(strategy.extended.worker_devices)


def _check_function(model, name: str) -> None:
    """Says that Keras's own step runs, if the model is of a run with several replicas.

    Raises:
      UserError: there are several workers, over which Keras's own step cannot run.
    """
    if not model.compiled or name.startswith("predict"):
        return  # Keras asks for `compile`, and needs none to predict
    strategy = model.distribute_strategy
    if strategy is not latest() or strategy.num_replicas_in_sync == 1:
        return
    cure = "call run.compile, with the same arguments, in place of model.compile"
    if num_local(strategy) < strategy.num_replicas_in_sync:
        raise UserError(
            f"{name} of model {model.name}: the model was compiled by model.compile, and "
            "Keras's own step cannot run on several workers; expected a model compiled by "
            f"run.compile; {cure}"
        )
    if model not in _said:
        _said.add(model)
        summary(
            "%s of model %s: the model was compiled by model.compile, so Keras's own step runs, "
            "without what run.compile adds: N replicas may not train as one device does; %s",
            *(name, model.name, cure),
        )


_said = weakref.WeakSet()  # the models of which it was said that Keras's own step runs
_ON_BATCH = ("train_on_batch", "test_on_batch", "predict_on_batch")


_KERAS_METHODS = {
    name: getattr(keras.Model, name) for name in ("fit", "evaluate", "predict", *_ON_BATCH)
}


for _name, _method in _KERAS_METHODS.items():
    setattr(keras.Model, _name, _with_around(_name, _method))
