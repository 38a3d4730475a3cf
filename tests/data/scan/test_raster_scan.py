"""The scan of images that are read as they are stored."""

import struct

import numpy as np
import planted
import pytest
from raster_files import noise, write_png16, write_tiff

from tfaccel.config import ImageConfig
from tfaccel.data import sources
from tfaccel.data.raster import RasterForm
from tfaccel.data.scan.examine import examine, strict
from tfaccel.data.scan.files import scan_files
from tfaccel.data.source import as_stored

FORM = RasterForm("uint16", 3)
PIXELS = noise((24, 32, 3), "uint16")


def _written(tmp_path, write, pixels, **how):
    write(tmp_path / "a", pixels, **how)
    found = [each for each in (tmp_path / "a", tmp_path / "a.npy") if each.exists()]
    return found[0].read_bytes()


@pytest.fixture
def faulty(tmp_path):
    """Faulty bytes by their kind; what stands behind the dash tells them apart."""
    png = _written(tmp_path, write_png16, PIXELS)
    tif = _written(tmp_path, write_tiff, PIXELS)
    wide = _written(tmp_path, write_tiff, noise((24, 32, 5), "uint16"))
    second = bytearray(tif)
    at = int.from_bytes(second[4:8], "little")
    second[at + 2 + 12 * struct.unpack_from("<H", second, at)[0]] = 8  # where a next page begins
    checksum = png.find(b"IEND") - 5
    (tmp_path / "a").unlink()
    npy = _written(tmp_path, np.save, PIXELS)
    return {
        "good-png": png,
        "good-tif": tif,
        "good-npy": npy,
        "empty": b"",
        "not_an_image-text": b"hello, this is no image\n",
        "not_an_image-jpeg": planted.JPEG,
        "truncated-png": png[: len(png) // 2],
        "truncated-png_end": png[:-3],
        "truncated-png_checksum": png[:checksum] + bytes([png[checksum] ^ 1]) + png[checksum + 1 :],
        "truncated-tif": tif[: len(tif) // 2],
        "truncated-npy": npy[:-1],
        "truncated-npy_header": npy[:30],
        "other_form-palette": planted.GOOD["palette.png"],
        "other_form-8_bits": planted.PNG,
        "other_form-channels": wide,
        "several_frames": bytes(second),
    }


def test_each_fault_is_named_and_no_other(faulty):
    for name, data in faulty.items():
        with strict():
            found, size = examine(data, suffix=".png", form=FORM)
        wanted = [] if name.startswith("good") else [name.partition("-")[0]]
        assert [kind for kind, _ in found] == wanted, name
        assert all("\n" not in cause for _, cause in found)
        assert wanted or size == (24, 32)


def test_a_scan_knows_each_file_for_each_form(tmp_path):
    (tmp_path / "all/a").mkdir(parents=True)
    write_png16(tmp_path / "all/a/1.png", PIXELS)
    write_png16(tmp_path / "all/a/2.png", PIXELS[..., 0])
    source = sources.class_folders(tmp_path / "all")
    for channels, bad in ((3, [1]), (1, [0]), (3, [1]), (2, [0, 1])):
        images = ImageConfig(channels=channels, pixel_dtype="uint16")
        report = scan_files(as_stored(source, images), num_workers=1, progress=False)
        assert report.bad_ids.tolist() == bad
    report = scan_files(source, num_workers=1, progress=False)
    assert [each.kind for each in report.faults] == ["sixteen_bit", "sixteen_bit"]
