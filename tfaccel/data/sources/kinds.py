"""Of which kind an encoded image is, by its header: one that every decoder reads as Pillow does?

Takes an image's bytes; gives None, or what it is and why decoders differ on it.

    unlike(data)                     # ("animated", "2 frames of PNG"), or None
    unfit(data, is_mask=True)        # "is of Pillow's mode P; expected masks of ...", or None

Measured with `tools/compare_decoders.py` on the test images of Pillow, image-rs and libjpeg-turbo:
`tools/results/decoders-2-cores.md`. A JPEG or a PNG of the usual kind takes some microseconds, any
other image what Pillow takes to open it.
"""

import io
from typing import NamedTuple

import numpy as np
import PIL.Image

from tfaccel.common.errors import UserError
from tfaccel.data.source import Blobs
from tfaccel.data.sources import pillow
from tfaccel.data.sources.pillow import (
    UNREADABLE,
    deep,
    largest_of_ppm,
    sample_bits,
    tiff_orientation,
    unfit_mask,
)

_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8\xff"
_SECOND_CHUNK = 37  # where a PNG has the name of what follows its header
HEAD_BYTES = _SECOND_CHUNK + 4  # that `are_usual` looks at
_GREY = 0  # of a PNG's colour types (W3C PNG, 11.2.1)
_RAMP = b"".join(bytes([level, level, level, 0]) for level in range(256))  # a BMP's grey palette
# Modes of a TIFF, and tags, with what each may have for all decoders to agree (TIFF 6.0).
_TIFF_MODES = ("1", "L", "RGB", "CMYK")
_TIFF_TAGS = {
    "sample format": (339, (1,)),  # whole numbers without a sign
    "extra samples": (338, ()),
}


def unlike(data: bytes, image: PIL.Image.Image | None = None) -> tuple[str, str] | None:
    """Returns the (kind, cause) of an image that decoders make different pixels of, or None.

    The kind is one of `tfaccel.data.scan.examine.KINDS`. What is damaged is not looked for.

    Args:
      data: the encoded image.
      image: the same as Pillow has opened it, not decoded yet; None to open it where need be.

    Raises:
      OSError, SyntaxError, ValueError, PIL.Image.DecompressionBombError: it is no image; see
        `pillow.UNREADABLE`.
    """
    if _is_usual(data):
        return None
    if image is None:
        with PIL.Image.open(io.BytesIO(data)) as image:
            return unlike(data, image)
    bits = sample_bits(image)
    if bits > 8:
        kind = "float" if image.mode == "F" else "whole-number"
        return "sixteen_bit", f"{bits}-bit {kind} samples"
    content = image.format
    num_frames = getattr(image, "n_frames", 1)
    if content in ("GIF", "PNG", "WEBP") and num_frames > 1:
        return "animated", f"{num_frames} frames of {content}"
    if content == "PNG" and _is_animated_png(data):
        return "animated", "a PNG that says it is animated"
    why = None
    if content == "BMP" and not _is_plain_bmp(data):
        why = "a BMP of another kind than plain 24-bit or grey pixels"
    elif content == "GIF" and _has_holes(image):
        why = "a GIF with transparent or missing parts"
    elif content == "TIFF":
        why = _odd_tiff(image)
    elif content == "PPM" and (largest := largest_of_ppm(image)) != 255:
        why = f"a PPM whose largest value is {largest}, not 255"
    return ("unsupported", why) if why else None


def unfit(data: bytes, *, is_mask: bool) -> str | None:
    """Returns why a decoder other than Pillow is not to be given an image; None for most.

    Args:
      data: the encoded image.
      is_mask: whether its grey levels are classes.

    Raises:
      OSError, SyntaxError, ValueError, PIL.Image.DecompressionBombError: it is no image.
    """
    if _is_usual(data) and not is_mask:
        return None
    if is_mask and data.startswith(_PNG) and _is_usual(data) and data[24:26] == bytes([8, _GREY]):
        return None
    with PIL.Image.open(io.BytesIO(data)) as image:
        if is_mask and (fault := unfit_mask(image)):
            return fault
        if fault := deep(image):
            return fault
        found = unlike(data, image)
    return f"is {_with_article(found[1])}, which decoders read in different ways" if found else None


def unfit_blob(blobs: Blobs, index: int, *, is_mask: bool) -> str | None:
    """Returns `"name (cause)"` of an image that is `unfit`, None of any other.

    Raises:
      OSError, SyntaxError, ValueError, PIL.Image.DecompressionBombError: it is no image, or cannot
        be read.
    """
    fault = unfit(blobs.read(index), is_mask=is_mask)
    return f"{blobs.name(index)} ({fault})" if fault else None


def check_kinds(blobs: Blobs, ids: np.ndarray, *, are_masks: bool, by_pillow: bool) -> None:
    """Looks at some images, for kinds that a loader does not take.

    Args:
      blobs: the images.
      ids: which of them are looked at: [num_ids].
      are_masks: whether their grey levels are classes.
      by_pillow: whether Pillow decodes them, which takes more.

    Raises:
      UserError: for the first that has samples of 16 bits, or that is no mask, or that the loader's
        decoder does not read as Pillow does.
    """
    pillow.check_kinds(blobs, ids, are_masks=are_masks)
    if by_pillow:
        return
    for index in ids.tolist():
        try:
            fault = unfit(blobs.read(index), is_mask=are_masks)
        except UNREADABLE:
            continue  # the loader names it, or leaves it out
        if fault:
            raise UserError(
                f"{blobs.name(index)} {fault}; convert all of that kind, let Pillow read them with "
                "loader='memory' or 'cache', or leave them out with bad_files='skip'"
            )


class Unseen:
    """Which examples a stream has not read yet: each is looked at as it is read first."""

    def __init__(self, num_examples: int):
        """Takes how many there are, none of which has been read."""
        self._is_seen = np.zeros(num_examples, bool)

    def among(self, ids: np.ndarray, number: int) -> np.ndarray:
        """Returns which examples of a batch are new, [rows] bool. Later they are not.

        Args:
          ids: of the batch.
          number: of the batch. Number 0 is always new: a stream makes it twice.
        """
        is_new = np.ones(len(ids), bool) if number == 0 else ~self._is_seen[ids]
        self._is_seen[ids] = True
        return is_new


def agreed(data: bytes, *, is_mask: bool) -> bool:
    """Returns whether an image is not `unfit`. What is no image is left to the decoder."""
    try:
        return unfit(data, is_mask=is_mask) is None
    except UNREADABLE:
        return True


def _with_article(cause: str) -> str:
    return cause if cause.startswith("a ") else f"an image of {cause}"


class Template(NamedTuple):
    """What the first bytes of a usual image may be: from `least` to `most`, [HEAD_BYTES] uint8."""

    least: np.ndarray
    most: np.ndarray


def usual_heads(*, are_masks: bool) -> list[Template]:
    """Returns what images that are not `unfit` mostly begin with.

    They are a JPEG, or a PNG of 8 bits a sample or fewer whose pixels follow its header at once;
    masks are such a PNG of 8-bit grey levels.

    Args:
      are_masks: whether their grey levels are classes.
    """
    plain_png = {0: _PNG, _SECOND_CHUNK: b"IDAT"}
    if are_masks:
        return [_template(plain_png | {24: bytes([8, _GREY])})]
    of_few_bits = _template(plain_png)
    of_few_bits.most[24] = 8
    return [of_few_bits, _template({0: _JPEG})]


def _template(parts: dict[int, bytes]) -> Template:
    found = Template(np.zeros(HEAD_BYTES, np.uint8), np.full(HEAD_BYTES, 255, np.uint8))
    for start, wanted in parts.items():
        for bound in found:
            bound[start : start + len(wanted)] = np.frombuffer(wanted, np.uint8)
    return found


def are_usual(heads: np.ndarray, *, are_masks: bool) -> np.ndarray:
    """Returns which images are known by their first bytes not to be `unfit`, [num] bool.

    Args:
      heads: [num, HEAD_BYTES] uint8, of each.
      are_masks: whether their grey levels are classes.
    """
    known = np.zeros(len(heads), bool)
    for least, most in usual_heads(are_masks=are_masks):
        known |= ((heads >= least) & (heads <= most)).all(axis=1)
    return known


def _is_usual(data: bytes) -> bool:
    """Returns whether it is a JPEG, or a PNG of one picture and 8 bits a sample or fewer."""
    if data[:3] == _JPEG:
        return True
    return data[:8] == _PNG and data[24:25] <= b"\x08" and not _is_animated_png(data)


def _is_animated_png(data: bytes) -> bool:
    """Returns whether a chunk ahead of a PNG's pixels says that it is animated."""
    start, end = 8, len(data)
    while start + 8 <= end:
        name = data[start + 4 : start + 8]
        if name in (b"IDAT", b"IEND"):
            return False
        if name == b"acTL":
            return True
        start += 12 + int.from_bytes(data[start : start + 4], "big")
    return False


def _is_plain_bmp(data: bytes) -> bool:
    """Returns whether a BMP has 24-bit pixels or grey levels, and nothing behind or beside them."""
    start, header, width, height, depth, compression = (
        int.from_bytes(data[at : at + size], "little", signed=signed)
        for at, size, signed in (
            (10, 4, False),
            (14, 4, False),
            (18, 4, True),
            (22, 4, True),
            (28, 2, False),
            (30, 4, False),
        )
    )
    if header < 40 or compression or depth not in (8, 24):
        return False
    palette = data[14 + header : start]
    if depth == 8 and not (palette and _RAMP.startswith(palette)):
        return False
    row = -(-width * depth // 32) * 4
    return len(data) == start + row * abs(height)


def _has_holes(image: PIL.Image.Image) -> bool:
    """Returns whether a GIF's first frame leaves pixels out."""
    covers = bool(image.tile) and tuple(image.tile[0].extents) == (0, 0, *image.size)
    return "transparency" in image.info or not covers


def _odd_tiff(image: PIL.Image.Image) -> str | None:
    if image.mode not in _TIFF_MODES:
        return f"a TIFF of mode {image.mode}"
    for name, (tag, allowed) in _TIFF_TAGS.items():
        found = image.tag_v2.get(tag, ())
        found = found if isinstance(found, tuple) else (found,)
        if not set(found) <= set(allowed):
            return f"a TIFF with the {name} {', '.join(map(str, found))}"
    orientation = tiff_orientation(image)
    if sample_bits(image) != 8 and orientation not in (None, 1):
        return f"a TIFF of {sample_bits(image)} bits with the orientation {orientation}"
    return None
