"""Architectures by name: tfaccel's own, one per file, and all of `keras.applications`.

"unet_" or "deeplab_" before the name of one that halves images makes a network for masks of it.

model = build("resnet50", image_shape=(224, 224, 3), num_outputs=1000)    # in run.scope()
"""

import functools
import math
from collections.abc import Callable

import keras

from tfaccel.common.errors import UserError
from tfaccel.config import VitConfig
from tfaccel.config.names import check_among
from tfaccel.config.segmentation import DECODERS
from tfaccel.config.vit import VITS, check_vit, is_vit
from tfaccel.experiment.models import (
    applications,
    cifar_resnet,
    mnist_cnn,
    resnet_v1_5,
    restoration_cnn,
    segmentation,
    vit,
)
from tfaccel.experiment.models.weights import own_weights
from tfaccel.keras_internals.layers import layers_of

OWN = {
    "cifar_resnet": cifar_resnet.build,
    "mnist_cnn": mnist_cnn.build,
    "restoration_cnn": restoration_cnn.build,
    **{name: functools.partial(resnet_v1_5.build, name) for name in resnet_v1_5.BLOCKS},
    **{name: functools.partial(vit.build, name) for name in VITS},
}

MOST = 0.5  # the share of a model's parameters from which one layer is worth mention


def described(model: keras.Model) -> str:
    """Returns a built model's name, its number of parameters, and the layer with most of them."""
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


def build(
    name: str,
    *,
    image_shape: tuple[int, int, int],
    num_outputs: int,
    vit: VitConfig | None = None,
) -> keras.Model:
    """Returns the model of that name, with random weights; pretrained ones would need a download.

    Args:
      name: one of OWN, an architecture of `keras.applications`, or "unet_" or "deeplab_" before one
        of these or of ResNet v1.5; upper case is allowed.
      image_shape: (height, width, channels).
      num_outputs: the number of classes; for "restoration_cnn", of values per pixel.
      vit: the settings of a Vision Transformer; None takes their defaults. Other models have none.

    Returns:
      A model. Its input is [batch, height, width, channels] float, normalized as the loader does.
      Its output is float32 with any policy: [batch, num_outputs] logits; for "restoration_cnn"
      and networks for masks, [batch, height, width, num_outputs].

    Raises:
      UserError: there is no such architecture, it does not take images of this shape, or `vit`
        does not suit it.
    """
    build_named = find(name)
    settings = {}
    if is_vit(name):
        settings["vit"] = vit = vit or VitConfig()
        check_vit(name, vit, image_size=image_shape[:2])
    try:
        return build_named(image_shape=image_shape, num_outputs=num_outputs, **settings)
    except ValueError as error:
        height, width, channels = image_shape
        raise UserError(
            f"{name} does not take images of {height}x{width} with {channels} channel(s): {error}; "
            "change image_size, channels or the model"
        ) from error


def find(name: str) -> Callable[..., keras.Model]:
    """Returns the function that builds the model of that name, in upper or lower case.

    Raises:
      UserError: there is no such architecture.
    """
    known = {**OWN, **applications.architectures(), **_segmentation()}
    check_among("model", name, known)
    return known[name.lower()]


def _segmentation() -> dict[str, Callable[..., keras.Model]]:
    """Returns what builds each network for masks, by name."""
    bodies = applications.bodies()
    bodies |= {name: functools.partial(resnet_v1_5.body, name) for name in resnet_v1_5.BLOCKS}
    return {
        f"{decoder}_{name}": functools.partial(segmentation.build, decoder, body)
        for decoder in DECODERS
        for name, body in bodies.items()
    }
