"""Rules about sizes that leave tiles of Tensor Cores empty. Each takes Facts and yields findings.

findings = [*widths(facts), *input_features(facts)]

Tensor Cores multiply tiles. NVIDIA recommends sizes that are multiples of 16 bytes, which is 8 in
float16 and 16 in int8, and on A100 multiples of 128 bytes ("Matrix Multiplication Background User's
Guide", docs.nvidia.com/deeplearning/performance; developer.nvidia.com/blog/optimizing-gpu-
performance-tensor-cores). With other sizes, part of the last tile is padding, and unaligned loads
are slower. Libraries before cuBLAS 11 and cuDNN 7.6.3 did not use Tensor Cores for them at all.
The gain in these findings is arithmetic: the share of the model's tiles that is padding because of
the size. The gain is larger if a kernel is also slower; `--fix` measures it for a head.
"""

from collections.abc import Iterator

from tfaccel.common.tables import counted
from tfaccel.diagnostics.lint.facts import OUTSIDE, Facts, Layer, Model
from tfaccel.diagnostics.lint.findings import Finding
from tfaccel.diagnostics.lint.products import (
    MUCH,
    can_pad,
    firsts,
    heads,
    multiple_of,
    padded,
    padding,
    share,
)
from tfaccel.diagnostics.lint.words import layer_names, padding_count, percent, tile_share

TINY, FEW = 0.001, 3  # FEW sizes or more that each cost less than TINY become one finding
FEW_CHANNELS = 4  # images with up to so many channels have their own kernels in cuDNN


def widths(facts: Facts) -> Iterator[Finding]:
    """Yields units and filters that are not a multiple of 8 (16 in int8), once for each size."""
    model = facts.model
    found: dict[tuple[int, int], list[Layer]] = {}
    for layer in model.layers:
        size, multiple = layer.features_out, multiple_of(layer)
        if size and size % multiple:
            found.setdefault((size, multiple), []).append(layer)
    lost = {
        (size, multiple): padding(model, [*each, *_takers(model, each, size)], size, multiple)
        for (size, multiple), each in found.items()
    }
    small = [each for each in found if lost[each] < TINY and not _is_head(model, found[each])]
    if len(small) >= FEW:
        yield _many(model, small, [each for key in small for each in found[key]])
    for size, multiple in found:
        if (size, multiple) not in small or len(small) < FEW:
            layers = found[size, multiple]
            yield _width(model, layers, size, multiple, lost[size, multiple])


def _width(model: Model, layers: list[Layer], size: int, multiple: int, lost: float) -> Finding:
    whole, head = padded(size, multiple), _is_head(model, layers)
    unit = "filter" if "Conv" in layers[0].kind else "output" if head else "unit"
    have = "the layer has" if len(layers) == 1 else "these layers have"
    can_change = not head or can_pad(layers[0])
    return Finding(
        "warning" if lost >= MUCH and can_change else "note",
        layer_names(layers),
        f"{counted(size, unit)}, not a multiple of {multiple}",
        f"Tensor Cores multiply tiles of {multiple}: "
        f"{padding_count(whole, whole - size, 'column')}",
        f"{tile_share(lost)}: {have} {percent(share(model, layers))} of its multiplications",
        _head_fix(layers[0], whole) if head else f"use {_nearest(size, multiple)} {unit}s",
    )


def _many(model: Model, sizes: list[tuple[int, int]], layers: list[Layer]) -> Finding:
    """Returns one finding for several sizes that cost almost nothing."""
    return Finding(
        "note",
        layer_names(layers),
        f"{', '.join(str(size) for size, _ in sizes)} units or filters, not multiples of "
        f"{sizes[0][1]}",
        "part of the last tile of each of these products is padding",
        f"next to nothing: these layers have {percent(share(model, layers))} of the model's "
        "multiplications",
        "leave them as they are",
    )


def _is_head(model: Model, layers: list[Layer]) -> bool:
    return set(layers) <= set(heads(model))


def _takers(model: Model, layers: list[Layer], size: int) -> list[Layer]:
    """Returns the products that take the outputs of these layers directly."""
    indices = {each for layer in layers for each in layer.feeds if each != OUTSIDE}
    return [model.layers[each] for each in indices if model.layers[each].features_in == size]


def _head_fix(layer: Layer, whole: int) -> str:
    if can_pad(layer):
        return f"use --fix or .fix(), which pads it to {whole}, cuts the padding off, and measures"
    return "leave it as it is: the task determines the number of outputs"


def _nearest(size: int, multiple: int) -> str:
    below, above = size // multiple * multiple, padded(size, multiple)
    return f"{below} or {above}" if below else f"{above}"


def input_features(facts: Facts) -> Iterator[Finding]:
    """Yields the number of the data's features if the first product takes them unchanged."""
    for layer, size in _first_sizes(facts):
        multiple = multiple_of(layer)
        if size % multiple == 0 or _is_image(layer, size):
            continue
        whole = padded(size, multiple)
        lost = padding(facts.model, [layer], size, multiple)
        yield Finding(
            "warning" if lost >= MUCH else "note",
            "data",
            f"{counted(size, 'feature')}, not a multiple of {multiple}",
            f"{layer.name} sums over them in tiles of {multiple}: "
            f"{padding_count(whole, whole - size, 'row')}",
            f"{tile_share(lost)}: {layer.name} has {percent(share(facts.model, [layer]))} of its "
            "multiplications",
            f"append {counted(whole - size, 'column')} of zeros in the input pipeline",
        )


def few_channels(facts: Facts) -> Iterator[str]:
    """Yields a remark on the number of an image's channels, which is fine."""
    for layer in firsts(facts.model):
        size, multiple = layer.features_in, multiple_of(layer)
        if size and size % multiple and _is_image(layer, size) and not _is_grouped(layer):
            yield (
                f"{counted(size, 'input channel')}, not a multiple of {multiple}: fine, because "
                f"cuDNN and XLA pad the few channels of images; {layer.name} has "
                f"{percent(share(facts.model, [layer]))} of the multiplications"
            )


def _first_sizes(facts: Facts) -> Iterator[tuple[Layer, int]]:
    """Yields each product that takes the model's input, with the number of features it gets."""
    for layer in firsts(facts.model):
        if not layer.is_input or not layer.features_in or _is_grouped(layer):
            continue
        size = layer.features_in
        if len(facts.data.inputs) == 1 and facts.data.inputs[0] and "Conv" not in layer.kind:
            size = facts.data.inputs[0][-1] or size
        yield layer, size


def _is_grouped(layer: Layer) -> bool:
    """Returns whether a convolution works on groups of its input channels."""
    if "Conv" not in layer.kind or not layer.inputs:
        return False
    return layer.features_in != layer.inputs[0 if layer.channels_first else -1]


def _is_image(layer: Layer, size: int) -> bool:
    return "Conv" in layer.kind and size <= FEW_CHANNELS
