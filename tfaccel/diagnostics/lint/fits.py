"""Rules: whether the model fits the data. Each rule takes Facts and yields findings.

findings = [*takes_the_data(facts), *gives_the_classes(facts), *gives_the_targets(facts)]
"""

from collections.abc import Iterator

from tfaccel.common.tables import counted
from tfaccel.config.keras_pixels import trained_on
from tfaccel.diagnostics.lint.facts import Facts, Layer, Output, Shape, Target
from tfaccel.diagnostics.lint.findings import Finding
from tfaccel.diagnostics.lint.words import OVERSCALED, UNSCALED, layer_names, range_text, shape_text
from tfaccel.training.own_scaling import FEW

# Why outputs of another shape than the targets are a fault, and what the fix gains.
MISMATCH = "the loss needs a target for each value; it raises an error, or repeats one of them"
LEARNS = "the model learns from these targets at all"


def takes_the_data(facts: Facts) -> Iterator[Finding]:
    """Yields a finding if the model cannot be called, or is built for other inputs."""
    built, given = facts.model.inputs, facts.data.inputs
    if facts.model.fault is not None:
        where = f" for {' and '.join(map(shape_text, given))}" if given and not built else ""
        yield Finding(
            "error",
            facts.model.name,
            f"cannot be called{where}",
            facts.model.fault,
            "the model runs at all",
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
            "the model runs at all",
            "pass one array for each input, in the order of model.inputs",
        )
        return
    for expected, shape in zip(built, given, strict=True):
        if not _fits(_as_keras_takes_it(shape, expected), expected):
            yield Finding(
                "error",
                "data",
                f"{_described(shape)}, but the model is built for {_described(expected)}",
                "the weights of the first layer fit only inputs of that shape",
                "the model runs at all",
                _how_to_fit(facts, shape, expected),
            )


def _how_to_call(facts: Facts) -> str:
    if not facts.data.inputs and not facts.model.inputs:
        return "pass a dataset to lint, or build the model"
    if facts.data.inputs and facts.data.global_batch_size is None:
        return "batch the data: dataset.batch(...)"
    return "make the layers fit each other and the data; lint could not check the rest"


def _as_keras_takes_it(shape: Shape, expected: Shape) -> Shape:
    """Returns the shape with a last axis of 1 added or removed, as a functional model does it."""
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
    return f"examples of {shape_text(shape)}"


def _how_to_fit(facts: Facts, shape: Shape, expected: Shape) -> str:
    if shape == expected[1:] and facts.data.global_batch_size is None:
        return "batch the data: dataset.batch(...)"
    if len(shape) > 2 and (*shape[1:], shape[0]) == expected:
        return "the data is channels first (NCHW); transpose it to NHWC in the input pipeline"
    if facts.step.from_config and len(shape) == 3:
        return "set data.image_size and data.channels to the sizes that the model takes"
    return f"build it for the data, keras.Input({shape}), or use the data that it was built for"


def scales_once(facts: Facts) -> Iterator[Finding]:
    """Yields a finding if both the loader and the model scale the pixels."""
    layer, given = facts.model.own_scaling, facts.data.pixel_range
    if layer and given and max(map(abs, given)) <= FEW:
        yield Finding(
            "error",
            layer,
            f"scales pixels of 0 to 255, but the loader gives {range_text(given)}",
            OVERSCALED,
            "accuracy",
            "set the loader's mean=0 and std=1/255, so that it gives 0 to 255, or remove the layer",
            f"--config.data.mean=0 --config.data.std={1 / 255:.16g}"
            if facts.step.from_config
            else None,
        )


def scales_at_all(facts: Facts) -> Iterator[Finding]:
    """Yields a finding if nothing scales the pixels, or not as the pretrained weights need it."""
    model, given = facts.model, facts.data.pixel_range
    if given is None:
        return
    if model.other_pixels:
        pixels = trained_on(model.other_pixels)
        order = "" if pixels.order == "rgb" else ", with the colours in the order blue, green, red"
        yield Finding(
            "warning",
            model.other_pixels,
            f"has pretrained weights, but the loader gives pixels of {range_text(given)}",
            f"Keras's weights were trained on {range_text(pixels.range)}{order}",
            "accuracy, if the weights are Keras's",
            f"set the loader's {pixels.settings}",
        )
    elif model.raw:
        yield Finding(
            "warning",
            model.raw,
            f"takes pixels of {range_text(given)} without scaling",
            UNSCALED,
            "accuracy",
            "remove the loader's std, so that it gives 0 to 1",
            "--config.data.mean=0 --config.data.std=1" if facts.step.from_config else None,
        )


def gives_the_classes(facts: Facts) -> Iterator[Finding]:
    """Yields a finding if the number of outputs is not the number of classes."""
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
            "a label that is not below the number of outputs makes the loss NaN or raises an error",
            "the model learns these classes at all",
            f"give the model {target.num_classes} outputs",
        )
    elif outputs > target.num_classes and target.num_labels is None:  # a sample may lack classes
        yield Finding(
            "warning",
            where,
            f"{outputs} outputs for {target.num_classes} classes",
            "the model must learn never to predict the other outputs, and may still predict them",
            "none in time; this is a mistake unless you add classes later",
            f"give the model {target.num_classes} outputs; to fill the tiles of Tensor Cores, use "
            "--fix, which pads the head and cuts the padding off again",
        )


def _pairs(facts: Facts) -> Iterator[tuple[Output, Target]]:
    """Yields each output with its target: by name if there are several names, else in order."""
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
    """Returns whether the target holds one class for each place of the output."""
    return len(target) == len(output) - 1 or (len(target) == len(output) and target[-1] == 1)


def gives_the_targets(facts: Facts) -> Iterator[Finding]:
    """Yields a finding if the output's shape is not the shape of masks, images or vectors."""
    for output, target in _pairs(facts):
        wanted, given = target.shape, output.shape
        if len(wanted) == len(given) + 1 and wanted[-1] == 1:  # Keras removes this axis
            wanted = wanted[:-1]
        sides = len(given) - 1
        if given and len(given) - len(wanted) not in (0, 1):
            yield _other_rank(wanted, given, _where(facts, output))
        elif len(given) >= 3 and not _fits(wanted[:sides], given[:sides]):
            yield _other_size(facts, target.shape, output)
        elif len(given) == len(wanted) == 1 and not target.has_labels and not _fits(wanted, given):
            yield _other_width(wanted, given, _where(facts, output))


def _other_rank(target: Shape, output: Shape, where: str) -> Finding:
    pools = "pool or flatten before the last layer: GlobalAveragePooling2D(), Flatten()"
    return Finding(
        "error",
        where,
        f"{shape_text(output)}, but the targets are {shape_text(target)}",
        MISMATCH,
        LEARNS,
        pools if len(output) > len(target) else "make the output as large as the target",
    )


def _other_width(target: Shape, output: Shape, where: str) -> Finding:
    return Finding(
        "error",
        where,
        f"{shape_text(output)} outputs, but targets of {shape_text(target)}",
        MISMATCH,
        LEARNS,
        f"give the last layer {shape_text(target)} units",
    )


def _other_size(facts: Facts, target: Shape, output: Output) -> Finding:
    shrinking = [each for each in facts.model.layers if _shrinks(each)]
    lost = tuple(sum(each.window[axis] - 1 for each in shrinking) for axis in (0, 1))
    why, fix = "the loss compares pixel by pixel", "make the output as large as the target"
    missing = tuple(
        (one or 0) - (other or 0) for one, other in zip(target[:2], output.shape[:2], strict=True)
    )
    if shrinking and lost == missing:  # no stride or pooling shrinks it too
        valid = f"{counted(len(shrinking), 'convolution')} with padding='valid'"
        verb = "removes" if len(shrinking) == 1 else "remove"
        why = f"{valid} {verb} {lost[0]} x {lost[1]} pixels, and {why}"
        fix = f"use padding='same' in {layer_names(shrinking, most=8)}"
    return Finding(
        "error",
        _where(facts, output),
        f"{shape_text(output.shape)}, but the targets are {shape_text(target)}",
        why,
        "the model runs at all",
        fix,
    )


def _shrinks(layer: Layer) -> bool:
    return (
        layer.padding == "valid"
        and layer.kind in ("Conv2D", "DepthwiseConv2D", "SeparableConv2D")
        and max(layer.window, default=1) > 1
    )
