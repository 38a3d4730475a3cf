"""Reads with Pillow whether images can be decoded, why not, and which size they have.

undecodable(source.images, 14)    # "cats/x.jpg (image file is truncated)"
"""

import concurrent.futures
import io

import numpy as np
import PIL.Image

from tfaccel.common.errors import UserError
from tfaccel.data import raster
from tfaccel.data.source import Blobs

# Both DALI and Pillow decode these, so that Pillow can name a file that fails in DALI.
PILLOW_SUFFIXES = (".bmp", ".jp2", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
IMAGE_SUFFIXES = (*PILLOW_SUFFIXES, raster.NPY_SUFFIX)  # what raster.py reads, too

# When Pillow decodes a TIFF, it applies the EXIF orientation. No other decoder here does so.
# These transposes turn the image back, by orientation. (1 is upright.)
_BACK = {
    2: PIL.Image.Transpose.FLIP_LEFT_RIGHT,
    3: PIL.Image.Transpose.ROTATE_180,
    4: PIL.Image.Transpose.FLIP_TOP_BOTTOM,
    5: PIL.Image.Transpose.TRANSPOSE,
    6: PIL.Image.Transpose.ROTATE_90,
    7: PIL.Image.Transpose.TRANSVERSE,
    8: PIL.Image.Transpose.ROTATE_270,
}
ORIENTATION = 0x112  # the tag in TIFF and EXIF data
BITS_PER_SAMPLE, SAMPLES_PER_PIXEL = 0x102, 0x115  # TIFF tags
PHOTOMETRIC, WHITE_IS_ZERO = 0x106, 0  # a TIFF tag, and one of its values

# Pillow's exceptions for files that are not images, are cut short, or are suspiciously large.
UNREADABLE = (OSError, SyntaxError, ValueError, PIL.Image.DecompressionBombError)


def undecodable(blobs: Blobs, index: int) -> str | None:
    """Returns "name (cause)", with a list's line, if an image cannot be decoded; else None."""
    if blobs.form is not None:
        fault = raster.fault_of(blobs, index)
        return _named(blobs, index, fault) if fault else None
    try:
        with _open(blobs, index) as image:
            image.load()
    except UNREADABLE as error:
        return _named(blobs, index, cause(error))
    return None


def _named(blobs: Blobs, index: int, fault: str) -> str:
    line = f", named in {blobs.lines.of(index)}" if blobs.lines else ""
    return f"{blobs.name(index)} ({fault}{line})"


def image_size(blobs: Blobs, index: int, *, headers: "Headers | None" = None) -> tuple[int, int]:
    """Returns an image's (height, width) in pixels, as they are stored.

    Args:
      blobs: the images.
      index: the image.
      headers: what has read some of them already; None for nothing.

    Raises:
      UserError: the file cannot be read, or is not an image.
    """
    if blobs.form is not None:
        found = raster_header(blobs, index)
        return found.height, found.width
    return stored_size((headers or header)(blobs, index))


def raster_header(blobs: Blobs, index: int) -> raster.Header:
    """Returns the header of an image that is read as it is stored.

    Raises:
      UserError: the file cannot be read, or is of a kind that cannot be read so.
    """
    try:
        return raster.header_of(blobs, index)
    except raster.FAULTS as error:
        raise _unreadable(blobs, index, error, raster.cause(error)) from error


def image_sizes(blobs: Blobs, ids: np.ndarray, *, num_threads: int) -> np.ndarray:
    """Returns the heights and widths of images, as `image_size` does: [num_ids, 2] int64.

    It takes 60 us for each image and thread if the files are in memory (2 cores, 2026-11-21).
    """

    def of(part):
        return [image_size(blobs, index) for index in part.tolist()]

    # One task for each image would take a GB for a million images.
    parts = np.array_split(ids, -(-len(ids) // 256) or 1)
    with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
        sizes = [size for part in pool.map(of, parts) for size in part]
    return np.array(sizes, np.int64).reshape(-1, 2)


def stored_size(image: PIL.Image.Image) -> tuple[int, int]:
    """Returns the (height, width) of the stored pixels of an image that is not decoded yet."""
    size = image.height, image.width
    return size[::-1] if (tiff_orientation(image) or 1) >= 5 else size


def tiff_orientation(image: PIL.Image.Image) -> int | None:
    """Returns a TIFF's EXIF orientation. The image must not be decoded: Pillow then removes it."""
    return image.tag_v2.get(ORIENTATION) if image.format == "TIFF" else None


def decoded(image: PIL.Image.Image, mode: str) -> PIL.Image.Image:
    """Returns an opened image's pixels as they are stored, in one of Pillow's modes."""
    orientation = tiff_orientation(image)
    pixels = image.convert(mode)
    return pixels.transpose(_BACK[orientation]) if orientation in _BACK else pixels


def check_kinds(
    blobs: Blobs, ids: np.ndarray, *, are_masks: bool, headers: "Headers | None" = None
) -> None:
    """Checks the headers of some images for kinds that no loader takes.

    Args:
      blobs: the images.
      ids: [num_ids], indices of the images that are checked.
      are_masks: whether the images' grey levels are classes.
      headers: what has read some of them already; None for nothing.

    Raises:
      UserError: an image has 16-bit samples, or not the form of the other images, or is not a mask.
        The first such image is named.
    """
    read = headers or header
    for index in ids.tolist():
        if blobs.form is not None:
            fault = blobs.form.misfit(raster_header(blobs, index))
            fix = "give the form of the images, convert this one, or skip it with bad_files='skip'"
        else:
            image = read(blobs, index)
            fault = unfit_mask(image) if are_masks else deep(image)
            fix = "convert all images of this kind, or skip them with bad_files='skip'"
            if fault and not are_masks and (form := _form_in_words(blobs, index)):
                fix = f"to read such images as they are stored, set {form}; or {fix}"
        if fault:
            raise UserError(f"{blobs.name(index)} {fault}; {fix}")


def _form_in_words(blobs: Blobs, index: int) -> str:
    """Returns the settings that read an image as it is stored; "" if there are none."""
    try:
        found = raster.header_of(blobs, index)
    except raster.FAULTS:
        return ""
    return f"channels={found.channels} and pixel_dtype={found.dtype!r}"


def mask_fault(blobs: Blobs, index: int) -> str | None:
    """Returns why an image is not a mask, judging from its header; None for a mask.

    Raises:
      UserError: the file cannot be read, or is not an image.
    """
    return unfit_mask(header(blobs, index))


def unfit_mask(image: PIL.Image.Image) -> str | None:
    """Returns why an image that is not decoded yet is not a mask, or None if it is one."""
    if image.mode != "L":
        return (
            f"is of Pillow's mode {image.mode}; expected masks of mode L, in which the grey level "
            "is the class (decoding loses a palette's indices, and turns mode 1 into 0 and 255)"
        )
    bits = sample_bits(image)
    if bits < 8:
        return (
            f"has grey samples of {bits} bits, which decoders spread over 0 to 255; expected masks "
            "of 8 bits, in which the grey level is the class"
        )
    if image.format == "PPM" and largest_of_ppm(image) != 255:
        return (
            f"is a PGM with the largest value {largest_of_ppm(image)}, which decoders spread over "
            "0 to 255; expected masks of 8 bits, in which the grey level is the class"
        )
    if image.format == "TIFF" and image.tag_v2.get(PHOTOMETRIC) == WHITE_IS_ZERO:
        return (
            "is a TIFF in which 0 is white, so decoders invert its levels; expected masks in which "
            "the grey level is the class"
        )
    return deep(image)


def deep(image: PIL.Image.Image) -> str | None:
    """Returns a fault if an image, not yet decoded, has samples of more than 8 bits, else None."""
    if sample_bits(image) <= 8:
        return None
    return (
        "has 16-bit or float samples, which decoders reduce in different ways; expected 8 bits, in "
        "0 to 255"
    )


def sample_bits(image: PIL.Image.Image) -> int:
    """Returns the bits of each sample of an image that is not decoded yet."""
    if image.format == "PNG":
        raw = image.tile[0].args if image.tile else image.mode
        raw = raw if isinstance(raw, str) else raw[0]
        # Pillow's raw modes: "L;2", "RGB;16B", "1", or "RGB" for 8 bits.
        bits = raw.partition(";")[2].rstrip("B")
        return 1 if raw.startswith("1") else int(bits) if bits.isdigit() else 8
    if image.format == "TIFF":
        return max(image.tag_v2.get(BITS_PER_SAMPLE, (1,)))
    if image.format == "PPM" and isinstance(image.tile[0].args, tuple):
        return image.tile[0].args[-1].bit_length()  # the bits of the largest value
    if image.mode.startswith(("I", "F")):
        return 16
    return 1 if image.mode == "1" else 8


def largest_of_ppm(image: PIL.Image.Image) -> int:
    """Returns the largest possible value in the header of a PPM, not yet decoded; else 255."""
    arguments = image.tile[0].args if image.tile else ()
    return arguments[-1] if isinstance(arguments, tuple) and image.mode in ("L", "RGB") else 255


def histogram(blobs: Blobs, index: int) -> list[int]:
    """Returns the number of pixels of a mask at each grey level, [256].

    Raises:
      OSError, SyntaxError, ValueError, PIL.Image.DecompressionBombError: the image cannot be read
        or decoded; see UNREADABLE.
    """
    with _open(blobs, index) as image:
        return image.convert("L").histogram()


def cause(error: Exception) -> str:
    """Returns the fault without a path or an object's name, which the caller states itself."""
    if isinstance(error, PIL.UnidentifiedImageError):
        return "not an image"
    return getattr(error, "strerror", None) or str(error)


def header(blobs: Blobs, index: int) -> PIL.Image.Image:
    """Returns an image that is not decoded, and has been closed.

    Raises:
      UserError: the file cannot be read, or is not an image.
    """
    try:
        with blobs.opened(index) as file, PIL.Image.open(file) as image:
            return image
    except UserError:
        raise  # of a source that says itself what is wrong with its item
    except UNREADABLE as error:
        if form := _form_in_words(blobs, index):
            raise UserError(
                f"{blobs.name(index)} is not an image of 8 bits with 1 or 3 channels; to read such "
                f"images as they are stored, set {form}"
            ) from error
        raise _unreadable(blobs, index, error, cause(error)) from error


def _unreadable(blobs: Blobs, index: int, error: Exception, why: str) -> UserError:
    """Returns the error for an image that cannot be read, because of `why`."""
    name = blobs.name(index)
    if blobs.lines is None:
        return UserError(f"{name} cannot be read as an image ({why}); replace it or move it away")
    skip = "train without such images by data.bad_files=skip"
    if isinstance(error, FileNotFoundError):
        return UserError(
            f"{blobs.lines.of(index)}: {name} does not exist; correct or remove the line, or {skip}"
        )
    return UserError(
        f"{blobs.lines.of(index)}: {name} cannot be read as an image ({why}); replace it, remove "
        f"the line, or {skip}"
    )


class Headers:
    """Reads the header of each image once, for several checks of the same images.

    headers = Headers()
    headers(blobs, 3) is headers(blobs, 3)      # what `header` returns
    """

    def __init__(self):
        """Starts without headers."""
        self._read = {}

    def __call__(self, blobs: Blobs, index: int) -> PIL.Image.Image:
        """Returns what `header` returned at the first call.

        Raises:
          UserError: the file cannot be read, or is not an image.
        """
        # The same file has another header if it is read in another encoding.
        key = blobs.name(index), blobs.recode
        if key not in self._read:
            self._read[key] = header(blobs, index)
        return self._read[key]


def _open(blobs: Blobs, index: int) -> PIL.Image.Image:
    return PIL.Image.open(io.BytesIO(blobs.read(index)))
