import bz2
import gzip
import lzma
import zlib

import numpy as np
import pytest

from tfaccel import UserError, sources
from tfaccel.data.sources.compression import compression_of_bytes

PACKED = {
    "ZLIB": zlib.compress,
    "GZIP": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "zstd": lambda data: b"\x28\xb5\x2f\xfd" + data,
    "LZ4": lambda data: b"\x04\x22\x4d\x18" + data,
}


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("find", [sources.tfrecord, sources.webdataset, sources.arrays])
def test_what_is_compressed_is_said_with_its_name(tmp_path, name, find):
    file = tmp_path / "file.npy"
    file.write_bytes(PACKED[name](np.random.default_rng(0).bytes(5000)))
    arguments = (file, np.zeros(3, int)) if find is sources.arrays else (file,)
    with pytest.raises(UserError, match=f"file.npy is compressed with {name}"):
        find(*arguments)


@pytest.mark.parametrize("level", [1, 6, 9])
def test_every_level_of_zlib_is_known(level):
    assert compression_of_bytes(zlib.compress(b"tfaccel" * 100, level)) == "compressed with ZLIB"


@pytest.mark.parametrize("start", [b"", b"x", b"x\x9c", b"x\x01\0\0\0\0\0\0\xff", b"\0" * 512])
def test_other_bytes_are_not_taken_for_it(start):
    assert compression_of_bytes(start) is None


def test_a_list_that_is_no_text_is_named(tmp_path):
    for data, words in (
        (gzip.compress(b"path,label\n"), "compressed with GZIP"),
        ("path,label\na.png,1\n".encode("utf-16"), "text in UTF-16"),
        (b"PK\x03\x04\xff\xfe", "a ZIP archive (as .zip, .npz and .xlsx are)"),
    ):
        (tmp_path / "list.csv").write_bytes(data)
        with pytest.raises(UserError) as error:
            sources.image_list(tmp_path / "list.csv")
        assert words in str(error.value)


def test_a_renamed_archive_of_arrays_is_named(tmp_path):
    np.savez(tmp_path / "x.npz", images=np.zeros((2, 3, 3), np.uint8))
    (tmp_path / "x.npz").rename(tmp_path / "x.npy")
    with pytest.raises(UserError, match="is a ZIP archive"):
        sources.arrays(tmp_path / "x.npy", np.zeros(2, int))
