"""Layers that compute in float32 within a model of half precision.

with tfaccel.float32_region():
    x = keras.layers.Dense(10)(x)       # built here, so of the policy float32

model = tfaccel.with_float32_layers(model, ["conv5_*"])     # of a model that is there already

Private Keras name relied on: `Functional`, the class of `keras.Model(inputs, outputs)`.
"""

import contextlib
import fnmatch
import logging
from collections.abc import Iterator, Sequence

import keras
from keras.src.models.functional import Functional

from tfaccel.errors import UserError, did_you_mean
from tfaccel.table_text import cleaned

log = logging.getLogger("tfaccel")


@contextlib.contextmanager
def float32_region() -> Iterator[None]:
    """Within the context, new layers compute in float32, unless they are given a `dtype`.

    As PyTorch's `autocast(enabled=False)`, but of layers that are made within, not of those that
    are called. May be nested; the policy before is back at its end.
    """
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("float32")
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def with_float32_layers(model: keras.Model, names: Sequence[str]) -> keras.Model:
    """Returns a copy of a model, not compiled, in which these layers compute in float32.

    Its weights are the model's: call it in the scope where they belong.

    Args:
      model: functional or sequential, built.
      names: of layers, those of models within it included; "*" stands for any letters.

    Raises:
      UserError: the model is of another kind, cannot be made again from its config, or a name is
        that of no layer.
    """
    cure = 'give its layers dtype="float32", or make them in tfaccel.float32_region()'
    if type(model) not in (keras.Sequential, Functional):
        raise UserError(f"{model.name} is a subclassed model, which cannot be copied; {cure}")
    try:
        config = model.get_config()
        layers = list(_configs(config))
        known = [each["name"] for each in layers]
        for name in names:
            if not fnmatch.filter(known, name):
                raise UserError(f"{model.name} has no layer '{name}'{did_you_mean(name, known)}")
        chosen = [
            each for each in layers if any(fnmatch.fnmatchcase(each["name"], one) for one in names)
        ]
        for each in chosen:
            _set_float32(each)
        copy = type(model).from_config(config)
    except UserError:
        raise
    except Exception as error:  # whatever a layer's own config raises, Lambda's say
        reason = cleaned(str(error)).partition(". ")[0]
        raise UserError(f"{model.name} cannot be copied ({reason}); {cure}") from error
    copy.set_weights(model.get_weights())
    log.info("precision: %d of %d layers compute in float32", len(chosen), len(layers))
    return copy


def _configs(config: dict) -> Iterator[dict]:
    """Yields the configs of a model's layers, and of models' within it; an input is none."""
    for each in config["layers"]:
        inner = each["config"]
        if "layers" in inner:
            yield from _configs(inner)
        elif each["class_name"] != "InputLayer":
            yield inner


def _set_float32(config: dict) -> None:
    config["dtype"] = "float32"
    for name in ("layer", "forward_layer", "backward_layer"):  # of wrappers
        if config.get(name):
            _set_float32(config[name]["config"])
