"""Tells which pixels and classes a file of weights was trained on; a config takes the pixels.

Takes the file and the model's name; gives mean, std and order of colours, and how they are known.

    known = of_file("resnet50_notop.h5", "resnet50")     # Known(pixels, "Keras's table ...")
    class_names_of("runs/a/export/1/model.keras")        # ("cat", "dog"), or () if unknown
    sections = with_pixels(sections)     # data.mean, data.std, model.weights_order if not given

A file beside the weights tells it, or their format together with the table in keras_pixels.py. It
does not need TensorFlow, and reads no weights.
"""

import dataclasses
import json
import pathlib
import re
from collections.abc import Mapping

from tfaccel.common.regular_file import read_regular
from tfaccel.config.keras_pixels import Pixels, trained_on
from tfaccel.config.names import weights_in
from tfaccel.config.segmentation import backbone_name

OF_EXPORT = "tfaccel.json"
TABLE = "tfaccel/config/keras_pixels.py, from Keras 3.15"


@dataclasses.dataclass(frozen=True)
class Known:
    """The pixels of a file of weights.

    Attributes:
      pixels: how they are normalised.
      source: what says so.
      is_sure: whether the file can be of no other origin, so that a config may take them unasked.
    """

    pixels: Pixels
    source: str
    is_sure: bool = True


def of_file(weights: str, name: str) -> Known | None:
    """Returns the pixels that a file was trained on, or None if nothing tells it.

    Args:
      weights: the path of the file, or the folder of an export or a run. It need not exist.
      name: the model's name.
    """
    path = weights_in(weights)
    for file, read in (
        (OF_EXPORT, _of_export),
        ("image_converter.json", _of_keras_hub),
        ("config.json", _of_timm),
    ):
        pixels = read(_json(path.with_name(file)))
        if pixels is not None:
            return Known(pixels, f"{file} beside the weights")
    table = trained_on(name)
    if table is None:
        return None
    if path.suffix == ".safetensors":
        of_torch = trained_on("resnet50_v1_5")  # torchvision's and nearly all of timm's
        return Known(of_torch, "torchvision's and timm's default for ImageNet")
    is_keras_own = path.suffix in (".h5", ".hdf5") and not path.name.endswith(".weights.h5")
    return Known(table, f"the table of keras.applications ({TABLE})", is_sure=is_keras_own)


def class_names_of(weights: str) -> tuple[str, ...]:
    """Returns the classes of an export's weights in their order; none if nothing tells them.

    Args:
      weights: as in `of_file`.
    """
    names = _json(weights_in(weights).with_name(OF_EXPORT)).get("class_names")
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        return ()
    return tuple(names)


def with_pixels(sections: Mapping[str, Mapping]) -> dict[str, dict]:
    """Returns a config's sections, with the pixels of `model.weights` where the config has none."""
    sections = {name: dict(each) for name, each in sections.items()}
    data, model = sections["data"], sections["model"]
    weights, name = model.get("weights"), model.get("name")
    are_given = isinstance(weights, str) and weights and isinstance(name, str)
    if not are_given or data.get("channels", 3) != 3:
        return sections
    known = of_file(weights, name)
    if re.fullmatch(
        r"efficientnetb[0-7]", backbone_name(name.lower())
    ):  # it takes no others: see own_scaling.py
        known = Known(Pixels((0.0,) * 3, (1 / 255,) * 3), f"{name}, which scales pixels itself")
    if known is None or not known.is_sure:
        return sections
    if data.get("mean") is None and data.get("std") is None:
        data |= {"mean": known.pixels.mean, "std": known.pixels.std}
        if model.get("weights_order") is None:
            model["weights_order"] = known.pixels.order
    return sections


def _json(path: pathlib.Path) -> dict:
    try:
        found = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _of_export(card: dict) -> Pixels | None:
    settings = card.get("preprocessing")
    return (
        _pixels(settings.get("mean"), settings.get("std")) if isinstance(settings, dict) else None
    )


def _of_timm(settings: dict) -> Pixels | None:
    settings = settings.get("pretrained_cfg", settings)
    return (
        _pixels(settings.get("mean"), settings.get("std")) if isinstance(settings, dict) else None
    )


def _of_keras_hub(settings: dict) -> Pixels | None:
    """Returns the pixels of `pixel * scale + offset`."""
    settings = settings.get("config")
    if not isinstance(settings, dict):
        return None
    given = ((settings.get("scale"), 1.0), (settings.get("offset"), 0.0))
    scale, offset = (_three(default if each is None else each) for each, default in given)
    if scale is None or offset is None or min(scale) <= 0:
        return None
    mean = [-theirs / (255 * each) for theirs, each in zip(offset, scale, strict=True)]
    return _pixels(mean, [1 / (255 * each) for each in scale])


def _pixels(mean, std) -> Pixels | None:
    mean, std = _three(mean), _three(std)
    if mean is None or std is None or min(std) <= 0:
        return None
    return Pixels(mean, std)


def _three(values) -> tuple[float, float, float] | None:
    values = values if isinstance(values, list) else [values]
    if not all(type(each) in (int, float) for each in values) or len(values) not in (1, 3):
        return None
    return tuple(float(each) for each in values) * (3 // len(values))
