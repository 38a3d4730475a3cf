"""Freezes layers of a model by name, so that training leaves their weights as they are.

    freeze(model, ("backbone",))            # all layers but the head
    freeze(model, ("conv1_*", "conv2_*"))   # "*" stands for any letters

The head is the last layer with weights; in a network for masks, the whole decoder, too.
A frozen batch normalization uses its moving statistics, also in training.
"""

import fnmatch
import math
from collections.abc import Sequence

import keras

from tfaccel.common.errors import UserError, did_you_mean
from tfaccel.common.run_log import summary
from tfaccel.config.segmentation import is_of_decoder
from tfaccel.keras_internals.layers import layers_of

BACKBONE = "backbone"


def backbone_of(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns all layers with weights but the last one and a decoder's, at the top of the model."""
    body = [each for each in model.layers if each.weights][:-1]
    return [each for each in body if not is_of_decoder(each.name)]


def freeze(model: keras.Model, names: Sequence[str]) -> None:
    """Makes layers untrainable.

    Args:
      model: a built model, not compiled yet.
      names: names of layers, also of layers in inner models; BACKBONE for those
        of `backbone_of`.

    Raises:
      UserError: no layer has one of the names, or no weight would be left to train.
    """
    for each in frozen_by(model, names):
        each.trainable = False
    trained, whole = (_num_values(each) for each in (model.trainable_weights, model.weights))
    if not trained:
        raise UserError(
            f"model.freeze={','.join(names)} leaves no weight of {model.name} to train; freeze "
            "fewer layers"
        )
    summary("model: %s of %s parameters are frozen", f"{whole - trained:,}", f"{whole:,}")


def frozen_by(model: keras.Model, names: Sequence[str]) -> list[keras.layers.Layer]:
    """Returns the layers that `freeze` makes untrainable by these names.

    Raises:
      UserError: no layer has one of the names.
    """
    layers = [each for each in layers_of(model, include_self=False) if each.weights]
    chosen = []
    for name in names:
        found = [each for each in layers if fnmatch.fnmatchcase(each.name, name)]
        if not found and name == BACKBONE:
            found = backbone_of(model)
        if not found:
            raise UserError(
                f"model.freeze: {model.name} has no layer {name!r} with weights"
                f"{did_you_mean(name, [each.name for each in layers])}"
            )
        chosen += found
    return chosen


def _num_values(weights: Sequence[keras.Variable]) -> int:
    return sum(math.prod(each.shape) for each in weights)
