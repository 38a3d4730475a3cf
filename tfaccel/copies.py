"""A model made again, in the same state: without its training, in float32, or with other layers.

Takes a built Keras model; gives another one, and leaves it as it is.

    without_training_state(model).save("model.keras")
    in_float32(model, lambda layer: layer.name == "conv5")

Private Keras name relied on: Model._flatten_layers, of Keras 3.15.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator

import keras

from tfaccel.errors import UserError
from tfaccel.table_text import cleaned


def without_training_state(model: keras.Model) -> keras.Model:
    """Returns a copy that plain Keras loads: not compiled, so without optimizer or loss of ours.

    Raises:
      UserError: it has a layer that its config does not make again.
    """
    return _made_again(model)


def in_float32(
    model: keras.Model, chosen: Callable[[keras.layers.Layer], bool] = lambda _: True
) -> keras.Model:
    """Returns a copy of which layers compute in float32.

    Args:
      model: functional or sequential.
      chosen: says of which; of all by default. Models within are not asked for: their layers are.

    Raises:
      UserError: it has a layer that its config does not make again.
    """

    def again(layer):
        config = layer.get_config()
        if _is_of_floats(layer) and chosen(layer):
            config = _policies_in_float32(config) | {"dtype": "float32"}
        return type(layer).from_config(config)

    return _made_again(model, clone_function=again, recursive=True)


def _is_of_floats(layer) -> bool:
    # Of Keras's operations, as `a + b`, no dtype is to be set; they take that of their inputs.
    return isinstance(layer, keras.layers.Layer) and keras.backend.is_float_dtype(
        layer.compute_dtype
    )


def take_state(copy: keras.layers.Layer, layer: keras.layers.Layer) -> None:
    """Gives a layer's copy, or a model's, its state: weights, what is kept beside them, and flags.

    Raises:
      ValueError: the copy has other weights, by a poor config.
    """
    copy.set_weights(layer.get_weights())
    pairs = zip(_flat(layer), _flat(copy), strict=True)
    for old, new in pairs:  # those that hold others first
        if new.trainable != old.trainable:
            new.trainable = old.trainable
        if hasattr(old, "save_assets") and hasattr(new, "load_assets"):  # a vocabulary
            with tempfile.TemporaryDirectory() as folder:
                old.save_assets(folder)
                new.load_assets(folder)
    refresh(copy)


def refresh(layer: keras.layers.Layer) -> None:
    """Recomputes what a layer, or a model's layers, keep of weights that were assigned."""
    for each in _flat(layer):
        if isinstance(each, keras.layers.Normalization):
            each.finalize_state()  # its mean and variance, as its `call` takes them


def _flat(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    return list(layer._flatten_layers())


def _made_again(model: keras.Model, **how) -> keras.Model:
    """Returns a copy, made as `clone_model` is told to, in the same state."""
    try:
        with _as_not_compiled(model):
            copy = keras.models.clone_model(model, **how)
        take_state(copy, model)
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
