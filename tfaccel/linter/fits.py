"""Rules: whether a model and its data belong together. Each takes Facts and gives findings.

findings = [*takes_the_data(facts), *gives_the_classes(facts), *gives_the_targets(facts)]
"""

from collections.abc import Iterator

from tfaccel.linter.facts import Facts, Layer, Shape
from tfaccel.linter.findings import Finding
from tfaccel.linter.words import named, shown
from tfaccel.table_text import counted


def takes_the_data(facts: Facts) -> Iterator[Finding]:
    """Yields where the model is built for other inputs than the data have."""
    built, given = facts.model.inputs, facts.data.inputs
    if facts.model.fault is not None:
        where = f" for {' and '.join(map(shown, given))}" if given and not built else ""
        yield Finding(
            "error",
            facts.model.name,
            f"cannot be called{where}",
            facts.model.fault,
            "none: it does not run",
            "batch the data: dataset.batch(...)"
            if given and facts.data.global_batch_size is None
            else "make the layers fit each other and the data; the rest was not judged",
        )
    if not built or not given:
        return
    if len(built) != len(given):
        yield Finding(
            "error",
            "data",
            f"{counted(len(given), 'input')}, but the model takes {len(built)}",
            "each keras.Input takes one array of the data",
            "none: it does not run",
            "give as many, in the order of model.inputs",
        )
        return
    for expected, shape in zip(built, given, strict=True):
        if not _fits(shape, expected):
            yield Finding(
                "error",
                "data",
                f"{_described(shape)}, but the model is built for {_described(expected)}",
                "the first layer's weights have no place for other inputs",
                "none: it does not run",
                _how_to_fit(facts, shape, expected),
            )


def _fits(shape: Shape, expected: Shape) -> bool:
    if len(shape) != len(expected):
        return False
    return all(
        None in (one, other) or one == other for one, other in zip(shape, expected, strict=True)
    )


def _described(shape: Shape) -> str:
    if len(shape) == 1:
        return "? features" if shape[0] is None else counted(shape[0], "feature")
    return f"examples of {shown(shape)}"


def _how_to_fit(facts: Facts, shape: Shape, expected: Shape) -> str:
    if shape == expected[1:] and facts.data.global_batch_size is None:
        return "batch the data: dataset.batch(...)"
    if len(shape) > 2 and (*shape[1:], shape[0]) == expected:
        return "the data are channels first (NCHW); transpose them to NHWC in the input pipeline"
    if facts.step.from_config and len(shape) == 3:
        return "set data.image_size and data.channels to what the model takes"
    return f"build it for the data, keras.Input({shape}), or give it the data that it was built for"


def gives_the_classes(facts: Facts) -> Iterator[Finding]:
    """Yields where there are more outputs than classes, or fewer."""
    data, model = facts.data, facts.model
    outputs = model.outputs[0][-1] if model.outputs and model.outputs[0] else None
    if not data.integer_targets or data.num_classes is None or outputs is None:
        return
    if outputs < 2 or not _are_labels(data.targets, model.outputs[0]):
        return  # one output is a binary classification or a regression
    where = next((each.name for each in model.layers if each.is_output), model.name)
    seen = "" if data.num_labels is None else f" in the first {data.num_labels} labels"
    if outputs < data.num_classes:
        yield Finding(
            "error",
            where,
            f"{outputs} outputs for {data.num_classes} classes{seen}",
            "a label at or above the number of outputs makes the loss NaN, or an error",
            "none: it does not learn them",
            f"give it {data.num_classes} outputs",
        )
    elif outputs > data.num_classes:
        yield Finding(
            "warning",
            where,
            f"{outputs} outputs for {data.num_classes} classes{seen}",
            "the model must learn never to give what no label is, and may still give it",
            "none in time: it is a mistake, unless classes come later",
            f"give it {data.num_classes} outputs; to fill Tensor Cores' tiles let --fix pad it, "
            "which cuts the rest off again",
        )


def _are_labels(targets: tuple[Shape, ...], outputs: Shape) -> bool:
    """Whether the target is one class for each place of the output."""
    if not targets:
        return True
    target = targets[0]
    return len(target) == len(outputs) - 1 or (len(target) == len(outputs) and target[-1] == 1)


def gives_the_targets(facts: Facts) -> Iterator[Finding]:
    """Yields where the output's size is not that of masks, target images or vectors."""
    if not facts.data.targets or not facts.model.outputs:
        return
    target, output = facts.data.targets[0], facts.model.outputs[0]
    if len(target) >= 2 and len(output) >= 3:
        sides = len(output) - 1
        if not _fits(target[:sides], output[:sides]):
            yield _other_size(facts, target, output)
        return
    as_label = facts.data.integer_targets and target in ((), (1,))
    if not as_label and len(target) == len(output) == 1 and not _fits(target, output):
        where = next((each.name for each in facts.model.layers if each.is_output), "output")
        yield Finding(
            "error",
            where,
            f"{shown(output)} outputs, but targets of {shown(target)}",
            "the loss compares them one by one: it raises, or stretches one over the other",
            "none: it does not learn this",
            f"give the last layer {shown(target)} units",
        )


def _other_size(facts: Facts, target: Shape, output: Shape) -> Finding:
    layers = [each for each in facts.model.layers if _shrinks(each)]
    why, fix = "the loss compares pixel with pixel", "make the output as large as the target"
    if layers:
        lost = [sum(each.window[axis] - 1 for each in layers) for axis in range(len(target[:2]))]
        valid = f"{counted(len(layers), 'convolution')} with padding='valid'"
        off = " x ".join(map(str, lost))
        why = f"{valid} take {off} pixels off, and the loss compares pixel with pixel"
        fix = f"padding='same' in {named(layers, most=8)}"
    return Finding(
        "error",
        "output",
        f"{shown(output)}, but the targets are {shown(target)}",
        why,
        "none: it does not run",
        fix,
    )


def _shrinks(layer: Layer) -> bool:
    return (
        layer.padding == "valid"
        and layer.kind in ("Conv2D", "DepthwiseConv2D", "SeparableConv2D")
        and max(layer.window, default=1) > 1
    )
