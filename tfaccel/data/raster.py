"""Reads PNG, TIFF and .npy files as arrays, exactly as they are stored.

The usual readers of images give 8 bits, and 1 or 3 channels. These files may have any number of
channels, of uint8, uint16 or float32:

  PNG   8 or 16 bits: grey, grey and opacity, RGB, RGB and opacity
  TIFF  see tiff.py
  .npy  [height, width] or [height, width, channels]

Nothing is converted. A file with another number of channels or another data type than asked for
does not fit, so a folder with mixed bit depths is refused.

    form = RasterForm("uint16", 5)
    form.misfit(header(file))    # "has 3 channels of uint8; expected ...", or None
    read(data, header(file))     # [height, width, 5] uint16

The content decides on the format, not the name.
"""

import dataclasses
import io
import os
import struct
from typing import BinaryIO, NamedTuple

import numpy as np

from tfaccel.common.errors import UserError
from tfaccel.common.tables import counted
from tfaccel.config import ImageConfig
from tfaccel.data import tiff
from tfaccel.data.tiff import OtherKindError

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
NPY_BEGINNING = b"\x93NUMPY"
NPY_SUFFIX = ".npy"
SUFFIXES = {NPY_SUFFIX, ".png", ".tif", ".tiff"}
PNG_CHANNELS = {0: 1, 2: 3, 4: 2, 6: 4}  # by colour type (W3C PNG, 11.2.1)
_PNG_HEADER = 33  # bytes up to the end of a PNG's first chunk
_DTYPES = ("uint8", "uint16", "float32")
MOST_BYTES = 2**31  # of a decoded image; a damaged or hostile header may claim any size

# What a damaged file may raise: struct.error is for a header that is cut off.
FAULTS = (OSError, SyntaxError, ValueError, EOFError, TypeError, KeyError, struct.error)


class Header(NamedTuple):
    """What the beginning of a file says.

    Attributes:
      kind: "PNG", "TIFF" or ".npy".
      height, width, channels, dtype: of the pixels.
      has_more_pages: whether a TIFF has other pages, which are not read.
    """

    kind: str
    height: int
    width: int
    channels: int
    dtype: str
    has_more_pages: bool = False


@dataclasses.dataclass(frozen=True)
class RasterForm:
    """The form that all images of a source have.

    Attributes:
      dtype: "uint8", "uint16" or "float32".
      channels: the number of channels.
    """

    dtype: str
    channels: int

    def misfit(self, found: Header) -> str | None:
        """Returns why an image does not have this form, or None if it has."""
        if (found.dtype, found.channels) == (self.dtype, self.channels):
            return None
        page = " in the first of its pages, the only one that is read" * found.has_more_pages
        return (
            f"has {counted(found.channels, 'channel')} of {found.dtype}{page}; expected "
            f"{counted(self.channels, 'channel')} of {self.dtype}, as channels={self.channels} and "
            f"pixel_dtype={self.dtype!r} say: convert it, or, if all are like it, set "
            + " and ".join(self._changes(found))
        )

    def _changes(self, found: Header) -> list[str]:
        changes = [f"channels={found.channels}"] if found.channels != self.channels else []
        return changes + ([f"pixel_dtype={found.dtype!r}"] if found.dtype != self.dtype else [])


def form_of(images: ImageConfig) -> RasterForm:
    """Returns the form that the settings ask for."""
    return RasterForm(images.pixel_dtype, images.channels)


def is_known(data: bytes) -> bool:
    """Returns whether the bytes begin like a file of a kind that is read here."""
    return data.startswith((PNG_SIGNATURE, NPY_BEGINNING, *tiff.BEGINNINGS))


def header(file: BinaryIO) -> Header:
    """Returns the header of an opened file, which is at its beginning.

    Raises:
      OtherKindError: it is of another kind, which the message says.
      ValueError, OSError, ...: it is damaged; see FAULTS.
    """
    begin = file.read(8)
    file.seek(0)
    if begin == PNG_SIGNATURE:
        found = _png_header(file.read(_PNG_HEADER))
    elif begin[:4] in tiff.BEGINNINGS:
        layout = tiff.read_layout(file)
        found = Header("TIFF", *layout[:4], has_more_pages=layout.has_more_pages)
    elif begin.startswith(NPY_BEGINNING):
        found = _npy_header(file)
    else:
        raise OtherKindError(
            "not a PNG, TIFF or .npy file, which alone can have other than 8 bits or other than 1 "
            "or 3 channels"
        )
    size = found.height * found.width * found.channels * np.dtype(found.dtype).itemsize
    if size > MOST_BYTES:
        raise OtherKindError(
            f"{found.height} x {found.width} x {found.channels} pixels are too many"
        )
    return found


def header_of(blobs, index: int) -> Header:
    """Returns the header of an example; only the header of a file is read.

    Raises:
      ValueError, OSError, ...: as in `header`.
    """
    with blobs.opened(index) as file:
        return header(file)


def read(data: bytes, found: Header) -> np.ndarray:
    """Returns the pixels of a file: [height, width, channels] uint8, uint16 or float32.

    Args:
      data: the file.
      found: its header.

    Raises:
      ValueError, OSError, ...: as in `header`, or the file is damaged or cut short.
    """
    if found.kind == "TIFF":
        return tiff.read(data)
    if found.kind == "PNG":
        return _read_png(data, found)
    array = np.load(io.BytesIO(data), allow_pickle=False)
    return np.ascontiguousarray(array, found.dtype).reshape(found[1:4])


def read_as(data: bytes, form: RasterForm) -> np.ndarray:
    """Returns the pixels of a file that has the form.

    Raises:
      ValueError, OSError, ...: as in `read`, or it has another form.
    """
    found = header(io.BytesIO(data))
    if fault := form.misfit(found):
        raise ValueError(fault)
    return read(data, found)


def cause(error: Exception) -> str:
    """Returns what is wrong with a file, in one line without its path."""
    return (
        " ".join((getattr(error, "strerror", None) or str(error)).split()) or type(error).__name__
    )


def fault_of(blobs, index: int) -> str | None:
    """Returns why an example cannot be read in the form of `blobs.form`; None if it can."""
    try:
        read_as(blobs.read(index), blobs.form)
    except FAULTS as error:
        return cause(error)
    return None


def has_arrays(blobs) -> bool:
    """Returns whether a file is named like an array of NumPy.

    Raises:
      UserError: beside it there are images that are not read as arrays.
    """
    suffixes = blobs.files.suffixes() if blobs.are_files else set()
    if NPY_SUFFIX not in suffixes:
        return False
    if others := sorted(suffixes - SUFFIXES):
        raise UserError(
            f"{blobs.folder} has {NPY_SUFFIX} files and {others[0]} files; beside {NPY_SUFFIX} "
            "only PNG and TIFF files are read: move one kind away, or convert it"
        )
    return True


def _png_header(begin: bytes) -> Header:
    width, height, bits, colour = struct.unpack_from(">IIBB", begin, 16)
    if colour not in PNG_CHANNELS or bits not in (8, 16):
        kind = "with a palette" if colour == 3 else f"of {bits} bits"
        raise OtherKindError(f"a PNG {kind}; expected 8 or 16 bits without a palette")
    if min(width, height) < 1:
        raise ValueError("a PNG without pixels")
    return Header("PNG", height, width, PNG_CHANNELS[colour], "uint16" if bits == 16 else "uint8")


def _npy_header(file: BinaryIO) -> Header:
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise OtherKindError(f"a .npy file of version {version}; expected 1.0 or 2.0")
    read_header = getattr(np.lib.format, f"read_array_header_{version[0]}_{version[1]}")
    shape, _, dtype = read_header(file)
    if dtype.kind not in "uf" or dtype.newbyteorder("=").name not in _DTYPES:
        raise OtherKindError(f"an array of {dtype.name}; expected {', '.join(_DTYPES)}")
    if len(shape) not in (2, 3) or 0 in shape:
        raise OtherKindError(
            f"an array of the shape {shape}; expected (height, width) or (height, width, channels)"
        )
    *size, channels = shape if len(shape) == 3 else (*shape, 1)
    left = os.fstat(file.fileno()).st_size if _is_file(file) else len(file.getbuffer())
    needed = file.tell() + int(np.prod(shape)) * dtype.itemsize
    if left < needed:
        raise ValueError(f"the file ends after {left:,} of {needed:,} bytes")
    return Header(".npy", *size, channels, dtype.newbyteorder("=").name)


def _is_file(file: BinaryIO) -> bool:
    return not isinstance(file, io.BytesIO)


def _read_png(data: bytes, found: Header) -> np.ndarray:
    if is_animated(data):
        raise OtherKindError("an animated PNG")
    import tensorflow as tf  # it takes seconds, and headers are read before it starts

    # TensorFlow does not take channels=2. With 0 it gives those of the file, which has no palette.
    channels = 0 if found.channels == 2 else found.channels
    try:
        with tf.device("/cpu:0"):
            pixels = tf.io.decode_png(data, channels=channels, dtype=found.dtype).numpy()
    except tf.errors.OpError as error:
        raise ValueError("the PNG is damaged or cut short") from error
    return pixels


def is_animated(data: bytes) -> bool:
    """Returns whether a chunk before a PNG's pixels marks it as animated."""
    start, end = 8, len(data)
    while start + 8 <= end:
        name = data[start + 4 : start + 8]
        if name in (b"IDAT", b"IEND"):
            return False
        if name == b"acTL":
            return True
        start += 12 + int.from_bytes(data[start : start + 4], "big")
    return False
