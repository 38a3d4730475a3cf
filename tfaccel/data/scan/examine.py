"""Finds what is wrong with one encoded image, with Pillow and by its bytes.

    examine(data, suffix=".jpg")    # [("truncated", "image file is truncated")], (480, 640)

The kinds of fault were measured on planted files with the decoders of DALI 2.4 (CPU) and TensorFlow
2.21 (decode_image), 2026-11-21 (tests/data/scan/test_decoders.py). A kind is "bad" if it ends or
spoils a run with one of these decoders:

- JPEG, PNG, BMP, WebP: both decode them by their content, whatever the name. An MPO (several
  pictures in one JPEG, from phones) counts as the JPEG at its beginning.
- GIF: an error in DALI. TIFF, PPM, JPEG 2000: an error in TensorFlow, so they are good only if
  their names have such a suffix, or in shards, without names. Other formats: an error in both.
- CMYK: both decode it to RGB as Pillow does, within 2 of 255. It is bad, because its colours are
  meant for print.
- 16 bits, float: DALI and TensorFlow keep the upper 8 bits, so 12-bit data becomes black. Pillow
  clips grey at 255, and DALI expects floats in 0..1.
- Several frames: an animated GIF is an error in DALI. For an animated PNG or WebP, DALI may give
  another picture than the first frame, or an error. For a TIFF all use the first frame.
- BMP other than plain 24 bits: TensorFlow refuses most, and DALI and Pillow differ on some (test
  images of Pillow and image-rs). TIFF other than grey and RGB: DALI gives other colours.
- Grey from a colour image: both decode the colours and then convert. A decoder's own grey is up to
  91 levels off: in DALI for a PNG with a gAMA or sRGB chunk, in both for a JPEG.
- EXIF orientation: neither turns the image.
- Cut short or damaged: mostly an error in both. Pillow ignores a PNG's wrong checksums and missing
  end, a JPEG's missing end, and stray bytes between its segments. Each is an error in at least one.
  With checks for these, 1 of 12,000 randomly damaged files passed here and failed there.
  (JPEG 2000 was not among them: damage to its header ended DALI's process.)
- Huge (more than 2**29 / 3 pixels): both decode it, with up to half a GB for one image. Pillow
  refuses it.
"""

import contextlib
import io
import warnings
import zlib

import PIL.Image
import PIL.ImageFile

from tfaccel.data import raster
from tfaccel.data.raster import RasterForm
from tfaccel.data.sources.kinds import unlike
from tfaccel.data.sources.pillow import ORIENTATION, stored_size, tiff_orientation
from tfaccel.data.tiff import OtherKindError

BAD, NOTE = "bad", "note"

# Every kind of fault, and whether an image with it can be trained on. files.py finds the faults
# that are not in the bytes.
KINDS = {
    "missing": BAD,  # no such file, or a broken link
    "unreadable": BAD,  # no permission, or an input/output error
    "empty": BAD,  # no bytes
    "not_an_image": BAD,  # or a format that no loader decodes
    "truncated": BAD,  # cut short or damaged
    "unsupported": BAD,  # a format that not every loader decodes, although its name differs
    "cmyk": BAD,
    "sixteen_bit": BAD,  # 16-bit or float samples, if 8 bits are asked for
    "other_form": BAD,  # other channels or another data type than all images are to have
    "animated": BAD,
    "huge": BAD,  # above Pillow's limit for decompression bombs
    "not_a_mask": BAD,  # only for masks: not grey of 8 bits
    "two_sizes": BAD,  # a pair with input and target of different sizes
    "small": BAD,  # smaller than the crop of the config
    "several_frames": NOTE,  # in a TIFF: the first is used
    "exif_rotated": NOTE,  # used as it is stored
    "wrong_extension": NOTE,  # decoders use the content
}

HUGE_PIXELS = 2**29 // 3  # 179 million, above which Pillow raises by default

_EVERY_LOADERS = {"BMP", "JPEG", "PNG", "WEBP"}
_DALIS = {"JPEG2000", "PPM", "TIFF"}
_FORMATS = tuple(sorted(_EVERY_LOADERS | _DALIS | {"GIF"}))
_BEGINNINGS = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"II*\0", b"MM\0*")


@contextlib.contextmanager
def strict():
    """Within the context, Pillow raises for all faults, whatever the program has set, and is quiet.

    Enter it once, around all threads, because the settings belong to the process.
    """
    before = PIL.ImageFile.LOAD_TRUNCATED_IMAGES, PIL.Image.MAX_IMAGE_PIXELS
    PIL.ImageFile.LOAD_TRUNCATED_IMAGES, PIL.Image.MAX_IMAGE_PIXELS = False, None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        PIL.ImageFile.LOAD_TRUNCATED_IMAGES, PIL.Image.MAX_IMAGE_PIXELS = before


def examine(
    data: bytes, *, suffix: str, form: RasterForm | None = None
) -> tuple[list[tuple[str, str]], tuple[int, int]]:
    """Returns the (kind, cause) of every fault, and the (height, width).

    The size is that of the stored pixels; (0, 0) if it is not known. Call it within `strict`.

    Args:
      data: the encoded image.
      suffix: suffix of the image's name, with the dot; empty if it has no name.
      form: the form of images that are read as they are stored; None for the usual ones.
    """
    size = (0, 0)
    if not data:
        return [("empty", "no bytes")], size
    if form is not None:
        return _examine_raster(data, form)
    try:
        with PIL.Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            size = stored_size(image)
            if image.width * image.height > HUGE_PIXELS:
                return [("huge", f"{image.width} x {image.height} pixels")], size
            found = _by_header(image, data, suffix.lower())
            found += _by_pixels(image, data)
        return found, size
    except PIL.UnidentifiedImageError:
        return [_unidentified(data)], size
    except MemoryError:  # the file is not at fault
        raise
    except Exception as error:  # Pillow raises nearly anything for a damaged file
        return [("truncated", " ".join(str(error).split()) or type(error).__name__)], size


def _examine_raster(data: bytes, form: RasterForm) -> tuple[list[tuple[str, str]], tuple[int, int]]:
    size = (0, 0)
    try:
        found = raster.header(io.BytesIO(data))
        size = found.height, found.width
        if fault := form.misfit(found):
            return [("other_form", fault)], size
        raster.read(data, found)
        if found.kind == "PNG":
            _check_png(data)
    except raster.FAULTS as error:
        kind = "other_form" if isinstance(error, OtherKindError) else "truncated"
        return [(kind if raster.is_known(data) else "not_an_image", raster.cause(error))], size
    if found.has_more_pages:
        return [("several_frames", "several pages of TIFF; the first is read")], size
    return [], size


def _by_header(image: PIL.Image.Image, data: bytes, suffix: str) -> list[tuple[str, str]]:
    found = []
    content = "JPEG" if image.format == "MPO" else image.format
    named = PIL.Image.registered_extensions().get(suffix)
    if named not in (content, None) and not (content == "JPEG" and named == "MPO"):
        found.append(("wrong_extension", f"{content} content"))
    if image.mode == "CMYK":
        found.append(("cmyk", "CMYK, which decoders convert in different ways"))
    differs = unlike(data, image)
    if differs:
        found.append(differs)
    num_frames = 1 if content == "JPEG" else getattr(image, "n_frames", 1)
    if num_frames > 1 and content not in ("GIF", "PNG", "WEBP"):
        found.append(("several_frames", f"{num_frames} frames of {content}"))
    elif not differs and (content == "GIF" or (content in _DALIS and named not in (content, None))):
        found.append(("unsupported", f"{content}, which not every loader decodes"))
    return found


def _by_pixels(image: PIL.Image.Image, data: bytes) -> list[tuple[str, str]]:
    """Decodes the image and returns the faults that this shows.

    Raises:
      Exception: the image is damaged.
    """
    orientation = tiff_orientation(image)
    # This reads all of a JPEG's data but makes an eighth of its pixels: 1.6 times as fast.
    image.draft("L", (1, 1))
    image.load()
    if image.format == "PNG":
        _check_png(data)
    if image.format in ("JPEG", "MPO"):
        _check_jpeg(data)
    with contextlib.suppress(Exception):  # no decoder refuses damaged EXIF data
        orientation = orientation or image.getexif().get(ORIENTATION)
    if orientation in range(2, 9):
        return [("exif_rotated", f"orientation {orientation}; it is used as stored")]
    return []


def _check_jpeg(data: bytes) -> None:
    """Raises OSError if a JPEG has stray bytes before its pixels, or no end marker after them."""
    start = 2
    while data[start : start + 1] == b"\xff":
        marker = data[start + 1]
        if marker == 0xDA:
            if data.find(b"\xff\xd9", start) < 0:
                raise OSError("the end of the JPEG is missing")
            return
        # A marker may follow any number of 0xFF bytes.
        length = 0 if marker == 0xFF else 1 + int.from_bytes(data[start + 2 : start + 4], "big")
        start += 1 + length
    raise OSError(f"the JPEG has stray bytes at {start}")


def _check_png(data: bytes) -> None:
    """Raises OSError unless all chunks that decoders check are intact, up to the last one."""
    view, start = memoryview(data), 8
    while start + 12 <= len(data):
        end = start + 8 + int.from_bytes(view[start : start + 4], "big")
        name = bytes(view[start + 4 : start + 8])
        is_critical = name[:1].isupper()
        checksum = int.from_bytes(view[end : end + 4], "big")
        if is_critical and zlib.crc32(view[start + 4 : end]) != checksum:
            raise OSError(f"the PNG's {name.decode('latin-1')} chunk is damaged")
        if name == b"IEND":
            return
        start = end + 4
    raise OSError("the end of the PNG is missing")


def _unidentified(data: bytes) -> tuple[str, str]:
    is_webp = data[:4] == b"RIFF" and data[8:12] == b"WEBP"
    if is_webp or data.startswith(_BEGINNINGS):
        return "truncated", "only the beginning of an image"
    return "not_an_image", f"begins with {data[:8]!r}; expected an image that a loader decodes"
