"""Writes MNIST as PNG class folders, from the standard IDX files or from `keras.datasets`.

    uv run python tools/write_mnist_png.py --out=/data/mnist_png --idx=/data/mnist
    uv run python tools/write_mnist_png.py --out=/data/mnist_png      # downloads, through Keras

The program writes OUT/training/<digit>/<index>.png (60,000 files) and
OUT/testing/<digit>/<index>.png (10,000 files) of 28 x 28 grey pixels. The last line of standard
output is JSON. Exit codes: 0 done; 2 a mistake in the call.
"""

import argparse
import gzip
import json
import pathlib
import struct
import sys
import zlib

import numpy as np
import PIL.Image

# An IDX file begins with two zero bytes, the type (8: uint8), and the number of dimensions.
IDX_UINT8 = 8
SPLITS = {"training": "train", "testing": "t10k"}


def main(arguments: list[str] | None = None) -> int:
    """Reads both splits, writes them, and returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the folder to write to")
    parser.add_argument(
        "--idx",
        type=pathlib.Path,
        help="the folder with train-images-idx3-ubyte and the other three files; .gz is allowed",
    )
    flags = parser.parse_args(arguments)
    try:
        splits = read_idx_folder(flags.idx) if flags.idx else read_keras()
        counts = {name: write_split(flags.out / name, *split) for name, split in splits.items()}
    except (OSError, ValueError) as error:
        print(f"write_mnist_png: error: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"out": str(flags.out.absolute()), **counts}))
    return 0


def read_keras() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns (images, labels) of both splits; Keras downloads them once and stores them.

    Raises:
      ValueError: the download failed.
    """
    import keras

    try:
        training, testing = keras.datasets.mnist.load_data()
    except Exception as error:  # Keras raises Exception itself
        raise ValueError(f"{error}; use --idx with a folder of IDX files") from error
    return {"training": training, "testing": testing}


def read_idx_folder(folder: pathlib.Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns images [n, 28, 28] uint8 and labels [n] uint8 of both splits.

    Raises:
      ValueError: a file is missing, is not an IDX file, or has a wrong shape.
    """
    splits = {}
    for split, prefix in SPLITS.items():
        images = read_idx(_find(folder, f"{prefix}-images"))
        labels = read_idx(_find(folder, f"{prefix}-labels"))
        if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
            raise ValueError(
                f"{folder} has {prefix} images {images.shape} and labels {labels.shape}; expected "
                "[n, height, width] and [n]; download the files again"
            )
        splits[split] = images, labels
    return splits


def read_idx(file: pathlib.Path) -> np.ndarray:
    """Returns the uint8 array of an IDX file, which may be gzipped.

    The format is described on yann.lecun.com/exdb/mnist, "the IDX file format".

    Raises:
      ValueError: the file is not an IDX file of uint8, or is incomplete.
    """
    content = file.read_bytes()
    if content[:2] == b"\x1f\x8b":
        try:
            content = gzip.decompress(content)
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(f"{file} cannot be unpacked ({error}); download it again") from error
    if len(content) < 4 or content[:3] != bytes([0, 0, IDX_UINT8]):
        raise ValueError(f"{file} is not an IDX file of uint8; download it again")
    start = 4 + 4 * content[3]
    shape = struct.unpack(f">{content[3]}I", content[4:start].ljust(4 * content[3], b"\0"))
    if len(content) - start != np.prod(shape):
        raise ValueError(
            f"{file} has {len(content) - start} values, but its header says {np.prod(shape)}; "
            "download it again"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def write_split(folder: pathlib.Path, images: np.ndarray, labels: np.ndarray) -> int:
    """Writes folder/<label>/<index>.png for each image, and returns the number of images.

    Raises:
      ValueError: the folder exists, so its files would be mixed with the new ones.
    """
    if folder.exists():
        raise ValueError(f"{folder} exists; remove it, or use another --out")
    for label in np.unique(labels):
        (folder / str(label)).mkdir(parents=True)
    for index, (image, label) in enumerate(zip(images, labels, strict=True)):
        PIL.Image.fromarray(image).save(folder / str(label) / f"{index:05d}.png")
    return len(images)


def _find(folder: pathlib.Path, stem: str) -> pathlib.Path:
    # The names of published files have a dash or a dot before "idx".
    found = sorted(folder.glob(f"{stem}[-.]idx*-ubyte*"))
    if not found:
        raise ValueError(f"{folder} has no {stem}-idx*-ubyte file; give the folder that has it")
    return found[0]


if __name__ == "__main__":
    sys.exit(main())
