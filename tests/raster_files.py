"""Writes TIFF files of any number of channels and PNG files of 16 bits, for tests.

Neither Pillow nor TensorFlow writes all of them. The writers follow TIFF 6.0 and W3C PNG, with
NumPy and zlib; Pillow's libtiff only packs bytes by LZW and others.
"""

import io
import pathlib
import struct
import zlib

import numpy as np
import PIL.Image
from PIL.TiffImagePlugin import ImageFileDirectory_v2

PACKED = {"raw": 1, "tiff_lzw": 5, "tiff_adobe_deflate": 8, "packbits": 32773, "zstd": 50000}


def write_tiff(
    path,
    pixels,
    *,
    planar=False,
    packing="raw",
    order="<",
    predictor=1,
    rows=None,
    tile=None,
    big=False,
    extra=(),
):
    """Writes [height, width] or [height, width, channels] of uint8, uint16, float32 or others."""
    pixels = np.atleast_3d(pixels)
    height, width, channels = pixels.shape
    bits, kind = 8 * pixels.dtype.itemsize, {"u": 1, "i": 2, "f": 3}[pixels.dtype.kind]
    planes = [pixels[..., each : each + 1] for each in range(channels)] if planar else [pixels]
    tall, wide = tile or (rows or height, width)
    parts = []
    for plane in planes:
        for top in range(0, height, tall):
            for left in range(0, width, wide):
                part = plane[top : top + tall, left : left + wide]
                if tile:
                    room = [(0, tall - part.shape[0]), (0, wide - part.shape[1]), (0, 0)]
                    part = np.pad(part, room)
                parts.append(_packed(_predicted(part, predictor, order), packing))
    is_rgb = channels in (3, 4)
    tags = {
        256: ("I", [width]),
        257: ("I", [height]),
        258: ("H", [bits] * channels),
        259: ("H", [PACKED[packing]]),
        262: ("H", [2 if is_rgb else 1]),
        277: ("H", [channels]),
        284: ("H", [2 if planar else 1]),
        317: ("H", [predictor]),
        339: ("H", [kind] * channels),
    }
    if more := channels - (3 if is_rgb else 1):
        tags[338] = ("H", [0] * more)
    tags |= {322: ("I", [wide]), 323: ("I", [tall])} if tile else {278: ("I", [tall])}
    places = (324, 325) if tile else (273, 279)
    at, offsets = 16 if big else 8, []
    for part in parts:
        offsets.append(at)
        at += len(part)
    tags |= {places[0]: ("I", offsets), places[1]: ("I", list(map(len, parts)))}
    body = b"".join(parts) + b"\0" * (at % 2)
    _assembled(path, tags | dict(extra), body, order, big)


def _assembled(path, tags, body, order, big):
    number, count, inline = ("Q", "Q", 8) if big else ("I", "H", 4)
    start = (16 if big else 8) + len(body)
    size = struct.calcsize(f"{order}HH{number}") + inline
    behind = start + struct.calcsize(order + count) + size * len(tags) + inline
    entries, values = struct.pack(order + count, len(tags)), b""
    for tag, (kind, numbers) in sorted(tags.items()):
        value = struct.pack(f"{order}{len(numbers)}{kind}", *numbers)
        entries += struct.pack(f"{order}HH{number}", tag, {"H": 3, "I": 4}[kind], len(numbers))
        if len(value) <= inline:
            entries += value.ljust(inline, b"\0")
        else:
            entries += struct.pack(order + number, behind + len(values))
            values += value
    mark = b"II" if order == "<" else b"MM"
    head = struct.pack(f"{order}HHH", 43, 8, 0) if big else struct.pack(f"{order}H", 42)
    whole = mark + head + struct.pack(order + number, start) + body + entries + bytes(inline)
    pathlib.Path(path).write_bytes(whole + values)


def _predicted(part, predictor, order):
    """Returns the bytes of [height, width, channels] after a predictor, row by row in a loop."""
    dtype = part.dtype.newbyteorder(order)
    if predictor == 1:
        return np.ascontiguousarray(part, dtype).tobytes()
    _, width, channels = part.shape
    if predictor == 2:
        whole = np.ascontiguousarray(part).view(f"u{part.dtype.itemsize}")
        left = whole.copy()
        for x in range(1, width):
            left[:, x] = whole[:, x] - whole[:, x - 1]
        return left.astype(whole.dtype.newbyteorder(order)).tobytes()
    packed = b""
    for row in part:
        of_each = np.frombuffer(row.astype(">f4").tobytes(), np.uint8).reshape(-1, 4)
        flat = of_each.T.ravel()
        left = flat.copy()
        for place in range(channels, len(flat)):
            left[place] = (int(flat[place]) - int(flat[place - channels])) % 256
        packed += left.tobytes()
    return packed


def _packed(data, packing):
    if packing == "raw":
        return data
    if packing == "tiff_adobe_deflate":
        return zlib.compress(data)
    file = io.BytesIO()
    row = PIL.Image.frombytes("L", (len(data), 1), data)
    row.save(file, "TIFF", compression=packing)
    file.seek(0)
    tags = ImageFileDirectory_v2(file.read(8))
    file.seek(tags.next)
    tags.load(file)
    (offset,), (size,) = tags[273], tags[279]
    return file.getvalue()[offset : offset + size]


def write_png16(path, pixels):
    """Writes [height, width] or [height, width, 1 to 4] uint16 as a PNG of 16 bits."""
    pixels = np.atleast_3d(pixels)
    height, width, channels = pixels.shape
    colour = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)

    def chunk(name, data):
        checksum = struct.pack(">I", zlib.crc32(name + data))
        return struct.pack(">I", len(data)) + name + data + checksum

    header = struct.pack(">IIBBBBB", width, height, 16, colour, 0, 0, 0)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")
    whole = b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*each) for each in chunks)
    pathlib.Path(path).write_bytes(whole)


def noise(shape, dtype, seed=0):
    """Returns random pixels of the whole range of a dtype; floats have a mean near 0."""
    random = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "f":
        return random.normal(size=shape).astype(dtype)
    return random.integers(0, np.iinfo(dtype).max + 1, shape).astype(dtype)
