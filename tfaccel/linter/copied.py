"""A copy of a model, some of whose layers are others.

Takes a functional or sequential model; gives one that is not compiled.

    faster = with_layers(model, {"logits": make_another}, strategy=None, instead="put it there")

Private Keras name relied on: `Functional`, the class of `keras.Model(inputs, outputs)`.
"""

import contextlib
from collections.abc import Callable, Mapping

import keras
from keras.src.models.functional import Functional

from tfaccel.copies import take_state
from tfaccel.errors import UserError
from tfaccel.table_text import cleaned


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
    if type(model) not in (keras.Sequential, Functional):
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
        with strategy.scope() if strategy else contextlib.nullcontext():
            made = keras.models.clone_model(model, clone_function=copy)
    except UserError:  # of an other's function
        raise
    except Exception as error:  # whatever a layer's `from_config` raises, Lambda's say
        raise UserError(
            f"{model.name} cannot be copied with another layer "
            f"({cleaned(str(error)).partition('. ')[0]}); {instead}"
        ) from error
    if not model.trainable:
        made.trainable = False
    for old, new in zip(model.layers, made.layers, strict=True):
        if old.name not in others:
            take_state(new, old)
    return made
