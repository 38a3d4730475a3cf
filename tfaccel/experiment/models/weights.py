"""Loads the weights that a model begins with from a local file.

`begin_from` takes a file and a built model. It changes the layers that the file has, and logs those
that it lacks.

    begin_from("resnet50_notop.h5", model)      # in the scope that the model was made in

Files of other libraries, whose names differ, are translated first (translated.py).

Names and shapes decide which layers are loaded. Comparing values would not work: a file may have
the same numbers as a new model, above all zeros and ones. So this module watches which variables
Keras's loaders assign.
"""

import contextlib
import dataclasses
import fnmatch
import logging
import pathlib
import random
import re
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Sequence

import h5py
import keras
import numpy as np

from tfaccel.common.errors import UserError, did_you_mean
from tfaccel.common.regular_file import open_regular
from tfaccel.common.run_log import summary
from tfaccel.config.names import weights_file
from tfaccel.config.segmentation import is_of_decoder
from tfaccel.config.weights_pixels import class_names_of
from tfaccel.experiment.models import safetensors_file
from tfaccel.experiment.models.translated import (
    HEAD,
    Tensors,
    is_head,
    read_keras_hub,
    translated,
    units_of,
)
from tfaccel.keras_internals.layers import layers_of
from tfaccel.keras_internals.weight_files import default_name, layer_names_in, place_of

log = logging.getLogger("tfaccel")

IMAGENET_STD = (0.229, 0.224, 0.225)  # of red, green and blue, for pixels in 0..1
SHOWN = 8  # names of layers in a message

FAULTS = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    EOFError,
    RuntimeError,  # also a RecursionError
    MemoryError,
    zipfile.BadZipFile,
)


@contextlib.contextmanager
def drawn_anew(file: str) -> Iterator[None]:
    """Within the context, Keras draws initial weights that do not depend on the seed alone.

    They depend on the seed and on the bytes of the file. If they depended on the seed alone, and
    the file came from a run with the same seed, a new head would begin as the head of that run
    began. The trained features fit such a head, so it would be sure of wrong classes. That cost 10
    points of accuracy on 100 images of each of 5 new classes of CIFAR-10 (2026-11-30).

    Args:
      file: the file of weights that the model will begin from.

    Raises:
      UserError: there is no such file, or it cannot be read.
    """
    path, state = weights_file(file), random.getstate()
    seed = random.getrandbits(32)  # Keras draws the seeds of initializers from this generator
    parts = path.parent.glob(f"{path.name.removesuffix('.weights.json')}_*.weights.h5")
    for each in [path, *(sorted(parts) if path.suffix == ".json" else ())]:
        try:
            with open_regular(each) as opened:
                while chunk := opened.read(2**20):
                    seed = zlib.crc32(chunk, seed)
        except OSError as error:
            raise UserError(
                f"model.weights={file!r} cannot be read ({error.strerror or error}); give a file "
                "that can"
            ) from error
    try:
        random.seed(seed)
        yield
    finally:
        random.setstate(state)


def begin_from(
    file: str,
    model: keras.Model,
    *,
    order: str = "rgb",
    new_layers: Sequence[str] = (),
    class_names: Sequence[str] = (),
) -> None:
    """Loads the weights that the file has for the model's layers.

    A layer gets all of its weights or none.

    Args:
      file: a file of `model.save` or `model.save_weights`, in one piece or several, a file of
        keras.applications, `model.weights.h5` of a KerasHub preset, or a `.safetensors` file of
        torchvision or timm. Only numbers are read from it: no code, no pickle. The folder of an
        export or a run stands for its newest model.keras.
      model: the built model.
      order: the order of the colors that the weights were trained on. For "bgr" the first
        convolution is flipped, so that the model takes red, green, blue with the same result.
      new_layers: names of layers that keep their weights although the file has them; "*" stands for
        any letters, and "head" for the last layer with weights.
      class_names: the classes of the data, if there are any. A warning says if the file's are
        others, and the head is loaded nevertheless.

    Raises:
      UserError: the file does not exist, cannot be read, fits no layer, or is of another
        architecture; there is no first convolution of three colors to flip; or there is no layer
        of such a name.
    """
    path = weights_file(file)
    new = [(each, each.get_weights()) for name in new_layers for each in _named(name, model)]
    try:
        loaded = _load(path, model)
    except UserError:
        raise
    except FAULTS as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(
            f"model.weights={file!r} cannot be read for {model.name} ({reason}); use a file of the "
            "same architecture"
        ) from error
    if not loaded.layers:
        raise UserError(
            f"model.weights={file!r} fits no layer of {model.name}; use a file of the same "
            "architecture"
        )
    if loaded.others:
        raise UserError(
            f"model.weights={file!r} is of another architecture than {model.name}: between the "
            f"layers that fit it has {_listed(loaded.others)}; use a file of the same architecture"
        )
    _log_loaded(loaded, path)
    for layer, values in new:
        layer.set_weights(values)
    if new:
        summary("model: random weights, as asked: %s", _listed([each.name for each, _ in new]))
    head = _named("head", model)[0]
    if head in loaded.layers and head not in [each for each, _ in new]:
        _compare_classes(class_names_of(file), class_names, head)
    if order == "bgr":
        _flip_colors(loaded, file, model)
    _square_deviation(model)


def _named(name: str, model: keras.Model) -> list[keras.layers.Layer]:
    layers = [each for each in layers_of(model, include_self=False) if each.weights]
    found = [each for each in layers if fnmatch.fnmatchcase(each.name, name)]
    if not found and name == "head":
        found = [each for each in model.layers if each.weights][-1:]
    if not found:
        raise UserError(
            f"model.new_layers: {model.name} has no layer {name!r} with weights"
            f"{did_you_mean(name, [each.name for each in layers])}"
        )
    return found


@dataclasses.dataclass(frozen=True)
class Loaded:
    """The result of loading a file into a model.

    Attributes:
      layers: the layers that got their weights from the file.
      missing: names of the layers that the file does not have.
      other_shapes: names of layers with other shapes, or another number of weights, in the file.
      unused: names of the file's layers that were not loaded, as far as they are known.
      others: those of them that show that the file is of another architecture.
      in_order: whether layers were matched by order, because the file has other names.
    """

    layers: list[keras.layers.Layer]
    missing: list[str]
    other_shapes: list[str]
    unused: list[str]
    others: list[str]
    in_order: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether every layer got its weights."""
        return not self.missing and not self.other_shapes


def _log_loaded(loaded: Loaded, path: pathlib.Path) -> None:
    number = len(loaded.layers) + len(loaded.missing) + len(loaded.other_shapes)
    by = ", matched by order, because the file has other names" if loaded.in_order else ""
    summary("model: %d of %d layers from %s%s", len(loaded.layers), number, path, by)
    for names, what in (
        (loaded.missing, "not in that file, so they start from random values"),
        (loaded.other_shapes, "with other shapes in that file, so they start from random values"),
        (loaded.unused, "in that file, but not in the model"),
    ):
        if names:
            log.warning("model: %s: %s", what, _listed(names))
    broken = [each.name for each in loaded.layers if not _is_finite(each)]
    if broken:
        log.warning("model: that file has infinite or NaN weights for: %s", _listed(broken))


def _compare_classes(
    of_file: Sequence[str], of_data: Sequence[str], head: keras.layers.Layer
) -> None:
    """Warns if a head that was loaded tells other classes apart, or the same in another order."""
    if not of_file or not of_data or tuple(of_file) == tuple(of_data):
        return
    log.warning(
        "model: the head, %s, begins with weights for other classes or another order: the file's "
        "are %s, and the data's are %s; to begin with a new head, use "
        "--config.model.new_layers=head",
        *(head.name, _listed(list(of_file)), _listed(list(of_data))),
    )


def _flip_colors(loaded: Loaded, file: str, model: keras.Model) -> None:
    """Changes a first convolution for blue, green, red into one for red, green, blue."""
    first = next((each for each in model.layers if isinstance(each, keras.layers.Conv2D)), None)
    if first is None or first not in loaded.layers or first.kernel.shape[2] != 3:
        raise UserError(
            f"model.weights_order='bgr', but {model.name} loaded no first convolution of three "
            f"colors from model.weights={file!r}; remove weights_order"
        )
    first.kernel.assign(keras.ops.flip(first.kernel, axis=2))
    log.info("model: flipped %s from blue, green, red to red, green, blue", first.name)


def _square_deviation(model: keras.Model) -> None:
    """Lets EfficientNetB0 to B7 divide by the deviation, as Keras does with `weights="imagenet"`.

    Keras's own files store the deviation as the variance. When Keras loads such a file into a model
    built without weights, the model divides by the square root of the deviation
    (keras/src/applications/efficientnet.py).
    """
    for each in model.layers:
        if not isinstance(each, keras.layers.Normalization) or each.input_variance is not None:
            continue
        variance = keras.ops.convert_to_numpy(each.adapt_variance)
        if variance.shape == (3,) and np.allclose(variance, IMAGENET_STD, rtol=1e-3, atol=0):
            each.adapt_variance.assign(variance**2)
            each.finalize_state()
            log.info("model: %s divides by the deviation, as Keras's weights need", each.name)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _is_finite(layer: keras.layers.Layer) -> bool:
    values = [keras.ops.convert_to_numpy(each).astype(np.float64) for each in own_weights(layer)]
    return all(np.isfinite(each).all() for each in values)


# Loading.


def _load(path: pathlib.Path, model: keras.Model) -> Loaded:
    """Loads the layers that fit. A layer that gets only some of its weights is put back."""
    if path.suffix == ".safetensors":
        return _load_translated(path, model, safetensors_file.read(path))
    if path.name.endswith(".weights.h5") and (arrays := read_keras_hub(path)) is not None:
        return _load_translated(path, model, arrays)
    before = {id(each): keras.ops.convert_to_numpy(each) for each in model.weights}
    if path.name.endswith((".keras", ".weights.h5", ".weights.json")):
        return _load_numbered(path, model, before)
    # Files from before Keras 3 name their layers. Names that Keras made ("dense_3") differ between
    # processes. So the order decides if it fits every layer and the names do not.
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


def _load_translated(path: pathlib.Path, model: keras.Model, arrays: dict) -> Loaded:
    """Loads a file with another library's names. The whole body must fit; the head need not.

    Raises:
      UserError: a layer does not fit, or the file has numbers that the model has no place for.
    """
    tensors = Tensors(arrays)
    given = translated(model, tensors)
    layers, head, misfits = [], {"missing": [], "other_shapes": []}, []
    for unit in units_of(model):
        shapes = [each.shape for each in given.get(unit.name, ())]
        if shapes == [tuple(each.shape) for each in unit.weights]:
            layers.append(unit)
        elif unit.name == HEAD or is_of_decoder(unit.name):
            head["other_shapes" if shapes else "missing"].append(unit.name)
        else:
            misfits.append(f"{unit.name} {'has other shapes' if shapes else 'is not there'}")
    left = [each for each in tensors.left if not is_head(each)]
    if misfits or left:
        reasons = []
        if misfits:
            reasons.append(f"of its layers, {_listed(misfits)}")
        if left:
            reasons.append(f"the file also has {_listed(left)}")
        raise UserError(
            f"model.weights={str(path)!r} is of another architecture than {model.name}: "
            f"{'; '.join(reasons)}; use a file of the same architecture, with the same sizes"
        )
    for unit in layers:
        for variable, array in zip(unit.weights, given[unit.name], strict=True):
            variable.assign(np.asarray(array, np.float32))
    leaves = [each for unit in layers for each in layers_of(unit) if own_weights(each)]
    return Loaded(leaves, **head, unused=[], others=[])


def _load_named(path: pathlib.Path, model: keras.Model, before: dict) -> Loaded:
    """Loads a file with named layers; each goes into the model's layer of that name."""
    with _watched(model) as seen:
        model.load_weights(path, skip_mismatch=True, by_name=True)
    loaded = _judged(model, before, seen)
    tops = _tops(model)
    used = {tops[id(each)] for each in loaded.layers if id(each) in tops}
    have = {each.name for each in model.layers}
    names = layer_names_in(path)
    places = [index for index, each in enumerate(names) if each in used] or [0]
    # Before them may be a Normalization that this model lacks, and after them another head.
    between = names[places[0] : places[-1]]
    return dataclasses.replace(
        loaded,
        unused=[each for each in names if each not in have],
        others=[each for each in between if each not in have],
    )


def _tops(model: keras.Model) -> dict[int, str]:
    """Returns, by the id of a layer at any depth, the name of the top layer that it is in."""
    return {id(each): top.name for top in model.layers for each in layers_of(top)}


def _load_numbered(path: pathlib.Path, model: keras.Model, before: dict) -> Loaded:
    """Loads a file of Keras 3, which numbers the layers of each kind and also has their names.

    If the architecture differs, a number may mean another layer, such as "conv2d_30" of a deeper
    network. So names that people gave decide. The number decides for the other layers, and for all
    layers if it fits every one.
    """
    with _watched(model) as seen:
        model.load_weights(path, skip_mismatch=True)
    loaded = _judged(model, before, seen)
    groups = sorted(each for each in seen.groups if each.startswith("layers/"))
    unused = [each for each in groups if each not in seen.paths.values()]
    renamed = [each for each in loaded.layers if id(each) in seen.renamed]
    if loaded.is_whole and not unused:
        return loaded
    for each in renamed:
        _put_back(own_weights(each), before)
    return dataclasses.replace(
        loaded,
        layers=[each for each in loaded.layers if each not in renamed],
        missing=[*loaded.missing, *(each.name for each in renamed)],
        unused=[seen.groups[each] for each in unused],
        others=[seen.groups[each] for each in unused if _is_between(each, seen)],
    )


def _is_between(path: str, seen: "_Seen") -> bool:
    """Returns whether a layer of the file is between loaded layers of its kind."""
    kind, number = _kind_and_number(path)
    loaded = [_kind_and_number(each) for each in seen.paths.values()]
    numbers = [other for each, other in loaded if each == kind]
    return bool(numbers) and min(numbers) < number < max(numbers)


def _kind_and_number(path: str) -> tuple[str, int]:
    """Returns ("layers/dense", 3) for "layers/dense_3"; the number is 0 if there is none."""
    kind, number = re.fullmatch(r"(.*?)(?:_(\d+))?", path).groups()
    return kind, int(number or 0)


def _is_given(layer: keras.layers.Layer, name: str) -> bool:
    """Returns whether a person chose the layer's name; Keras makes names like "dense_3"."""
    return not re.fullmatch(rf"{default_name(layer)}(_\d+)?", name)


def _judged(model: keras.Model, before: dict, seen: "_Seen") -> Loaded:
    """Returns which layers got all of their weights, and restores those that got only some."""
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
    return Loaded(layers, missing, other_shapes, unused=[], others=[])


def _put_back(variables: list[keras.Variable], before: dict[int, np.ndarray]) -> None:
    """Gives variables their values from before the load."""
    for each in variables:
        each.assign(before[id(each)])


def own_weights(layer: keras.layers.Layer) -> list[keras.Variable]:
    """Returns the variables of the layer itself, without those of layers within it."""
    inner = {id(weight) for each in layers_of(layer, include_self=False) for weight in each.weights}
    return [each for each in layer.weights if id(each) not in inner]


# Watching Keras's loaders.


@dataclasses.dataclass
class _Seen:
    """The observations during a load.

    Attributes:
      assigned: ids of the variables that were assigned.
      complaints: Keras's warnings, which have the paths of variables with another shape.
      files: the files that were searched for groups; several if the weights are in several.
      groups: for a file of Keras 3, the path of each layer's group and the layer's name there.
      paths: the group that a layer's values were read from, by the layer's id.
      renamed: ids of the layers whose group has another name that a person chose.
    """

    assigned: set[int] = dataclasses.field(default_factory=set)
    complaints: str = ""
    files: set[str] = dataclasses.field(default_factory=set)
    groups: dict[str, str] = dataclasses.field(default_factory=dict)
    paths: dict[int, str] = dataclasses.field(default_factory=dict)
    renamed: set[int] = dataclasses.field(default_factory=set)


@contextlib.contextmanager
def _watched(model: keras.Model) -> Iterator[_Seen]:
    """Within the context, notes what is loaded into the model, and hides Keras's warnings."""
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
        if name is not None:  # else Keras looks elsewhere in the file
            seen.paths.setdefault(id(layer), path)
        if is_other and _is_given(layer, layer.name):
            seen.renamed.add(id(layer))
        return own(store.get(path))

    return load_own_variables


def _groups(store) -> dict[str, str]:
    """Returns the paths of the groups with numbers in a file, and the names of their layers.

    A file in several pieces does not have all names. The end of the path then stands for the name.
    """
    found = {}

    def look(path, group):
        if path.endswith("/vars") and isinstance(group, h5py.Group) and len(group):
            found[path.removesuffix("/vars")] = group.attrs.get("name")

    store.h5_file.visititems(look)
    return {path: name or path.rpartition("/")[2] for path, name in found.items()}
