"""Checks the names in a config: of the model, the optimizer, a metric and the file of weights.

Each function takes a name and raises UserError if it is wrong. It does not import Keras, because
that takes seconds.

    check_model("resnet5")      # UserError: there is no model 'resnet5'; did you mean 'resnet50'?
    check_optimizer("adamw")
    weights_file("resnet50.h5")
"""

import ast
import functools
import importlib.util
import os
import pathlib
import shlex
from collections.abc import Collection

from tfaccel.common.errors import UserError, did_you_mean
from tfaccel.common.local_path import local_path
from tfaccel.config.segmentation import network_names
from tfaccel.config.vit import VITS

RESNETS_V1_5 = ("resnet50_v1_5", "resnet101_v1_5", "resnet152_v1_5")
# Those of experiment/models/.
OWN_MODELS = ("cifar_resnet", "mnist_cnn", "restoration_cnn", *RESNETS_V1_5, *VITS)
# Their constructors take other optimizers, or nothing that a recipe can set.
NO_OPTIMIZERS = ("Optimizer", "LossScaleOptimizer", "MultiOptimizer", "OptimizerMap")
WEIGHTS_SUFFIXES = (".keras", ".weights.h5", ".weights.json", ".h5", ".hdf5", ".safetensors")
PICKLES = (".pt", ".pth", ".bin", ".pkl", ".ckpt")  # PyTorch's; reading one can run code in it


def check_model(name: str) -> None:
    """Raises UserError unless `tfaccel` or `keras.applications` has this model, in any case.

    A network for masks has the name of a decoder before that of its backbone: "unet_resnet50".

    If the names cannot be read from this version of Keras, every name passes, and `models.build`
    asks Keras itself.
    """
    if exported("applications"):
        backbones = {*map(str.lower, exported("applications"))}
        masks = network_names([*backbones, *RESNETS_V1_5])
        check_among("model", name, {*OWN_MODELS, *backbones, *masks})


def check_optimizer(name: str) -> None:
    """Raises UserError unless Keras has this optimizer, in any case; see `check_model`."""
    names = {each.lower() for each in exported("optimizers") if each not in NO_OPTIMIZERS}
    if names:
        check_among("optimizer", name, names)


def check_monitor(monitor: str, metrics: Collection[str]) -> None:
    """Raises UserError unless `train.monitor` is one of an epoch's metrics or `val_` and one."""
    known = {*metrics, *(f"val_{name}" for name in metrics)}
    if monitor not in known:
        hint = did_you_mean(monitor, known)
        if "expected" not in hint:
            hint += f" This experiment has {', '.join(sorted(known))}"
        raise UserError(f"train.monitor={monitor!r} is not a metric of this experiment{hint}")


def weights_in(file: str) -> pathlib.Path:
    """Returns the path of `file`; for the folder of an export or a run, that of its model.keras.

    The newest of several exports counts. Nothing need exist. "~" is the home folder.
    """
    path = pathlib.Path(os.path.expanduser(file))
    exports = [path, *_numbered(path), *_numbered(path / "export")] if path.is_dir() else []
    found = (each / "model.keras" for each in exports)
    return next((each for each in found if each.is_file()), path)


def _numbered(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the entries of a folder with a number as their name, the largest first."""
    found = [each for each in folder.glob("*") if each.name.isdecimal()]
    return sorted(found, key=lambda each: int(each.name), reverse=True)


def weights_file(file: str) -> pathlib.Path:
    """Returns the path of a file of weights, which may be given as an export's or a run's folder.

    Raises:
      UserError: there is no such file, or its name has another suffix; or the folder has no export.
    """
    path = weights_in(local_path(file))
    if path.is_dir():
        fix = "give a run's workdir, the folder of an export, or a file of weights"
        run = next((each for each in (path, *path.parents) if (each / "config.json").is_file()), 0)
        if run:
            fix = f"write an export first: `tfaccel export --workdir={shlex.quote(str(run))}`"
            fix += f", and then give model.weights={str(run)!r}"
        raise UserError(
            f"model.weights={file!r} is a folder, and it has no export with a model.keras; {fix}"
        )
    if path.suffix.lower() in PICKLES:
        raise UserError(
            f"model.weights={file!r} is a pickle of PyTorch, which can run code when it is read; "
            "where you trust it and have PyTorch, write a .safetensors file of it: "
            "safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'model.safetensors')"
        )
    if not path.is_file() or not path.name.endswith(WEIGHTS_SUFFIXES):
        raise UserError(
            f"model.weights={file!r} is no file that ends in {', '.join(WEIGHTS_SUFFIXES)}; give "
            "the path of one, or remove model.weights"
        )
    return path


def check_among(kind: str, name: str, known: Collection[str]) -> None:
    """Raises UserError unless `known` has the name in lower case; `kind` is the word for a name."""
    if name.lower() not in known:
        raise UserError(f"there is no {kind} '{name}'{did_you_mean(name, known)}")


@functools.cache
def exported(module: str) -> frozenset[str]:
    """Returns the classes and functions that `keras.applications` or `keras.optimizers` exports.

    Keras writes each of them into `__init__.py` of the module as an import from `keras.src`. Only
    names that begin with a capital letter are returned, as those of architectures and optimizers
    do.
    """
    spec = importlib.util.find_spec("keras")
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    file = pathlib.Path(spec.submodule_search_locations[0]) / module / "__init__.py"
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return frozenset()
    return frozenset(
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"keras.src.{module}.")
        for alias in node.names
        if alias.name[:1].isupper()
    )
