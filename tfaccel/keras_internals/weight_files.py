"""How Keras names layers in files of weights."""

import pathlib

import h5py
import keras
from keras.src.legacy.saving import legacy_h5_format
from keras.src.utils.naming import to_snake_case


def layer_names_in(path: pathlib.Path) -> list[str]:
    """Returns the names of the layers with weights in a file that names them, in its order."""
    read = legacy_h5_format.load_attributes_from_hdf5_group
    with h5py.File(path, "r") as file:
        group = file.get("model_weights", file)
        return [each for each in read(group, "layer_names") if read(group[each], "weight_names")]


def default_name(layer: keras.layers.Layer) -> str:
    """Returns the name that Keras gives to a layer without one, before its number: "dense"."""
    return to_snake_case(type(layer).__name__)


def place_of(store) -> str:
    """Returns the path in a file of Keras 3 that a layer's `load_own_variables` reads."""
    return store._h5_entry_path
