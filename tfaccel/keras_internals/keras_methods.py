"""Wraps Keras's own `fit`, `evaluate` and `predict` for one model.

The import replaces these methods of `keras.Model`, once, by ones that look for a wrapper first.
"""

import functools
import types
from collections.abc import Callable

import keras

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
        if around is None:
            return keras_own(model, *args, **kwargs)
        return around(*args, **kwargs)

    return method


_ON_BATCH = ("train_on_batch", "test_on_batch", "predict_on_batch")


_KERAS_METHODS = {
    name: getattr(keras.Model, name) for name in ("fit", "evaluate", "predict", *_ON_BATCH)
}


for _name, _method in _KERAS_METHODS.items():
    setattr(keras.Model, _name, _with_around(_name, _method))
