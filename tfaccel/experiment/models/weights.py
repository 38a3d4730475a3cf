"""Weights that a model begins with, from a file of this machine.

Takes a built model and a file; changes the layers that the file has, and says which it has not.

    begin_from("resnet50_notop.h5", model)      # in the scope that the model was made in

Names and shapes decide what is taken. The values decide nothing: a file may well hold the very
numbers that a new model begins with, zeros and ones above all. So this module watches which
variables Keras's loaders assign to.
"""

import contextlib
import dataclasses
import logging
import pathlib
import re
import warnings
import zipfile
from collections.abc import Iterator

import h5py
import keras
import numpy as np

from tfaccel.common.errors import UserError
from tfaccel.common.run_log import summary
from tfaccel.config.names import weights_file
from tfaccel.keras_internals.layers import layers_of
from tfaccel.keras_internals.weight_files import default_name, layer_names_in, place_of

log = logging.getLogger("tfaccel")

IMAGENET_STD = (0.229, 0.224, 0.225)  # of red, green and blue, of pixels in 0..1
SHOWN = 8  # names of layers in a line

FAULTS = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    EOFError,
    RuntimeError,  # a RecursionError, too
    MemoryError,
    zipfile.BadZipFile,
)


def begin_from(file: str, model: keras.Model, *, order: str = "rgb") -> None:
    """Gives the model's layers the weights that the file has for them.

    A layer takes all of its weights or none.

    Args:
      file: that `model.save` or `model.save_weights` wrote, in one piece or in several, or one of
        keras.applications. Only numbers are read of it: no code, no pickle.
      model: built.
      order: of the colours that they were trained on. Of "bgr" the first convolution is turned
        round, so that the model takes red, green, blue: the sum over the colours is the same.

    Raises:
      UserError: there is no such file, it cannot be read, it fits no layer, it is of another
        architecture, or there is no first convolution of three colours to turn round.
    """
    path = weights_file(file)
    try:
        taken = _load(path, model)
    except FAULTS as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(
            f"model.weights={file!r} cannot be read for {model.name} ({reason}); give a file of "
            "the same architecture"
        ) from error
    if not taken.layers:
        raise UserError(
            f"model.weights={file!r} fits no layer of {model.name}; give a file of the same "
            "architecture"
        )
    if taken.others:
        raise UserError(
            f"model.weights={file!r} is of another architecture than {model.name}: among the "
            f"layers that fit it has {_listed(taken.others)}; give a file of the same architecture"
        )
    _say(taken, path)
    if order == "bgr":
        _turn_round(taken, file, model)
    _normalise_as_keras(model)


@dataclasses.dataclass(frozen=True)
class Taken:
    """What a model took of a file.

    Attributes:
      layers: that have their weights of the file.
      missing: names of the layers that the file does not have.
      other_shapes: names of those that it has with other shapes, or another number of weights.
      unused: names of the file's layers that no layer of the model took; what is known of them.
      others: names of those that show that the file is of another architecture.
      in_order: whether layers were found by their order, as the file names them otherwise.
    """

    layers: list[keras.layers.Layer]
    missing: list[str]
    other_shapes: list[str]
    unused: list[str]
    others: list[str]
    in_order: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether every layer took its weights."""
        return not self.missing and not self.other_shapes


def _say(taken: Taken, path: pathlib.Path) -> None:
    """Logs what a model took of a file, and what it did not."""
    number = len(taken.layers) + len(taken.missing) + len(taken.other_shapes)
    by = ", by their order, as the file names them otherwise" if taken.in_order else ""
    summary("model: %d of %d layers from %s%s", len(taken.layers), number, path, by)
    for names, what in (
        (taken.missing, "not in that file, so as they were"),
        (taken.other_shapes, "of other shapes in that file, so as they were"),
        (taken.unused, "in that file, but not in the model"),
    ):
        if names:
            log.warning("model: %s: %s", what, _listed(names))
    broken = [each.name for each in taken.layers if not _is_finite(each)]
    if broken:
        log.warning("model: infinite or NaN weights came from that file: %s", _listed(broken))


def _turn_round(taken: Taken, file: str, model: keras.Model) -> None:
    """Makes a first convolution of blue, green, red one of red, green, blue."""
    first = next((each for each in model.layers if isinstance(each, keras.layers.Conv2D)), None)
    if first is None or first not in taken.layers or first.kernel.shape[2] != 3:
        raise UserError(
            f"model.weights_order='bgr', but {model.name} took no first convolution of three "
            f"colours of model.weights={file!r}; leave weights_order out"
        )
    first.kernel.assign(keras.ops.flip(first.kernel, axis=2))
    log.info("model: %s turned round, from blue, green, red to red, green, blue", first.name)


def _normalise_as_keras(model: keras.Model) -> None:
    """Lets EfficientNetB0 to B7 divide by the deviation, as with `weights="imagenet"` in Keras.

    The variance of Keras's own files is the deviation; with these weights alone, Keras divides by
    its root once more (keras/src/applications/efficientnet.py).
    """
    for each in model.layers:
        if not isinstance(each, keras.layers.Normalization) or each.input_variance is not None:
            continue
        variance = keras.ops.convert_to_numpy(each.adapt_variance)
        if variance.shape == (3,) and np.allclose(variance, IMAGENET_STD, rtol=1e-3, atol=0):
            each.adapt_variance.assign(variance**2)
            each.finalize_state()
            log.info("model: %s divides by the deviation, as Keras's weights want", each.name)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _is_finite(layer: keras.layers.Layer) -> bool:
    values = [keras.ops.convert_to_numpy(each).astype(np.float64) for each in own_weights(layer)]
    return all(np.isfinite(each).all() for each in values)


# Loading.


def _load(path: pathlib.Path, model: keras.Model) -> Taken:
    """Loads what fits; a layer that took a part of its weights has its own ones back."""
    before = {id(each): keras.ops.convert_to_numpy(each) for each in model.weights}
    if path.name.endswith((".keras", ".weights.h5", ".weights.json")):
        return _load_numbered(path, model, before)
    # Files before Keras 3 name their layers. Names that Keras made ("dense_3") are others in each
    # process, so the order counts where it fits every layer and names do not.
    named = _load_named(path, model, before)
    if named.is_whole:
        return named
    _put_back(model.weights, before)
    with _watched(model) as seen, contextlib.suppress(*FAULTS):
        model.load_weights(path)
    ordered = _judged(model, before, seen)
    if ordered.is_whole:
        return dataclasses.replace(ordered, in_order=True)
    _put_back(model.weights, before)
    return _load_named(path, model, before)


def _load_named(path: pathlib.Path, model: keras.Model, before: dict) -> Taken:
    """Loads a file that names its layers, each into the layer of that name."""
    with _watched(model) as seen:
        model.load_weights(path, skip_mismatch=True, by_name=True)
    taken = _judged(model, before, seen)
    tops = _tops(model)
    used = {tops[id(each)] for each in taken.layers if id(each) in tops}
    have = {each.name for each in model.layers}
    names = layer_names_in(path)
    places = [index for index, each in enumerate(names) if each in used] or [0]
    # In front may be a Normalization that the model is built without, and behind another head.
    between = names[places[0] : places[-1]]
    return dataclasses.replace(
        taken,
        unused=[each for each in names if each not in have],
        others=[each for each in between if each not in have],
    )


def _tops(model: keras.Model) -> dict[int, str]:
    """Returns, by id of a layer at any depth, the name of the model's own layer that holds it."""
    return {id(each): top.name for top in model.layers for each in layers_of(top)}


def _load_numbered(path: pathlib.Path, model: keras.Model, before: dict) -> Taken:
    """Loads a file of Keras 3, which numbers layers by their kinds, and has their names beside.

    A number may be another layer's where the architecture is another one: "conv2d_30" of a deeper
    network. So names that people gave decide; the number does for the others, and where every
    layer fits by it.
    """
    with _watched(model) as seen:
        model.load_weights(path, skip_mismatch=True)
    taken = _judged(model, before, seen)
    groups = sorted(each for each in seen.groups if each.startswith("layers/"))
    unused = [each for each in groups if each not in seen.paths.values()]
    renamed = [each for each in taken.layers if id(each) in seen.renamed]
    if taken.is_whole and not unused:
        return taken
    for each in renamed:
        _put_back(own_weights(each), before)
    return dataclasses.replace(
        taken,
        layers=[each for each in taken.layers if each not in renamed],
        missing=[*taken.missing, *(each.name for each in renamed)],
        unused=[seen.groups[each] for each in unused],
        others=[seen.groups[each] for each in unused if _is_between(each, seen)],
    )


def _is_between(path: str, seen: "_Seen") -> bool:
    """Whether a layer of the file comes before and after layers of its kind that were taken."""
    kind, number = _kind_and_number(path)
    taken = [_kind_and_number(each) for each in seen.paths.values()]
    numbers = [other for each, other in taken if each == kind]
    return bool(numbers) and min(numbers) < number < max(numbers)


def _kind_and_number(path: str) -> tuple[str, int]:
    """Returns ("layers/dense", 3) of "layers/dense_3", and 0 where there is no number."""
    kind, number = re.fullmatch(r"(.*?)(?:_(\d+))?", path).groups()
    return kind, int(number or 0)


def _is_given(layer: keras.layers.Layer, name: str) -> bool:
    """Whether a person gave such a layer the name; Keras makes "dense_3"."""
    return not re.fullmatch(rf"{default_name(layer)}(_\d+)?", name)


def _judged(model: keras.Model, before: dict, seen: "_Seen") -> Taken:
    """Returns which layers took all of their weights; those that took some have theirs back."""
    layers, missing, other_shapes = [], [], []
    tops = _tops(model)
    for layer in layers_of(model):
        own = own_weights(layer)
        if not own:
            continue
        if all(id(each) in seen.assigned for each in own):
            layers.append(layer)
            continue
        _put_back(own, before)
        is_there = (
            id(layer) in seen.paths
            or any(id(each) in seen.assigned for each in own)
            or any(f"weight {each.path}. " in seen.complaints for each in own)
            or f"(named {tops.get(id(layer))}) due to mismatch in number" in seen.complaints
        )
        (other_shapes if is_there else missing).append(layer.name)
    return Taken(layers, missing, other_shapes, unused=[], others=[])


def _put_back(variables: list[keras.Variable], before: dict[int, np.ndarray]) -> None:
    """Gives variables the values that they had before anything was loaded."""
    for each in variables:
        each.assign(before[id(each)])


def own_weights(layer: keras.layers.Layer) -> list[keras.Variable]:
    """Returns the variables of the layer itself, without those of layers in it."""
    inner = {id(weight) for each in layers_of(layer, include_self=False) for weight in each.weights}
    return [each for each in layer.weights if id(each) not in inner]


# What Keras's loaders do.


@dataclasses.dataclass
class _Seen:
    """What was seen of a load.

    Attributes:
      assigned: ids of the variables that were given a value.
      complaints: what Keras warned of, which has the paths of variables of another shape.
      files: that were looked through for places; several where weights are in several.
      groups: of a file of Keras 3: each layer's place in it, and its name there.
      paths: by id of a layer: the place that its values were looked for.
      renamed: ids of the layers whose place has another name, which somebody gave.
    """

    assigned: set[int] = dataclasses.field(default_factory=set)
    complaints: str = ""
    files: set[str] = dataclasses.field(default_factory=set)
    groups: dict[str, str] = dataclasses.field(default_factory=dict)
    paths: dict[int, str] = dataclasses.field(default_factory=dict)
    renamed: set[int] = dataclasses.field(default_factory=set)


@contextlib.contextmanager
def _watched(model: keras.Model) -> Iterator[_Seen]:
    """Within the context, notes what is loaded into the model; Keras's warnings are not shown."""
    seen = _Seen()
    layers = layers_of(model)
    for each in model.weights:
        vars(each)["assign"] = _noting_assign(each, seen)
    names = {each.name for each in layers}
    for each in layers:
        vars(each)["load_own_variables"] = _noting_load(each, names, seen)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")  # a line for each layer
            yield seen
    finally:
        for each in model.weights:
            vars(each).pop("assign", None)
        for each in layers:
            vars(each).pop("load_own_variables", None)
        seen.complaints = "\n".join(str(each.message) for each in caught)


def _noting_assign(variable: keras.Variable, seen: _Seen):
    own = variable.assign

    def assign(value):
        result = own(value)
        seen.assigned.add(id(variable))
        return result

    return assign


def _noting_load(layer: keras.layers.Layer, names: set[str], seen: _Seen):
    own = layer.load_own_variables

    def load_own_variables(store):
        if not layer.weights:
            return own(store)
        if store.h5_file.filename not in seen.files:
            seen.files.add(store.h5_file.filename)
            seen.groups.update(_groups(store))
        path = place_of(store)
        by_name = [each for each, name in seen.groups.items() if name == layer.name]
        if _is_given(layer, layer.name) and len(by_name) == 1:
            path = by_name[0]
        name = seen.groups.get(path)
        is_other = name is not None and name != layer.name and _is_given(layer, name)
        if is_other and name in names:
            raise KeyError(f"{path} is {name}, not {layer.name}")
        if name is not None:  # else Keras asks elsewhere in the file
            seen.paths.setdefault(id(layer), path)
        if is_other and _is_given(layer, layer.name):
            seen.renamed.add(id(layer))
        return own(store.get(path))

    return load_own_variables


def _groups(store) -> dict[str, str]:
    """Returns the places of a file that hold numbers, and the names of the layers they are of.

    A file of several pieces does not have all names: then the place stands for it.
    """
    found = {}

    def look(path, group):
        if path.endswith("/vars") and isinstance(group, h5py.Group) and len(group):
            found[path.removesuffix("/vars")] = group.attrs.get("name")

    store.h5_file.visititems(look)
    return {path: name or path.rpartition("/")[2] for path, name in found.items()}
