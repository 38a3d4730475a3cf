"""Two folders of images that match by path: inputs and their targets.

    inputs_root/any/depth/x.png        targets_root/any/depth/x.jpg

Takes the two folders; gives the pairs, sorted by path.

    source = image_pairs("train/blurry", "train/sharp")
    source.images.files[0], source.targets.files[0]
"""

import logging
import os
import pathlib
import sys

from tfaccel.data.file_names import FileNames
from tfaccel.data.source import Blobs, ImageSource
from tfaccel.data.sources.clutter import is_clutter
from tfaccel.data.sources.paths import absolute, nearest
from tfaccel.data.sources.pillow import IMAGE_SUFFIXES
from tfaccel.errors import UserError

log = logging.getLogger("tfaccel")


def image_pairs(inputs_root: str | os.PathLike, targets_root: str | os.PathLike) -> ImageSource:
    """Pairs every image below `inputs_root` with the one below `targets_root` of the same path.

    Suffixes may differ. Files that are not named like images are passed over, and so are names that
    start with a dot.

    Gives whole files, sorted by path, in `images` and `targets`; `labels` is None. Images may be of
    any size, but input and target of a pair must have the same one.

    Args:
      inputs_root: folder of the inputs, in sub-folders of any depth.
      targets_root: folder of the targets, in the same sub-folders.

    Raises:
      UserError: a folder is missing or holds no image, an image has no partner, or two images of a
        folder differ only in their suffix.
    """
    roots = absolute(inputs_root), absolute(targets_root)
    if roots[0] == roots[1]:
        raise UserError(f"inputs and targets are both in {roots[0]}; expected two folders")
    if all(map(os.path.isdir, roots)) and os.path.samefile(*roots):
        log.warning(
            "data: %s and %s are one folder, by a link: each image is its own target", *roots
        )
    inputs, targets = (_by_path(root) for root in roots)
    problems = [_unmatched(inputs, targets, roots), _unmatched(targets, inputs, roots[::-1])]
    if any(problems):
        raise UserError(
            f"{'; and '.join(filter(None, problems))}: expected the same paths below both, but for "
            "the suffix"
        )
    keys = sorted(inputs)
    images, targets = (
        FileNames.below(str(root), (key + suffix_of[key] for key in keys))
        for root, suffix_of in zip(roots, (inputs, targets), strict=True)
    )
    return ImageSource(images=Blobs(images), labels=None, targets=Blobs(targets))


def find_images(root: pathlib.Path) -> None:
    """Raises UserError where the folder, whose path is absolute, cannot be listed."""
    try:
        os.scandir(root).close()
    except OSError as error:
        _refuse(error)


def _by_path(root: pathlib.Path) -> dict[str, str]:
    """Returns the suffix of each image below a folder, by its path from there without it."""
    found = {}
    for folder, subfolders, names in os.walk(root, followlinks=True, onerror=_refuse):
        subfolders[:] = (each for each in subfolders if not is_clutter(each))
        inner = "" if folder == str(root) else f"{os.path.relpath(folder, root)}/"
        for name in names:
            stem, suffix = os.path.splitext(name)
            if is_clutter(name) or suffix.lower() not in IMAGE_SUFFIXES:
                continue
            key = inner + stem
            if key in found:
                one, other = (root / f"{key}{each}" for each in (found[key], suffix))
                raise UserError(
                    f"{one} and {other} differ only in their suffix; expected one image of "
                    "each name: remove one"
                )
            found[key] = sys.intern(suffix)
    if not found:
        raise UserError(
            f"image folder {root} holds no image at any depth; expected files named "
            f"{' '.join(IMAGE_SUFFIXES)}"
        )
    return found


def _refuse(error: OSError):
    """`os.walk` would pass over what it cannot list."""
    path = pathlib.Path(error.filename)
    if isinstance(error, FileNotFoundError):
        cure = nearest(path, kind="folder", wanted="a folder of images")
        raise UserError(f"image folder {path} does not exist{cure}") from None
    raise UserError(
        f"image folder {path} cannot be listed ({error.strerror}); expected a folder of images"
    ) from None


def _unmatched(inputs: dict, targets: dict, roots: tuple) -> str:
    """Returns "" where every input has a target."""
    alone = sorted(inputs.keys() - targets.keys())
    if not alone:
        return ""
    first = ", ".join(key + inputs[key] for key in alone[:3])
    return (
        f"{len(alone)} of {len(inputs)} images below {roots[0]} have no partner below {roots[1]}, "
        f"first {first}"
    )
