"""Any architecture of `keras.applications`, with untrained weights and a float32 head."""

import inspect
from collections.abc import Callable

import keras

from tfaccel.errors import UserError


def constructors() -> dict[str, Callable]:
    """Returns every architecture's constructor by its name in lower case."""
    return {
        name.lower(): value
        for name, value in vars(keras.applications).items()
        if inspect.isfunction(value)
    }


def build(
    constructor: Callable, *, image_shape: tuple[int, int, int], num_classes: int
) -> keras.Model:
    """Returns the architecture's body, averaged over space, and a dense layer.

    Input: [batch, height, width, channels] float, 0..1. Output: [batch, num_classes] float32
    logits. Weights are random: pretrained ones would be a download.

    Raises:
      UserError: the architecture does not take images of this shape.
    """
    arguments = {
        "include_top": False,
        "weights": None,
        "pooling": "avg",
        "input_shape": image_shape,
    }
    # Some bring a first layer that expects 0..255.
    if "include_preprocessing" in inspect.signature(constructor).parameters:
        arguments["include_preprocessing"] = False
    try:
        body = constructor(**arguments)
    except ValueError as error:
        height, width, channels = image_shape
        raise UserError(
            f"{constructor.__name__} does not take images of {height}x{width} with {channels} "
            f"channel(s) ({error}); change image_size, channels or the model"
        ) from error
    logits = keras.layers.Dense(num_classes, dtype="float32", name="logits")(body.output)
    return keras.Model(body.input, logits, name=body.name)
