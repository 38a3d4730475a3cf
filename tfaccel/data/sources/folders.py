"""Checks and lists a folder of class folders.

    root/<class name>/<any name>.png

Classes are numbered by the sorted order of their names as text ("10" before "2"), as in Keras and
DALI.

    source = class_folders("mnist_png/training")
    source.images.files[0], source.labels[0], source.class_names
"""

import logging
import os
import pathlib
from collections.abc import Sequence

import numpy as np

from tfaccel.common.errors import UserError
from tfaccel.common.regular_file import is_special
from tfaccel.data.file_names import FileNames
from tfaccel.data.source import Blobs, ImageSource
from tfaccel.data.sources import stored
from tfaccel.data.sources.clutter import is_clutter
from tfaccel.data.sources.labels import check_known
from tfaccel.data.sources.levels import (
    advice_on_file,
    advice_on_folders,
    folders_in,
    holds_images,
)
from tfaccel.data.sources.paths import absolute, nearest
from tfaccel.data.sources.pillow import IMAGE_SUFFIXES
from tfaccel.data.stores.files import DEFAULT_CACHE_GIB
from tfaccel.data.stores.urls import is_url

log = logging.getLogger("tfaccel")


def class_folders(
    root: str | os.PathLike,
    *,
    class_names: Sequence[str] | None = None,
    cache_gib: float = DEFAULT_CACHE_GIB,
) -> ImageSource:
    """Lists the class folders below `root`.

    Names that start with a dot are skipped, and so are files and folders of archives and file
    managers, such as `__MACOSX`, `Thumbs.db` and `desktop.ini`.

    The source has whole files, sorted by class and then by name, and labels [num_examples] int32,
    indices into `class_names`. The images may have any size and 1 or 3 channels.

    Args:
      root: the folder of class folders, or its URL in a store, such as "s3://bucket/photos".
      class_names: all classes in order, for a test set that lacks some: `train.class_names`. The
        default is the sorted names of the folders.
      cache_gib: for a URL: the most that fetched files of all stores may take on this host, in GiB.

    Raises:
      UserError: the folder is missing or empty; it holds images beside the class folders, or a
        class that `class_names` lacks; a class folder is empty or holds something that is not named
        like an image; or a link puts one file into two classes.
    """
    if is_url(root):
        files, labels, found = stored.list_classes(root, IMAGE_SUFFIXES, cache_gib=cache_gib)
        class_names, numbers = _numbered(found, class_names, root)
        return ImageSource(Blobs(files.names, reader=files), numbers[labels], class_names)
    files, labels, class_names = list_classes(root, IMAGE_SUFFIXES, class_names)
    return ImageSource(Blobs(files), labels, class_names)


def list_classes(
    root: str | os.PathLike,
    suffixes: tuple[str, ...],
    class_names: Sequence[str] | None = None,
) -> tuple[FileNames, np.ndarray, tuple[str, ...]]:
    """Returns absolute files, their labels [num_examples] int32, and the class names.

    Args:
      root: the folder of class folders.
      suffixes: suffixes of images, in lowercase.
      class_names: as in `class_folders`.

    Raises:
      UserError: as in `class_folders`.
    """
    root = absolute(root)
    classes = find_classes(root, suffixes)
    found = [folder.name for folder in classes]
    class_names, numbers = _numbered(found, class_names, root)
    counts, strays, linked = [], [], any(map(os.DirEntry.is_symlink, classes))

    def files_of_classes():  # one folder at a time, so that a million files take little memory
        nonlocal linked
        for folder in classes:
            names, odd, has_links = _files(folder, root, suffixes)
            counts.append(len(names))
            strays.extend(odd)
            linked = linked or has_links
            yield names

    files = FileNames.in_folders(str(root), found, files_of_classes())
    if strays:
        _refuse(strays, suffixes)
    if linked:
        _check_links(root, found)
    return files, np.repeat(numbers, counts), class_names


def _numbered(
    found: Sequence[str], class_names: Sequence[str] | None, root: str | os.PathLike
) -> tuple[tuple[str, ...], np.ndarray]:
    """Returns all classes' names, and [num_found] int32, the number of each class that is found."""
    class_names = tuple(found if class_names is None else class_names)
    index_of = {name: index for index, name in enumerate(class_names)}
    check_known(found, class_names, f"image folder {root} has the class")
    missing = sorted(set(class_names).difference(found), key=index_of.get)
    if missing:
        shown = f"{', '.join(missing[:10])}{', ...' if len(missing) > 10 else ''}"
        log.warning("data: %s has no images of these classes: %s", root, shown)
    return class_names, np.array([index_of[each] for each in found], np.int32)


def find_classes(
    root: pathlib.Path, suffixes: tuple[str, ...] = IMAGE_SUFFIXES
) -> list[os.DirEntry]:
    """Returns the class folders by name. It does not read what they contain.

    Args:
      root: the folder of class folders, absolute.
      suffixes: suffixes of images, in lowercase.

    Raises:
      UserError: the folder is missing or empty, or holds files.
    """
    classes = _list(root, "one folder of images per class")
    stray = next((entry for entry in classes if not entry.is_dir()), None)
    if stray:
        raise UserError(
            f"image folder {root} holds the file '{stray.name}'; expected one folder per class "
            f"and nothing else: {advice_on_file(root, stray.name, suffixes)}"
        )
    if not classes:
        raise UserError(f"image folder {root} is empty; expected one folder of images per class")
    return classes


def _list(folder: pathlib.Path, wanted: str) -> list[os.DirEntry]:
    """Returns the folder's entries by name, without clutter."""
    try:
        with os.scandir(folder) as entries:
            shown = [entry for entry in entries if not is_clutter(entry.name)]
    except FileNotFoundError:
        above = "a folder with one folder per class"
        hint = _how_to_split(folder) or nearest(folder, kind="folder", wanted=above)
        raise UserError(f"image folder {folder} does not exist{hint}") from None
    except OSError as error:
        raise UserError(
            f"image folder {folder} cannot be listed ({error.strerror}); expected a folder that "
            f"holds {wanted}"
        ) from None
    return sorted(shown, key=lambda entry: entry.name)


def _how_to_split(missing: pathlib.Path) -> str:
    """Returns advice if the parent folder holds classes that are not split into two folders."""
    root = missing.parent
    folders = folders_in(root)
    if not folders or not all(holds_images(each, IMAGE_SUFFIXES) for each in folders):
        return ""
    names = ", ".join(each.name for each in folders[:2])
    return (
        f"; {root} holds the classes themselves ({names}{', ...' if len(folders) > 2 else ''}), "
        "which are not yet split into training and test images. To test on a fifth of them, use "
        "--config.data.train=. --config.data.validation_split=0.2, or in a script "
        "tfaccel.sources.split(tfaccel.sources.class_folders(...), 0.2)"
    )


def _files(
    folder: os.DirEntry, root: pathlib.Path, suffixes: tuple[str, ...]
) -> tuple[list[str], list[str], bool]:
    """Returns a class folder's file names, the paths of files that are not images, and whether it
    has links."""
    entries = _list(pathlib.Path(folder.path), "images")
    if not entries:
        raise UserError(
            f"class folder {folder.path} is empty; put images into it, or remove it from {root}"
        )
    names = [entry.name for entry in entries]
    if not all(map(os.DirEntry.is_file, entries)):  # `all` is faster than a loop over a million
        names = _without_special(folder, root, entries, suffixes)
    strays = [name for name in names if not name.lower().endswith(suffixes)]
    has_links = any(map(os.DirEntry.is_symlink, entries))
    return names, [os.path.join(folder.path, name) for name in strays], has_links


def _without_special(folder: os.DirEntry, root, entries, suffixes) -> list[str]:
    """Returns the names of the entries that are files; a broken link raises when it is read.

    Raises:
      UserError: the class folder holds folders, or no file.
    """
    below = [entry.name for entry in entries if entry.is_dir()]
    if below:
        advice = advice_on_folders(pathlib.Path(folder.path), root, below, suffixes)
        raise UserError(
            f"class folder {folder.path} holds the folder '{below[0]}'; expected only images: "
            f"{advice}"
        )
    special = {each.path for each in entries if not each.is_file() and is_special(each.path)}
    if special:
        log.warning(
            "data: skips %s, which is a FIFO, a device or a socket, and %d such files in all of %s",
            min(special),
            len(special),
            folder.path,
        )
    names = [entry.name for entry in entries if entry.path not in special]
    if not names:
        raise UserError(f"class folder {folder.path} holds no file; put images into it")
    return names


def _check_links(root: pathlib.Path, classes: list[str]) -> None:
    """Raises UserError if a link makes one file an image of two classes.

    Two hard links count as two files: tools that save disk space make them for equal files.
    """
    class_of, is_link = {}, {}  # by device and inode: the path, and whether it is a link
    for name in classes:
        linked = (root / name).is_symlink()
        for entry in _list(root / name, "images"):
            try:
                status = entry.stat()
            except OSError:  # a broken link
                continue
            key = status.st_dev, status.st_ino
            before, by_link = class_of.setdefault(key, entry.path), linked or entry.is_symlink()
            if os.path.dirname(before) != os.path.dirname(entry.path) and (
                by_link or is_link.get(key)
            ):
                raise UserError(
                    f"{before} and {entry.path} are one file, through a link, in two classes; "
                    "expected one class for each image: remove one of the two"
                )
            is_link[key] = by_link or is_link.get(key, False)


def _refuse(strays: list[str], suffixes: tuple[str, ...]) -> None:
    """Raises one UserError for all files that are not named like images."""
    (folder, name), others = os.path.split(strays[0]), strays[1:]
    verb = "is 1 other" if len(others) == 1 else f"are {len(others)} others"
    fix = "move them away or convert them" if others else "move it away or convert it"
    also = f", nor {verb}, first {', '.join(others[:2])}" if others else ""
    raise UserError(
        f"class folder {folder} holds '{name}', which is not an image{also}; expected only images "
        f"({' '.join(suffixes)}): {fix}"
    )
