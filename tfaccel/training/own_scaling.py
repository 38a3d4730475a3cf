"""Whether a model and a loader agree on who scales the pixels: one of them, once.

Takes a model; gives the layer that scales, at any depth, or the one that takes pixels as they come.

    layer = own_scaling(model)              # EfficientNetB0's Rescaling(1/255)
    misfit(model, loader.pixel_range)       # scaled twice: a sentence, or "" where they fit
    unscaled(model, loader.pixel_range)     # not at all, or not as its weights want: likewise
"""

import math
from collections.abc import Iterator

import keras
import numpy as np

from tfaccel.common.tables import in_figures
from tfaccel.keras_internals.layers import layers_of
from tfaccel.training.keras_pixels import Pixels, trained_on

SMALL = 0.02  # 1/255, 1/127.5 and 1/128 are below; a layer that scales 0..1 is not
FEW = 3.0  # a loader whose pixels are all within this gives 0..1, -1..1, or about deviation 1
MANY = 50.0  # one that gives nothing below 0 and more than this gives 0..255

# What pixels go through before the first layer with weights, and come out as large as before.
PASSES = (
    keras.layers.InputLayer,
    keras.layers.Identity,
    keras.layers.ZeroPadding2D,
    keras.layers.Cropping2D,
    keras.layers.Resizing,
    keras.layers.CenterCrop,
    keras.layers.RandomCrop,
    keras.layers.RandomFlip,
    keras.layers.RandomRotation,
    keras.layers.RandomTranslation,
    keras.layers.RandomZoom,
    keras.layers.RandomContrast,
    keras.layers.RandomBrightness,
    keras.layers.Flatten,
    keras.layers.Reshape,
    keras.layers.MaxPooling2D,
    keras.layers.AveragePooling2D,
    keras.layers.Dropout,
)
WEIGHS = (
    keras.layers.Dense,
    keras.layers.Conv2D,
    keras.layers.SeparableConv2D,
    keras.layers.DepthwiseConv2D,
)
STARTS_AT_ZERO = ("bias", "beta", "moving_mean")


def own_scaling(model: keras.Model) -> keras.layers.Layer | None:
    """Returns the layer that brings 0..255 to small numbers: Rescaling, or a Normalization.

    None too where something comes before it that may make 0..255 of small numbers, as
    Rescaling(255) before EfficientNetB0, or a layer that Keras does not know.
    """
    gain = 1.0  # of what comes before
    has_order = isinstance(model, keras.Sequential) or hasattr(model, "operations")
    for layer in _in_order(model):
        if isinstance(layer, keras.layers.Rescaling):
            scale, mean = np.abs(np.asarray(layer.scale, np.float64)), 0.0
        elif isinstance(layer, keras.layers.Normalization) and layer.variance is not None:
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
        steps = model.operations  # from the input on
    for each in steps:
        if isinstance(each, keras.Model):
            yield from _in_order(each)
        else:
            yield each
            if isinstance(each, keras.layers.Layer):
                yield from layers_of(each, include_self=False)


def _may_enlarge(step: keras.Operation) -> bool:
    """Whether nobody can tell what it makes of numbers: `x * 255`, a Lambda, somebody's layer."""
    if isinstance(step, keras.layers.Lambda) or type(step).__name__ == "Multiply":
        return True
    return isinstance(step, keras.layers.Layer) and not type(step).__module__.startswith("keras.")


def misfit(model: keras.Model, pixel_range: tuple[float, float] | None) -> str:
    """Returns what is wrong with pixels that a model would scale once more, or ""."""
    layer = own_scaling(model) if pixel_range and max(map(abs, pixel_range)) <= FEW else None
    if layer is None:
        return ""
    return (
        f"model {model.name} scales pixels by itself (layer {layer.name}), so it expects 0 to 255, "
        f"but the loader gives {_range(pixel_range)}: they would be "
        f"scaled twice; give the loader mean=0 and std={1 / 255:.16g}, or leave the layer out"
    )


def unscaled(model: keras.Model, pixel_range: tuple[float, float] | None) -> str:
    """Returns what is wrong with a loader's pixels for a model that does not scale; or ""."""
    if pixel_range is None:
        return ""
    if name := of_other_pixels(model, pixel_range):
        pixels = trained_on(name)
        order = ", the colours in the order blue, green, red" if pixels.order == "bgr" else ""
        return (
            f"{name} has trained weights; Keras's own were trained on pixels of "
            f"{_range(pixels.range)}{order}, but the loader gives {_range(pixel_range)}; if they "
            f"are Keras's, give the loader {pixels.settings}"
        )
    if layer := of_raw_pixels(model, pixel_range):
        return (
            f"the loader gives pixels of {_range(pixel_range)}, and model {model.name} does not "
            f"scale them before layer {layer}, which begins with weights for numbers of about "
            "1; leave out the loader's std, so that it gives 0 to 1"
        )
    return ""


def _range(ends: tuple[float, float]) -> str:
    return " to ".join(in_figures(each, 4) for each in ends)


def of_raw_pixels(model: keras.Model, pixel_range: tuple[float, float]) -> str | None:
    """Returns the name of the layer with weights that takes 0..255 as they come; None for none."""
    least, most = pixel_range
    layer = _first(model) if least >= 0 and most > MANY else None
    if isinstance(layer, keras.Model):  # one of keras.applications, whose first layers are known
        layer = _first(layer, inner=True)
    return layer.name if isinstance(layer, WEIGHS) else None


def of_other_pixels(model: keras.Model, pixel_range: tuple[float, float]) -> str | None:
    """Returns the name of a network of keras.applications with trained weights for other pixels.

    It counts as trained where something is not 0 that begins at 0.
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


def _known(layer: keras.layers.Layer | None) -> Pixels | None:
    return trained_on(layer.name) if isinstance(layer, keras.Model) else None


def _first(model: keras.Model, *, inner: bool = False) -> keras.layers.Layer | None:
    """Returns the first layer that changes pixels' size, or the known network that takes them.

    Args:
      model: of one input.
      inner: whether to look into the model though it is a known network.

    Returns:
      None where the order is not known, as in a subclassed model, or something else comes first.
    """
    if _known(model) is not None and not inner:
        return model
    is_sequential = isinstance(model, keras.Sequential)
    if not is_sequential and not (hasattr(model, "operations") and len(model.inputs) == 1):
        return None
    for each in model.layers if is_sequential else model.operations:  # from the input on
        if isinstance(each, keras.Model):
            return _first(each)
        if not isinstance(each, PASSES):
            return each if isinstance(each, keras.layers.Layer) else None
    return None


def _is_trained(network: keras.Model) -> bool:
    return any(
        keras.ops.convert_to_numpy(each).any()
        for each in network.weights
        if each.name in STARTS_AT_ZERO
    )
