"""Masks with a palette, or of 1, 2 or 4 bits, as grey images of 8 bits.

Takes an encoded mask whose pixels are numbers of classes, and returns an encoded grey image whose
grey levels are these numbers. Decoders would return the palette's colours, or spread the levels.

    grey = as_grey(data)      # the same bytes, if they are grey of 8 bits already

Pascal VOC's masks are PNGs with a palette. In such a PNG of 8 bits, a pixel is one byte, as in a
grey one (PNG specification, third edition, sections 11.2.1 and 11.2.3). So only its header changes.
"""

import contextlib
import dataclasses
import io
import logging
import zlib

import numpy as np
import PIL.Image

from tfaccel.common.errors import UserError
from tfaccel.data.raster import PNG_SIGNATURE
from tfaccel.data.source import ImageSource, spread
from tfaccel.data.sources.pillow import UNREADABLE, Headers, header, sample_bits

log = logging.getLogger("tfaccel")

NUM_SAMPLED = 64  # masks whose headers are read

GREY, PALETTE = 0, 3  # PNG's colour types
_KEPT = (b"IHDR", b"IDAT", b"IEND")  # other chunks have a palette's form, or change the levels
_AT_TYPE, _HEADER = 25, 33  # bytes before the colour type, and before what follows IHDR


def with_grey_masks(source: ImageSource, *, headers: Headers | None = None) -> ImageSource:
    """Returns the source whose masks are read `as_grey`, if a sampled one needs it; or the same.

    Reading takes longer then: each mask goes through Python, also where DALI decodes it.

    Args:
      source: pairs of images and masks.
      headers: what reads the masks, for later checks of the same ones; None for nothing.
    """
    read = headers or header
    for index in spread(len(source), NUM_SAMPLED).tolist():
        with contextlib.suppress(UserError):  # the loader answers for an unreadable file
            image = read(source.targets, index)
            if why := _classes_are_in(image):
                log.info(
                    "data: masks are read as grey images, because the classes of %s are in %s",
                    source.targets.name(index),
                    why,
                )
                grey = dataclasses.replace(source.targets, recode=as_grey)
                return dataclasses.replace(source, targets=grey)
    return source


def _classes_are_in(image: PIL.Image.Image) -> str | None:
    """Returns where a PNG has its classes, if decoders would lose them; else None."""
    if image.format != "PNG":
        return None
    if image.mode == "P":
        return "a palette"
    bits = sample_bits(image)
    return f"{bits} bits" if image.mode in ("1", "L") and bits < 8 else None


def as_grey(data: bytes) -> bytes:
    """Returns the mask as a grey image of 8 bits, or the same bytes if it is no such PNG.

    A damaged image is left for the decoder to refuse.
    """
    if not data.startswith(PNG_SIGNATURE) or len(data) < _HEADER:
        return data
    bits, kind = data[_AT_TYPE - 1], data[_AT_TYPE]
    if kind == PALETTE and bits == 8:
        return _with_grey_header(data)
    if kind in (GREY, PALETTE) and bits < 8:
        with contextlib.suppress(*UNREADABLE):
            return _decoded(data)
    return data


def _with_grey_header(data: bytes) -> bytes:
    """Returns a palette's PNG of 8 bits with the header of a grey one, and without its palette."""
    parts, at = [PNG_SIGNATURE], len(PNG_SIGNATURE)
    while at + 12 <= len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        name, chunk = data[at + 4 : at + 8], data[at : at + 12 + size]
        if name == b"IHDR":
            body = bytearray(chunk[4:-4])  # the name and the 13 bytes of the header
            body[_AT_TYPE - len(PNG_SIGNATURE) - 4] = GREY
            chunk = chunk[:4] + bytes(body) + zlib.crc32(body).to_bytes(4, "big")
        if name in _KEPT:
            parts.append(chunk)
        at += 12 + size
    return b"".join(parts)


def _decoded(data: bytes) -> bytes:
    """Returns an image of few bits as a grey PNG of 8 bits."""
    with PIL.Image.open(io.BytesIO(data)) as image:
        bits, levels = sample_bits(image), np.asarray(image)
        if image.mode == "L":  # Pillow has spread the levels over 0 to 255
            levels = levels // (255 // (2**bits - 1))
    grey = io.BytesIO()
    PIL.Image.fromarray(levels.astype(np.uint8)).save(grey, "PNG", compress_level=1)
    return grey.getvalue()
