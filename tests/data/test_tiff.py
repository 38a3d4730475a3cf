"""TIFF files of any number of channels are read exactly, whatever way they are stored in."""

import io

import numpy as np
import PIL.Image
import pytest
from raster_files import PACKED, noise, write_tiff

from tfaccel.data import tiff
from tfaccel.data.sources import kinds


def _read(path):
    return tiff.read(path.read_bytes())


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("planar", [False, True])
@pytest.mark.parametrize("packing", PACKED)
def test_strips_are_read_exactly(tmp_path, dtype, channels, planar, packing):
    pixels = noise((11, 7, channels), dtype)
    write_tiff(tmp_path / "a.tif", pixels, planar=planar, packing=packing, rows=4)
    found = _read(tmp_path / "a.tif")
    assert found.dtype == pixels.dtype
    np.testing.assert_array_equal(found, pixels)


@pytest.mark.parametrize(
    ("dtype", "predictor", "packing"),
    [
        ("uint8", 2, "tiff_lzw"),
        ("uint16", 1, "raw"),
        ("uint16", 2, "tiff_adobe_deflate"),
        ("float32", 1, "tiff_lzw"),
        ("float32", 2, "zstd"),
        ("float32", 3, "tiff_adobe_deflate"),
    ],
)
@pytest.mark.parametrize("planar", [False, True])
@pytest.mark.parametrize("order", ["<", ">"])
def test_tiles_and_predictors_are_read_exactly(tmp_path, dtype, planar, order, predictor, packing):
    pixels = noise((35, 50, 5), dtype)
    how = {"planar": planar, "order": order, "predictor": predictor, "packing": packing}
    write_tiff(tmp_path / "tiles.tif", pixels, tile=(16, 32), **how)
    write_tiff(tmp_path / "strips.tif", pixels, rows=9, **how)
    np.testing.assert_array_equal(_read(tmp_path / "tiles.tif"), pixels)
    np.testing.assert_array_equal(_read(tmp_path / "strips.tif"), pixels)


def test_large_images_are_unpacked_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(tiff, "AT_ONCE", 1000)
    pixels = noise((40, 33, 5), "uint16")
    for name, how in {"strips": {"rows": 3}, "tiles": {"tile": (16, 16)}}.items():
        write_tiff(tmp_path / name, pixels, packing="tiff_adobe_deflate", **how)
        np.testing.assert_array_equal(_read(tmp_path / name), pixels)


def test_a_big_tiff_is_read(tmp_path):
    pixels = noise((6, 7, 5), "uint16")
    write_tiff(tmp_path / "a.tif", pixels, big=True, packing="tiff_lzw")
    np.testing.assert_array_equal(_read(tmp_path / "a.tif"), pixels)
    write_tiff(tmp_path / "b.tif", pixels, big=True, order=">")
    with pytest.raises(ValueError, match="BigTIFF whose numbers begin with the highest byte"):
        _read(tmp_path / "b.tif")


def test_the_files_of_pillow_are_read_as_pillow_reads_them(tmp_path):
    grey = PIL.Image.fromarray(noise((9, 13), "uint16"))
    colour = PIL.Image.fromarray(noise((9, 13, 3), "uint8"))
    for image in (grey, colour):
        for packing in (None, "tiff_lzw", "tiff_adobe_deflate"):
            file = io.BytesIO()
            image.save(file, "TIFF", compression=packing)
            expected = np.atleast_3d(np.asarray(image))
            np.testing.assert_array_equal(tiff.read(file.getvalue()), expected)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({259: ("H", [7])}, "compression 7"),
        ({262: ("H", [0])}, "photometric interpretation 0"),
        ({262: ("H", [3])}, "photometric interpretation 3"),
        ({339: ("H", [2])}, "16-bit signed samples; expected uint8, uint16, float32"),
        ({258: ("H", [16, 8])}, "different types"),
        ({266: ("H", [2])}, "fill order 2"),
        ({317: ("H", [3])}, "predictor 3"),
        ({278: ("I", [1])}, "names 1 strips or tiles, but its size needs 6"),
        ({256: ("I", [0])}, "no pixels"),
    ],
)
def test_other_kinds_are_refused_in_words(tmp_path, extra, said):
    write_tiff(tmp_path / "a.tif", noise((6, 7, 5), "uint16"), extra=extra)
    with pytest.raises(ValueError, match=said):
        _read(tmp_path / "a.tif")


@pytest.mark.parametrize("packing", PACKED)
def test_a_file_that_is_cut_short_is_refused(tmp_path, packing):
    write_tiff(tmp_path / "a.tif", noise((30, 30, 5), "uint16"), packing=packing)
    data = bytearray((tmp_path / "a.tif").read_bytes())
    start = int.from_bytes(data[4:8], "little")
    # The tags are behind the pixels, so this keeps the tags and shortens the pixels' strip.
    layout = tiff.read_layout(io.BytesIO(data))
    where = data.index((279).to_bytes(2, "little"), start)
    data[where + 8 : where + 12] = (layout.sizes[0] // 2).to_bytes(4, "little")
    with pytest.raises((OSError, ValueError)):
        tiff.read(bytes(data))
    with pytest.raises((OSError, ValueError, SyntaxError)):
        tiff.read(bytes(data[:100]))


def test_usual_settings_do_not_take_a_tiff_whose_channels_pillow_drops(tmp_path):
    # Pillow reads these as grey or RGB, without an error.
    for channels, planar in ((2, False), (4, False), (5, True)):
        path = tmp_path / f"{channels}.tif"
        how = {"planar": planar, "packing": "tiff_adobe_deflate"}
        write_tiff(path, noise((6, 7, channels), "uint8"), **how)
        found = kinds.unfit(path.read_bytes(), is_mask=False)
        assert f"a TIFF of {channels} channels, of which Pillow reads" in found
