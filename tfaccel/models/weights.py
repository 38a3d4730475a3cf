"""Weights that a model begins with, from a file of this machine.

Takes a built model and a file; changes the layers that the file has, and says which it has not.

    begin_from("resnet50_notop.h5", model)      # in the scope that the model was made in
"""

import logging
import warnings
import zipfile

import keras
import numpy as np

from tfaccel.errors import UserError
from tfaccel.local_path import local_path
from tfaccel.run_log import summary

log = logging.getLogger("tfaccel")

SUFFIXES = (".keras", ".weights.h5", ".h5")


def begin_from(file: str, model: keras.Model) -> None:
    """Gives the model's layers the weights that the file has for them.

    Args:
      file: that `model.save` or `model.save_weights` wrote, or one of keras.applications. Only
        numbers are read of it: no code, no pickle.
      model: built.

    Raises:
      UserError: there is no such file, it cannot be read, or it fits no layer.
    """
    path = local_path(file)
    if not path.is_file() or not path.name.endswith(SUFFIXES):
        raise UserError(
            f"model.weights={file!r} is no file that ends in {', '.join(SUFFIXES)}; give one, or "
            "leave it out"
        )
    # Files before Keras 3 name their layers; the others' are numbered as the model has them.
    names = {"by_name": True} if path.suffix == ".h5" and ".weights" not in path.name else {}
    layers = [each for each in model._flatten_layers(include_self=False) if _own_weights(each)]
    before = [_own_weights(each) for each in layers]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a line for each layer: they are named below
            model.load_weights(path, skip_mismatch=True, **names)
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        EOFError,
        RuntimeError,  # a RecursionError, too
        MemoryError,
        zipfile.BadZipFile,
    ) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(
            f"model.weights={file!r} cannot be read for {model.name} ({reason}); give a file of "
            "the same architecture"
        ) from error
    untouched = [
        layer.name
        for layer, old in zip(layers, before, strict=True)
        if all(map(np.array_equal, old, _own_weights(layer)))
    ]
    if len(untouched) == len(layers):
        raise UserError(
            f"model.weights={file!r} fits no layer of {model.name}; give a file of the same "
            "architecture"
        )
    summary("model: %d of %d layers from %s", len(layers) - len(untouched), len(layers), path)
    if untouched:
        log.warning(
            "model: not in that file, so as they were: %s (or the same there)", ", ".join(untouched)
        )


def _own_weights(layer: keras.layers.Layer) -> list[np.ndarray]:
    """Returns the values of the layer itself, without those of layers in it."""
    inner = {
        id(weight) for each in layer._flatten_layers(include_self=False) for weight in each.weights
    }
    return [keras.ops.convert_to_numpy(each) for each in layer.weights if id(each) not in inner]
