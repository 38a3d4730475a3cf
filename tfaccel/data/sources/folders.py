"""A folder of class folders, checked and listed.

    root/<class name>/<any name>.png

Takes the folder; gives the files, their labels and the class names. Classes are numbered by the
sorted order of their names as text ("10" before "2"), as Keras and DALI number them.

    source = class_folders("mnist_png/training")
    source.images.files[0], source.labels[0], source.class_names
"""

import logging
import os
import pathlib
from collections.abc import Sequence

import numpy as np

from tfaccel.data.source import Blobs, ImageSource
from tfaccel.data.sources.paths import absolute, nearest
from tfaccel.data.sources.pillow import IMAGE_SUFFIXES
from tfaccel.errors import UserError

log = logging.getLogger("tfaccel")


def class_folders(
    root: str | os.PathLike, *, class_names: Sequence[str] | None = None
) -> ImageSource:
    """Lists the class folders below `root`. Names that start with a dot are passed over.

    Gives whole files, sorted by class, then by name; labels [num_examples] int32, an index into
    `class_names`. The images may be of any size and of 1 or 3 channels.

    Args:
      root: the folder of class folders.
      class_names: all classes in order, as for a test set that lacks some: `train.class_names`.
        None for the sorted names of the folders.

    Raises:
      UserError: the folder is missing or empty, holds images beside the class folders or a class
        that `class_names` lacks, or a class folder is empty or holds something that is not named
        like an image.
    """
    files, labels, class_names = list_classes(root, IMAGE_SUFFIXES, class_names)
    return ImageSource(Blobs(files), labels, class_names)


def list_classes(
    root: str | os.PathLike,
    suffixes: tuple[str, ...],
    class_names: Sequence[str] | None = None,
) -> tuple[tuple[str, ...], np.ndarray, tuple[str, ...]]:
    """Returns absolute files, their labels [num_examples] int32, and the class names.

    Args:
      root: the folder of class folders.
      suffixes: what a file's name may end in, in lowercase.
      class_names: as for `class_folders`.

    Raises:
      UserError: as `class_folders`.
    """
    root = absolute(root)
    classes = _list(root)
    stray = next((entry for entry in classes if not entry.is_dir()), None)
    if stray:
        raise UserError(
            f"image folder {root} holds the file '{stray.name}'; expected one folder per class "
            "and nothing else: move the file away, or put images into class folders"
        )
    if not classes:
        raise UserError(f"image folder {root} is empty; expected one folder of images per class")
    found = [folder.name for folder in classes]
    class_names = tuple(found if class_names is None else class_names)
    unknown = sorted(set(found) - set(class_names))
    if unknown:
        raise UserError(
            f"image folder {root} has the class '{unknown[0]}', which is not among the "
            f"{len(class_names)} class_names, {', '.join(class_names[:3])}"
            f"{', ...' if len(class_names) > 3 else ''}; move it away, or add it to the others"
        )
    missing = [each for each in class_names if each not in found]
    if missing:
        log.warning("data: %s has no images of the class %s", root, ", ".join(missing))
    per_class = [_files(folder, root) for folder in classes]
    _check_suffixes([file for files in per_class for file in files], suffixes)
    counts = [len(each) for each in per_class]
    return (
        tuple(file for files in per_class for file in files),
        np.repeat(np.array([class_names.index(each) for each in found], np.int32), counts),
        class_names,
    )


def _list(folder: pathlib.Path) -> list[os.DirEntry]:
    """Returns the folder's entries by name, without those whose name starts with a dot."""
    wanted = "a folder with one folder per class"
    try:
        with os.scandir(folder) as entries:
            shown = [entry for entry in entries if not entry.name.startswith(".")]
    except FileNotFoundError:
        cure = nearest(folder, kind="folder", wanted=wanted)
        raise UserError(f"image folder {folder} does not exist{cure}") from None
    except (NotADirectoryError, PermissionError) as error:
        raise UserError(
            f"image folder {folder} cannot be listed ({error.strerror}); expected a folder that "
            "holds one folder of images per class"
        ) from None
    return sorted(shown, key=lambda entry: entry.name)


def _files(folder: os.DirEntry, root: pathlib.Path) -> list[str]:
    entries = _list(pathlib.Path(folder.path))
    if not entries:
        raise UserError(
            f"class folder {folder.path} is empty; put images into it, or remove it from {root}"
        )
    below = [entry.name for entry in entries if entry.is_dir()]
    if below:
        cure = (
            f"did you mean {folder.path} as the image folder?"
            if len(below) == len(entries)
            else "move it away"
        )
        raise UserError(
            f"class folder {folder.path} holds '{below[0]}', a folder; expected only images: {cure}"
        )
    # A broken link stays: it is named when it is read.
    special = [entry for entry in entries if not entry.is_file() and os.path.exists(entry.path)]
    if special:
        log.warning(
            "data: %s is a FIFO, a device or a socket and no image; %d such files of %s are left "
            "out",
            special[0].path,
            len(special),
            folder.path,
        )
    files = [entry.path for entry in entries if entry not in special]
    if not files:
        raise UserError(f"class folder {folder.path} holds no file; put images into it")
    return files


def _check_suffixes(files: list[str], suffixes: tuple[str, ...]) -> None:
    """Raises UserError for all files at once that are not named like images."""
    strays = [file for file in files if not file.lower().endswith(suffixes)]
    if strays:
        (folder, name), others = os.path.split(strays[0]), strays[1:]
        verb = "is 1 other" if len(others) == 1 else f"are {len(others)} others"
        cure = "move them away or convert them" if others else "move it away or convert it"
        also = f", nor {verb}, first {', '.join(others[:2])}" if others else ""
        raise UserError(
            f"class folder {folder} holds '{name}', not an image{also}; expected only images "
            f"({' '.join(suffixes)}): {cure}"
        )
