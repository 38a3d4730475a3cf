"""Gives the last stage of a backbone twice the resolution, with the same weights (atrous).

Takes a functional body of an output stride of 32; gives a copy of it whose output stride is 16.

    body = dilated(body)        # raises DilationError, with the reason, where it would not be right

The layers that halve the last time get a stride of 1, and convolutions behind them take every
second pixel (Chen et al. 2018, arXiv:1802.02611, section 3.1). It is right if every second pixel of
the copy's output equals the original's output. So all layers that halve must keep the same pixels,
the even or the odd ones. Only averages over the whole image (squeeze and excitation) then differ:
they are taken over four times as many pixels.
"""

import keras
from keras import layers

from tfaccel.experiment.models.feature_maps import inputs_of

CONVOLUTIONS = (layers.Conv2D, layers.DepthwiseConv2D)
POOLINGS = (layers.MaxPooling2D, layers.AveragePooling2D)
AVERAGES = (layers.GlobalAveragePooling2D, layers.Reshape)  # they give 1 x 1 of any resolution
# What computes each pixel by itself, or the mean of all. By name, for these may be operations, too.
POINTWISE = {
    *("BatchNormalization", "LayerNormalization", "Activation", "ReLU", "Dropout", "Add"),
    *("Multiply", "Concatenate", "GlobalAveragePooling2D", "Reshape", "Rescaling"),
}


class DilationError(Exception):
    """The body cannot be dilated rightly; the message says why."""


def dilated(body: keras.Model) -> keras.Model:
    """Returns a copy of the body with random weights and twice the output's resolution.

    Args:
      body: a functional model of an output [batch, height, width, channels]; the sides before the
        last halving must be even.

    Returns:
      A model with the same names and shapes of weights, and an output [batch, 2 height, 2 width,
      channels].

    Raises:
      DilationError: a layer halves in a way that cannot be undone, or the last stage has a layer
        that cannot be dilated.
    """
    changes = _changes(body)

    def remade(layer):
        return type(layer).from_config(layer.get_config() | changes.get(layer.name, {}))

    copy = keras.models.clone_model(body, clone_function=remade)
    height, width = body.output.shape[1:3]
    if copy.output.shape[1:3] != (2 * height, 2 * width):
        raise DilationError(f"its last stage would give {copy.output.shape[1:3]} pixels")
    return copy


def _changes(body: keras.Model) -> dict[str, dict]:
    """Returns the new settings of layers by name."""
    maker = {id(each.output): each for each in body.operations}
    small = body.output.shape[1:3]
    large = tuple(2 * side for side in small)
    behind, phases, changes = set(), set(), {}  # ids of tensors behind the last halving
    for step in body.operations:
        given = inputs_of(step)
        if any(id(each) in behind for each in given):
            changes |= _spread(step)
        elif not given or _size(step.output) != small or isinstance(step, AVERAGES):
            continue
        else:
            pad = maker[id(given[0])]
            pad = pad if isinstance(pad, layers.ZeroPadding2D) else None
            before = inputs_of(pad)[0] if pad else given[0]
            if _size(before) != large:
                continue
            phase, change = _unstrided(step, pad)
            phases.add(phase)
            changes |= change
        behind.add(id(step.output))
    if len(phases) != 1:
        raise DilationError("the layers that halve last keep different pixels")
    return changes


def _size(tensor: keras.KerasTensor) -> tuple:
    return tuple(tensor.shape[1:3]) if len(tensor.shape) == 4 else ()


def _unstrided(step: keras.Operation, pad: layers.ZeroPadding2D | None) -> tuple[int, dict]:
    """Returns which pixels a halving layer keeps (0: the even, 1: the odd), and its new settings.

    Its window is then centered on each pixel. Before, it was centered on the pixels that it kept.
    """
    if isinstance(step, POOLINGS) and pad is None:
        size = step.pool_size[0]
        if size == 1 or (size == 2 and step.padding == "valid"):
            return 0, {step.name: {"strides": 1, "padding": "same"}}
        if size % 2 and step.padding == "same":
            return 1, {step.name: {"strides": 1}}
    elif isinstance(step, CONVOLUTIONS) and (size := step.kernel_size[0]) % 2:
        half = size // 2
        if pad is None and (size == 1 or step.padding == "same"):
            # Of an even number of pixels, "same" pads one less before than behind.
            return int(size > 1), {step.name: {"strides": 1, "padding": "same"}}
        if pad is not None and step.padding == "valid":
            before = {each[0] for each in pad.padding}
            centered = {pad.name: {"padding": half}, step.name: {"strides": 1}}
            if before == {half}:
                return 0, centered
            if before == {half - 1}:
                return 1, centered
    raise DilationError(f"{step.name} ({type(step).__name__}) halves in another way")


def _spread(step: keras.Operation) -> dict[str, dict]:
    """Returns the new settings of a layer behind the last halving: it takes every second pixel."""
    if isinstance(step, layers.ZeroPadding2D):
        return {step.name: {"padding": [[2 * side for side in each] for each in step.padding]}}
    if isinstance(step, CONVOLUTIONS) and set(step.strides) == {1}:
        return {step.name: {"dilation_rate": 2}} if max(step.kernel_size) > 1 else {}
    if type(step).__name__ in POINTWISE:
        return {}
    raise DilationError(f"{step.name} ({type(step).__name__}) is of a kind without dilation")
