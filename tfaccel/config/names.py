"""The names in a config: of a model, an optimizer, a file of weights. Each is checked here.

Takes a name; raises the sentence about a wrong one. Keras is not imported, which takes seconds.

    check_model("resnet5")      # UserError: there is no model 'resnet5'; did you mean 'resnet50'?
    check_optimizer("adamw")
    weights_file("resnet50.h5")
"""

import ast
import functools
import importlib.util
import pathlib
from collections.abc import Collection

from tfaccel.common.errors import UserError, did_you_mean
from tfaccel.common.local_path import local_path

OWN_MODELS = ("cifar_resnet", "mnist_cnn", "restoration_cnn")  # files of tfaccel/models
# Their constructors take other optimizers, or nothing that a recipe says.
NO_OPTIMIZERS = ("Optimizer", "LossScaleOptimizer", "MultiOptimizer", "OptimizerMap")
WEIGHTS_SUFFIXES = (".keras", ".weights.h5", ".weights.json", ".h5", ".hdf5")


def check_model(name: str) -> None:
    """Raises UserError for a name that neither tfaccel nor `keras.applications` has, in any case.

    Where this Keras does not list its names as is known here, nothing is refused: `models.build`
    asks Keras itself.
    """
    if exported("applications"):
        check_among("model", name, {*OWN_MODELS, *map(str.lower, exported("applications"))})


def check_optimizer(name: str) -> None:
    """Raises UserError for a name that Keras has no optimizer of, in any case; as `check_model`."""
    names = {each.lower() for each in exported("optimizers") if each not in NO_OPTIMIZERS}
    if names:
        check_among("optimizer", name, names)


def weights_file(file: str) -> pathlib.Path:
    """Returns the path of a file of weights.

    Raises:
      UserError: there is no such file, or its name ends in another way.
    """
    path = local_path(file)
    if not path.is_file() or not path.name.endswith(WEIGHTS_SUFFIXES):
        raise UserError(
            f"model.weights={file!r} is no file that ends in {', '.join(WEIGHTS_SUFFIXES)}; give "
            "one, or leave it out"
        )
    return path


def check_among(kind: str, name: str, known: Collection[str]) -> None:
    """Raises UserError for a name that is not among those in lower case, whatever its own case.

    Args:
      kind: what has the name, in a word.
      name: as the user wrote it.
      known: the names that there are.
    """
    if name.lower() not in known:
        raise UserError(f"there is no {kind} '{name}'{did_you_mean(name, known)}")


@functools.cache
def exported(module: str) -> frozenset[str]:
    """Returns what a module of Keras has from the files below `keras.src` of the same name.

    Keras writes each such name into the module's `__init__.py` as an import. Functions and classes
    that begin with a capital letter are returned, as architectures and optimizers do.
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
