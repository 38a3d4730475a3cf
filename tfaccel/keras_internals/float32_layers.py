"""Lets some layers of a model of half precision compute in float32.

Takes new layers, or a model that exists.

    with tfaccel.float32_region():
        x = keras.layers.Dense(10)(x)       # a new layer, with the policy float32

    with run.scope():
        model = tfaccel.with_float32_layers(model, ["conv5_*"])
"""

import contextlib
import logging
import re
from collections.abc import Iterator, Sequence

import keras

from tfaccel.common.errors import UserError, did_you_mean
from tfaccel.keras_internals.copies import PLAIN, in_float32, is_of_floats
from tfaccel.keras_internals.layers import layers_of

log = logging.getLogger("tfaccel")

HALVES = ("float16", "bfloat16")
SCALED = ("float16", "float32")  # dtypes of mixed_float16: of computations, and of weights
MOST_NAMES = 12  # in an error


def policy_of(model: keras.Model) -> str:
    """Returns the name of the dtype policy that most layers with weights have.

    A model from a file has the policy of the process that loads it, whatever policies its layers
    have. So the policy of the model counts only if no layer has weights yet.
    """
    layers = layers_of(model, include_self=False)
    own = [each for each in layers if each._trainable_variables]
    names = [each.dtype_policy.name for each in own]
    return max(names, key=names.count) if names else model.dtype_policy.name


def needs_loss_scale(model: keras.Model) -> bool:
    """Returns whether the model, or a layer, computes in float16 with float32 weights."""
    policies = [each.dtype_policy for each in layers_of(model)]
    return any((each.compute_dtype, each.variable_dtype) == SCALED for each in policies)


@contextlib.contextmanager
def float32_region() -> Iterator[None]:
    """Within the context, new layers compute in float32, unless you give them a `dtype`.

    PyTorch's `autocast(enabled=False)` is similar, but it applies to layers that are called within
    the context. This one applies to layers that are made within it. You may nest contexts. At its
    end, a context restores the policy from before.
    """
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("float32")
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def with_float32_layers(model: keras.Model, names: Sequence[str] | str) -> keras.Model:
    """Returns a copy of a model in which some layers compute in float32. The copy is not compiled.

    The copy has the weights of the model. Call this function in `run.scope()`. Your own layer must
    pass its dtype to the layers that it makes. A warning names the inner layers that stay in half
    precision.

    Args:
      model: A built functional or sequential model.
      names: The names of layers, also of layers in inner models. The name of an inner model chooses
        all of its layers. "*" stands for any characters. You may pass a single name as a string.

    Raises:
      UserError: The model is subclassed, not built, or cannot be made again from its config; or no
        layer has one of the names.
    """
    names = [names] if isinstance(names, str) else list(names)
    if type(model) not in PLAIN:
        raise UserError(
            f"{model.name} is a subclassed model, which cannot be copied; give its layers "
            'dtype="float32", or make them within tfaccel.float32_region()'
        )
    if not model.built:
        raise UserError(f"{model.name} is not built; begin it with keras.Input(shape)")
    known = list(dict.fromkeys(name for own, _ in _named(model) for name in own))
    for name in names:
        if not isinstance(name, str) or not any(_fits(name, each) for each in known):
            raise UserError(f"{model.name} has no layer {name!r}{_nearest(name, known)}")
    chosen = _chosen(model, names)
    copy = in_float32(model, lambda layer: any(layer is each for each in chosen))
    for layer in _chosen(copy, names):
        left = [each.name for each in layers_of(layer) if each.compute_dtype in HALVES]
        if left:
            log.warning(
                "precision: %s is in float32, but not %s, which it made without its own dtype",
                layer.name,
                left[0],
            )
    log.info("precision: in float32 by name: %s", ", ".join(each.name for each in chosen))
    return copy


def layers_by_name(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns the layers that `with_float32_layers` accepts; none for a subclassed model."""
    return [layer for _, layer in _named(model)] if type(model) in PLAIN else []


def _chosen(model: keras.Model, names: Sequence[str]) -> list[keras.layers.Layer]:
    return [
        layer
        for own, layer in _named(model)
        if any(_fits(name, each) for name in names for each in own)
    ]


def _named(model: keras.Model) -> Iterator[tuple[tuple[str, ...], keras.layers.Layer]]:
    """Yields each layer with its names: its own, and those of the inner models that hold it."""
    for each in model.layers:
        if isinstance(each, PLAIN):
            for own, layer in _named(each):
                yield (each.name, *own), layer
        elif _has_dtype(each):
            yield (each.name,), each


def _has_dtype(layer) -> bool:
    return is_of_floats(layer) and not isinstance(layer, keras.layers.InputLayer)


def _fits(pattern: str, name: str) -> bool:
    letters = ".*".join(map(re.escape, pattern.split("*")))
    return pattern == name or re.fullmatch(letters, name) is not None


def _nearest(name: str, known: Sequence[str]) -> str:
    if isinstance(name, str) and len(known) > MOST_NAMES:
        said = did_you_mean(name, known)
        return said if "did you mean" in said else "; model.summary(expand_nested=True) lists them"
    return did_you_mean(str(name), known)
