"""Finds loaders in a script, and whether the script scales their pixels once, twice or never.

Takes a script's syntax tree; yields findings. It runs nothing.

    findings = list(pixels(ast.parse(source), "train.py"))

tfaccel's loaders give (pixel / 255 - mean) / std, which is 0 to 1 unless mean or std are set.
`image_dataset_from_directory`, TFDS and TensorFlow's decoders give 0 to 255. `ImageDataGenerator`
gives 0 to 255 times its `rescale`.
"""

import ast
import dataclasses
import math
import re
from collections.abc import Iterator

from tfaccel.config.keras_pixels import trained_on
from tfaccel.diagnostics.lint.findings import Finding
from tfaccel.diagnostics.lint.words import OVERSCALED, UNSCALED, range_text

DECODERS = re.compile(r"decode_(image|jpeg|png|bmp|gif|webp|and_crop_jpeg)")
BY_KERAS = re.compile(r"image_dataset_from_directory|flow_from_(directory|dataframe)")
SCALES_INSIDE = re.compile(r"EfficientNet(B\d|V2\w+)|MobileNetV3(Small|Large)|ConvNeXt\w+")
CONVOLVES = re.compile(r"(Separable|Depthwise)?Conv2D")
NORMALISES = re.compile(r"\w*Normalization|BatchNorm\w*|Rescaling|preprocess_input|Lambda")
SHOWS = ("imshow", "imsave", "plot", "print")  # they show pictures to people
SMALL = 0.02  # a smaller factor scales 0..255 to small numbers
FEW, MANY = 3.0, 50.0  # pixels up to FEW are scaled; pixels above MANY are not


@dataclasses.dataclass(frozen=True)
class Place:
    """A loader, or a scaling, in a script.

    Attributes:
      line: the line in the script.
      text: the source text, shortened.
      range: the range of a loader's pixels; None if it is not known.
      mean_and_std: the settings with which tfaccel's loader gives the same pixels; "" for the
        defaults.
    """

    line: int
    text: str
    range: tuple[float, float] | None = None
    mean_and_std: str = ""


def pixels(tree: ast.AST, name: str) -> Iterator[Finding]:
    """Yields findings on loaders and scalings that do not fit together."""
    calls = [each for each in ast.walk(tree) if isinstance(each, ast.Call)]
    values = _values(tree)
    our_loaders = [_our_loader(each, values) for each in calls if _is_our_loader(each)]
    others = list(_other_loaders(calls, values))
    scaled = [*_scaling_calls(calls, values), *_divisions(tree, values)]
    known = [each for each in our_loaders if each.range is not None]
    for each in known:
        if max(map(abs, each.range)) <= FEW and scaled:
            yield _scaled_twice(each, scaled[0], name)
            break
        if min(each.range) >= 0 and max(each.range) > MANY and not scaled and _is_bare(calls):
            yield _never_scaled(each, name)
            break
    if known and others and not scaled and not _are_equal(known[0].range, others[0].range):
        yield _different_ranges(known[0], others[0], name)
    if others and not our_loaders and any(last_name(each.func) == "fit" for each in calls):
        yield _if_moved(others[0], scaled, name)


# The findings.


def _scaled_twice(loader: Place, scaling: Place, name: str) -> Finding:
    return Finding(
        "error",
        f"{name}:{scaling.line}",
        f"{scaling.text} scales pixels of 0 to 255, but {loader.text} in line {loader.line} gives "
        f"{range_text(loader.range)}",
        OVERSCALED,
        "accuracy",
        f"set mean=0 and std=1/255 in {loader.text}, so that it gives 0 to 255, or remove "
        f"{scaling.text}",
    )


def _never_scaled(loader: Place, name: str) -> Finding:
    return Finding(
        "warning",
        f"{name}:{loader.line}",
        f"{loader.text} gives pixels of {range_text(loader.range)}, and nothing here scales them",
        UNSCALED,
        "accuracy",
        "remove its std, so that it gives 0 to 1, or start the model with Rescaling(1/255)",
    )


def _different_ranges(loader: Place, other: Place, name: str) -> Finding:
    return Finding(
        "error",
        f"{name}:{other.line}",
        f"{other.text} gives pixels of {range_text(other.range)}, but {loader.text} in line "
        f"{loader.line} gives {range_text(loader.range)}",
        "what the model learns from the one does not apply to the other",
        "accuracy",
        f"load both with {loader.text}, or set {other.mean_and_std or 'mean=0'} in it",
    )


def _if_moved(loader: Place, scaled: list[Place], name: str) -> Finding:
    settings = f"with {loader.mean_and_std} it" if loader.mean_and_std else "it"
    fix = f"run.image_folder gives 0 to 1; {settings} gives the same pixels as this loader"
    if scaled and loader.mean_and_std:
        fix += f", which {scaled[0].text} in line {scaled[0].line} needs; or remove both"
    return Finding(
        "note",
        f"{name}:{loader.line}",
        f"{loader.text} gives pixels of {range_text(loader.range)}",
        "tfaccel's loaders give 0 to 1 unless mean and std are set, so a script that you move to "
        "them gets other pixels",
        "none by itself; know this before you move the script",
        fix,
    )


def _are_equal(one: tuple[float, float], other: tuple[float, float]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(math.isclose(mine, theirs, rel_tol=0.01, abs_tol=0.01) for mine, theirs in pairs)


# Loaders.


def _is_our_loader(call: ast.Call) -> bool:
    name = last_name(call.func) if isinstance(call.func, ast.Attribute) else ""
    if name == "image_folder" or ast.unparse(call.func) == "run.loader":
        return True
    keywords = {each.arg for each in call.keywords}
    return name == "loader" and bool({"image_size", "global_batch_size"} & keywords)


def _our_loader(call: ast.Call, values: dict[str, ast.expr]) -> Place:
    given = _keywords(call, values)
    place = Place(call.lineno, ast.unparse(call.func))
    if given is None:
        return place
    mean, std = (_numbers(given.get(each), default) for each, default in (("mean", 0), ("std", 1)))
    if mean is None or std is None or min(std) <= 0:
        return place
    longest = max(len(mean), len(std))
    pairs = list(zip(mean * (longest // len(mean)), std * (longest // len(std)), strict=False))
    low, high = min((0 - m) / s for m, s in pairs), max((1 - m) / s for m, s in pairs)
    return dataclasses.replace(place, range=(low, high))


def _other_loaders(calls: list[ast.Call], values: dict[str, ast.expr]) -> Iterator[Place]:
    """Yields the loaders that are not tfaccel's, the most telling ones first."""
    raw = {"range": (0.0, 255.0), "mean_and_std": "mean=0 and std=1/255"}
    generators = [each for each in calls if last_name(each.func) == "ImageDataGenerator"]
    yield from (_image_generator(each, values) for each in generators)
    for call in calls:
        if BY_KERAS.fullmatch(last_name(call.func)) and not generators:
            yield Place(call.lineno, last_name(call.func), **raw)
    gives_floats = any(last_name(each.func) == "convert_image_dtype" for each in calls)
    for call in calls:
        if ast.unparse(call.func) in ("tfds.load", "tensorflow_datasets.load"):
            yield Place(call.lineno, ast.unparse(call.func), **raw)
        elif DECODERS.fullmatch(last_name(call.func)) and not gives_floats:
            yield Place(call.lineno, last_name(call.func), **raw)


def _image_generator(call: ast.Call, values: dict[str, ast.expr]) -> Place:
    given = _keywords(call, values) or {}
    text = "ImageDataGenerator"
    scale = _number(given.get("rescale"), values)
    function = given.get("preprocessing_function")
    if function is not None and (known := trained_on(_module(ast.unparse(function)))):
        return Place(call.lineno, text, known.range, known.settings)
    if not scale:
        return Place(call.lineno, text, (0.0, 255.0), "mean=0 and std=1/255")
    same = "" if math.isclose(scale, 1 / 255, rel_tol=1e-3) else f"std={1 / (255 * scale):.6g}"
    return Place(call.lineno, f"{text}(rescale)", (0.0, 255 * scale), same)


def _module(function: str) -> str:
    """Returns "resnet50" for `keras.applications.resnet50.preprocess_input`."""
    module = function.removesuffix(".preprocess_input").rpartition(".")[2]
    named = {"resnet": "resnet50", "resnet_v2": "resnet50v2", "densenet": "densenet121"}
    return named.get(module, module)


# Scalings.


def _scaling_calls(calls: list[ast.Call], values: dict[str, ast.expr]) -> Iterator[Place]:
    for call in calls:
        last, given = last_name(call.func), _keywords(call, values) or {}
        if last == "Rescaling":
            scale = _number(call.args[0] if call.args else given.get("scale"), values)
            if scale is not None and abs(scale) < SMALL:
                yield Place(call.lineno, _shortened(call))
        elif last == "preprocess_input":
            yield Place(call.lineno, "preprocess_input")
        elif SCALES_INSIDE.fullmatch(last):
            inside = given.get("include_preprocessing")
            if not (isinstance(inside, ast.Constant) and inside.value is False):
                yield Place(call.lineno, last)


def _divisions(tree: ast.AST, values: dict[str, ast.expr]) -> Iterator[Place]:
    """Yields divisions of images by 255, such as `image / 255` or `x *= 1 / 255`."""
    shown = {
        id(inner)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and last_name(call.func) in SHOWS
        for inner in ast.walk(call)
    }
    for each in ast.walk(tree):
        if isinstance(each, ast.BinOp):
            left, right = each.left, each.right
        elif isinstance(each, ast.AugAssign):
            left, right = each.target, each.value
        else:
            continue
        number = _number(right, values)
        if number is None and isinstance(each.op, ast.Mult):
            left, number = right, _number(left, values)
        if not number or id(each) in shown or _number(left, values) is not None:
            continue
        scale = number if isinstance(each.op, ast.Mult) else 1 / number
        if isinstance(each.op, ast.Mult | ast.Div) and _brings_255(scale):
            yield Place(each.lineno, _shortened(each))


def _brings_255(scale: float) -> bool:
    return any(math.isclose(scale, 1 / each, rel_tol=0.01) for each in (255, 127.5, 128))


def _is_bare(calls: list[ast.Call]) -> bool:
    """Returns whether the script makes a network of convolutions, and nothing that may scale."""
    lasts = [last_name(each.func) for each in calls]
    return any(map(CONVOLVES.fullmatch, lasts)) and not any(map(NORMALISES.fullmatch, lasts))


# Values in the source.


def _values(tree: ast.AST) -> dict[str, ast.expr]:
    """Returns the values of the names that are assigned exactly once."""
    found: dict[str, list[ast.expr]] = {}
    for each in ast.walk(tree):
        if isinstance(each, ast.Assign):
            for target in each.targets:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, []).append(each.value)
    return {name: given[0] for name, given in found.items() if len(given) == 1}


def _keywords(call: ast.Call, values: dict[str, ast.expr]) -> dict[str, ast.expr] | None:
    """Returns a call's arguments by name, including those of `**settings`; None if unknown."""
    given = {}
    for each in call.keywords:
        if each.arg is not None:
            given[each.arg] = values.get(ast.unparse(each.value), each.value)
            continue
        settings = values.get(ast.unparse(each.value), each.value)
        inner = None
        if isinstance(settings, ast.Call) and last_name(settings.func) == "dict":
            inner = _keywords(settings, values)
        elif isinstance(settings, ast.Dict) and all(map(_is_text, settings.keys)):
            names = [key.value for key in settings.keys]
            inner = dict(zip(names, settings.values, strict=True))
        if inner is None:
            return None
        given |= inner
    return given


def _is_text(key: ast.expr | None) -> bool:
    return isinstance(key, ast.Constant) and isinstance(key.value, str)


def _numbers(value: ast.expr | None, default: float) -> list[float] | None:
    if value is None:
        return [float(default)]
    parts = value.elts if isinstance(value, ast.Tuple | ast.List) else [value]
    numbers = [_number(each) for each in parts]
    return numbers if numbers and None not in numbers else None


def _number(value: ast.expr | None, values: dict[str, ast.expr] | None = None) -> float | None:
    """Returns a number such as `1 / 255`, or the number that a name stands for; None otherwise."""
    if isinstance(value, ast.Name) and values and value.id in values:
        return _number(values[value.id])
    if isinstance(value, ast.Constant):
        is_number = isinstance(value.value, int | float) and not isinstance(value.value, bool)
        return float(value.value) if is_number else None
    if isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.USub):
        inner = _number(value.operand, values)
        return None if inner is None else -inner
    if isinstance(value, ast.BinOp):
        left, right = _number(value.left, values), _number(value.right, values)
        if left is None or right is None:
            return None
        if isinstance(value.op, ast.Div):
            return left / right if right else None
        return left * right if isinstance(value.op, ast.Mult) else None
    return None


def last_name(function: ast.expr) -> str:
    """Returns the name of a called function: load for `tf.data.load`; "" if it has none."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _shortened(node: ast.expr, most: int = 40) -> str:
    text = ast.unparse(node)
    if isinstance(node, ast.Call):
        text = text[len(ast.unparse(node.func)) - len(last_name(node.func)) :]
    return text if len(text) <= most else f"{text[: most - 3]}..."
