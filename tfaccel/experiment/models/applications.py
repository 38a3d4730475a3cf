"""Any architecture of `keras.applications`, with untrained weights and a float32 head."""

import functools
import inspect
from collections.abc import Callable

import keras


def architectures() -> dict[str, Callable]:
    """Returns each architecture's `build(image_shape=..., num_outputs=...)`, by lower-case name."""
    return {
        name.lower(): functools.partial(_build, constructor)
        for name, constructor in vars(keras.applications).items()
        if inspect.isfunction(constructor)
    }


def _build(
    constructor: Callable, *, image_shape: tuple[int, int, int], num_outputs: int
) -> keras.Model:
    """Returns the architecture's body with average pooling and a dense layer to logits.

    Raises:
      ValueError: Keras's own, if the architecture does not take images of this shape.
    """
    body = _body(constructor, image_shape=image_shape, pooling="avg")
    logits = keras.layers.Dense(num_outputs, dtype="float32", name="logits")(body.output)
    return keras.Model(body.input, logits, name=body.name)


def bodies() -> dict[str, Callable]:
    """Returns `body(image, image_shape=...)` of each architecture, by lower-case name.

    It gives the model from the source of the tensor `image` to the last feature map.
    """
    return {
        name: functools.partial(_body_on, each.args[0]) for name, each in architectures().items()
    }


def _body_on(
    constructor: Callable, image: keras.KerasTensor, *, image_shape: tuple[int, int, int]
) -> keras.Model:
    return _body(constructor, image_shape=image_shape, input_tensor=image)


def _body(constructor: Callable, *, image_shape: tuple[int, int, int], **others) -> keras.Model:
    """Returns the architecture without its classifier, untrained and without scaling of pixels."""
    arguments = {"include_top": False, "weights": None, "input_shape": image_shape, **others}
    # Some architectures have a first layer that expects 0..255.
    if "include_preprocessing" in inspect.signature(constructor).parameters:
        arguments["include_preprocessing"] = False
    return constructor(**arguments)
