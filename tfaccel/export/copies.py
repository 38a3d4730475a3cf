"""A model made again, with the same weights: without its training, or in float32.

Takes a built Keras model; gives another one, and leaves it as it is.

    without_training_state(model).save("model.keras")
"""

import contextlib
from collections.abc import Iterator

import keras

from tfaccel.errors import UserError
from tfaccel.table_text import cleaned


def without_training_state(model: keras.Model) -> keras.Model:
    """Returns a copy that plain Keras loads: not compiled, so without optimizer or loss of ours.

    Raises:
      UserError: it has a layer that its config does not make again.
    """
    return _made_again(model)


def in_float32(model: keras.Model) -> keras.Model:
    """Returns a copy of which every layer computes in float32.

    Raises:
      UserError: it has a layer that its config does not make again.
    """

    def again(layer):
        # Of Keras's operations, as `a + b`, no dtype is to be set; they take that of their inputs.
        own = {"dtype": "float32"} if isinstance(layer, keras.layers.Layer) else {}
        return type(layer).from_config(_policies_in_float32(layer.get_config()) | own)

    return _made_again(model, clone_function=again, recursive=True)


def _made_again(model: keras.Model, **how) -> keras.Model:
    """Returns a copy, made as `clone_model` is told to, with the same weights."""
    try:
        with _as_not_compiled(model):
            copy = keras.models.clone_model(model, **how)
        copy.set_weights(model.get_weights())  # which may have become others, by a poor config
        return copy
    except (NotImplementedError, TypeError, ValueError) as error:
        why = cleaned(str(error).partition("\n\nExample:")[0])  # Keras adds a page of code
        raise UserError(
            f"model {model.name} cannot be made again from its config ({why}); let its own classes "
            "return all of __init__'s arguments from get_config(), take **kwargs, and be "
            "registered, as its own functions, by keras.saving.register_keras_serializable()"
        ) from error


@contextlib.contextmanager
def _as_not_compiled(model: keras.Model) -> Iterator[None]:
    """Within the context, a clone gets no optimizer, whose state is as large as the weights."""
    compiled, model.compiled = model.compiled, False
    try:
        yield
    finally:
        model.compiled = compiled


def _policies_in_float32(config):
    """Returns a layer's config with all dtype policies in float32: what it wraps has its own."""
    if isinstance(config, dict):
        if config.get("class_name") == "DTypePolicy":
            return "float32"
        return {name: _policies_in_float32(each) for name, each in config.items()}
    if isinstance(config, list):
        return [_policies_in_float32(each) for each in config]
    return config
