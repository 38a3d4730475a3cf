"""Advice on which folder was meant, if the given folder is not a folder of class folders.

The functions return the end of an error message. They read a few entries of a few folders, so they
are fast even if there are millions of files.

    advice_on_file(root, "1.png")      # images where class folders should be
    advice_on_folders(root / "cats", root, ["small", "large"])    # folders where images should be
"""

import itertools
import os
import pathlib

from tfaccel.data.sources.clutter import is_clutter

# Usual names for the parts of a data set, in lowercase.
SPLITS = ("train", "training", "val", "valid", "validation", "dev", "eval", "test", "testing")
MOST = 200  # entries that are read in each folder
LIST = "list the images and their classes in a CSV file (source csv, sources.image_list)"


def advice_on_file(root: pathlib.Path, name: str, suffixes: tuple[str, ...]) -> str:
    """Returns advice on a file that lies beside class folders, or where they should be.

    Args:
      root: the folder that was given.
      name: name of the file.
      suffixes: suffixes of images, in lowercase.
    """
    if not name.lower().endswith(suffixes):
        return "move the file away"
    if folders_in(root):
        return f"move the image into a class folder, or {LIST}"
    beside = [each for each in folders_in(root.parent) if holds_images(each, suffixes)]
    if len(beside) > 1 and root.name.lower() not in SPLITS:
        return (
            f"did you mean {root.parent} as the image folder? It holds {root.name} and "
            f"{len(beside) - 1} other folders of images"
        )
    return f"move the images into one folder per class, or {LIST}"


def advice_on_folders(
    folder: pathlib.Path, root: pathlib.Path, below: list[str], suffixes: tuple[str, ...]
) -> str:
    """Returns advice on folders that lie in a class folder.

    Args:
      folder: the class folder.
      root: the folder that was given.
      below: names of the folders in the class folder.
      suffixes: suffixes of images, in lowercase.
    """
    if holds_images(folder, suffixes):
        return f"move the images of {below[0]} into {folder}, or {below[0]} away"
    classes = folders_in(root)
    splits = [each for each in classes if each.name.lower() in SPLITS]
    if len(classes) == 1 or splits:
        meant = next((each for each in splits if each.name.lower().startswith("train")), None)
        meant = _deepest(meant or (splits or classes)[0], suffixes)
        others = [each.name for each in splits if each.name != meant.name]
        also = f" (and {', '.join(others)} in the same way)" if others else ""
        return f"did you mean {meant} as the image folder?{also}"
    if folders_in(folder / below[0]):
        return f"the images are deeper than {folder / below[0]}: give the folder of one split"
    return (
        f"the classes are one level deeper in each of {len(classes)} folders, such as "
        f"{folder.name}/{below[0]}: move all class folders into one folder, or {LIST}"
    )


def _deepest(folder: pathlib.Path, suffixes) -> pathlib.Path:
    """Returns the first folder, from the given one downward, that holds class folders."""
    for _ in range(8):
        below = folders_in(folder)
        if any(holds_images(each, suffixes) for each in below) or not below:
            return folder
        splits = [each for each in below if each.name.lower() in SPLITS]
        train = [each for each in splits if each.name.lower().startswith("train")]
        folder = (train or splits or below)[0]
        if len(below) > 1 and not splits:
            return folder.parent
    return folder


def _entries(folder: pathlib.Path) -> list[os.DirEntry]:
    try:
        with os.scandir(folder) as entries:
            shown = (each for each in entries if not is_clutter(each.name))
            return sorted(itertools.islice(shown, MOST), key=lambda each: each.name)
    except OSError:
        return []


def folders_in(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the first sub-folders of a folder, by name; none if it cannot be listed."""
    return [pathlib.Path(each.path) for each in _entries(folder) if each.is_dir()]


def holds_images(folder: pathlib.Path, suffixes: tuple[str, ...]) -> bool:
    """Returns whether a file that is named like an image is among the first of a folder."""
    return any(
        each.name.lower().endswith(suffixes) and not each.is_dir() for each in _entries(folder)
    )
