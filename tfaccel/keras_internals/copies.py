"""A model made again, in the same state: without its training, in float32, or with other layers.

Takes a built Keras model; gives another one, and leaves it as it is.

    without_training_state(model).save("model.keras")
    in_float32(model, lambda layer: layer.name == "conv5")
    with_layers(model, {"logits": make_another}, strategy=None, instead="put it there")

Private Keras names relied on: Layer._flatten_layers, of Keras 3.15, and `Functional`, the class of
`keras.Model(inputs, outputs)`.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping

import keras
from keras.src.models.functional import Functional

from tfaccel.common import temporary
from tfaccel.common.errors import UserError
from tfaccel.common.tables import cleaned
from tfaccel.keras_internals.layers import layers_held, layers_of

PLAIN = (keras.Sequential, Functional)  # kinds of models that Keras copies layer by layer


def without_training_state(model: keras.Model) -> keras.Model:
    """Returns a copy that plain Keras loads: not compiled, so without optimizer or loss of ours.

    Raises:
      UserError: it has a layer that its config does not make again.
    """
    return _made_again(model)


def check_config(model: keras.Model) -> None:
    """Raises as `without_training_state` would, as far as that is known without making weights.

    Raises:
      UserError: a layer's config does not make it again, or is nothing that JSON holds.
    """
    with _explained(model), _as_not_compiled(model):
        json.dumps(keras.saving.serialize_keras_object(model))
        for layer in model.layers if isinstance(model, PLAIN) else ():
            if isinstance(layer, PLAIN):
                for each in _held(layer):  # by its registered name: it is made with its model
                    _deserialized(each)
            else:
                type(layer).from_config(layer.get_config())


def check_made_again(model: keras.Model, build: Callable[[keras.Model], object]) -> None:
    """Raises where the config of a subclassed model does not make it, and its weights, again.

    Args:
      model: built.
      build: makes the weights of a copy.

    Raises:
      UserError: it does not.
    """
    with _explained(model), _as_not_compiled(model):
        copy = keras.models.clone_model(model)
        build(copy)
        shapes = [[tuple(each.shape) for each in one.weights] for one in (model, copy)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"it has weights of {shapes[1]} then, and not of {shapes[0]}")


def _deserialized(layer: keras.layers.Layer) -> None:
    if isinstance(layer, PLAIN):
        for each in _held(layer):
            _deserialized(each)
        return
    config = keras.saving.serialize_keras_object(layer)
    config.pop("build_config", None)  # or it would get its weights
    keras.saving.deserialize_keras_object(config)


def in_float32(
    model: keras.Model, chosen: Callable[[keras.layers.Layer], bool] = lambda _: True
) -> keras.Model:
    """Returns a copy of which layers compute in float32.

    Args:
      model: functional or sequential.
      chosen: says of which; of all by default. Models within are not asked for: their layers are.
        Layers of whole numbers, and quantized ones, stay as they are.

    Raises:
      UserError: the model is of another kind, or has a layer that its config does not make again.
    """
    if not isinstance(model, PLAIN):
        raise UserError(
            f"{model.name} is a subclassed model, which cannot be made again in float32; make it "
            "of keras.Model(inputs, outputs)"
        )

    def again(layer):
        config = layer.get_config()
        if is_of_floats(layer) and chosen(layer):
            config = _policies_in_float32(config) | {"dtype": "float32"}
        return type(layer).from_config(config)

    return _made_again(model, clone_function=again, recursive=True)


def with_layers(
    model: keras.Model,
    others: Mapping[str, Callable[[keras.layers.Layer], keras.layers.Layer]],
    *,
    strategy,
    instead: str,
) -> keras.Model:
    """Returns a copy in which each of these layers is what its function returns for it.

    The other layers have their weights; these have new ones.

    Args:
      model: functional or sequential, built.
      others: by the name of a layer among the model's own.
      strategy: whose scope the copy is built in; None for none.
      instead: what to do about a model that cannot be copied.

    Raises:
      UserError: the model is of another kind, lacks such a layer, or cannot be copied.
    """
    # Exactly these: a copy of a subclass would lose what it adds, a train_step say.
    if type(model) not in PLAIN:
        raise UserError(
            f"{model.name} is a subclassed model, which cannot be copied with another layer; "
            f"{instead}"
        )
    unknown = sorted(set(others).difference(each.name for each in model.layers))
    if unknown:
        raise UserError(f"{model.name} has no layer {unknown[0]} among its own; {instead}")

    def copy(layer):
        if layer.name in others:
            return others[layer.name](layer)
        return layer.__class__.from_config(layer.get_config())

    try:
        scope = strategy.scope() if strategy else contextlib.nullcontext()
        with scope, _as_not_compiled(model):
            made = keras.models.clone_model(model, clone_function=copy)
        if not model.trainable:
            made.trainable = False
        for old, new in zip(model.layers, made.layers, strict=True):
            if old.name not in others:
                take_state(new, old)
        return made
    except UserError:  # of an other's function
        raise
    except Exception as error:  # whatever a layer's `from_config` raises, Lambda's say
        raise UserError(
            f"{model.name} cannot be copied with another layer "
            f"({cleaned(str(error)).partition('. ')[0]}); {instead}"
        ) from error


def is_of_floats(layer) -> bool:
    """Whether it is a layer that computes in a dtype which may be another."""
    # Of Keras's operations, as `a + b`, no dtype is to be set; they take that of their inputs.
    return (
        isinstance(layer, keras.layers.Layer)
        and keras.backend.is_float_dtype(layer.compute_dtype)
        and not layer.quantization_mode
    )


def take_state(copy: keras.layers.Layer, layer: keras.layers.Layer) -> None:
    """Gives a layer's copy, or a model's, its state: weights, vocabularies, what is trained.

    Raises:
      ValueError: the copy has other weights, by a poor config.
    """
    copy.set_weights(layer.get_weights())
    for old, new in _pairs(layer, copy):  # those that hold others first
        if new.trainable != old.trainable:
            new.trainable = old.trainable
        # One that has adapted: its config does not say to what.
        if hasattr(old, "get_vocabulary") and old.get_vocabulary(include_special_tokens=False):
            store = {}
            old.save_own_variables(store)
            new.load_own_variables(store)
            with temporary.folder("copy") as folder:
                old.save_assets(str(folder))
                new.load_assets(str(folder))
    for old, new in zip(layer.weights, copy.weights, strict=True):
        if new.trainable != old.trainable:
            new.trainable = old.trainable
    refresh(copy)


def _pairs(layer, copy) -> Iterator[tuple[keras.layers.Layer, keras.layers.Layer]]:
    """Yields layer and copy, and then what they hold, likewise; a layer twice if it is there so."""
    yield layer, copy
    for each in zip(_held(layer), _held(copy), strict=False):
        yield from _pairs(*each)


def _held(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    # A layer that a model was given as an attribute is not copied with it.
    if isinstance(layer, PLAIN):
        return layer.layers
    return layers_held(layer)


def refresh(layer: keras.layers.Layer) -> None:
    """Recomputes what a layer, or a model's layers, keep of weights that were assigned."""
    for each in layers_of(layer):
        if isinstance(each, keras.layers.Normalization):
            each.finalize_state()  # its mean and variance, as its `call` takes them


def _made_again(model: keras.Model, **how) -> keras.Model:
    """Returns a copy, made as `clone_model` is told to, in the same state."""
    with _explained(model):
        with _as_not_compiled(model):
            copy = keras.models.clone_model(model, **how)
        take_state(copy, model)
        return copy


@contextlib.contextmanager
def _explained(model: keras.Model) -> Iterator[None]:
    """Within the context, whatever a layer's own config raises becomes a sentence."""
    try:
        yield
    except Exception as error:
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
