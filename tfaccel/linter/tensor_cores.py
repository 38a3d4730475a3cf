"""Rules: sizes that leave tiles of Tensor Cores empty, and what that costs. Each takes Facts.

findings = [*widths(facts), *input_features(facts), *batch_rows(facts), *tail_batch(facts)]

Tensor Cores multiply tiles. NVIDIA's guides ask for sizes that are multiples of 16 bytes, so 8 in
float16 and 16 in int8, best 128 bytes ("Matrix Multiplication Background User's Guide" and
"Linear/Fully-Connected Layers User's Guide", docs.nvidia.com/deeplearning/performance). Of another
size the last tile is part padding, and unaligned loads are slower; libraries before cuBLAS 11 and
cuDNN 7.6.3 left Tensor Cores altogether. The gain named here is arithmetic: what part of all tiles
of the model is padding because of this size. Where a kernel is slower still, the gain is larger;
`--fix` measures that of a head.
"""

from collections.abc import Iterator

from tfaccel.linter.facts import (
    OUTSIDE,
    Data,
    Facts,
    Layer,
    Model,
    counted,
    firsts,
    heads,
    multiple_of,
    named,
    of_which,
    padded,
    percent,
    share,
    tile_work,
)
from tfaccel.linter.findings import Finding

MUCH = 0.05  # of the model's tiles: from there on it is a warning
LITTLE, FEW = 0.001, 3  # so many sizes that each cost less than this are one finding
FEW_CHANNELS = 4  # of images, for which cuDNN has kernels


def widths(facts: Facts) -> Iterator[Finding]:
    """Yields units and filters that are no multiple of 8, or 16 in int8, once for each size."""
    model = facts.model
    found: dict[tuple[int, int], list[Layer]] = {}
    for layer in model.layers:
        size, multiple = layer.features_out, multiple_of(layer)
        if size and size % multiple:
            found.setdefault((size, multiple), []).append(layer)
    lost = {
        (size, multiple): _lost(model, [*each, *_takers(model, each, size)], size, multiple)
        for (size, multiple), each in found.items()
    }
    small = [each for each in found if lost[each] < LITTLE and not _is_head(model, found[each])]
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
    return Finding(
        "warning" if lost >= MUCH else "note",
        named(layers),
        f"{counted(size, unit)}, not a multiple of {multiple}",
        f"Tensor Cores multiply tiles of {multiple}: {of_which(whole, whole - size, 'column')}",
        f"{_of(lost)}: {have} {percent(share(model, layers))} of its multiplications",
        _head_fix(layers[0], whole) if head else f"{_nearest(size, multiple)} {unit}s",
    )


def _many(model: Model, sizes: list[tuple[int, int]], layers: list[Layer]) -> Finding:
    """Returns one finding for several sizes of which none costs anything."""
    return Finding(
        "note",
        named(layers),
        f"{', '.join(str(size) for size, _ in sizes)} units or filters, no multiples of "
        f"{sizes[0][1]}",
        "the last tile of each of these products is part padding",
        f"next to nothing: these layers have {percent(share(model, layers))} of the model's "
        "multiplications",
        "leave them",
    )


def _is_head(model: Model, layers: list[Layer]) -> bool:
    return set(layers) <= set(heads(model))


def _lost(model: Model, layers: list[Layer], size: int, multiple: int) -> float:
    """Returns the part of the model's tiles that is padding of this size."""
    whole = sum(map(tile_work, model.layers))
    empty = 1 - size / padded(size, multiple)
    return sum(map(tile_work, dict.fromkeys(layers))) * empty / whole if whole else 0.0


def _takers(model: Model, layers: list[Layer], size: int) -> list[Layer]:
    """Returns the products whose inputs are these layers' outputs, next to them."""
    indices = {each for layer in layers for each in layer.feeds if each != OUTSIDE}
    return [model.layers[each] for each in indices if model.layers[each].features_in == size]


def _of(lost: float) -> str:
    """Returns the gain in words."""
    small = "next to nothing, " if lost < 0.01 else ""
    return f"{small}{percent(lost)} of the model's tiles"


def _head_fix(layer: Layer, whole: int) -> str:
    if layer.kind == "Dense" and layer.dtype != "int8":
        return f"--fix, or .fix(): pads it to {whole}, cuts the rest off again, and measures"
    return "leave it: the number of outputs is the task's"


def _nearest(size: int, multiple: int) -> str:
    below, above = size // multiple * multiple, padded(size, multiple)
    return f"{below} or {above}" if below else f"{above}"


def input_features(facts: Facts) -> Iterator[Finding]:
    """Yields the data's own features, where the first product takes them as they are."""
    for layer, size in _first_sizes(facts):
        multiple = multiple_of(layer)
        if size % multiple == 0 or _is_image(layer, size):
            continue
        whole = padded(size, multiple)
        lost = _lost(facts.model, [layer], size, multiple)
        yield Finding(
            "warning" if lost >= MUCH else "note",
            "data",
            f"{counted(size, 'feature')}, not a multiple of {multiple}",
            f"{layer.name} sums over them in tiles of {multiple}: "
            f"{of_which(whole, whole - size, 'row')}",
            f"{_of(lost)}: {layer.name} has {percent(share(facts.model, [layer]))} of its "
            "multiplications",
            f"append {counted(whole - size, 'column')} of zeros in the input pipeline",
        )


def few_channels(facts: Facts) -> Iterator[str]:
    """Yields a remark on images' channels: they are in order."""
    for layer in firsts(facts.model):
        size, multiple = layer.features_in, multiple_of(layer)
        if size and size % multiple and _is_image(layer, size):
            yield (
                f"{counted(size, 'input channel')}, not a multiple of {multiple}: cuDNN and XLA "
                f"pad the few channels of images; {layer.name} has "
                f"{percent(share(facts.model, [layer]))} of the multiplications"
            )


def _first_sizes(facts: Facts) -> Iterator[tuple[Layer, int]]:
    """Yields the products that take the model's input, and how many features they are given."""
    for layer in firsts(facts.model):
        if not layer.is_input or not layer.features_in:
            continue
        size = layer.features_in
        if len(facts.data.inputs) == 1 and facts.data.inputs[0] and "Conv" not in layer.kind:
            size = facts.data.inputs[0][-1] or size
        yield layer, size


def _is_image(layer: Layer, size: int) -> bool:
    return "Conv" in layer.kind and size <= FEW_CHANNELS


def batch_rows(facts: Facts) -> Iterator[Finding]:
    """Yields a batch that is no multiple of 8 on each replica, where products have its rows."""
    rows, batch, replicas = facts.rows, facts.data.global_batch_size, facts.step.num_replicas
    if rows is None or (rows % 8 == 0 and batch % replicas == 0):
        return
    touched = [each for each in facts.model.layers if each.multiplies and rows * each.positions % 8]
    lost = share(facts.model, touched) * (1 - rows / padded(rows, 8))
    if not touched and facts.model.layers and batch % replicas == 0:
        return
    on = f" on each of {replicas} replicas" if replicas > 1 else ""
    whole = max(8 * replicas, round(batch / (8 * replicas)) * 8 * replicas)
    yield Finding(
        "warning" if lost >= MUCH else "note",
        "data",
        f"batches of {batch}, so {rows} rows{on}: not a multiple of 8",
        "Tensor Cores multiply tiles of 8 rows: "
        f"{of_which(padded(rows, 8), padded(rows, 8) - rows, 'row')}",
        f"{_of(lost)}: {percent(share(facts.model, touched))} of its multiplications are in layers "
        "whose rows are the batch's",
        f"a batch of {whole}",
        f"--config.data.global_batch_size={whole}" if facts.step.from_config else None,
    )


def rows_of_pixels(facts: Facts) -> Iterator[str]:
    """Yields a remark on an odd batch whose products have pixels for rows."""
    rows = facts.rows
    if rows is None or rows % 8 == 0 or list(batch_rows(facts)):
        return
    yield (
        f"batches of {rows} on each replica, not a multiple of 8: the products' rows are the "
        "batch times the pixels, which is one"
    )


def tail_batch(facts: Facts) -> Iterator[Finding]:
    """Yields a last batch with fewer rows than the others."""
    data = facts.data
    if data.num_examples is None or not data.global_batch_size:
        return
    if data.last_batch == "drop" and data.num_examples < data.global_batch_size:
        yield Finding(
            "error",
            "data",
            f"{data.num_examples:,} examples make no batch of {data.global_batch_size}",
            "the only batch is not full, and is dropped",
            "none: it does not train",
            f"a batch of at most {data.num_examples}, or one that is not dropped",
        )
    left = data.num_examples % data.global_batch_size
    if not left or data.last_batch not in ("smaller", "pad"):
        return
    if data.last_batch == "pad":
        yield from _padding(data, left)
        return
    batches = -(-data.num_examples // data.global_batch_size)
    odd = left // facts.step.num_replicas % 8
    yield Finding(
        "warning",
        "data",
        f"the last of {batches} batches has {left} rows, not {data.global_batch_size} "
        f"({data.num_examples:,} examples)",
        "for another shape the step is compiled once more; each of its rows weighs "
        f"{data.global_batch_size / left:.2g} times as much in the update"
        + ("; it is no multiple of 8" if odd else ""),
        f"one compilation; a step in {batches} that is "
        f"{percent(1 - left / data.global_batch_size)} empty",
        "a tfaccel loader (last_batch='pad' counts every row once), or "
        f"batch({data.global_batch_size}, drop_remainder=True)",
    )


def _padding(data: Data, left: int) -> Iterator[Finding]:
    """Yields where a good part of an epoch's rows is padding."""
    batch = data.global_batch_size
    rows = padded(data.num_examples, batch)
    lost = 1 - data.num_examples / rows
    if lost >= MUCH:
        yield Finding(
            "note",
            "data",
            f"{batch - left:,} of an epoch's {rows:,} rows are padding",
            f"{data.num_examples:,} examples in batches of {batch} leave {left} for the last one, "
            "which costs as much as the others; loss and metrics do not count it",
            f"{percent(lost)} of an epoch's time",
            "a batch that divides the examples more evenly",
        )
