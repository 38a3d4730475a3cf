"""Finds faults in a script's source: a data set passed to a model, waits in a loop, wrong pixels.

Takes source text; returns findings. It reads the syntax tree and runs nothing.

    findings = read_script(pathlib.Path("train.py").read_text(), "train.py")

A name is a data set if the script assigns it the result of a function that makes data sets, or if a
function's argument has a typical name, such as train_loader. The same holds for models; the script
may also call a model's `fit`.
"""

import ast
import os
import re
from collections.abc import Iterator

from tfaccel.common.local_path import local_path
from tfaccel.diagnostics.lint.findings import Finding
from tfaccel.diagnostics.lint.script_pixels import last_name, pixels
from tfaccel.diagnostics.lint.script_text import read_text
from tfaccel.diagnostics.lint.speed import run_eagerly

MAKE_DATA = re.compile(
    r"(DataLoader|.*[Dd]ataset(_from_\w+)?|from_tensor_slices|from_generator|batch|prefetch"
    r"|image_folder|loader)"
)
MAKE_SEVERAL = re.compile(r"\w+_dataset_from_directory|split_dataset")  # returns several data sets
# NumPy and others have functions of these names, so they must be called on a data set or a run.
CHANGE_DATA = ("shuffle", "cache", "repeat", "map", "take", "skip", "examples", "pipeline")
DATA_NAME = re.compile(r"(\w+_)?(loader|dataset|ds)(_\w+)?")
MAKE_MODELS = re.compile(r"(Sequential|Model|Functional|load_model|clone_model)")
MODEL_NAME = re.compile(r"(\w+_)?(model|net|network)")
MODEL_METHODS = ("fit", "compile", "evaluate", "predict", "summary")
BATCH_METHODS = ("train_on_batch", "test_on_batch", "predict_on_batch", "call")
WAITS = ("numpy", "item")


def read_script(source: str, name: str = "script") -> list[Finding]:
    """Returns the findings in the Python source of a script, or of a notebook's cells."""
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        return [_syntax(error, name)]
    data, models = _names(tree)
    calls = [each for each in ast.walk(tree) if isinstance(each, ast.Call)]
    given = ((each, _given_data(each, data)) for each in calls if _is_model(each, models))
    whole = [_whole_data(call, text, name) for call, text in given if text]
    return [*whole, *_waits(tree, data, name), *_eager(calls, name), *pixels(tree, name)]


def in_script(script: str | os.PathLike) -> list[Finding]:
    """Returns the findings in a script, which is given as a path or as text.

    Raises:
      UserError: the script cannot be read.
    """
    if isinstance(script, str) and "\n" in script:
        return read_script(script)
    path = local_path(script)
    return read_script(read_text(path), path.name)


def _syntax(error: SyntaxError, name: str) -> Finding:
    return Finding(
        "error",
        f"{name}:{error.lineno}",
        f"Python cannot read it: {error.msg}",
        "the script does not run, and lint could not check the rest of it",
        "the script runs at all",
        "put commas between the layers of a list" if "comma" in error.msg else "correct this line",
    )


# The names of data sets and models.


def _names(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Returns the names of data sets and the names of models."""
    data, models, others = set(), set(), set()
    kinds = _model_classes(tree)
    for each in ast.walk(tree):
        if isinstance(each, ast.Assign | ast.AnnAssign) and each.value is not None:
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            called = last_name(each.value.func) if isinstance(each.value, ast.Call) else ""
            if MAKE_SEVERAL.fullmatch(called):
                data |= {name for target in targets for name in _parts(target)}
            elif _is_data(each.value, data):
                data |= {ast.unparse(target) for target in targets}
            elif MAKE_MODELS.fullmatch(called) or called in kinds:
                models |= {ast.unparse(target) for target in targets}
            else:
                others |= {name for target in targets for name in _parts(target)}
        elif isinstance(each, ast.For | ast.comprehension):
            others |= _parts(each.target)
        elif isinstance(each, ast.arg):
            data |= {each.arg} if DATA_NAME.fullmatch(each.arg) else set()
            models |= {each.arg} if MODEL_NAME.fullmatch(each.arg) else set()
        elif isinstance(each, ast.Attribute) and each.attr in MODEL_METHODS:
            models.add(ast.unparse(each.value))
    return data - others, models


def _model_classes(tree: ast.AST) -> set[str]:
    """Returns the script's classes that inherit from a model class."""
    found: set[str] = set()
    classes = [each for each in ast.walk(tree) if isinstance(each, ast.ClassDef)]
    for each in classes:
        bases = [last_name(base) for base in each.bases]
        if any(MAKE_MODELS.fullmatch(base) or base in found for base in bases):
            found.add(each.name)
    return found


def _parts(target: ast.expr) -> set[str]:
    """Returns the names that an assignment sets."""
    if isinstance(target, ast.Tuple | ast.List):
        return {name for each in target.elts for name in _parts(each)}
    return {ast.unparse(target)}


def _is_data(value: ast.expr, data: set[str]) -> bool:
    """Returns whether an expression makes a data set, or is the name of one."""
    if not isinstance(value, ast.Call):
        return ast.unparse(value) in data
    name = last_name(value.func)
    if name in CHANGE_DATA and isinstance(value.func, ast.Attribute):
        base = value.func.value
        return _is_data(base, data) or ast.unparse(base) == "run"
    return MAKE_DATA.fullmatch(name) is not None


# The faults.


def _given_data(call: ast.Call, data: set[str]) -> str | None:
    """Returns the data set that a call takes as its inputs, or None."""
    arguments = [*call.args[:1], *(each.value for each in call.keywords if each.arg == "inputs")]
    return next((text for text in map(ast.unparse, arguments) if text in data), None)


def _is_model(call: ast.Call, models: set[str]) -> bool:
    """Returns whether it calls a model, or a model's method that takes one batch."""
    called = ast.unparse(call.func)
    if isinstance(call.func, ast.Attribute) and call.func.attr in BATCH_METHODS:
        called = ast.unparse(call.func.value)
    return called in models or MODEL_NAME.fullmatch(called) is not None


def _whole_data(call: ast.Call, given: str, name: str) -> Finding:
    called = ast.unparse(call.func)
    model = called.rpartition(".")[0] if called.endswith(BATCH_METHODS) else called
    return Finding(
        "error",
        f"{name}:{call.lineno}",
        f"{called}({given}) passes the loader itself to the model, not a batch of it",
        "a model takes tensors, but a loader is an object that gives batches of tensors",
        "the script runs at all",
        f"use {model}.fit({given}) or {model}.predict({given}), which loop over it, or "
        f"`for x, y in {given}: {called}(x)`, which takes one batch at a time",
    )


def _waits(tree: ast.AST, data: set[str], name: str) -> Iterator[Finding]:
    """Yields calls that make each step of a hand-written loop wait for the device."""
    for loop in ast.walk(tree):
        if not isinstance(loop, ast.For) or not _iterates(loop.iter, data):
            continue
        own = {each.id for each in ast.walk(loop.target) if isinstance(each, ast.Name)}
        for call in (each for part in loop.body for each in ast.walk(part)):
            read = _read_by(call)
            if read is not None and _root(read) not in own:  # the batch itself is on the host
                yield Finding(
                    "warning",
                    f"{name}:{call.lineno}",
                    f"{ast.unparse(call)} in the loop over {ast.unparse(loop.iter)}",
                    "Python waits until the device has finished the step, and then the device "
                    "waits until Python launches the next step",
                    "the time between two steps; `tfaccel train` logs the share of waiting",
                    "keep sums as tensors, and read them once an epoch",
                )


def _read_by(call: ast.AST) -> ast.expr | None:
    """Returns the value that a call copies to Python, as in `x.numpy()` or `float(x)`, or None."""
    if not isinstance(call, ast.Call):
        return None
    if isinstance(call.func, ast.Attribute) and call.func.attr in WAITS and not call.args:
        return call.func.value
    is_float = ast.unparse(call.func) == "float" and len(call.args) == 1
    return call.args[0] if is_float and isinstance(call.args[0], ast.Name) else None


def _root(value: ast.expr) -> str:
    """Returns the name before all attributes and indices: x in `x[0].y`."""
    while isinstance(value, ast.Attribute | ast.Subscript):
        value = value.value
    return ast.unparse(value)


def _iterates(value: ast.expr, data: set[str]) -> bool:
    """Returns whether a loop iterates over a data set, also inside `enumerate` or `take`."""
    if ast.unparse(value) in data or _is_data(value, data):
        return True
    return isinstance(value, ast.Call) and any(_iterates(each, data) for each in value.args)


def _eager(calls: list[ast.Call], name: str) -> Iterator[Finding]:
    for call in calls:
        given = [*call.args, *(each.value for each in call.keywords)]
        if last_name(call.func) == "run_functions_eagerly" and any(map(_is_true, given)):
            yield run_eagerly(f"{name}:{call.lineno}", "tf.config.run_functions_eagerly(True)")


def _is_true(argument: ast.expr) -> bool:
    return isinstance(argument, ast.Constant) and argument.value is True
