"""Rules: whether a model and its data belong together. Each takes Facts and gives findings.

findings = [*takes_the_data(facts), *gives_the_classes(facts), *gives_the_targets(facts)]
"""

from collections.abc import Iterator

from tfaccel.common.tables import counted, in_figures
from tfaccel.diagnostics.lint.facts import Facts, Layer, Output, Shape, Target
from tfaccel.diagnostics.lint.findings import Finding
from tfaccel.diagnostics.lint.words import named, shown
from tfaccel.training.keras_pixels import trained_on
from tfaccel.training.own_scaling import FEW


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
            _how_to_call(facts),
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
        if not _fits(_as_keras_takes_it(shape, expected), expected):
            yield Finding(
                "error",
                "data",
                f"{_described(shape)}, but the model is built for {_described(expected)}",
                "the first layer's weights have no place for other inputs",
                "none: it does not run",
                _how_to_fit(facts, shape, expected),
            )


def _how_to_call(facts: Facts) -> str:
    if not facts.data.inputs and not facts.model.inputs:
        return "give lint a dataset, or build the model"
    if facts.data.inputs and facts.data.global_batch_size is None:
        return "batch the data: dataset.batch(...)"
    return "make the layers fit each other and the data; the rest was not judged"


def _as_keras_takes_it(shape: Shape, expected: Shape) -> Shape:
    """Returns the shape with a last side of 1, or without it, as a functional model adjusts it."""
    if len(shape) == len(expected) - 1 and expected[-1] == 1 and shape:
        return (*shape, 1)
    if len(shape) == len(expected) + 1 and shape[-1] == 1:
        return shape[:-1]
    return shape


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


def scales_once(facts: Facts) -> Iterator[Finding]:
    """Yields where a loader has scaled the pixels that the model scales by itself."""
    layer, given = facts.model.own_scaling, facts.data.pixel_range
    if layer and given and max(map(abs, given)) <= FEW:
        yield Finding(
            "error",
            layer,
            f"scales pixels of 0 to 255, but the loader gives {in_figures(given[0], 4)} to "
            f"{in_figures(given[1], 4)}",
            "scaled twice, all images are nearly one colour, and pretrained weights see nothing",
            "accuracy",
            "give the loader mean=0 and std=1/255, so that it gives 0 to 255, or leave the layer "
            "out",
            f"--config.data.mean=0 --config.data.std={1 / 255:.16g}"
            if facts.step.from_config
            else None,
        )


def scales_at_all(facts: Facts) -> Iterator[Finding]:
    """Yields where nobody scales the pixels, or not as the model's trained weights want."""
    model, given = facts.model, facts.data.pixel_range
    if given is None:
        return
    seen = f"{in_figures(given[0], 4)} to {in_figures(given[1], 4)}"
    if model.other_pixels:
        pixels = trained_on(model.other_pixels)
        order = "" if pixels.order == "rgb" else ", the colours in the order blue, green, red"
        yield Finding(
            "warning",
            model.other_pixels,
            f"has trained weights, but the loader gives pixels of {seen}",
            "Keras's own weights were trained on {} to {}".format(
                *(in_figures(each, 4) for each in pixels.range)
            )
            + order,
            "accuracy, if they are Keras's",
            f"give the loader {pixels.settings}",
        )
    elif model.raw:
        yield Finding(
            "warning",
            model.raw,
            f"takes pixels of {seen} as they come",
            "it begins with weights for numbers of about 1: the first steps are far too large",
            "accuracy",
            "leave out the loader's std, so that it gives 0 to 1",
            "--config.data.mean=0 --config.data.std=1" if facts.step.from_config else None,
        )


def gives_the_classes(facts: Facts) -> Iterator[Finding]:
    """Yields where there are more outputs than classes, or fewer."""
    for output, target in _pairs(facts):
        outputs = output.shape[-1] if output.shape else None
        if target.num_classes is None or outputs is None:
            continue
        # One output is a binary classification or a regression.
        if outputs > 1 and _are_labels(target.shape, output.shape):
            yield from _of_classes(target, outputs, _where(facts, output))


def _of_classes(target: Target, outputs: int, where: str) -> Iterator[Finding]:
    seen = "" if target.num_labels is None else f" in the first {target.num_labels} labels"
    if outputs < target.num_classes:
        yield Finding(
            "error",
            where,
            f"{outputs} outputs for {target.num_classes} classes{seen}",
            "a label at or above the number of outputs makes the loss NaN, or an error",
            "none: it does not learn them",
            f"give it {target.num_classes} outputs",
        )
    elif outputs > target.num_classes and target.num_labels is None:  # a sample may lack some
        yield Finding(
            "warning",
            where,
            f"{outputs} outputs for {target.num_classes} classes",
            "the model must learn never to give what no label is, and may still give it",
            "none in time: it is a mistake, unless classes come later",
            f"give it {target.num_classes} outputs; to fill Tensor Cores' tiles let --fix pad it, "
            "which cuts the rest off again",
        )


def _pairs(facts: Facts) -> Iterator[tuple[Output, Target]]:
    """Yields each output with its target: by name where the data name several, else in order."""
    outputs, targets = facts.model.outputs, facts.data.targets
    if len(targets) < 2 or targets[0].name is None:
        yield from zip(outputs, targets, strict=False)
        return
    by_name = {each.name: each for each in outputs}
    yield from ((by_name[each.name], each) for each in targets if each.name in by_name)


def _where(facts: Facts, output: Output) -> str:
    layer = None if output.layer is None else facts.model.layers[output.layer].name
    return layer or output.name or "output"


def _are_labels(target: Shape, output: Shape) -> bool:
    """Whether the target is one class for each place of the output."""
    return len(target) == len(output) - 1 or (len(target) == len(output) and target[-1] == 1)


def gives_the_targets(facts: Facts) -> Iterator[Finding]:
    """Yields where the output's size is not that of masks, target images or vectors."""
    for output, target in _pairs(facts):
        wanted, given = target.shape, output.shape
        if len(wanted) == len(given) + 1 and wanted[-1] == 1:  # Keras leaves that side out
            wanted = wanted[:-1]
        sides = len(given) - 1
        if given and len(given) - len(wanted) not in (0, 1):
            yield _other_rank(wanted, given, _where(facts, output))
        elif len(given) >= 3 and not _fits(wanted[:sides], given[:sides]):
            yield _other_size(facts, target.shape, output)
        elif len(given) == len(wanted) == 1 and not target.has_labels and not _fits(wanted, given):
            yield _other_width(wanted, given, _where(facts, output))


def _other_rank(target: Shape, output: Shape, where: str) -> Finding:
    return Finding(
        "error",
        where,
        f"{shown(output)}, but the targets are {shown(target)}",
        "the loss finds no target for each value: it raises, or stretches one over the other",
        "none: it does not learn this",
        "pool or flatten before the last layer: GlobalAveragePooling2D(), Flatten()"
        if len(output) > len(target)
        else "make the output as large as the target",
    )


def _other_width(target: Shape, output: Shape, where: str) -> Finding:
    return Finding(
        "error",
        where,
        f"{shown(output)} outputs, but targets of {shown(target)}",
        "the loss compares them one by one: it raises, or stretches one over the other",
        "none: it does not learn this",
        f"give the last layer {shown(target)} units",
    )


def _other_size(facts: Facts, target: Shape, output: Output) -> Finding:
    shrinking = [each for each in facts.model.layers if _shrinks(each)]
    lost = tuple(sum(each.window[axis] - 1 for each in shrinking) for axis in (0, 1))
    why, fix = "the loss compares pixel with pixel", "make the output as large as the target"
    missing = tuple(
        (one or 0) - (other or 0) for one, other in zip(target[:2], output.shape[:2], strict=True)
    )
    if shrinking and lost == missing:  # so that no stride or pooling shrinks it too
        valid = f"{counted(len(shrinking), 'convolution')} with padding='valid'"
        verb = "takes" if len(shrinking) == 1 else "take"
        why = f"{valid} {verb} {lost[0]} x {lost[1]} pixels off, and {why}"
        fix = f"padding='same' in {named(shrinking, most=8)}"
    return Finding(
        "error",
        _where(facts, output),
        f"{shown(output.shape)}, but the targets are {shown(target)}",
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
