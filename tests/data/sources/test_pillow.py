import io
import os
import pathlib
import struct
import zlib

import numpy as np
import PIL.Image
import pytest

from tfaccel import UserError
from tfaccel.data.source import Blobs
from tfaccel.data.sources import pillow


@pytest.fixture
def packed(folder, tmp_path):
    """A good image, a text and a cut image, one behind the other in one file."""
    good = next((folder / "a").iterdir()).read_bytes()
    parts = [good, b"not an image", good[:60]]
    (tmp_path / "packed").write_bytes(b"".join(parts))
    sizes = np.array([len(part) for part in parts])
    return Blobs((str(tmp_path / "packed"),), np.zeros(3, np.int32), sizes.cumsum() - sizes, sizes)


def test_undecodable_names_file_and_cause(folder, tmp_path):
    good = next((folder / "a").iterdir())
    names = ("text.png", "empty.png", "cut.png", "header.png", "gone.png")
    text, empty, cut, header, gone = (tmp_path / name for name in names)
    text.write_text("not an image")
    empty.touch()
    cut.write_bytes(good.read_bytes()[:60])
    header.write_bytes(good.read_bytes()[:8] + b"\0\0\0\x05IHDR\0\0\0\0\x06" + bytes(4))
    blobs = Blobs((str(good), *(str(tmp_path / name) for name in names)))
    none, *bad = (pillow.undecodable(blobs, index) for index in range(6))
    assert none is None
    assert [each.split(" (")[0] for each in bad] == list(blobs.files[1:])
    assert bad[0] == f"{text} (not an image)"
    assert bad[4] == f"{gone} (No such file or directory)"
    with pytest.raises(UserError, match=r"header.png cannot be read as an image \(Truncated IHDR"):
        pillow.image_size(blobs, 4)


def test_undecodable_decodes_ranges_of_bytes(packed):
    none, *bad = (pillow.undecodable(packed, index) for index in range(3))
    assert none is None
    assert [each.split(" (")[0] for each in bad] == [packed.name(1), packed.name(2)]


def test_image_size_is_height_then_width(folder, packed):
    file = str(next((folder / "a").iterdir()))
    assert pillow.image_size(Blobs((file,)), 0) == (12, 10)
    assert pillow.image_size(packed, 0) == (12, 10)
    with pytest.raises(UserError, match=r"packed\[bytes .* cannot be read as an image"):
        pillow.image_size(packed, 1)


def test_a_mask_is_of_grey_levels(tmp_path, packed):
    files = []
    for mode in ("L", "1", "P", "RGB"):
        files.append(str(tmp_path / f"{mode}.png"))
        PIL.Image.new(mode, (4, 4)).save(files[-1])
    files.append(str(tmp_path / "two_bits.png"))
    header = struct.pack(">IIBBBBB", 4, 4, 2, 0, 0, 0, 0)
    pixels = zlib.compress(b"\0\x1b" * 4)
    chunks = ((b"IHDR", header), (b"IDAT", pixels), (b"IEND", b""))
    data = b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in chunks
    )
    pathlib.Path(files[-1]).write_bytes(b"\x89PNG\r\n\x1a\n" + data)
    pillow.check_kinds(Blobs(tuple(files)), np.array([0]), are_masks=True)
    with pytest.raises(UserError, match=r"two_bits.png has grey samples of 2 bits"):
        pillow.check_kinds(Blobs(tuple(files)), np.array([0, 4]), are_masks=True)
    for index in (1, 2, 3):
        with pytest.raises(
            UserError, match=r"png is of Pillow's mode .*; expected masks of mode L"
        ):
            pillow.check_kinds(Blobs(tuple(files)), np.array([0, index]), are_masks=True)


def test_a_mask_that_is_no_image_is_named(tmp_path, packed):
    with pytest.raises(UserError, match=r"packed\[bytes .* cannot be read .* \(not an image\)"):
        pillow.check_kinds(packed, np.array([1]), are_masks=True)
    with pytest.raises(UserError, match=r"gone.png cannot be read .* \(No such file"):
        pillow.check_kinds(Blobs((str(tmp_path / "gone.png"),)), np.array([0]), are_masks=True)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", [".tiff", ".jpg", ".png"])
def test_pixels_and_size_are_those_that_are_stored(tmp_path, orientation, suffix):
    pixels = np.repeat(np.repeat(np.arange(1, 7, dtype=np.uint8).reshape(2, 3) * 40, 16, 0), 16, 1)
    exif = PIL.Image.Exif()
    exif[0x112] = orientation
    file = tmp_path / f"turned{suffix}"
    PIL.Image.fromarray(pixels).save(file, exif=exif)
    assert pillow.image_size(Blobs((str(file),)), 0) == (32, 48)
    with PIL.Image.open(io.BytesIO(file.read_bytes())) as image:
        # JPEG's own loss.
        np.testing.assert_allclose(np.asarray(pillow.decoded(image, "L")), pixels, atol=3)


def test_a_fifo_is_named_and_not_waited_for(tmp_path):
    fifo = str(tmp_path / "z.png")
    os.mkfifo(fifo)
    assert "z.png (not a regular file" in pillow.undecodable(Blobs((fifo,)), 0)
    with pytest.raises(UserError, match=r"z.png cannot be read .* \(not a regular file"):
        pillow.image_size(Blobs((fifo,)), 0)
