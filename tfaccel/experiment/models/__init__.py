"""Architectures by name: the toolkit's own, one per file, and all of `keras.applications`.

model = build("resnet50", image_shape=(224, 224, 3), num_outputs=1000)    # in run.scope()
"""

import math
from collections.abc import Callable

import keras

from tfaccel.common.errors import UserError
from tfaccel.config.names import check_among
from tfaccel.experiment.models import applications, cifar_resnet, mnist_cnn, restoration_cnn
from tfaccel.experiment.models.weights import own_weights
from tfaccel.keras_internals.layers import layers_of

OWN = {
    "cifar_resnet": cifar_resnet.build,
    "mnist_cnn": mnist_cnn.build,
    "restoration_cnn": restoration_cnn.build,
}

MOST = 0.5  # of a model's parameters, in one layer


def described(model: keras.Model) -> str:
    """Returns a model's name, its number of parameters, and the layer that holds most, if one does.

    Args:
      model: built.
    """
    total = model.count_params()
    counts = {
        each.name: sum(math.prod(weight.shape) for weight in own_weights(each))
        for each in layers_of(model)
    }
    name = max(counts, key=counts.get)
    text = f"{model.name}, {total:,} parameters"
    if len(counts) < 3 or counts[name] <= MOST * total:
        return text
    return f"{text}, {counts[name] / total:.0%} of them in layer {name}"


def build(name: str, *, image_shape: tuple[int, int, int], num_outputs: int) -> keras.Model:
    """Returns the model of that name, with random weights: pretrained ones would be a download.

    Args:
      name: one of OWN, or an architecture of `keras.applications`; in any case.
      image_shape: (height, width, channels).
      num_outputs: classes; of "restoration_cnn", values per pixel.

    Returns:
      Input: [batch, height, width, channels] float, normalised as the loader does. Output, float32
      whatever the policy: [batch, num_outputs] logits; of "restoration_cnn",
      [batch, height, width, num_outputs].

    Raises:
      UserError: no such architecture, or it does not take images of this shape.
    """
    build_named = find(name)
    try:
        return build_named(image_shape=image_shape, num_outputs=num_outputs)
    except ValueError as error:
        height, width, channels = image_shape
        raise UserError(
            f"{name} does not take images of {height}x{width} with {channels} channel(s): {error}; "
            "change image_size, channels or the model"
        ) from error


def find(name: str) -> Callable[..., keras.Model]:
    """Returns what builds the model of that name, in any case.

    Raises:
      UserError: no such architecture.
    """
    known = {**OWN, **applications.architectures()}
    check_among("model", name, known)
    return known[name.lower()]
