"""Finds out from its header whether all decoders read an image as Pillow does.

    unlike(data)                     # ("animated", "2 frames of PNG"), or None
    unfit(data, is_mask=True)        # "is of Pillow's mode P; expected masks of ...", or None

The rules are measured with `tools/compare_decoders.py` on the test images of Pillow, image-rs and
libjpeg-turbo: `tools/results/decoders-2-cores.md`. A JPEG or a PNG of the usual kind takes some
microseconds. Any other image takes as long as Pillow needs to open it.
"""

import io
import struct
from typing import NamedTuple

import numpy as np
import PIL.Image

from tfaccel.common.errors import UserError
from tfaccel.data import raster
from tfaccel.data.source import Blobs
from tfaccel.data.sources import pillow
from tfaccel.data.sources.pillow import (
    SAMPLES_PER_PIXEL,
    UNREADABLE,
    deep,
    largest_of_ppm,
    sample_bits,
    tiff_orientation,
    unfit_mask,
)

_JPEG = b"\xff\xd8\xff"
_SECOND_CHUNK = 37  # offset of the name of a PNG's second chunk
HEAD_BYTES = _SECOND_CHUNK + 4  # the first bytes, which `are_usual` checks
_GREY = 0  # one of PNG's colour types (W3C PNG, 11.2.1)
_RAMP = b"".join(bytes([level, level, level, 0]) for level in range(256))  # a BMP's grey palette
# The modes of a TIFF, and the values of two tags, for which all decoders agree (TIFF 6.0).
_TIFF_MODES = {"1": 1, "L": 1, "RGB": 3, "CMYK": 4}  # and their numbers of channels
_TIFF_TAGS = {
    "sample format": (339, (1,)),  # unsigned whole numbers
    "extra samples": (338, ()),
}


def unlike(data: bytes, image: PIL.Image.Image | None = None) -> tuple[str, str] | None:
    """Returns the (kind, cause) of an image whose pixels depend on the decoder, or None.

    The kind is one of `tfaccel.data.scan.examine.KINDS`. Damage is not looked for.

    Args:
      data: the encoded image.
      image: the image as Pillow has opened it, not yet decoded. None opens it if needed.

    Raises:
      OSError, SyntaxError, ValueError, PIL.Image.DecompressionBombError: the bytes are not an
        image; see `pillow.UNREADABLE`.
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
    if content == "PNG" and raster.is_animated(data):
        return "animated", "a PNG that is marked as animated"
    why = None
    if content == "BMP" and not _is_plain_bmp(data):
        why = "a BMP of another kind than plain 24-bit or grey pixels"
    elif content == "GIF" and _has_holes(image):
        why = "a GIF with transparent or missing parts"
    elif content == "TIFF":
        why = _odd_tiff(image)
    elif content == "PPM" and (largest := largest_of_ppm(image)) != 255:
        why = f"a PPM with the largest value {largest}, not 255"
    return ("unsupported", why) if why else None


def unfit(data: bytes, *, is_mask: bool) -> str | None:
    """Returns why only Pillow may decode an image, or None for most images.

    Args:
      data: the encoded image.
      is_mask: whether the image's grey levels are classes.

    Raises:
      OSError, SyntaxError, ValueError, PIL.Image.DecompressionBombError: the bytes are not an
        image.
    """
    if _is_usual(data) and not is_mask:
        return None
    if (
        is_mask
        and data.startswith(raster.PNG_SIGNATURE)
        and _is_usual(data)
        and data[24:26] == bytes([8, _GREY])
    ):
        return None
    with PIL.Image.open(io.BytesIO(data)) as image:
        if is_mask and (fault := unfit_mask(image)):
            return fault
        if fault := deep(image):
            return fault
        found = unlike(data, image)
    return f"is {_with_article(found[1])}, which decoders read in different ways" if found else None


def unfit_blob(blobs: Blobs, index: int, *, is_mask: bool) -> str | None:
    """Returns `"name (cause)"` if an image is `unfit`, else None.

    Raises:
      OSError, SyntaxError, ValueError, PIL.Image.DecompressionBombError: the image cannot be read,
        or is not an image.
    """
    if blobs.form is not None:
        fault = blobs.form.misfit(raster.header_of(blobs, index))
    else:
        fault = unfit(blobs.read(index), is_mask=is_mask)
    return f"{blobs.name(index)} ({fault})" if fault else None


def check_kinds(
    blobs: Blobs,
    ids: np.ndarray,
    *,
    are_masks: bool,
    by_pillow: bool,
    headers: pillow.Headers | None = None,
) -> None:
    """Checks some images for kinds that a loader does not take.

    Args:
      blobs: the images.
      ids: [num_ids], indices of the images that are checked.
      are_masks: whether the images' grey levels are classes.
      by_pillow: whether Pillow decodes them, which takes more kinds.
      headers: what has read some of them already; None for nothing.

    Raises:
      UserError: an image has 16-bit samples, is not a mask, or is read differently by the loader's
        decoder and by Pillow. The first such image is named.
    """
    pillow.check_kinds(blobs, ids, are_masks=are_masks, headers=headers)
    if by_pillow or blobs.form is not None:
        return
    for index in ids.tolist():
        try:
            fault = unfit(blobs.read(index), is_mask=are_masks)
        except UNREADABLE:
            continue  # the loader names or skips it
        if fault:
            raise UserError(
                f"{blobs.name(index)} {fault}; convert all images of this kind, let Pillow read "
                "them with loader='memory' or 'cache', or skip them with bad_files='skip'"
            )


class Unseen:
    """Knows which examples a stream has not read yet, because each is checked when first read."""

    def __init__(self, num_examples: int):
        """Starts with `num_examples` examples that have not been read."""
        self._is_seen = np.zeros(num_examples, bool)

    def among(self, ids: np.ndarray, number: int) -> np.ndarray:
        """Returns which examples of a batch are new, [rows] bool, and marks them as read.

        Args:
          ids: [rows], the examples of the batch.
          number: the batch's number. All of batch 0 is new, because a stream makes it twice.
        """
        is_new = np.ones(len(ids), bool) if number == 0 else ~self._is_seen[ids]
        self._is_seen[ids] = True
        return is_new


def agreed(data: bytes, *, is_mask: bool) -> bool:
    """Returns whether an image is not `unfit`. Other bytes are left for the decoder to refuse."""
    try:
        return unfit(data, is_mask=is_mask) is None
    except UNREADABLE:
        return True


def _with_article(cause: str) -> str:
    return cause if cause.startswith("a ") else f"an image of {cause}"


class Template(NamedTuple):
    """Bounds of the first bytes of a usual image, from `least` to `most`, [HEAD_BYTES] uint8."""

    least: np.ndarray
    most: np.ndarray


def usual_heads(*, are_masks: bool) -> list[Template]:
    """Returns templates for the first bytes of most images that are not `unfit`.

    Such an image is a JPEG, or a PNG with at most 8 bits a sample whose pixels directly follow its
    header. Such a mask is a PNG of this kind with 8-bit grey levels.

    Args:
      are_masks: whether the images' grey levels are classes.
    """
    plain_png = {0: raster.PNG_SIGNATURE, _SECOND_CHUNK: b"IDAT"}
    if are_masks:
        return [_template(plain_png | {24: bytes([8, _GREY])})]
    at_most_8_bits = _template(plain_png)
    at_most_8_bits.most[24] = 8
    return [at_most_8_bits, _template({0: _JPEG})]


def _template(parts: dict[int, bytes]) -> Template:
    found = Template(np.zeros(HEAD_BYTES, np.uint8), np.full(HEAD_BYTES, 255, np.uint8))
    for start, wanted in parts.items():
        for bound in found:
            bound[start : start + len(wanted)] = np.frombuffer(wanted, np.uint8)
    return found


def are_usual(heads: np.ndarray, *, are_masks: bool) -> np.ndarray:
    """Returns which images are certainly not `unfit`, judging from their first bytes: [num] bool.

    Args:
      heads: [num, HEAD_BYTES] uint8, the first bytes of each image.
      are_masks: whether the images' grey levels are classes.
    """
    known = np.zeros(len(heads), bool)
    for least, most in usual_heads(are_masks=are_masks):
        known |= ((heads >= least) & (heads <= most)).all(axis=1)
    return known


def _is_usual(data: bytes) -> bool:
    """Returns whether it is a JPEG, or a PNG with one picture and at most 8 bits a sample."""
    if data[:3] == _JPEG:
        return True
    return (
        data[:8] == raster.PNG_SIGNATURE and data[24:25] <= b"\x08" and not raster.is_animated(data)
    )


def _is_plain_bmp(data: bytes) -> bool:
    """Returns whether a BMP has 24-bit pixels or grey levels, and no bytes after its pixels."""
    fields = struct.unpack_from("<IIiiHHI", data[:34].ljust(34, b"\0"), offset=10)
    start, header, width, height, _, depth, compression = fields
    if header < 40 or compression or depth not in (8, 24):
        return False
    palette = data[14 + header : start]
    if depth == 8 and not (palette and _RAMP.startswith(palette)):
        return False
    row = -(-width * depth // 32) * 4
    return len(data) == start + row * abs(height)


def _has_holes(image: PIL.Image.Image) -> bool:
    """Returns whether a GIF's first frame leaves pixels undefined."""
    covers = bool(image.tile) and tuple(image.tile[0].extents) == (0, 0, *image.size)
    return "transparency" in image.info or not covers


def _odd_tiff(image: PIL.Image.Image) -> str | None:
    if image.mode not in _TIFF_MODES:
        return f"a TIFF of mode {image.mode}"
    samples = image.tag_v2.get(SAMPLES_PER_PIXEL, 1)
    if samples != _TIFF_MODES[image.mode]:  # Pillow drops the others
        return f"a TIFF of {samples} channels, of which Pillow reads {_TIFF_MODES[image.mode]}"
    for name, (tag, allowed) in _TIFF_TAGS.items():
        found = image.tag_v2.get(tag, ())
        found = found if isinstance(found, tuple) else (found,)
        if not set(found) <= set(allowed):
            return f"a TIFF with the {name} {', '.join(map(str, found))}"
    orientation = tiff_orientation(image)
    if sample_bits(image) != 8 and orientation not in (None, 1):
        return f"a TIFF of {sample_bits(image)} bits with the orientation {orientation}"
    return None
