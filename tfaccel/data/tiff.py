"""Reads TIFF files of any number of channels, as they are stored.

    layout = read_layout(file)      # 480 x 640, 5 channels of uint16, in strips of 8 rows
    pixels = read(data)             # [480, 640, 5] uint16

Pillow reads at most 8 bits of several channels, and drops channels that it does not know. So this
module reads the tags itself, and Pillow only unpacks: each strip or tile is given to it as grey
bytes, in a new file without channels. Pillow's libtiff knows all lossless compressions: deflate,
LZW, PackBits, Zstandard and LZMA. (tifffile needs another package for LZW.) DALI 2.4 does not read
planar files: it refuses most, and gives other values for 16 bits and 3 or 4 channels (2026-11-30).

The tags and numbers are those of TIFF 6.0; BigTIFF is read, too. Predictor 3 is of Adobe's TIFF
Technical Note 3 (2005). Only the first page of a file is read.
"""

import io
import math
import struct
from typing import BinaryIO, NamedTuple

import numpy as np
import PIL.Image
from PIL.TiffImagePlugin import ImageFileDirectory_v2

BEGINNINGS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_BIG_ENDIAN_BIG = b"MM\0+"  # which Pillow does not read
_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC = 256, 257, 258, 259, 262
_FILL_ORDER, _OFFSETS, _SAMPLES, _ROWS_PER_STRIP, _SIZES = 266, 273, 277, 278, 279
_PLANAR, _PREDICTOR, _TILE_WIDTH, _TILE_HEIGHT = 284, 317, 322, 323
_TILE_OFFSETS, _TILE_SIZES, _SAMPLE_FORMAT = 324, 325, 339
NONE = 1  # no compression
COMPRESSIONS = {
    NONE: "none",
    5: "LZW",
    8: "deflate",
    32946: "deflate",
    32773: "PackBits",
    34925: "LZMA",
    50000: "Zstandard",
}
_DTYPES = {(1, 8): "uint8", (1, 16): "uint16", (3, 32): "float32"}  # by sample format and bits
_KINDS = {1: "unsigned", 2: "signed", 3: "float", 4: "undefined", 5: "complex", 6: "complex"}
_BLACK_IS_ZERO, _RGB = 1, 2
AT_ONCE = 2**26  # bytes that Pillow unpacks at once; it refuses more than 179 million


class OtherKindError(ValueError):
    """The file may be whole, but it is of a kind that is not read."""


class Layout(NamedTuple):
    """Where the pixels of a TIFF are.

    Attributes:
      height, width, channels: of the image.
      dtype: "uint8", "uint16" or "float32".
      order: "<" or ">", the order of bytes.
      is_planar: whether each channel has segments of its own.
      tiles: (height, width) of a tile; None for strips.
      segment: (height, width) of a strip or tile.
      compression, predictor: as in the tags.
      offsets, sizes: where each segment is, in bytes.
      has_more_pages: whether other pages follow.
    """

    height: int
    width: int
    channels: int
    dtype: str
    order: str
    is_planar: bool
    tiles: tuple[int, int] | None
    segment: tuple[int, int]
    compression: int
    predictor: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    has_more_pages: bool


def read_layout(file: BinaryIO) -> Layout:
    """Returns the layout of the first page.

    Args:
      file: an opened TIFF, at its beginning.

    Raises:
      OtherKindError: it is of a kind that is not read, which the message says.
      ValueError, OSError, SyntaxError, struct.error: the tags are damaged.
    """
    begin = file.read(8)
    if begin[:4] == _BIG_ENDIAN_BIG:
        raise OtherKindError("a BigTIFF whose numbers begin with the highest byte")
    begin += file.read(8) if begin[2:3] == b"+" else b""
    tags = ImageFileDirectory_v2(begin)
    file.seek(tags.next)
    tags.load(file)

    def all_of(tag, default=()):
        found = tags.get(tag, default)
        return found if isinstance(found, tuple) else (found,)

    def one(tag, default=0):
        found = all_of(tag, (default,))
        return int(found[0]) if found else default

    height, width, channels = one(_HEIGHT), one(_WIDTH), one(_SAMPLES, 1)
    if min(height, width, channels) < 1:
        raise ValueError("the TIFF has no pixels, or its tags are damaged")
    dtype = _dtype(all_of(_BITS, (1,)), all_of(_SAMPLE_FORMAT, (1,)))
    compression, predictor = one(_COMPRESSION, NONE), one(_PREDICTOR, 1)
    if compression not in COMPRESSIONS:
        known = ", ".join(dict.fromkeys(COMPRESSIONS.values()))
        raise OtherKindError(f"a TIFF with the compression {compression}; expected one of {known}")
    if (photometric := one(_PHOTOMETRIC, _BLACK_IS_ZERO)) not in (_BLACK_IS_ZERO, _RGB):
        raise OtherKindError(
            f"a TIFF with the photometric interpretation {photometric}; expected 1 (0 is black) or "
            "2 (RGB)"
        )
    if predictor not in (1, 2, 3) or (predictor == 3 and dtype != "float32"):
        raise OtherKindError(f"a TIFF of {dtype} with the predictor {predictor}; expected 1 or 2")
    if one(_FILL_ORDER, 1) != 1:
        raise OtherKindError("a TIFF whose bytes begin with their last bit (fill order 2)")
    tiles = None
    if _TILE_WIDTH in tags:
        tiles = segment = one(_TILE_HEIGHT), one(_TILE_WIDTH)
    else:
        segment = min(one(_ROWS_PER_STRIP, height) or height, height), width
    if min(segment) < 1:
        raise ValueError("the tags of the TIFF's tiles are damaged")
    layout = Layout(
        height,
        width,
        channels,
        dtype,
        "<" if begin[:2] == b"II" else ">",
        one(_PLANAR, 1) == 2 and channels > 1,
        tiles,
        segment,
        compression,
        predictor if compression != NONE else 1,
        tuple(map(int, all_of(_OFFSETS if tiles is None else _TILE_OFFSETS))),
        tuple(map(int, all_of(_SIZES if tiles is None else _TILE_SIZES))),
        tags.next != 0,
    )
    wanted = math.prod(_grid(layout)) * (channels if layout.is_planar else 1)
    if not len(layout.offsets) == len(layout.sizes) == wanted:
        raise ValueError(
            f"the TIFF names {len(layout.offsets)} strips or tiles, but its size needs {wanted}"
        )
    return layout


def read(data: bytes) -> np.ndarray:
    """Returns the pixels of a TIFF's first page: [height, width, channels].

    Raises:
      ValueError, OSError, SyntaxError, struct.error: as in `read_layout`, or it ends too early.
    """
    layout = read_layout(io.BytesIO(data))
    num_planes = layout.channels if layout.is_planar else 1
    per_plane = len(layout.offsets) // num_planes
    pixels = np.empty((layout.height, layout.width, layout.channels), layout.dtype)
    for plane in range(num_planes):
        into = pixels[..., plane : plane + 1] if layout.is_planar else pixels
        _fill(into, data, layout, plane * per_plane)
    return pixels


def _dtype(bits: tuple, formats: tuple) -> str:
    kinds = {(int(kind), int(bit)) for bit in set(bits) for kind in set(formats)}
    if len(kinds) > 1:
        raise OtherKindError("a TIFF whose channels have different types; expected one type")
    ((kind, bit),) = kinds
    kind = 1 if kind == 4 else kind  # "undefined" is read as unsigned, as by libtiff
    if (kind, bit) not in _DTYPES:
        raise OtherKindError(
            f"a TIFF of {bit}-bit {_KINDS.get(kind, 'unknown')} samples; expected "
            f"{', '.join(_DTYPES.values())}"
        )
    return _DTYPES[kind, bit]


def _grid(layout: Layout) -> tuple[int, int]:
    """Returns how many segments a plane has, downward and across."""
    return (-(-layout.height // layout.segment[0]), -(-layout.width // layout.segment[1]))


def _fill(pixels: np.ndarray, data: bytes, layout: Layout, first: int) -> None:
    """Fills [height, width, channels of the plane], from segment number `first` on."""
    (down, across), (tall, wide) = _grid(layout), layout.segment
    channels, item = pixels.shape[-1], np.dtype(layout.dtype).itemsize
    row_bytes = wide * channels * item  # of one segment
    together = max(1, AT_ONCE // (tall * across * row_bytes))  # rows of segments
    for start in range(0, down, together):
        stop = min(start + together, down)
        top, bottom = start * tall, stop * tall
        if layout.tiles is None:  # the last strip has only the rest
            bottom = min(bottom, layout.height)
        parts = []
        for number in range(first + start * across, first + stop * across):
            begin, size = layout.offsets[number], layout.sizes[number]
            if begin + size > len(data):
                raise OSError(f"the TIFF ends after {len(data):,} bytes, before its last pixels")
            parts.append(data[begin : begin + size])
        if layout.compression == NONE:
            unpacked = _joined(parts, bottom - top, across, tall, row_bytes)
        else:
            unpacked = _unpacked(parts, layout, bottom - top, across, row_bytes)
        found = _levels(unpacked.reshape(bottom - top, across, row_bytes), layout, channels)
        found = found.reshape(bottom - top, across * wide, channels)
        bottom = min(bottom, layout.height)
        pixels[top:bottom] = found[: bottom - top, : layout.width]


def _joined(parts: list[bytes], rows: int, across: int, tall: int, row_bytes: int) -> np.ndarray:
    """Returns the bytes of segments that are not compressed: [rows, across * row_bytes] uint8."""
    found = np.empty((rows, across, row_bytes), np.uint8)
    for number, part in enumerate(parts):
        top, place = number // across * tall, number % across
        into = found[top : top + tall, place]
        if len(part) < into.size:
            raise OSError(f"a strip of the TIFF has {len(part):,} bytes, and needs {into.size:,}")
        into[:] = np.frombuffer(part, np.uint8, into.size).reshape(into.shape)
    return found


def _unpacked(
    parts: list[bytes], layout: Layout, rows: int, across: int, row_bytes: int
) -> np.ndarray:
    """Returns the bytes of compressed segments, unpacked by Pillow: [rows, bytes] uint8."""
    tall = layout.segment[0]
    width, offset = across * row_bytes, 8
    short, long = "H", "I"
    offsets = []
    for part in parts:
        offsets.append(offset)
        offset += len(part)
    tags = {
        _WIDTH: (long, [width]),
        _HEIGHT: (long, [rows]),
        _BITS: (short, [8]),
        _COMPRESSION: (short, [layout.compression]),
        _PHOTOMETRIC: (short, [_BLACK_IS_ZERO]),
        _SAMPLES: (short, [1]),
    }
    sizes = list(map(len, parts))
    if layout.tiles is None:
        tags |= {_OFFSETS: (long, offsets), _ROWS_PER_STRIP: (long, [tall]), _SIZES: (long, sizes)}
    else:
        tags |= {_TILE_WIDTH: (long, [row_bytes]), _TILE_HEIGHT: (long, [tall])}
        tags |= {_TILE_OFFSETS: (long, offsets), _TILE_SIZES: (long, sizes)}
    packed = _file(b"".join(parts), tags)
    with PIL.Image.open(io.BytesIO(packed), formats=("TIFF",)) as image:
        return np.asarray(image)


def _file(pixels: bytes, tags: dict[int, tuple[str, list[int]]]) -> bytes:
    """Returns a little-endian TIFF: a header, the pixels from byte 8 on, and the tags."""
    pixels += b"\0" * (len(pixels) % 2)
    start = 8 + len(pixels)
    behind = start + 2 + 12 * len(tags) + 4  # where long values go
    entries, values = struct.pack("<H", len(tags)), b""
    for tag, (kind, numbers) in sorted(tags.items()):
        value = struct.pack(f"<{len(numbers)}{kind}", *numbers)
        entries += struct.pack("<HHI", tag, {"H": 3, "I": 4}[kind], len(numbers))
        if len(value) <= 4:
            entries += value.ljust(4, b"\0")
        else:
            entries += struct.pack("<I", behind + len(values))
            values += value
    return b"II*\0" + struct.pack("<I", start) + pixels + entries + bytes(4) + values


def _levels(unpacked: np.ndarray, layout: Layout, channels: int) -> np.ndarray:
    """Returns the values of segments, [rows, across, width, channels], from their bytes.

    A predictor is undone: 2 stores the difference from the pixel to the left; 3 does so with the
    bytes of floats, after it has put all first bytes of a row before all second ones.
    """
    rows, across, row_bytes = unpacked.shape
    dtype = np.dtype(layout.dtype)
    if layout.predictor == 3:
        moved = unpacked.reshape(rows, across, row_bytes // channels, channels)
        moved = np.cumsum(moved, axis=2, dtype=np.uint8)
        moved = moved.reshape(rows, across, dtype.itemsize, -1).swapaxes(-1, -2)
        found = np.ascontiguousarray(moved).view(dtype.newbyteorder(">")).astype(dtype)
        return found.reshape(rows, across, -1, channels)
    if layout.predictor == 2:
        whole = np.dtype(f"u{dtype.itemsize}")
        stored = np.ascontiguousarray(unpacked).view(whole.newbyteorder(layout.order))
        stored = stored.reshape(rows, across, -1, channels)
        return np.cumsum(stored, axis=2, dtype=whole).view(dtype)
    stored = np.ascontiguousarray(unpacked).view(dtype.newbyteorder(layout.order))
    return stored.astype(dtype).reshape(rows, across, -1, channels)
