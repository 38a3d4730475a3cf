"""What `tfaccel predict` is asked about, looked at before TensorFlow starts.

Takes the command's words; gives the folder of an export and the paths of image files.

    folder = find_export(pathlib.Path("runs/a"))          # runs/a/export/3
    paths = image_files(["cat.jpg", "photographs"])       # a folder stands for the images in it
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
    """Returns the folder of an export: this one, or the newest version in it or in a run's export.

    Raises:
      UserError: it is none of these.
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
    expected = "expected the folder of an export, e.g. runs/a/export, or a run's workdir"
    if not model.exists():
        there = [str(each) for each in model.parent.glob("*/")] if model.parent.is_dir() else []
        raise UserError(f"there is no folder {model}{_like(str(model), there)}; {expected}")
    if not model.is_dir():
        raise UserError(f"{model} is a file, not the folder of an export; {expected}")
    if (model / "config.json").is_file():
        raise UserError(
            f"{model} is a run that has no export yet; let it end, or make one from its newest "
            f"checkpoint: `tfaccel export --workdir={shlex.quote(str(model))}`"
        )
    raise UserError(f"{model} holds no SavedModel, and no numbered folder with one; {expected}")


def _like(name: str, there: Sequence[str]) -> str:
    cure = did_you_mean(name, there)
    return cure if "did you mean" in cure else ""


def image_files(given: Iterable[str]) -> list[str]:
    """Returns the paths, and for each folder those of the images in it and below, in order.

    A file keeps its place even if it is not there: that is one error among answers.

    Raises:
      UserError: a folder holds no images, or none of the files is there.
    """
    given, files = list(given), []
    for each in given:
        files += _below(each) if os.path.isdir(each) else [each]
    missing = [each for each in files if not os.path.exists(each)]
    if missing and len(missing) == len(files):
        others = f", nor do the {len(missing) - 1} others" if len(missing) > 1 else ""
        raise UserError(
            f"{missing[0]} does not exist{others}; give image files, or folders of them"
        )
    return files


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
            f"the folder {folder} holds no images, and none below it ({suffixes}); give image "
            "files, or folders of them"
        )
    return sorted(found)
