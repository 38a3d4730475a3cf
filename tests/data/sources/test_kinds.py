"""Which images decoders read in different ways, by their bytes."""

import io
import struct
import zlib

import numpy as np
import PIL.Image
import pytest

from tfaccel import UserError
from tfaccel.data.loaders import tf_data
from tfaccel.data.source import Blobs
from tfaccel.data.sources import kinds

PIXELS = np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3)
PICTURE = PIL.Image.fromarray(PIXELS)
GREY = PIL.Image.fromarray(PIXELS[..., 0])


def encoded(picture, form, **settings):
    file = io.BytesIO()
    picture.save(file, form, **settings)
    return file.getvalue()


def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def bmp_555():
    """A BMP of 16 bits a pixel, which Pillow reads and does not write."""
    red, green, blue = (PIXELS[::-1, :, each].astype(np.uint16) >> 3 for each in range(3))
    rows = (red << 10 | green << 5 | blue).astype("<u2").tobytes()
    header = struct.pack("<IiiHHIIiiII", 40, 8, 8, 1, 16, 0, len(rows), 2835, 2835, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54 + len(rows), 0, 0, 54) + header + rows


def bmp_with_palette(levels):
    """A BMP of 8 bits whose palette has these grey levels."""
    palette = b"".join(bytes([level, level, level, 0]) for level in levels)
    rows = bytes(64)
    header = struct.pack("<IiiHHIIiiII", 40, 8, 8, 1, 8, 0, 64, 2835, 2835, len(levels), 0)
    start = 54 + len(palette)
    return b"BM" + struct.pack("<IHHI", start + 64, 0, 0, start) + header + palette + rows


def moving(form, **settings):
    other = PIL.Image.fromarray(255 - PIXELS)
    return encoded(PICTURE, form, save_all=True, append_images=[other], **settings)


def turned_bilevel_tiff():
    exif = PIL.Image.Exif()
    exif[0x112] = 6
    return encoded(GREY.convert("1"), "TIFF", exif=exif)


PNG = encoded(PICTURE, "PNG")
DEEP = encoded(PIL.Image.fromarray(PIXELS[..., 0].astype(np.uint16) * 257), "PNG")
SPOILT_FRAMES = PNG[:33] + chunk(b"acTL", struct.pack(">II", 0, 0)) + PNG[33:]
HIDDEN_FRAMES = PNG[:33] + chunk(b"tEXt", b"a" * 5000) + SPOILT_FRAMES[33:]

ALIKE = {
    "jpeg": encoded(PICTURE, "JPEG"),
    "progressive": encoded(PICTURE, "JPEG", progressive=True),
    "png": PNG,
    "grey png": encoded(GREY, "PNG"),
    "palette png": encoded(PICTURE.quantize(), "PNG"),
    "bilevel png": encoded(GREY.convert("1"), "PNG"),
    "24-bit bmp": encoded(PICTURE, "BMP"),
    "grey bmp": encoded(GREY, "BMP"),
    "bmp of few grey levels": bmp_with_palette(range(4)),
    "webp": encoded(PICTURE, "WEBP"),
    "gif": encoded(PICTURE, "GIF"),
    "tiff": encoded(PICTURE, "TIFF", compression="tiff_lzw"),
    "ppm": encoded(PICTURE, "PPM"),
}
UNLIKE = {
    "16-bit png": (DEEP, "sixteen_bit"),
    "16-bit ppm": (b"P5 2 1 65535\n\0\1\0\2", "sixteen_bit"),
    "float tiff": (encoded(PIL.Image.fromarray(PIXELS[..., 0] / np.float32(255)), "TIFF"), None),
    "moving png": (moving("PNG"), "animated"),
    "png of no frames": (SPOILT_FRAMES, "animated"),
    "png of frames behind a text": (HIDDEN_FRAMES, "animated"),
    "moving webp": (moving("WEBP"), "animated"),
    "moving gif": (moving("GIF"), "animated"),
    "gif with holes": (encoded(PICTURE.quantize(), "GIF", transparency=0), "unsupported"),
    "palette bmp": (encoded(PICTURE.quantize(), "BMP"), "unsupported"),
    "32-bit bmp": (encoded(PICTURE.convert("RGBA"), "BMP"), "unsupported"),
    "555 bmp": (bmp_555(), "unsupported"),
    "bmp and bytes behind": (encoded(PICTURE, "BMP") + bytes(2), "unsupported"),
    "bmp of levels from white": (bmp_with_palette(range(255, -1, -1)), "unsupported"),
    "bilevel bmp": (encoded(GREY.convert("1"), "BMP"), "unsupported"),
    "turned bilevel tiff": (turned_bilevel_tiff(), "unsupported"),
    "tiff of a palette": (encoded(PICTURE.quantize(), "TIFF"), "unsupported"),
    "ppm up to 200": (b"P5 2 1 200\n\1\2", "unsupported"),
}


@pytest.mark.parametrize("name", ALIKE)
def test_what_all_decoders_read_alike_is_taken(name):
    assert kinds.unlike(ALIKE[name]) is None
    assert kinds.unfit(ALIKE[name], is_mask=False) is None


@pytest.mark.parametrize("name", UNLIKE)
def test_what_decoders_read_in_different_ways_is_named(name, tmp_path):
    data, kind = UNLIKE[name]
    assert kinds.unlike(data)[0] == (kind or "sixteen_bit")
    assert kinds.unfit(data, is_mask=False)
    assert not kinds.agreed(data, is_mask=False)
    file = tmp_path / "it.any"
    file.write_bytes(data)
    blobs, ids = Blobs((str(file),)), np.array([0])
    with pytest.raises(UserError, match=r"it\.any (is|has) .*bad_files='skip'"):
        kinds.check_kinds(blobs, ids, are_masks=False, by_pillow=False)
    if kind != "sixteen_bit" and kind:  # Pillow itself reads it rightly
        kinds.check_kinds(blobs, ids, are_masks=False, by_pillow=True)


MASKS = {
    "grey png": (encoded(GREY, "PNG"), True),
    "grey bmp": (encoded(GREY, "BMP"), True),
    "grey tiff": (encoded(GREY, "TIFF"), True),
    "pgm": (encoded(GREY, "PPM"), True),
    "colour png": (PNG, False),
    "colour jpeg": (encoded(PICTURE, "JPEG"), False),
    "palette png": (encoded(PICTURE.quantize(), "PNG"), False),
    "bilevel png": (encoded(GREY.convert("1"), "PNG"), False),
    "grey png with opacity": (encoded(GREY.convert("LA"), "PNG"), False),
    "16-bit png": (DEEP, False),
    "pgm up to 3": (b"P5 2 1 3\n\1\2", False),
    "pgm up to 200": (b"P5 2 1 200\n\1\2", False),
    "tiff in which 0 is white": (encoded(GREY, "TIFF", tiffinfo={262: 0}), False),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_has_its_classes_for_grey_levels(name):
    data, fits = MASKS[name]
    assert kinds.agreed(data, is_mask=True) is fits


def test_what_is_no_image_is_left_to_the_decoder():
    assert kinds.agreed(b"hello", is_mask=False)
    assert kinds.agreed(PNG[:20], is_mask=True)


def test_an_example_is_new_once_and_the_first_batch_always():
    unseen = kinds.Unseen(5)
    assert unseen.among(np.array([3, 1]), 0).tolist() == [True, True]
    assert unseen.among(np.array([3, 1]), 0).tolist() == [True, True]
    assert unseen.among(np.array([1, 4]), 1).tolist() == [False, True]
    assert unseen.among(np.array([4, 0]), 2).tolist() == [False, True]


def test_what_is_usual_by_its_first_bytes_is_never_unfit():
    images = {**ALIKE, **{name: data for name, (data, _) in (UNLIKE | MASKS).items()}}
    heads = [data[: kinds.HEAD_BYTES].ljust(kinds.HEAD_BYTES, b"\0") for data in images.values()]
    heads = np.frombuffer(b"".join(heads), np.uint8).reshape(len(images), kinds.HEAD_BYTES)
    for are_masks in (False, True):
        usual = kinds.are_usual(heads, are_masks=are_masks)
        assert usual.any()
        in_a_graph = [bool(tf_data.is_usual(each, is_mask=are_masks)) for each in heads]
        assert in_a_graph == usual.tolist()
        for (name, data), is_usual in zip(images.items(), usual, strict=True):
            assert kinds.agreed(data, is_mask=are_masks) or not is_usual, name
    assert kinds.are_usual(heads, are_masks=False)[list(images).index("palette png")] == 0
