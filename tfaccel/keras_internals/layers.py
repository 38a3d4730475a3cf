"""What the layers of Keras hold, at any depth."""

import keras


def layers_of(layer: keras.layers.Layer, *, include_self: bool = True) -> list:
    """Returns a layer or model and the layers in it, at every depth, each once."""
    return list(layer._flatten_layers(include_self=include_self))


def layers_held(layer: keras.layers.Layer) -> list:
    """Returns the layers that are attributes of this one, without the layers in them."""
    return list(layer._flatten_layers(include_self=False, recursive=False))


def kernel_of(layer: keras.layers.Layer) -> keras.Variable | None:
    """Returns the matrix or filter that a layer multiplies its inputs with; None if it has none."""
    # The public `kernel` of a Dense has the product of LoRA's two matrices added.
    for name in ("pointwise_kernel", "_kernel", "kernel"):
        if (kernel := getattr(layer, name, None)) is not None:
            return kernel
    return None


def shapes_built_for(layer: keras.layers.Layer) -> list:
    """Returns the shapes of inputs that `build` was called with; none if Keras kept none."""
    return list((getattr(layer, "_build_shapes_dict", None) or {}).values())


def forget_losses(model: keras.Model) -> None:
    """Drops the losses that layers added in a call, which may be tensors of a finished trace."""
    model._clear_losses()
