"""Reads the tensors of a `.safetensors` file, the format of timm and torchvision on Hugging Face.

Takes a path; gives arrays by name. A file has numbers and names only: no code can be in it.

    tensors = read("resnet50.safetensors")      # {"conv1.weight": float32 [64, 3, 7, 7], ...}

The format (github.com/huggingface/safetensors, README): 8 bytes with the length of a header, as a
little-endian number; the header, a JSON object of name: dtype, shape and place; then the values,
which follow each other without gaps. This module checks all of that and needs no package.
"""

import json
import math
import pathlib
from collections.abc import Iterable

import ml_dtypes
import numpy as np

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
LONGEST_HEADER = 100 * 10**6  # bytes, as in the reference reader


def read(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the tensors by name. Their values are read from the disk when they are used.

    Raises:
      ValueError: the file does not have this format, or is cut off; the message says where.
      OSError: it cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, LONGEST_HEADER):
            raise ValueError("it does not begin with the length of a safetensors header")
        header = json.loads(file.read(length).decode("utf-8"), object_pairs_hook=_each_once)
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    header.pop("__metadata__", None)
    places = {name: _place(name, entry) for name, entry in header.items()}
    _check_whole(places.values(), size - 8 - length)
    if size == 8 + length:
        return {name: np.zeros(shape, dtype) for name, (dtype, shape, _, _) in places.items()}
    values = np.memmap(path, np.uint8, "r", offset=8 + length)
    return {
        name: values[begin:end].view(dtype).reshape(shape)
        for name, (dtype, shape, begin, end) in places.items()
    }


def _each_once(pairs: list) -> dict:
    names = dict(pairs)
    if len(names) != len(pairs):
        raise ValueError("its header has a name twice")
    return names


def _place(name: str, entry) -> tuple[np.dtype, tuple[int, ...], int, int]:
    """Returns the dtype, the shape, and the first byte and the byte after the last."""
    fields = entry if isinstance(entry, dict) else {}
    shape, ends = fields.get("shape"), fields.get("data_offsets")
    if not _are_counts(shape) or not _are_counts(ends) or len(ends) != 2:
        raise ValueError(f"its header has no shape and place of {name}")
    if fields.get("dtype") not in DTYPES:
        raise ValueError(
            f"{name} has dtype {fields.get('dtype')}; expected one of {', '.join(DTYPES)}"
        )
    dtype = DTYPES[fields["dtype"]]
    if ends[1] - ends[0] != dtype.itemsize * math.prod(shape):
        raise ValueError(f"{name} of shape {shape} has {ends[1] - ends[0]} bytes")
    return dtype, tuple(shape), *ends


def _are_counts(values) -> bool:
    return isinstance(values, list) and all(type(each) is int and each >= 0 for each in values)


def _check_whole(places: Iterable[tuple], size: int) -> None:
    """Raises ValueError unless the values fill `size` bytes, without a gap and without sharing."""
    at = 0
    for begin, end in sorted((begin, end) for _, _, begin, end in places):
        if begin != at:
            raise ValueError(f"its values have a gap or share bytes at byte {min(begin, at)}")
        at = end
    if at != size:
        raise ValueError(f"its header describes {at} bytes of values, and {size} bytes follow")
