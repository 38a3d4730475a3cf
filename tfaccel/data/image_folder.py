"""A folder of class folders, checked and listed.

    root/<class name>/<any name>.png

Takes the folder; gives the files, their labels and the class names. Classes are numbered by the
sorted order of their names as text ("10" before "2"), as Keras and DALI number them.

    folder = scan("mnist_png/training")
    folder.files[0], folder.labels[0], folder.class_names
"""

import dataclasses
import logging
import os
import pathlib
from collections.abc import Iterable

import numpy as np
import PIL.Image

from tfaccel.errors import UserError, did_you_mean

# What both DALI and Pillow decode, so that a file that fails in one can be named by the other.
IMAGE_SUFFIXES = (".bmp", ".jp2", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")

# What Pillow raises for files that are no image, cut short, or too large to be honest.
UNREADABLE = (OSError, SyntaxError, PIL.Image.DecompressionBombError)

log = logging.getLogger("tfaccel")


@dataclasses.dataclass(frozen=True)
class ImageFolder:
    """Labelled image files.

    Attributes:
      files: absolute paths, sorted by class, then by name.
      labels: [num_examples] int32, an index into `class_names` for each file.
      class_names: the names of the class folders, sorted.
    """

    files: tuple[str, ...]
    labels: np.ndarray
    class_names: tuple[str, ...]


def scan(root: str | os.PathLike) -> ImageFolder:
    """Lists the class folders below `root`. Names that start with a dot are passed over.

    Raises:
      UserError: the folder is missing or empty, holds images beside the class folders, or a class
        folder is empty or holds something that is not named like an image.
    """
    root = pathlib.Path(root).expanduser().absolute()
    classes = _list(root)
    stray = next((entry for entry in classes if not entry.is_dir()), None)
    if stray:
        raise UserError(
            f"image folder {root} holds the file '{stray.name}'; expected one folder per class "
            "and nothing else: move the file away, or put images into class folders"
        )
    if not classes:
        raise UserError(f"image folder {root} is empty; expected one folder of images per class")
    per_class = [_images(folder, root) for folder in classes]
    return ImageFolder(
        files=tuple(file for files in per_class for file in files),
        labels=np.repeat(
            np.arange(len(classes), dtype=np.int32), [len(each) for each in per_class]
        ),
        class_names=tuple(folder.name for folder in classes),
    )


def undecodable(files: Iterable[str]) -> list[str]:
    """Returns `"path (cause)"` for each file that Pillow cannot decode either."""
    bad = []
    for file in files:
        try:
            with PIL.Image.open(file) as image:
                image.load()
        except UNREADABLE as error:
            bad.append(f"{file} ({error})")
    return bad


def log_resize(folder: ImageFolder, size: tuple[int, int]) -> None:
    """Says whether the files are resized to `size`, going by the first one."""
    found = image_size(folder.files[0])
    if found != size:
        log.info("data: images are resized to %dx%d; the first file is %dx%d", *size, *found)


def image_size(file: str) -> tuple[int, int]:
    """Returns (height, width) in pixels as the file's header has them.

    Raises:
      UserError: the file is not an image.
    """
    try:
        with PIL.Image.open(file) as image:
            return image.height, image.width
    except UNREADABLE as error:
        raise UserError(
            f"{file} cannot be read as an image ({error}); replace it or move it away"
        ) from error


def _list(folder: pathlib.Path) -> list[os.DirEntry]:
    """Returns the folder's entries by name, without those whose name starts with a dot."""
    try:
        with os.scandir(folder) as entries:
            shown = [entry for entry in entries if not entry.name.startswith(".")]
    except FileNotFoundError:
        raise UserError(f"image folder {folder} does not exist{_nearest(folder)}") from None
    except (NotADirectoryError, PermissionError) as error:
        raise UserError(
            f"image folder {folder} cannot be listed ({error.strerror}); expected a folder that "
            "holds one folder of images per class"
        ) from None
    return sorted(shown, key=lambda entry: entry.name)


def _images(folder: os.DirEntry, root: pathlib.Path) -> list[str]:
    entries = _list(pathlib.Path(folder.path))
    if not entries:
        raise UserError(
            f"class folder {folder.path} is empty; put images into it, or remove it from {root}"
        )
    for entry in entries:
        if entry.is_dir():
            kind, cure = "a folder", f"did you mean {folder.path} as the image folder?"
        elif not entry.name.lower().endswith(IMAGE_SUFFIXES):
            kind, cure = "not an image", "move it away or convert it"
        else:
            continue
        raise UserError(
            f"class folder {folder.path} holds '{entry.name}', {kind}; expected only images "
            f"({' '.join(IMAGE_SUFFIXES)}): {cure}"
        )
    return [entry.path for entry in entries]


def _nearest(folder: pathlib.Path) -> str:
    """Says what lies where the missing folder was expected."""
    parent = folder.parent
    if not parent.is_dir():
        return f", nor does {parent}; give the path of a folder with one folder per class"
    siblings = [each.name for each in parent.iterdir() if each.is_dir()]
    if not siblings:
        return f"; {parent} holds no folders at all"
    return did_you_mean(folder.name, siblings)
