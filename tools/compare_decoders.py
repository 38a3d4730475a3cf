"""Compares what each loader decodes with Pillow, over folders of images.

    python tools/compare_decoders.py FOLDER ... --output=decoders.md

Each file goes through the decoders of tf_data (and of an export's predict_bytes), dali_cpu, and
memory and cache, in 1 and 3 channels, at its own size. The table has the largest difference in grey
levels, or what the scan says. The exit code is 1 where the scan finds nothing wrong with a file and
a loader differs silently by more than one level. DALI on a GPU is not compared.
"""

import argparse
import concurrent.futures
import io
import pathlib
import sys

import numpy as np
import nvidia.dali
import PIL.Image
import tensorflow as tf
from nvidia.dali import fn, pipeline_def, types

from tfaccel.config import AugmentConfig, ImageConfig
from tfaccel.data.loaders import dali_graph, decode, tf_image
from tfaccel.data.scan.examine import BAD, KINDS, examine, strict
from tfaccel.data.sources.pillow import IMAGE_SUFFIXES, decoded

SUFFIXES = (*IMAGE_SUFFIXES, ".apng", ".dib", ".gif", ".j2k", ".mpo", ".pbm", ".pgm")
LOADERS = ("tf_data, export", "dali_cpu", "memory, cache")
MOST_PIXELS = 20_000_000
FILE_S = 60  # that a file may take


def main() -> None:
    """Writes the table; exits with 1 for a silent difference."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="+", type=pathlib.Path)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    files = [
        file
        for folder in arguments.folders
        for file in sorted(folder.rglob("*"))
        if file.suffix.lower() in SUFFIXES and file.is_file()
    ]
    rows, silent = [], []
    for file, found in zip(files, every(files), strict=True):
        faults, differences = found
        rows.append(f"| {file.name} | {faults} | {' | '.join(differences)} |")
        good = not any(KINDS.get(each) == BAD for each in faults.split(", "))
        if good and any(each.isdigit() and int(each) > 1 for each in differences):
            silent.append(file.name)
    columns = [f"{each}, {channels} ch." for channels in (1, 3) for each in LOADERS]
    head = [
        f"{len(files)} files; Pillow {PIL.__version__}, TensorFlow {tf.__version__}, DALI "
        f"{nvidia.dali.__version__}. Silent differences: {', '.join(silent) or 'none'}.",
        "",
        f"| file | scan | {' | '.join(columns)} |",
        "|---" * (2 + len(columns)) + "|",
    ]
    arguments.output.write_text("\n".join([*head, *rows, ""]))
    print(head[0])
    sys.exit(1 if silent else 0)


def every(files):
    """Yields `one` of each file, in another process: some end a decoder's process."""
    pool = concurrent.futures.ProcessPoolExecutor(1)
    for file in files:
        try:
            yield pool.submit(one, file).result(FILE_S)
        except (TimeoutError, concurrent.futures.process.BrokenProcessPool):
            yield "the process ends", ["-"] * 6
            pool = concurrent.futures.ProcessPoolExecutor(1)
        except Exception as error:  # Pillow's, of what the scan lets through
            yield f"no truth by Pillow ({error})".replace("\n", " "), ["-"] * 6


def one(file: pathlib.Path) -> tuple[str, list[str]]:
    """Returns the scan's kinds, and each loader's difference, in words."""
    data = file.read_bytes()
    with strict():
        found = examine(data, suffix=file.suffix)[0]
        kinds = ", ".join(kind for kind, _ in found)
        if any(kind in ("empty", "huge", "not_an_image", "truncated") for kind, _ in found):
            return kinds, ["-"] * 6  # no truth
        with PIL.Image.open(io.BytesIO(data)) as image:
            if image.width * image.height > MOST_PIXELS:
                return "not compared", ["-"] * 6
        differences = []
        for channels in (1, 3):
            with PIL.Image.open(io.BytesIO(data)) as image:
                right = np.asarray(decoded(image, "L" if channels == 1 else "RGB"), int)
            right = right.reshape(*right.shape[:2], channels)
            differences += [_difference(by, data, right) for by in (by_tf, by_dali, by_memory)]
    return kinds, differences


def _difference(by, data: bytes, right: np.ndarray) -> str:
    try:
        pixels = by(data, right.shape)
    except Exception as error:  # any error is said, and not silent
        return type(error).__name__
    return str(np.abs(pixels.astype(int) - right).max())


def by_tf(data: bytes, shape) -> np.ndarray:
    """Returns the pixels as the loader tf_data has them."""
    images = ImageConfig(image_size=shape[:2], channels=shape[2])
    return tf_image.windowed(data, None, images=images, augment=AugmentConfig())[0].numpy()


def by_memory(data: bytes, shape) -> np.ndarray:
    """Returns the pixels as the loaders memory and cache have them."""
    pixels = np.zeros(shape, np.uint8)
    decode._decode(pixels, data, nearest=False)
    return pixels


def by_dali(data: bytes, shape) -> np.ndarray:
    """Returns the pixels as the loader dali_cpu has them."""
    images = ImageConfig(image_size=shape[:2], channels=shape[2])
    pipeline = _dali(images, batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1)
    pipeline.feed_input("data", [np.frombuffer(data, np.uint8)])
    return np.array(pipeline.run()[0].at(0))


@pipeline_def
def _dali(images):
    data = fn.external_source(name="data", ndim=1, dtype=types.UINT8)
    settings = {"inputs": {}, "images": images, "augment": AugmentConfig()}
    grey = images.channels == 1
    return dali_graph._geometry(data, grey=grey, decode={"device": "cpu"}, **settings)


if __name__ == "__main__":
    main()
