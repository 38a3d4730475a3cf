import io
import struct
import zlib

import numpy as np
import PIL.Image
import pytest
import tensorflow as tf

from tfaccel.data.raster import PNG_SIGNATURE
from tfaccel.data.source import Blobs, ImageSource
from tfaccel.data.sources.mask_values import as_grey, with_grey_masks
from tfaccel.data.sources.pillow import mask_fault


def drawn(bits=8):
    return np.random.default_rng(0).integers(0, 2**bits, (37, 53)).astype(np.uint8)


def with_palette(mask, bits=8):
    """A PNG whose colours have nothing to do with their numbers, and one of them transparent."""
    image = PIL.Image.fromarray(mask).convert("P")
    image.putdata(mask.ravel().tolist())
    image.putpalette([each * factor % 256 for each in range(2**bits) for factor in (37, 91, 17)])
    data = io.BytesIO()
    image.save(data, "PNG", bits=bits, transparency=0)
    assert data.getvalue()[24:26] == bytes([bits, 3])
    return data.getvalue()


def grey_of(mask, bits):
    """A grey PNG of few bits, which Pillow does not write."""
    rows = [np.unpackbits(row[:, None], axis=1)[:, 8 - bits :].ravel() for row in mask]
    lines = b"".join(b"\0" + np.packbits(row).tobytes() for row in rows)
    header = struct.pack(">IIBBBBB", mask.shape[1], mask.shape[0], bits, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    return PNG_SIGNATURE + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in chunks
    )


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("write", [with_palette, grey_of])
def test_decoders_see_the_classes(bits, write):
    mask = drawn(bits)
    grey = as_grey(write(mask, bits))
    with PIL.Image.open(io.BytesIO(grey)) as image:
        image.load()
        assert (image.mode, image.format) == ("L", "PNG")
        np.testing.assert_array_equal(np.asarray(image), mask)
    np.testing.assert_array_equal(tf.io.decode_png(grey)[..., 0], mask)


def test_other_bytes_stay():
    for data in (b"", b"no image", PNG_SIGNATURE, grey_of(drawn(), 8)):
        assert as_grey(data) == data
    for bits in (4, 8):
        cut = with_palette(drawn(bits), bits)[:-40]  # damaged: the decoder refuses it
        with pytest.raises((OSError, SyntaxError)):
            PIL.Image.open(io.BytesIO(as_grey(cut))).load()


def pairs_of(tmp_path, masks):
    """Pairs whose images are not read, with masks of these bytes."""
    paths = [str(tmp_path / f"{index}.png") for index in range(len(masks))]
    for path, data in zip(paths, masks, strict=True):
        with open(path, "wb") as file:
            file.write(data)
    return ImageSource(Blobs(paths), None, targets=Blobs(paths))


def test_a_source_of_grey_masks_stays_as_it_is(tmp_path, caplog):
    caplog.set_level("INFO", "tfaccel")
    source = pairs_of(tmp_path, [b"no image", grey_of(drawn(), 8)])
    assert with_grey_masks(source) is source
    assert source.targets.are_read_as_files
    assert not caplog.messages


@pytest.mark.parametrize(("write", "where"), [(with_palette, "a palette"), (grey_of, "2 bits")])
def test_a_source_of_other_masks_is_read_as_grey(tmp_path, caplog, write, where):
    caplog.set_level("INFO", "tfaccel")
    source = pairs_of(tmp_path, [b"no image", grey_of(drawn(), 8), write(drawn(2), 2)])
    assert mask_fault(source.targets, 2)
    found = with_grey_masks(source).taken(np.array([1, 2]))
    assert f"the classes of {source.targets.name(2)} are in {where}" in caplog.text
    assert not found.targets.are_read_as_files
    assert found.images.are_read_as_files
    for index, bits in enumerate((8, 2)):
        assert mask_fault(found.targets, index) is None
        pixels = tf.io.decode_png(found.targets.read(index))[..., 0]
        np.testing.assert_array_equal(pixels, drawn(bits))
