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
    arguments = {
        "include_top": False,
        "weights": None,
        "pooling": "avg",
        "input_shape": image_shape,
    }
    # Some architectures have a first layer that expects 0..255.
    if "include_preprocessing" in inspect.signature(constructor).parameters:
        arguments["include_preprocessing"] = False
    body = constructor(**arguments)
    logits = keras.layers.Dense(num_outputs, dtype="float32", name="logits")(body.output)
    return keras.Model(body.input, logits, name=body.name)
