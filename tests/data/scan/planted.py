"""Encoded images, good and with each kind of fault, made from one smooth picture."""

import io
import struct
import zlib

import numpy as np
import PIL.Image

_Y, _X = np.mgrid[0:24, 0:32]
PIXELS = np.stack([_X * 8, _Y * 10, (_X + _Y) * 4], axis=-1).astype(np.uint8)
PICTURE = PIL.Image.fromarray(PIXELS)
GREY = PIL.Image.fromarray(PIXELS[..., 0])


def encoded(picture, form, **settings):
    file = io.BytesIO()
    picture.save(file, form, **settings)
    return file.getvalue()


def frames(form, **settings):
    other = PIL.Image.fromarray(255 - PIXELS)
    return encoded(PICTURE, form, save_all=True, append_images=[other], **settings)


def rotated(form, **settings):
    exif = PIL.Image.Exif()
    exif[0x112] = 6
    return encoded(PICTURE, form, exif=exif, **settings)


def png_chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_16(pixels):
    """A PNG of [height, width, 3] uint16, which Pillow does not write."""
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*each) for each in chunks)


def huge_png():
    """A PNG that says it has 180 million pixels."""
    header = struct.pack(">IIBBBBB", 13500, 13400, 8, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*each) for each in chunks)


JPEG = encoded(PICTURE, "JPEG", quality=90)
PNG = encoded(PICTURE, "PNG")
WEBP = encoded(PICTURE, "WEBP", quality=90)
GIF = encoded(PICTURE, "GIF")
TIFF = encoded(PICTURE, "TIFF")
SIXTEEN = PIXELS.astype(np.uint16) * 257
QUANTIZATION = JPEG.find(b"\xff\xdb")  # where a segment begins
CHECKSUM = PNG.find(b"IEND") - 5  # of the pixels

# What every loader decodes.
GOOD = {
    "jpeg": JPEG,
    "progressive.jpg": encoded(PICTURE, "JPEG", progressive=True),
    "grey.jpg": encoded(GREY, "JPEG"),
    "pictures.jpg": frames("MPO"),
    "trailing.jpg": JPEG + bytes(100),
    "damaged_exif.jpg": JPEG[:2] + b"\xff\xe1\x00\x10Exif\0\0MM\0*\xff\xff\xff\xff" + JPEG[2:],
    "rgb.png": PNG,
    "grey.png": encoded(GREY, "PNG"),
    "one_bit.png": encoded(GREY.convert("1"), "PNG"),
    "palette.png": encoded(PICTURE.convert("P"), "PNG", transparency=0),
    "alpha.png": encoded(PIL.Image.merge("RGBA", (*PICTURE.split(), GREY)), "PNG"),
    "rgb.bmp": encoded(PICTURE, "BMP"),
    "grey.bmp": encoded(GREY, "BMP"),
    "rgb.webp": WEBP,
}

# What DALI alone decodes; no fault where names say so.
DALIS = {
    "rgb.tif": TIFF,
    "rgb.tiff": encoded(PICTURE, "TIFF", compression="tiff_lzw"),
    "rgb.ppm": encoded(PICTURE, "PPM"),
    "rgb.jp2": encoded(PICTURE, "JPEG2000"),
}

# One fault each: the kind is what stands before the first dot or dash.
FAULTY = {
    "empty.jpg": b"",
    "not_an_image.jpg": b"hello, this is no image\n",
    "not_an_image-avif.jpg": encoded(PICTURE, "AVIF"),
    "not_an_image-tga.png": encoded(PICTURE, "TGA"),
    "truncated.jpg": JPEG[: len(JPEG) // 2],
    "truncated-header.jpg": JPEG[:20],
    "truncated-end.jpg": JPEG[:-2],
    "truncated-restarts.jpg": encoded(PICTURE, "JPEG", restart_marker_blocks=1)[:-2],
    "truncated-stray_bytes.jpg": JPEG[:QUANTIZATION] + b"\0\0" + JPEG[QUANTIZATION:],
    "truncated.png": PNG[: len(PNG) // 2],
    "truncated-end.png": PNG[:-3],
    "truncated-checksum.png": PNG[:CHECKSUM] + bytes([PNG[CHECKSUM] ^ 1]) + PNG[CHECKSUM + 1 :],
    "truncated.webp": WEBP[: len(WEBP) // 2],
    "truncated.bmp": GOOD["rgb.bmp"][:-100],
    "truncated.tif": TIFF[:-100],
    "unsupported.gif": GIF,
    "unsupported-palette.bmp": encoded(PICTURE.quantize(), "BMP"),
    "unsupported-one_bit.bmp": encoded(GREY.convert("1"), "BMP"),
    "cmyk.jpg": encoded(PICTURE.convert("CMYK"), "JPEG"),
    "cmyk.tif": encoded(PICTURE.convert("CMYK"), "TIFF"),
    "sixteen_bit.png": png_16(SIXTEEN),
    "sixteen_bit-grey.png": encoded(PIL.Image.fromarray(SIXTEEN[..., 0]), "PNG"),
    "sixteen_bit-grey.tif": encoded(PIL.Image.fromarray(SIXTEEN[..., 0]), "TIFF"),
    "sixteen_bit-float.tif": encoded(PIL.Image.fromarray(PIXELS[..., 0] / np.float32(255)), "TIFF"),
    "sixteen_bit.ppm": b"P6 32 24 65535\n" + SIXTEEN.astype(">u2").tobytes(),
    "animated.gif": frames("GIF"),
    "animated.webp": frames("WEBP"),
    "huge.png": huge_png(),
    "animated.png": frames("PNG"),
    "several_frames.tif": frames("TIFF"),
    "exif_rotated.jpg": rotated("JPEG"),
    "exif_rotated.png": rotated("PNG"),
    "exif_rotated.webp": rotated("WEBP"),
    "exif_rotated.tif": rotated("TIFF"),
    "wrong_extension.jpg": PNG,
    "wrong_extension.png": WEBP,
    "wrong_extension.bmp": JPEG,
}


def kind_of(name):
    return name.split(".")[0].split("-")[0]


# Kinds that no bytes have by themselves.
NOT_OF_BYTES = {"not_a_mask", "other_form", "missing", "unreadable", "two_sizes", "small"}
