"""Copies a model in the same state: without its training, in float32, or with other layers.

Takes a built Keras model; gives another one, and does not change the first.

    without_training_state(model).save("model.keras")
    in_float32(model, lambda layer: layer.name == "conv5")
    with_layers(model, {"logits": make_another}, strategy=None, instead="change it in your code")
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

PLAIN = (keras.Sequential, Functional)  # Keras copies such models layer by layer


def without_training_state(model: keras.Model) -> keras.Model:
    """Returns a copy that is not compiled: Keras alone can load it, without tfaccel's optimizer.

    Raises:
      UserError: The config of a layer does not make the layer again.
    """
    return _made_again(model)


def check_config(model: keras.Model) -> None:
    """Raises the errors of `without_training_state` that can be found without making weights.

    Raises:
      UserError: The config of a layer does not make the layer again, or is not JSON.
    """
    with _explained(model), _as_not_compiled(model):
        json.dumps(keras.saving.serialize_keras_object(model))
        for layer in model.layers if _is_made_of_layers(model) else ():
            if isinstance(layer, PLAIN):
                _deserialized(layer)  # each of its layers is made by its registered name
            else:
                type(layer).from_config(layer.get_config())


def check_made_again(model: keras.Model, build: Callable[[keras.Model], object]) -> None:
    """Raises an error if the config of a subclassed model does not make its weights again.

    Args:
      model: The built model.
      build: A function that makes the weights of a copy.

    Raises:
      UserError: The config does not make the model, or makes weights of other shapes.
    """
    with _explained(model), _as_not_compiled(model):
        copy = keras.models.clone_model(model)
        build(copy)
        _wear_lora(model, copy)
        shapes = [[tuple(each.shape) for each in one.weights] for one in (model, copy)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"the copy has weights of {shapes[1]}, not of {shapes[0]}")


def _is_made_of_layers(model: keras.Model) -> bool:
    """Returns whether a model's config has those of its layers.

    A model of KerasHub has a config of its own, such as its depth and width. Keras makes it from
    that, and never from the configs of its layers, which may lack arguments.
    """
    return isinstance(model, PLAIN) and "layers" in model.get_config()


def _deserialized(layer: keras.layers.Layer) -> None:
    if isinstance(layer, PLAIN):
        for each in _held(layer) if _is_made_of_layers(layer) else ():
            _deserialized(each)
        return
    config = keras.saving.serialize_keras_object(layer)
    config.pop("build_config", None)  # else the layer would make its weights
    keras.saving.deserialize_keras_object(config)


def in_float32(
    model: keras.Model, chosen: Callable[[keras.layers.Layer], bool] = lambda _: True
) -> keras.Model:
    """Returns a copy of a model in which some layers compute in float32.

    Args:
      model: A functional or sequential model.
      chosen: Says whether a layer shall compute in float32; by default every layer does. It is
        called for the layers of inner models, but not for the inner models. Layers of whole numbers
        and quantized layers stay as they are.

    Raises:
      UserError: The model is subclassed, or the config of a layer does not make the layer again.
    """
    if not isinstance(model, PLAIN):
        raise UserError(
            f"{model.name} is a subclassed model, which cannot be made again in float32; build it "
            "with keras.Model(inputs, outputs)"
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
    """Returns a copy of a model in which functions replace some layers.

    The other layers keep their weights. The replaced layers get new weights.

    Args:
      model: A built functional or sequential model.
      others: From the name of one of the model's own layers to the function that returns its
        replacement.
      strategy: The strategy in whose scope the copy is built; None for no strategy.
      instead: What you can do about a model that cannot be copied, for the error.

    Raises:
      UserError: The model is subclassed, has no such layer, or cannot be copied.
    """
    # No subclasses of these: a copy would lose, for example, their own train_step.
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
    except UserError:  # from a function in `others`
        raise
    except Exception as error:  # `from_config` may raise anything, such as Lambda's ValueError
        raise UserError(
            f"{model.name} cannot be copied with another layer "
            f"({cleaned(str(error)).partition('. ')[0]}); {instead}"
        ) from error


def is_of_floats(layer) -> bool:
    """Returns whether a layer computes in a float dtype that can be changed."""
    # Operations, such as `a + b`, have no dtype of their own: they use that of their inputs.
    return (
        isinstance(layer, keras.layers.Layer)
        and keras.backend.is_float_dtype(layer.compute_dtype)
        and not layer.quantization_mode
    )


def take_state(copy: keras.layers.Layer, layer: keras.layers.Layer) -> None:
    """Gives the copy of a layer or model the same weights, vocabularies and trainable flags.

    Raises:
      ValueError: The copy has other weights, because of an incomplete config.
    """
    _wear_lora(layer, copy)
    copy.set_weights(layer.get_weights())
    for old, new in _pairs(layer, copy):  # outer layers first
        if new.trainable != old.trainable:
            new.trainable = old.trainable
        # The config of an adapted layer lacks the vocabulary.
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


def _wear_lora(layer: keras.layers.Layer, copy: keras.layers.Layer) -> None:
    """Enables LoRA in the layers of a copy where the config of an outer layer or model lacks it.

    Attention and the models of KerasHub have no LoRA in their configs. Keras saves the sum of a
    kernel and its LoRA, so a file answers alike with LoRA and without.
    """
    for old, new in _pairs(layer, copy):
        if getattr(old, "lora_enabled", False) and not getattr(new, "lora_enabled", True):
            alpha = getattr(old, "lora_alpha", None)
            new.enable_lora(old.lora_rank, **({} if alpha is None else {"lora_alpha": alpha}))


def _pairs(layer, copy) -> Iterator[tuple[keras.layers.Layer, keras.layers.Layer]]:
    """Yields a layer and its copy, then the layers that both hold. A layer may come twice."""
    yield layer, copy
    for each in zip(_held(layer), _held(copy), strict=False):
        yield from _pairs(*each)


def _held(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    # A clone lacks layers that are only attributes of the model.
    if isinstance(layer, PLAIN):
        return layer.layers
    return layers_held(layer)


def refresh(layer: keras.layers.Layer) -> None:
    """Recomputes the values that layers derive from weights, after weights were assigned."""
    for each in layers_of(layer):
        if isinstance(each, keras.layers.Normalization):
            each.finalize_state()  # computes the mean and variance that its `call` uses


def _made_again(model: keras.Model, **how) -> keras.Model:
    """Returns a copy in the same state; `how` goes to `clone_model`."""
    with _explained(model):
        with _as_not_compiled(model):
            if how or not isinstance(model, PLAIN) or _is_made_of_layers(model):
                copy = keras.models.clone_model(model, **how)
            else:
                config = keras.saving.serialize_keras_object(model)
                copy = keras.saving.deserialize_keras_object(
                    config, custom_objects={type(model).__name__: type(model)}
                )
        take_state(copy, model)
        return copy


@contextlib.contextmanager
def _explained(model: keras.Model) -> Iterator[None]:
    """Within the context, an error in the config of a layer becomes a UserError."""
    try:
        yield
    except Exception as error:
        why = cleaned(str(error).partition("\n\nExample:")[0])  # Keras adds a page of code
        raise UserError(
            f"model {model.name} cannot be made again from its config ({why}); in its own classes, "
            "return all arguments of __init__ from get_config() and accept **kwargs, and register "
            "its classes and functions with keras.saving.register_keras_serializable()"
        ) from error


@contextlib.contextmanager
def _as_not_compiled(model: keras.Model) -> Iterator[None]:
    """Within the context, a clone gets no optimizer: its state is as large as the weights."""
    compiled, model.compiled = model.compiled, False
    try:
        yield
    finally:
        model.compiled = compiled


def _policies_in_float32(config):
    """Returns a layer's config with all dtype policies in float32, also inner layers'."""
    if isinstance(config, dict):
        if config.get("class_name") == "DTypePolicy":
            return "float32"
        return {name: _policies_in_float32(each) for name, each in config.items()}
    if isinstance(config, list):
        return [_policies_in_float32(each) for each in config]
    return config
