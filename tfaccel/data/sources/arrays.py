"""Reads decoded images from NumPy arrays, in memory or in .npy files that are mapped.

A mapped file may be larger than memory: its pages are read when examples are taken.

    arrays(images, labels), arrays("cifar/images.npy", "cifar/labels.npy"), arrays("cifar")
    npy_folders("cifar_npy/training")
"""

import os
import pathlib
from collections.abc import Sequence

import numpy as np

from tfaccel.common.errors import UserError
from tfaccel.common.regular_file import open_regular
from tfaccel.config import PIXEL_SCALES
from tfaccel.data.source import ArraySource
from tfaccel.data.sources.compression import compression_of
from tfaccel.data.sources.folders import list_classes
from tfaccel.data.sources.labels import OWN_DATA, numbered
from tfaccel.data.sources.paths import absolute, nearest

Array = np.ndarray | str | os.PathLike


def arrays(
    images: Array,
    labels: Array | None = None,
    *,
    targets: Array | None = None,
    class_names: Sequence[str] = (),
) -> ArraySource:
    """Checks arrays or maps .npy files, and returns them as a source. Nothing is copied.

    The source has images [num_examples, height, width, channels] uint8, uint16 or float32, and
    either labels [num_examples] int32, or targets of the same form as the images.

    Args:
      images: [num_examples, height, width, channels] or [num_examples, height, width] of these
        dtypes; or a .npy file of such an array; or a folder with images.npy, and labels.npy or
        targets.npy. A loader of other than 8 bits needs `pixel_dtype`.
      labels: [num_examples] or [num_examples, 1] of any integer dtype, indices into `class_names`;
        or a .npy file of such an array.
      targets: target images of pairs, which replace the labels; they have the number, height and
        width of `images`.
      class_names: names of the labels, in order. The default is "0", "1", ... up to the largest
        label.

    Raises:
      UserError: a file is missing, or an array has the wrong shape or dtype.
    """
    if isinstance(images, str | os.PathLike) and absolute(images).is_dir():
        images, labels, targets = _in_folder(absolute(images), labels, targets)
    images = _images("images", images)
    if (labels is None) == (targets is None):
        given = "neither labels nor targets" if labels is None else "both labels and targets"
        raise UserError(f"arrays() received {given}; expected one of the two")
    if targets is not None:
        targets = _images("targets", targets)
        if targets.shape[:3] != images.shape[:3]:
            raise UserError(
                f"targets have the shape {targets.shape} and images {images.shape}; expected the "
                "same number, height and width"
            )
        return ArraySource(images, labels=None, targets=targets)
    labels, numbers = _labels(labels, len(images))
    if class_names and len(numbers) > len(class_names):
        raise UserError(
            f"labels go up to {len(numbers) - 1}, but there are {len(class_names)} class_names; "
            "give a name for each label from 0"
        )
    return ArraySource(images, labels, tuple(class_names) or numbers)


def npy_folders(
    root: str | os.PathLike, *, class_names: Sequence[str] | None = None
) -> ArraySource:
    """Loads class folders with one .npy file per image, `root/<class>/<any name>.npy`, into memory.

    The source has images [num_examples, height, width, channels] uint8, uint16 or float32, sorted
    by class and then by name, and labels [num_examples] int32, indices into the sorted names of the
    class folders. (`class_folders` reads such files one by one, so that they need not fit in
    memory, nor have one size.)

    Args:
      root: the folder of class folders. Each file has [height, width, channels] or [height, width],
        and all files have the same shape and dtype.
      class_names: all classes in order, for a test set that lacks some: `train.class_names`. The
        default is the sorted names of the folders.

    Raises:
      UserError: the folders are refused as in `class_folders`, or a file has the wrong shape or
        dtype.
    """
    files, labels, class_names = list_classes(root, (".npy",), class_names)
    first = _load(files[0])
    dtype = first.dtype.newbyteorder("=")
    images = np.empty((len(files), *first.shape), dtype)
    for row, file in zip(images, files, strict=True):
        image = _load(file)
        if image.shape != first.shape or image.dtype != first.dtype:
            raise UserError(
                f"{file} is {image.dtype.name} {image.shape}; expected {dtype.name} of the shape "
                f"{first.shape}, as in the first file, {files[0]}"
            )
        row[...] = image
    return ArraySource(_images(f"images below {root}", images), labels, class_names)


def find_arrays(path: pathlib.Path) -> None:
    """Raises UserError if the folder lacks its arrays, or the array of images cannot be read.

    Args:
      path: an absolute path of a file or folder, as for `arrays`; only the file's header is read.
    """
    _load(_in_folder(path, None, None)[0] if path.is_dir() else path)


def _in_folder(folder: pathlib.Path, labels, targets) -> tuple:
    """Returns the paths of the folder's files for the arguments that were not given."""
    there = {name: folder / f"{name}.npy" for name in ("images", "labels", "targets")}
    if not there["images"].is_file():
        raise UserError(f"{folder} has no images.npy; expected images.npy and labels.npy")
    if labels is None and targets is None:
        labels, targets = (
            there[name] if there[name].is_file() else None for name in ("labels", "targets")
        )
    return there["images"], labels, targets


def _load(array: Array) -> np.ndarray:
    """Returns the array itself, or the mapped file."""
    if not isinstance(array, str | os.PathLike):
        return np.asarray(array)
    file = absolute(array)
    if not file.exists():
        hint = nearest(file, kind="file", wanted="a .npy file")
        raise UserError(f"{file} does not exist{hint}")
    if file.suffix == ".npz":
        raise UserError(
            f"{file} is an archive and cannot be mapped; save each of its arrays with np.save"
        )
    packed = compression_of(file)
    if packed:
        raise UserError(
            f"{file} is {packed} and cannot be mapped; unpack it, and save each array with np.save"
        )
    try:
        with open_regular(file):  # np.load would wait for a FIFO
            return np.load(file, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # NumPy may raise anything for a damaged header
        cause = getattr(error, "strerror", None) or str(error).split("\n")[0]
        raise UserError(
            f"{file} cannot be read ({cause:.200}); expected an array of numbers, saved completely "
            "by np.save"
        ) from error


def _images(what: str, images: Array) -> np.ndarray:
    images = _load(images)
    if images.dtype not in tuple(PIXEL_SCALES):  # in the order of bytes of this machine
        fix = "round them and use .astype('uint8')"
        if images.dtype.kind == "f":
            fix = "use .astype('float32'), or if they are in 0..1, (255 * images).round() as uint8"
        if not images.dtype.isnative:
            fix = f"use .astype({images.dtype.name!r}), in the order of bytes of this machine"
        raise UserError(
            f"{what} are {images.dtype.name}; expected uint8 in 0..255, uint16 or float32: {fix}"
        )
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or 0 in images.shape:
        raise UserError(
            f"{what} have the shape {images.shape}; expected [num_examples, height, width, "
            "channels], and at least one example"
        )
    return images


def _labels(labels: Array, num_images: int) -> tuple[np.ndarray, tuple[str, ...]]:
    labels = _load(labels)
    if labels.shape == (num_images, 1):
        labels = labels[:, 0]  # the shape in keras.datasets.cifar10
    if labels.shape != (num_images,):
        hint = ""
        if labels.ndim == 2:
            one_each = labels.dtype.kind in "buif" and (labels.sum(axis=1) == 1).all()
            hint = f"; for several labels of an image, {OWN_DATA}"
            hint = "; labels.argmax(axis=1) gives indices" if one_each else hint
        raise UserError(f"labels have the shape {labels.shape}; expected ({num_images},){hint}")
    if labels.dtype.kind not in "iu":
        fix = "use .astype('int32')"
        if labels.dtype.kind == "f" and not (labels == np.floor(labels)).all():
            fix = f"for a regression, with numbers as targets, {OWN_DATA}"
        elif labels.dtype.kind not in "fb":
            fix = "give the index of each image's class, and class_names"
        raise UserError(f"labels are {labels.dtype.name}; expected whole numbers: {fix}")

    return numbered(labels, name_of=lambda index: f"labels[{index}]")
