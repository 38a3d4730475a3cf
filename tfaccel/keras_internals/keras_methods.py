"""Keras's own `fit`, `evaluate` and `predict`, with something around them for one model."""

import functools
import types
from collections.abc import Callable

import keras

AROUND = "_tfaccel_around"  # in a model's __dict__: what its calls of Keras's own methods become


def around_keras(model, name: str, wrap: Callable) -> None:
    """Puts `wrap` around the method `name` as Keras has it, for this model alone.

    A model's own `fit` may take any arguments, and may call Keras's as often as it likes: what is
    added to a call is added where Keras's own method is entered, whose arguments are known.

    Args:
      model: of Keras.
      name: of a method of `keras.Model`: "fit", "evaluate", "predict" or one of a batch.
      wrap: from the method, bound to the model, to what stands for it.
    """
    method = types.MethodType(_KERAS_METHODS[name], model)
    vars(model).setdefault(AROUND, {})[name] = wrap(method)  # past Keras's tracking of attributes


def _with_around(name: str, keras_own: Callable) -> Callable:
    """Returns what stands for Keras's own method on `keras.Model`: it asks the model first."""

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
