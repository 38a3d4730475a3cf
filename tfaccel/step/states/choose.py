"""Decides what a model's optimizers keep in fewer bytes: `StepConfig.state_dtype`.

set_states(model, "8bit")        # after Keras's `compile`, in the strategy's scope
"""

import math
from collections.abc import Callable

import keras

from tfaccel.common.errors import UserError
from tfaccel.common.run_log import summary
from tfaccel.keras_internals.layers import layers_of
from tfaccel.keras_internals.model_view import every_optimizer, optimizers_of
from tfaccel.keras_internals.optimizer_states import (
    KNOWN,
    is_known,
    num_states,
    pack,
    packed_by,
    save_as_keras,
)
from tfaccel.keras_internals.seeds import global_seed
from tfaccel.step.states.codecs import CODECS, EIGHT_BIT, FLOAT32
from tfaccel.step.states.rounding import random_bits

SMALLEST = 4096  # values of a weight whose states are packed: bitsandbytes' min_8bit_size
MIB = 2**20


def set_states(model: keras.Model, state_dtype: str) -> None:
    """Lets the optimizers of a compiled model keep their states in a dtype.

    Args:
      model: a compiled model. An optimizer that is built already has its states converted.
      state_dtype: `StepConfig.state_dtype`.

    Raises:
      UserError: an optimizer's states cannot be kept so.
    """
    wrapped = [each for own in every_optimizer(model) for each in optimizers_of(own)]
    optimizers = [each for each in wrapped if len(optimizers_of(each)) == 1]
    if state_dtype == FLOAT32:
        optimizers = [each for each in optimizers if packed_by(each) is not None]
    else:
        for each in optimizers:
            _check(each, state_dtype)
    seed = global_seed()

    def fits(weight) -> bool:
        is_exempt = state_dtype == EIGHT_BIT and _is_of_embedding(weight, model)
        return _is_large(weight) and not is_exempt

    settings = {
        "fits": fits,
        "bits": lambda num, key: random_bits(num, key=(seed, *key)),
    }
    for each in wrapped if optimizers else ():
        save_as_keras(each)
    for each in optimizers:
        pack(each, CODECS.get(state_dtype), **settings)
        if state_dtype != FLOAT32:
            _tell(each, model, state_dtype, fits)


def may_pack(model: keras.Model) -> bool:
    """Returns whether the states of a compiled model's optimizers could be kept in fewer bytes."""
    wrapped = [each for own in every_optimizer(model) for each in optimizers_of(own)]
    optimizers = [each for each in wrapped if len(optimizers_of(each)) == 1]
    return bool(optimizers) and all(
        is_known(each) and not getattr(each, "centered", False) and num_states(each)
        for each in optimizers
    )


def _check(optimizer, state_dtype: str) -> None:
    kind = type(optimizer).__name__
    if not is_known(optimizer):
        raise UserError(
            f"state_dtype={state_dtype!r} with the optimizer {kind}; expected one of "
            f"{', '.join(KNOWN)} of keras.optimizers; choose one of these, or "
            f"state_dtype={FLOAT32!r}"
        )
    if getattr(optimizer, "centered", False):
        raise UserError(
            f"state_dtype={state_dtype!r} with {kind}(centered=True), whose variance is a "
            "difference of two states and could become negative by their rounding; set "
            f"centered=False, or state_dtype={FLOAT32!r}"
        )


def _is_of_embedding(weight, model) -> bool:
    """Returns whether a weight is that of an embedding, some rows of which change rarely."""
    # Looked up late, because a subclassed model makes its weights after it is compiled.
    layers = [each for each in layers_of(model) if isinstance(each, keras.layers.Embedding)]
    return any(each is weight for layer in layers for each in layer.weights)


def _is_large(weight) -> bool:
    is_of_keras = isinstance(weight, keras.Variable)  # a plain `tf.Variable` may be trained, too
    return is_of_keras and weight.dtype == "float32" and math.prod(weight.shape) >= SMALLEST


def _tell(optimizer, model, state_dtype: str, fits: Callable) -> None:
    """Logs what is stored how, and the bytes that it takes if that is known yet."""
    kind, number = type(optimizer).__name__, num_states(optimizer)
    if not number:
        summary("step: state_dtype=%s changes nothing, as %s keeps no states", state_dtype, kind)
        return
    # Of several optimizers it is not known before the first step which weights are whose.
    is_only = len(every_optimizer(model)) == 1 and len(optimizers_of(model.optimizer)) <= 2
    weights = model.trainable_variables if is_only else []
    codec, sizes = CODECS[state_dtype], [math.prod(each.shape) for each in weights]
    pairs = zip(weights, sizes, strict=True)
    now = sum(codec.num_bytes(size) if fits(each) else 4 * size for each, size in pairs)
    before = f"{number * 4 * sum(sizes) / MIB:,.1f} MiB"
    figures = f" in {number * now / MIB:,.1f} in place of {before}" if weights else ""
    summary(
        "step: %s keeps its states as %s%s; those of weights with fewer than %s values%s stay in "
        "float32",
        *(kind, state_dtype, figures, f"{SMALLEST:,}"),
        ", and of embeddings," if state_dtype == EIGHT_BIT else "",
    )
