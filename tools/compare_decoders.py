"""Compares the pixels of each loader with Pillow's, over folders of images.

    python tools/compare_decoders.py FOLDER ... --output=decoders.md

Each file goes the whole way of the loaders tf_data, dali_cpu and memory (the loader cache and an
export's samples have memory's decoder): the look at it as the loader opens, and the loader's own
stream; as an image of 1 and of 3 channels, and as a mask; at its own size. The table has a row for
all files of which scan and loaders say the same: "same" where no level differs by more than one,
else the largest difference in grey levels; "refused" where the loader names the file as of a kind
that it does not take, "not decoded" where it names it otherwise. The exit code is 1 where a loader
gives pixels that differ by more than one level, or pixels of a file that it would refuse as it
opens. `--loaders=dali_gpu` compares DALI on the first GPU.
"""

import argparse
import collections
import concurrent.futures
import io
import os
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # DALI has the same GPU

import numpy as np
import nvidia.dali
import PIL.Image
import tensorflow as tf

from tfaccel.common.errors import UserError
from tfaccel.config import AugmentConfig, DaliConfig, ImageConfig
from tfaccel.data import images as images_lib
from tfaccel.data.images import ImageData
from tfaccel.data.loaders.memory import decode_all
from tfaccel.data.placement import Placement
from tfaccel.data.scan.examine import examine, strict
from tfaccel.data.shards import Plan
from tfaccel.data.source import Blobs, ImageSource, UnreadableError
from tfaccel.data.sources.pillow import IMAGE_SUFFIXES, decoded, unfit_mask
from tfaccel.runtime.devices import Device

SUFFIXES = (*IMAGE_SUFFIXES, ".apng", ".dib", ".gif", ".j2k", ".mpo", ".pbm", ".pgm", ".pnm")
LOADERS = ("tf_data", "dali_cpu", "memory")  # what needs no GPU
USES = ("1 channel", "3 channels", "mask")
WITHIN = "same"  # within one level
MOST_NAMES = 3  # of a row
MOST_PIXELS = 20_000_000
MOST_FILES = 64  # of a batch
GROUP_S = 600  # that a batch may take
NO_TRUTH = {"empty", "huge", "not_an_image", "truncated"}
PLACEMENT = Placement(Device("/cpu:0", None), num_threads=2, seed=0)
ON_GPU = Placement(Device("/gpu:0", 0), num_threads=2, seed=0)


class File(NamedTuple):
    """A file, what the scan says, and its (height, width): None where Pillow has no pixels."""

    path: pathlib.Path
    kinds: str
    size: tuple[int, int] | None


def main() -> None:
    """Writes the table; exits with 1 for a silent difference."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="+", type=pathlib.Path)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--all", action="store_true", help="a row for each file, not each kind")
    parser.add_argument("--loaders", nargs="+", choices=(*LOADERS, "dali_gpu"), default=LOADERS)
    arguments = parser.parse_args()
    num_cells = len(arguments.loaders) * len(USES)
    with strict():
        files = [
            looked_at(file)
            for folder in arguments.folders
            for file in sorted(folder.rglob("*"))
            if file.suffix.lower() in SUFFIXES and file.is_file()
        ]
    cells = compared([each for each in files if each.size], arguments.loaders)
    kinds, silent = collections.defaultdict(list), []
    for file in files:
        found = cells.get(file.path, [""] * num_cells)
        if any(each == "silent" or (each.isdigit() and int(each) > 1) for each in found):
            silent.append(file.path.name)
        what = (file.kinds, *(WITHIN if each in ("0", "1") else each for each in found))
        kinds[(file.path.name, *what) if arguments.all else what].append(file.path.name)
    rows = [
        f"| {len(names)} | {', '.join(names[:MOST_NAMES])} | {' | '.join(what[-1 - num_cells :])} |"
        for what, names in sorted(kinds.items(), key=lambda each: -len(each[1]))
    ]
    columns = [f"{loader}, {use}" for use in USES for loader in arguments.loaders]
    head = [
        f"{len(files)} files, of which Pillow decodes {len(cells)}; Pillow {PIL.__version__}, "
        f"TensorFlow {tf.__version__}, DALI {nvidia.dali.__version__}. Silent differences: "
        f"{', '.join(silent) or 'none'}.",
        "",
        f"| files | such as | scan | {' | '.join(columns)} |",
        "|---" * (3 + len(columns)) + "|",
    ]
    arguments.output.write_text("\n".join([*head, *rows, ""]))
    print(head[0])
    sys.exit(1 if silent else 0)


def looked_at(path: pathlib.Path) -> File:
    """Returns what the scan says, and the size of what Pillow decodes."""
    data = path.read_bytes()
    found, size = examine(data, suffix=path.suffix)
    kinds = [kind for kind, _ in found]
    has_pixels = not NO_TRUTH & set(kinds) and 0 < size[0] * size[1] <= MOST_PIXELS
    try:
        if has_pixels:
            for mode in ("L", "RGB"):
                _pixels(data, mode)
    except Exception:  # Pillow's, of what it opens and cannot convert
        return File(path, "no pixels by Pillow", None)
    return File(path, ", ".join(kinds), size if has_pixels else None)


def compared(files: list[File], loaders: Sequence[str]) -> dict[pathlib.Path, list[str]]:
    """Returns the cells of each file's row: those of one size are a batch, in a process of its own.

    Where that process ends, as some files end a decoder's, each goes alone.
    """
    by_size = collections.defaultdict(list)
    for file in files:
        by_size[file.size].append(file.path)
    groups = [
        (size, paths[start : start + MOST_FILES])
        for size, paths in by_size.items()
        for start in range(0, len(paths), MOST_FILES)
    ]
    cells, pool = {}, None
    while groups:
        size, paths = groups.pop(0)
        pool = pool or concurrent.futures.ProcessPoolExecutor(1)
        try:
            cells |= pool.submit(rows_of, paths, size, loaders).result(GROUP_S)
        except (TimeoutError, concurrent.futures.process.BrokenProcessPool):
            pool = None
            if len(paths) == 1:
                cells[paths[0]] = ["the process ends"] * len(loaders) * len(USES)
            groups += [(size, [path]) for path in paths if len(paths) > 1]
    return cells


def rows_of(
    paths: list[pathlib.Path], size: tuple[int, int], loaders: Sequence[str]
) -> dict[pathlib.Path, list[str]]:
    """Returns the cells of files of one size, by path."""
    rows = {path: [] for path in paths}
    for use in USES:
        for loader in loaders:
            for path, cell in zip(paths, cells_of(paths, size, use, loader), strict=True):
                rows[path].append(cell)
    return rows


def cells_of(paths, size: tuple[int, int], use: str, loader: str) -> list[str]:
    """Returns what a loader makes of each file, in words."""
    with tempfile.TemporaryDirectory() as folder:
        blobs = Blobs(tuple(map(str, paths)))
        images = ImageConfig(image_size=size, channels=1 if use == "1 channel" else 3)
        if use == "mask":
            images = ImageConfig(image_size=size, channels=3, targets="mask")
            blank = pathlib.Path(folder, "blank.png")
            PIL.Image.new("RGB", size[::-1]).save(blank)
            source = ImageSource(Blobs((str(blank),) * len(paths)), None, targets=blobs)
        else:
            source = ImageSource(blobs, np.zeros(len(paths), np.int32), ("any",))
        said = [opened(source, images, loader, index) for index in range(len(paths))]
        found, faults = read(source, images, loader)
    cells = []
    for index, path in enumerate(paths):
        right = truth(path.read_bytes(), use)
        if index in faults:
            cells.append(faults[index])
        elif right is None or said[index] is not None:  # of a sample it would be refused
            cells.append("silent")
        else:
            cells.append(str(np.abs(found[index].astype(int) - right).max()))
    return cells


def opened(source: ImageSource, images: ImageConfig, loader: str, index: int) -> str | None:
    """Returns why a loader refuses an example as it opens; None where it does not."""
    try:
        one = source.taken(np.array([index]))
        images_lib._check_some(one, images, AugmentConfig(), by_pillow=loader == "memory")
    except UserError as error:
        return str(error)
    return None


def read(source: ImageSource, images: ImageConfig, loader: str):
    """Returns the pixels of all examples, uint8 by index, and what is said of those that are named.

    As a Loader does with bad_files="skip": what is named is left out, and the rest goes on.
    """
    left, faults = list(range(len(source))), {}
    while left:
        part = source.taken(np.array(left))
        try:
            return dict(zip(left, streamed(part, images, loader), strict=True)), faults
        except UnreadableError as error:
            kind = "refused" if _is_of_a_kind(str(error)) else "not decoded"
            faults |= {left[each]: kind for each in error.ids}
            left = [each for each in left if each not in faults]
        except Exception as error:  # which names no file
            if len(left) == 1:
                return {}, faults | {left[0]: f"{type(error).__name__}, unnamed"}
            pixels = {}
            for each in left:
                found, said = read(source.taken(np.array([each])), images, loader)
                pixels |= dict.fromkeys({each} if found else (), found.get(0))
                faults |= dict.fromkeys({each} if said else (), said.get(0))
            return pixels, faults
    return {}, faults


def streamed(source: ImageSource, images: ImageConfig, loader: str) -> np.ndarray:
    """Returns the images, or masks, as the loader's stream gives them: [rows, ...] uint8 levels."""
    stored = source
    if loader == "memory":
        settings = {"channels": images.channels, "targets": images.targets, "num_threads": 1}
        stored = decode_all(source, stored_size=images.image_size, **settings)
    plan = Plan(len(source), len(source), 1)
    data = ImageData(
        stored, images, AugmentConfig(), plan, loader, "float32", DaliConfig(), found=source
    )
    image, second = next(data.stream(ON_GPU if loader == "dali_gpu" else PLACEMENT, data.feed(0)))
    if source.targets is not None:
        return second.numpy()
    return np.round((image.numpy() * images.std + images.mean) * 255)


def truth(data: bytes, use: str) -> np.ndarray | None:
    """Returns Pillow's pixels, [height, width, channels] int; None for what is no mask."""
    if use == "mask":
        with PIL.Image.open(io.BytesIO(data)) as image:
            if unfit_mask(image):
                return None
    pixels = _pixels(data, "RGB" if use == "3 channels" else "L")
    return pixels.reshape(*pixels.shape[:2], -1)


def _pixels(data: bytes, mode: str) -> np.ndarray:
    with PIL.Image.open(io.BytesIO(data)) as image:
        return np.asarray(decoded(image, mode), int)


def _is_of_a_kind(sentence: str) -> bool:
    return "of a kind that this loader does not take" in sentence or "expected" in sentence


if __name__ == "__main__":
    main()
