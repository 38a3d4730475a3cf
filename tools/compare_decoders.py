"""Compares the pixels of each loader with Pillow's, for folders of images.

    python tools/compare_decoders.py FOLDER ... --output=decoders.md

Each file goes through the loaders tf_data, dali_cpu and memory, at the size of the file: with 1
channel, with 3 channels, and as a mask. The program runs the check that a loader makes when it
opens, and then the loader's stream. The loader cache and the samples of an export use the decoder
of memory. `--loaders=dali_gpu` compares DALI on the first GPU.

The table has a row for all files with equal results of the scan and of the loaders. A cell is:
  same           no level differs by more than one
  a number       the largest difference in levels of 0 to 255
  refused        the loader names the file as of a kind that it does not take
  not decoded    the loader names the file for another reason
  silent         the loader gives pixels of a file that it refuses when it opens, or of a file that
                 cannot be a mask
  ERROR, unnamed     the loader fails with an error that does not name the file
  the process ends   the file crashes the decoder, or decoding it takes too long

The table is written again after each batch of files, so an interrupted run keeps its rows. The exit
code is 1 if a cell is "silent" or a number.
"""

import argparse
import collections
import concurrent.futures
import io
import os
import pathlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import NamedTuple

os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # DALI uses the same GPU

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
from tfaccel.data.sources.pillow import PILLOW_SUFFIXES, Headers, decoded, unfit_mask
from tfaccel.runtime.devices import Device

SUFFIXES = (*PILLOW_SUFFIXES, ".apng", ".dib", ".gif", ".j2k", ".mpo", ".pbm", ".pgm", ".pnm")
LOADERS = ("tf_data", "dali_cpu", "memory")  # the loaders that need no GPU
USES = ("1 channel", "3 channels", "mask")
SAME = "same"  # no level differs by more than one
MAX_NAMES = 3  # names of files in a row
MAX_PIXELS = 20_000_000
MAX_FILES = 64  # files of a batch
GROUP_S = 600  # the time limit of a batch
NO_TRUTH = {"empty", "huge", "not_an_image", "truncated"}
PLACEMENT = Placement(Device("/cpu:0", None), num_threads=2, seed=0)
ON_GPU = Placement(Device("/gpu:0", 0), num_threads=2, seed=0)


class File(NamedTuple):
    """A file, the result of its scan, and its (height, width): None if Pillow has no pixels."""

    path: pathlib.Path
    kinds: str
    size: tuple[int, int] | None


def main() -> None:
    """Writes the table; exits with 1 if a loader gives wrong pixels without an error."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="+", type=pathlib.Path)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--all", action="store_true", help="a row for each file, not each kind")
    parser.add_argument("--loaders", nargs="+", choices=(*LOADERS, "dali_gpu"), default=LOADERS)
    arguments = parser.parse_args()
    with strict():
        files = [
            scanned(file)
            for folder in arguments.folders
            for file in sorted(folder.rglob("*"))
            if file.suffix.lower() in SUFFIXES and file.is_file()
        ]
    for cells in compared([each for each in files if each.size], arguments.loaders):
        said, lines, is_wrong = table(files, cells, arguments.loaders, alone=arguments.all)
        part = arguments.output.with_name(f"{arguments.output.name}.part")
        part.write_text("\n".join([said, "", *lines, ""]))
        part.replace(arguments.output)
    print(said)
    sys.exit(1 if is_wrong else 0)


def table(
    files: list[File], cells: dict[pathlib.Path, list[str]], loaders: Sequence[str], *, alone: bool
) -> tuple[str, list[str], bool]:
    """Returns a sentence, the lines of the table, and whether a cell is "silent" or a number.

    Args:
      files: all files.
      cells: the cells of the files that were compared so far. Others with pixels have no row yet.
      loaders: the loaders.
      alone: whether each file has its own row.
    """
    num_cells = len(loaders) * len(USES)
    kinds, silent, num_left = collections.defaultdict(list), [], 0
    for file in files:
        if file.size and file.path not in cells:
            num_left += 1
            continue
        found = cells.get(file.path, [""] * num_cells)
        if any(each == "silent" or (each.isdigit() and int(each) > 1) for each in found):
            silent.append(file.path.name)
        what = (file.kinds, *(SAME if each in ("0", "1") else each for each in found))
        kinds[(file.path.name, *what) if alone else what].append(file.path.name)
    rows = [
        f"| {len(names)} | {', '.join(names[:MAX_NAMES])} | {' | '.join(what[-1 - num_cells :])} |"
        for what, names in sorted(kinds.items(), key=lambda each: -len(each[1]))
    ]
    columns = [f"{loader}, {use}" for use in USES for loader in loaders]
    left = f", and {num_left} are not compared yet" if num_left else ""
    said = (
        f"{len(files)} files, of which Pillow decodes {len(cells) + num_left}{left}; Pillow "
        f"{PIL.__version__}, TensorFlow {tf.__version__}, DALI {nvidia.dali.__version__}. Silent "
        f"differences: {', '.join(silent) or 'none'}."
    )
    head = [
        f"| files | such as | scan | {' | '.join(columns)} |",
        "|---" * (3 + len(columns)) + "|",
    ]
    return said, [*head, *rows], bool(silent)


def scanned(path: pathlib.Path) -> File:
    """Scans a file, and returns the result with the size of the image that Pillow decodes."""
    data = path.read_bytes()
    found, size = examine(data, suffix=path.suffix)
    kinds = [kind for kind, _ in found]
    has_pixels = not NO_TRUTH & set(kinds) and 0 < size[0] * size[1] <= MAX_PIXELS
    try:
        if has_pixels:
            for mode in ("L", "RGB"):
                _pixels(data, mode)
    except Exception:  # Pillow opens some files that it cannot convert
        return File(path, "no pixels from Pillow", None)
    return File(path, ", ".join(kinds), size if has_pixels else None)


def compared(files: list[File], loaders: Sequence[str]) -> Iterator[dict[pathlib.Path, list[str]]]:
    """Yields the cells of each file's row, so far, after each batch of files.

    Files of one size form batches, which are decoded in another process. Some files crash a
    decoder. If the process ends, each file of the batch is decoded alone.
    """
    by_size = collections.defaultdict(list)
    for file in files:
        by_size[file.size].append(file.path)
    groups = [
        (size, paths[start : start + MAX_FILES])
        for size, paths in by_size.items()
        for start in range(0, len(paths), MAX_FILES)
    ]
    cells, pool = {}, None
    if not groups:
        yield cells
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
        yield cells


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
    """Returns the cell of each file for one loader and one use."""
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
        elif right is None or said[index] is not None:  # the loader refuses it when it opens
            cells.append("silent")
        else:
            cells.append(str(np.abs(found[index].astype(int) - right).max()))
    return cells


def opened(source: ImageSource, images: ImageConfig, loader: str, index: int) -> str | None:
    """Returns why a loader refuses an example when it opens; None if it does not."""
    try:
        one = source.taken(np.array([index]))
        own = {"by_pillow": loader == "memory", "headers": Headers()}
        images_lib._check_some(one, images, AugmentConfig(), **own)
    except UserError as error:
        return str(error)
    return None


def read(source: ImageSource, images: ImageConfig, loader: str):
    """Returns the pixels of the examples by index, uint8, and the faults of the others by index.

    Like a Loader with bad_files="skip", it leaves out the files that an error names, and reads the
    others.
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
        except Exception as error:  # the error names no file
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
    """Returns the images or masks that the loader's stream gives: [rows, ...] levels 0..255."""
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
    """Returns Pillow's pixels, [height, width, channels] int; None if the file cannot be a mask."""
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
