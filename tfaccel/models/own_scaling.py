"""Whether a model scales pixels by itself, so that it expects 0..255 of whoever feeds it.

Takes a model; gives the layer that does it, at any depth, or None.

    layer = own_scaling(model)              # EfficientNetB0's Rescaling(1/255)
    misfit(model, loader.pixel_range)       # a sentence, or "" where they fit

Private name relied on: Model._flatten_layers, of Keras 3.15.
"""

import keras
import numpy as np

from tfaccel.table_text import in_figures

SMALL = 0.02  # 1/255, 1/127.5 and 1/128 are below; a layer that scales 0..1 is not
FEW = 3.0  # a loader whose pixels are all within this gives 0..1, -1..1, or about deviation 1


def own_scaling(model: keras.Model) -> keras.layers.Layer | None:
    """Returns the layer that brings 0..255 to small numbers: Rescaling, or a Normalization."""
    for layer in model._flatten_layers(include_self=False):
        if isinstance(layer, keras.layers.Rescaling):
            scale = np.abs(np.asarray(layer.scale, np.float64))
        elif isinstance(layer, keras.layers.Normalization) and layer.variance is not None:
            variance = keras.ops.convert_to_numpy(layer.variance).astype(np.float64)
            scale = 1 / np.sqrt(np.maximum(variance, 1e-12))
        else:
            continue
        if scale.max() < SMALL:
            return layer
    return None


def misfit(model: keras.Model, pixel_range: tuple[float, float] | None) -> str:
    """Returns what is wrong with a loader's pixels for this model, in a sentence; or ""."""
    layer = own_scaling(model) if pixel_range and max(map(abs, pixel_range)) <= FEW else None
    if layer is None:
        return ""
    least, most = pixel_range
    return (
        f"model {model.name} scales pixels by itself (layer {layer.name}), so it expects 0 to 255, "
        f"but the loader gives {in_figures(least, 4)} to {in_figures(most, 4)}: they would be "
        f"scaled twice; give the loader mean=0 and std={1 / 255:.16g}, or leave the layer out"
    )
