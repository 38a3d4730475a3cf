"""Pairs the images of two folders by their paths: inputs and their targets.

    inputs_root/any/depth/x.png        targets_root/any/depth/x.jpg

The source has the pairs sorted by path.

    source = image_pairs("train/blurry", "train/sharp")
    source.images.files[0], source.targets.files[0]
"""

import logging
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence

from tfaccel.common.errors import UserError
from tfaccel.common.regular_file import NOT_REGULAR, is_special
from tfaccel.data.file_names import GrowingFileNames
from tfaccel.data.source import Blobs, ImageSource
from tfaccel.data.sources.clutter import is_clutter
from tfaccel.data.sources.paths import absolute, nearest
from tfaccel.data.sources.pillow import IMAGE_SUFFIXES

log = logging.getLogger("tfaccel")


def image_pairs(
    inputs_root: str | os.PathLike,
    targets_root: str | os.PathLike,
    *,
    class_names: Sequence[str] = (),
) -> ImageSource:
    """Pairs every image below `inputs_root` with the image of the same path below `targets_root`.

    Suffixes may differ. Files that are not named like images are skipped, and so are names that
    start with a dot.

    The source has whole files, sorted by path, in `images` and `targets`; its `labels` is None.
    Images may have any size, but input and target of a pair must have the same size.

    Args:
      inputs_root: folder of the inputs, in sub-folders of any depth.
      targets_root: folder of the targets, in the same sub-folders.
      class_names: for masks, the names of the values 0, 1, 2 and so on. Reports use them.

    Raises:
      UserError: a folder is missing or holds no image, an image has no partner, or two images of a
        folder differ only in their suffix.
    """
    roots = absolute(inputs_root), absolute(targets_root)
    if roots[0] == roots[1]:
        raise UserError(f"inputs and targets are both in {roots[0]}; expected two folders")
    if all(map(os.path.isdir, roots)) and os.path.samefile(*roots):
        message = "data: %s and %s are one folder, through a link: each image is its own target"
        log.warning(message, *roots)
    found = tuple(GrowingFileNames() for _ in roots)
    numbers, alone = [0, 0], ([], [])
    for parts in _matched(roots, "", [True, True]):
        for side, (part, other) in enumerate(zip(parts, parts[::-1], strict=True)):
            numbers[side] += len(part)
            if part.keys() != other.keys():
                alone[side].extend(key + part[key] for key in sorted(part.keys() - other.keys()))
            elif not any(alone):
                begin = os.path.join(roots[side], "")
                found[side].add([begin + key + suffix for key, suffix in part.items()])
    for root, number in zip(roots, numbers, strict=True):
        if not number:
            raise UserError(
                f"image folder {root} holds no image at any depth; expected files named "
                f"{' '.join(IMAGE_SUFFIXES)}"
            )
    if any(alone):
        problems = (
            _unmatched(alone[side], numbers[side], roots[side], roots[1 - side])
            for side in range(2)
            if alone[side]
        )
        raise UserError(
            f"{'; and '.join(problems)}: expected the same paths below both, except for the "
            "suffix. Add or rename the partners, or move these images away"
        )
    images, targets = (each.done() for each in found)
    return ImageSource(
        images=Blobs(images), labels=None, targets=Blobs(targets), target_names=tuple(class_names)
    )


def find_images(root: pathlib.Path) -> None:
    """Raises UserError if the folder, an absolute path, cannot be listed."""
    try:
        os.scandir(root).close()
    except OSError as error:
        raise _refused(error) from None


def _matched(roots, inner: str, there: list[bool]) -> Iterator[tuple[dict[str, str], ...]]:
    """Yields parts of both trees: for each image its path below the root and its suffix.

    The parts follow one another in the order of the paths as text. One folder at a time is in
    memory.

    Args:
      roots: roots of the two trees.
      inner: the folder that is listed, below both roots: "" or "any/depth/".
      there: whether it exists, for each root.
    """
    listed = [
        _list(root, inner) if here else ({}, set()) for root, here in zip(roots, there, strict=True)
    ]
    images, folders = zip(*listed, strict=True)
    all_folders = {
        f"{each}/": [each in those for those in folders] for each in set().union(*folders)
    }
    order = sorted({*images[0], *images[1], *all_folders})
    begins = 0
    for place in [place for place, name in enumerate(order) if name in all_folders]:
        yield _part(images, inner, order[begins:place])
        yield from _matched(roots, inner + order[place], all_folders[order[place]])
        begins = place + 1
    yield _part(images, inner, order[begins:])


def _part(images, inner: str, names: list[str]) -> tuple[dict[str, str], ...]:
    return tuple({inner + name: those[name] for name in names if name in those} for those in images)


def _list(root: pathlib.Path, inner: str) -> tuple[dict[str, str], set[str]]:
    """Returns a dict from stems to suffixes of a folder's images, and the set of sub-folders."""
    images, folders = {}, set()
    try:
        with os.scandir(root / inner) as entries:
            shown = [entry for entry in entries if not is_clutter(entry.name)]
    except OSError as error:
        raise _refused(error) from None
    for entry in shown:
        name = entry.name
        if entry.is_dir():
            folders.add(name)
            continue
        stem, dot, suffix = name.rpartition(".")
        suffix = sys.intern(dot + suffix)
        if suffix.lower() not in IMAGE_SUFFIXES:
            continue
        if not entry.is_file() and is_special(entry.path):
            log.warning("data: %s is %s and is skipped", entry.path, NOT_REGULAR)
            continue
        if stem in images:
            one, other = (root / f"{inner}{stem}{each}" for each in (images[stem], suffix))
            raise UserError(
                f"{one} and {other} differ only in their suffix; expected one image for each name: "
                "remove one"
            )
        images[stem] = suffix
    return images, folders


def _refused(error: OSError) -> UserError:
    path = pathlib.Path(error.filename)
    if isinstance(error, FileNotFoundError):
        hint = nearest(path, kind="folder", wanted="a folder of images")
        return UserError(f"image folder {path} does not exist{hint}")
    return UserError(
        f"image folder {path} cannot be listed ({error.strerror}); expected a folder of images"
    )


def _unmatched(alone: list[str], number: int, root: pathlib.Path, other: pathlib.Path) -> str:
    return (
        f"{len(alone)} of {number} images below {root} have no partner below {other}, first "
        f"{', '.join(alone[:3])}"
    )
