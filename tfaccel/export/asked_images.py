"""The arguments of `tfaccel predict`, checked before TensorFlow starts.

folder = find_export(pathlib.Path("runs/a"))          # runs/a/export/3
paths = image_files(["cat.jpg", "photographs"])       # a folder stands for the images in it
names = picture_names(["photos/a/1.jpg", "photos/b/1.jpg"])    # ["a/1.png", "b/1.png"]
"""

import os
import pathlib
import shlex
from collections.abc import Iterable, Sequence

from tfaccel.common.errors import UserError, did_you_mean
from tfaccel.common.local_path import local_path
from tfaccel.data.sources.pillow import IMAGE_SUFFIXES
from tfaccel.training.workdir import versions


def find_export(model: pathlib.Path) -> pathlib.Path:
    """Returns an export's folder: `model`, or the newest version in it or in a run's `export`.

    Raises:
      UserError: no export is there.
    """
    model = local_path(model)
    if model.name == "saved_model.pb" and model.is_file():
        return model.parent
    if (model / "saved_model.pb").is_file():
        return model
    for folder in (model, model / "export"):
        exports = [each for each in versions(folder) if (each / "saved_model.pb").is_file()]
        if exports:
            return exports[-1]
    expected = "expected the folder of an export, for example runs/a/export, or a run's workdir"
    if not model.exists():
        there = [str(each) for each in model.parent.glob("*/")] if model.parent.is_dir() else []
        hint = did_you_mean(str(model), there)
        like = hint if "did you mean" in hint else ""
        raise UserError(f"there is no folder {model}{like}; {expected}")
    if not model.is_dir():
        raise UserError(f"{model} is a file; {expected}")
    if (model / "config.json").is_file():
        raise UserError(
            f"{model} is a run that has no export yet; wait for its end, or export its newest "
            f"checkpoint: `tfaccel export --workdir={shlex.quote(str(model))}`"
        )
    raise UserError(f"{model} has no SavedModel, and no numbered folder with one; {expected}")


def image_files(given: Iterable[str]) -> list[str]:
    """Returns the image files: the given files, and in order the images in each given folder.

    A file that does not exist keeps its place, so that its answer is an error.

    Raises:
      UserError: a folder has no images in or below it, or none of the files exists.
    """
    given, files = list(given), []
    for each in given:
        files += _below(each) if os.path.isdir(each) else [each]
    missing = [each for each in files if not os.path.exists(each)]
    if missing and len(missing) == len(files):
        others = f", and neither do {len(missing) - 1} others" if len(missing) > 1 else ""
        raise UserError(f"{missing[0]} does not exist{others}; give image files or folders of them")
    return files


def picture_names(paths: Sequence[str]) -> list[str]:
    """Returns the name of each path's PNG file: the path below the deepest folder of all of them.

    Raises:
      UserError: two images would have the same name, because only their suffixes differ.
    """
    whole = [os.path.abspath(each) for each in paths]
    common = os.path.commonpath([os.path.dirname(each) for each in whole])
    names, first = [], {}
    for given, path in zip(paths, whole, strict=True):
        name = os.path.splitext(os.path.relpath(path, common))[0] + ".png"
        other = first.setdefault(name, given)
        if other != given:
            raise UserError(
                f"{other} and {given} would both be written as {name}; predict them in two calls, "
                "with two folders as --output"
            )
        names.append(name)
    return names


def _below(folder: str) -> list[str]:
    found = [
        os.path.join(place, name)
        for place, _, names in os.walk(folder)
        for name in names
        if name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith(".")
    ]
    if not found:
        suffixes = " ".join(IMAGE_SUFFIXES)
        raise UserError(
            f"the folder {folder} has no images in or below it ({suffixes}); give image files or "
            "folders of them"
        )
    return sorted(found)
