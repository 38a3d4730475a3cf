"""Writes MNIST as PNG class folders, from the standard IDX files or from `keras.datasets`.

    uv run python tools/write_mnist_png.py --out=/data/mnist_png --idx=/data/mnist
    uv run python tools/write_mnist_png.py --out=/data/mnist_png      # downloads, through Keras

Gives OUT/training/<digit>/<index>.png (60,000) and OUT/testing/<digit>/<index>.png (10,000), of
28 x 28 grey pixels. The last line of standard output is JSON. Exit codes: 0 done, 2 a mistake in
the call.
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

# Of the IDX files' first four bytes: two zeros, the type (8: uint8), the number of dimensions.
IDX_UINT8 = 8
SPLITS = {"training": "train", "testing": "t10k"}


def main(arguments: list[str] | None = None) -> int:
    """Reads both splits, writes them, and returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, required=True, help="a folder to make")
    parser.add_argument(
        "--idx",
        type=pathlib.Path,
        help="the folder of train-images-idx3-ubyte and the other three files, .gz or not",
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
    """Returns both splits' (images, labels); Keras downloads them once and keeps them.

    Raises:
      ValueError: they could not be downloaded.
    """
    import keras

    try:
        training, testing = keras.datasets.mnist.load_data()
    except Exception as error:  # Keras raises plain ones
        raise ValueError(f"{error}; give --idx, the folder of the IDX files") from error
    return {"training": training, "testing": testing}


def read_idx_folder(folder: pathlib.Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns both splits' images [n, 28, 28] uint8 and labels [n] uint8.

    Raises:
      ValueError: a file is missing or not IDX, or images and labels differ in number.
    """
    splits = {}
    for split, prefix in SPLITS.items():
        images = read_idx(_find(folder, f"{prefix}-images"))
        labels = read_idx(_find(folder, f"{prefix}-labels"))
        if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
            raise ValueError(
                f"{folder} has {prefix} images {images.shape} and labels {labels.shape}; expected "
                "[n, height, width] and [n]: fetch the files again"
            )
        splits[split] = images, labels
    return splits


def read_idx(file: pathlib.Path) -> np.ndarray:
    """Returns the uint8 array of an IDX file, gzipped or not.

    Format: yann.lecun.com/exdb/mnist, "the IDX file format".

    Raises:
      ValueError: the file is not IDX of uint8, or is cut off.
    """
    content = file.read_bytes()
    if content[:2] == b"\x1f\x8b":
        try:
            content = gzip.decompress(content)
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(f"{file} cannot be unpacked ({error}); fetch it again") from error
    if len(content) < 4 or content[:3] != bytes([0, 0, IDX_UINT8]):
        raise ValueError(f"{file} is not an IDX file of uint8; fetch it again")
    start = 4 + 4 * content[3]
    shape = struct.unpack(f">{content[3]}I", content[4:start].ljust(4 * content[3], b"\0"))
    if len(content) - start != np.prod(shape):
        raise ValueError(
            f"{file} holds {len(content) - start} values; its header says {np.prod(shape)}: fetch "
            "it again"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def write_split(folder: pathlib.Path, images: np.ndarray, labels: np.ndarray) -> int:
    """Writes folder/<label>/<index>.png for each image and returns how many.

    Raises:
      ValueError: the folder exists: what is in it would be mixed with these.
    """
    if folder.exists():
        raise ValueError(f"{folder} exists; give another --out, or remove it")
    for label in np.unique(labels):
        (folder / str(label)).mkdir(parents=True)
    for index, (image, label) in enumerate(zip(images, labels, strict=True)):
        PIL.Image.fromarray(image).save(folder / str(label) / f"{index:05d}.png")
    return len(images)


def _find(folder: pathlib.Path, stem: str) -> pathlib.Path:
    # Published with a dash and with a dot before "idx".
    found = sorted(folder.glob(f"{stem}[-.]idx*-ubyte*"))
    if not found:
        raise ValueError(f"{folder} has no {stem}-idx*-ubyte file; give the folder that has it")
    return found[0]


if __name__ == "__main__":
    sys.exit(main())
