"""Checks that either the model or the loader scales the pixels, but not both.

Takes a model; gives the layer that scales pixels, at any depth, or the first layer with weights if
none scales them.

    layer = own_scaling(model)              # EfficientNetB0's Rescaling(1/255)
    misfit(model, loader.pixel_range)       # a message if pixels would be scaled twice, else ""
    unscaled(model, loader.pixel_range)     # a message if they are not scaled, or wrongly, else ""
"""

import math
from collections.abc import Iterator

import keras
import numpy as np
from keras import layers

from tfaccel.common.tables import in_figures
from tfaccel.config.keras_pixels import Pixels, trained_on
from tfaccel.keras_internals.layers import layers_of

SMALL = 0.02  # a scale below this is one for 0..255: 1/255, 1/127.5 or 1/128
FEW = 3.0  # pixels within -FEW..FEW are scaled: 0..1, -1..1, or to a deviation of about 1
MANY = 50.0  # pixels from 0 to more than this are 0..255, so they are not scaled

# Layers before the first layer with weights that do not scale the pixels.
PASSES = (layers.InputLayer, layers.Identity, layers.Flatten, layers.Reshape, layers.Dropout)
PASSES += (layers.Permute, layers.ZeroPadding1D)
PASSES += (layers.ZeroPadding2D, layers.Cropping2D, layers.Resizing, layers.CenterCrop)
PASSES += (layers.MaxPooling2D, layers.AveragePooling2D, layers.RandomCrop, layers.RandomFlip)
PASSES += (layers.RandomRotation, layers.RandomTranslation, layers.RandomZoom)
PASSES += (layers.RandomContrast, layers.RandomBrightness)
WEIGHS = (layers.Dense, layers.Conv2D, layers.SeparableConv2D, layers.DepthwiseConv2D)
WEIGHS += (layers.EinsumDense,)
STARTS_AT_ZERO = ("bias", "beta", "moving_mean")


def own_scaling(model: keras.Model) -> layers.Layer | None:
    """Returns the layer that scales 0..255 to small numbers: a Rescaling or a Normalization.

    Returns None if there is no such layer, or if layers before it may turn small numbers into
    0..255, such as Rescaling(255) before EfficientNetB0, or a layer that is not Keras's.
    """
    gain = 1.0  # of the layers before
    has_order = isinstance(model, keras.Sequential) or hasattr(model, "operations")
    for layer in _in_order(model):
        if isinstance(layer, layers.Rescaling):
            scale, mean = np.abs(np.asarray(layer.scale, np.float64)), 0.0
        elif isinstance(layer, layers.Normalization) and layer.variance is not None:
            variance = keras.ops.convert_to_numpy(layer.variance).astype(np.float64)
            scale = 1 / np.sqrt(np.maximum(variance, 1e-12))
            mean = np.abs(keras.ops.convert_to_numpy(layer.mean)).max()
        elif has_order and _may_enlarge(layer):
            return None
        else:
            continue
        if scale.max() * gain < SMALL or mean > FEW * gain:
            return layer
        gain *= max(1.0, scale.max())
    return None


def _in_order(model: keras.Model) -> Iterator[keras.Operation]:
    """Yields layers at every depth, and operations between a functional model's layers."""
    if isinstance(model, keras.Sequential) or not hasattr(model, "operations"):
        steps = model.layers
    else:
        steps = model.operations  # in order from the input
    for each in steps:
        if isinstance(each, keras.Model):
            yield from _in_order(each)
        else:
            yield each
            if isinstance(each, layers.Layer):
                yield from layers_of(each, include_self=False)


def _may_enlarge(step: keras.Operation) -> bool:
    """Returns whether an operation may enlarge numbers: `x * 255`, a Lambda, a user's layer."""
    if isinstance(step, layers.Lambda) or type(step).__name__ == "Multiply":
        return True
    return isinstance(step, layers.Layer) and not type(step).__module__.startswith("keras.")


def misfit(model: keras.Model, pixel_range: tuple[float, float] | None) -> str:
    """Returns a message if the model scales pixels that are scaled already, else ""."""
    layer = own_scaling(model) if pixel_range and max(map(abs, pixel_range)) <= FEW else None
    if layer is None:
        return ""
    return (
        f"model {model.name} scales its pixels itself (layer {layer.name}), so it expects 0 to "
        f"255, but the loader gives {_range(pixel_range)}: pixels would be scaled twice; give the "
        f"loader mean=0 and std={1 / 255:.16g}, or remove the layer"
    )


def unscaled(model: keras.Model, pixel_range: tuple[float, float] | None) -> str:
    """Returns a message if pixels are not as a model without scaling expects them, else ""."""
    if pixel_range is None:
        return ""
    if name := of_other_pixels(model, pixel_range):
        pixels = trained_on(name)
        order = ", with the colours in the order blue, green, red" if pixels.order == "bgr" else ""
        return (
            f"{name} has trained weights; Keras's weights were trained on pixels of "
            f"{_range(pixels.range)}{order}, but the loader gives {_range(pixel_range)}; if these "
            f"weights are Keras's, give the loader {pixels.settings}"
        )
    if layer := of_raw_pixels(model, pixel_range):
        return (
            f"the loader gives pixels of {_range(pixel_range)}, and model {model.name} does not "
            f"scale them before layer {layer}, which starts with weights for numbers of about 1; "
            "remove the loader's std, so that it gives 0 to 1"
        )
    return ""


def _range(ends: tuple[float, float]) -> str:
    return " to ".join(in_figures(each, 4) for each in ends)


def of_raw_pixels(model: keras.Model, pixel_range: tuple[float, float]) -> str | None:
    """Returns the name of the first layer with weights if it gets pixels of 0..255, else None."""
    least, most = pixel_range
    layer = _first(model) if least >= 0 and most > MANY else None
    if isinstance(layer, keras.Model):  # a network of keras.applications
        layer = _first(layer, inner=True)
    return layer.name if isinstance(layer, WEIGHS) else None


def of_other_pixels(model: keras.Model, pixel_range: tuple[float, float]) -> str | None:
    """Returns the name of a trained network of keras.applications that expects other pixels.

    A network counts as trained if a variable that is 0 before training is not 0. Returns None if
    there is no such network.
    """
    network = _first(model)
    pixels = _known(network)
    if pixels is None or _is_close(pixels.range, pixel_range) or own_scaling(network):
        return None
    return network.name if _is_trained(network) else None


def _is_close(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return all(
        math.isclose(mine, theirs, rel_tol=0.02, abs_tol=0.02)
        for mine, theirs in zip(one, other, strict=True)
    )


def _known(layer: layers.Layer | None) -> Pixels | None:
    return trained_on(layer.name) if isinstance(layer, keras.Model) else None


def _first(model: keras.Model, *, inner: bool = False) -> layers.Layer | None:
    """Returns the first layer that is not in PASSES, or the known network that gets the pixels.

    Returns None if the order of layers is not known, as in a subclassed model, or if an operation
    that is not a layer comes first. With `inner`, it searches inside a known network.
    """
    if _known(model) is not None and not inner:
        return model
    is_sequential = isinstance(model, keras.Sequential)
    if not is_sequential and not (hasattr(model, "operations") and len(model.inputs) == 1):
        return None
    for each in model.layers if is_sequential else model.operations:  # in order from the input
        if isinstance(each, keras.Model):
            return _first(each)
        if not isinstance(each, PASSES):
            return each if isinstance(each, layers.Layer) else None
    return None


def _is_trained(network: keras.Model) -> bool:
    return any(
        keras.ops.convert_to_numpy(each).any()
        for each in network.weights
        if each.name in STARTS_AT_ZERO
    )
