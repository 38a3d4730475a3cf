"""Arrays on the disk and back, bit for bit."""

import ml_dtypes
import numpy as np
import pytest

from tfaccel.training.checkpoint.arrays import read_arrays, write_arrays
from tfaccel.training.checkpoint.store import CheckpointError

DTYPES = (
    *(np.float16, np.float32, np.float64, ml_dtypes.bfloat16, np.bool_),
    *(np.int8, np.int32, np.int64, np.uint8, np.uint32, np.uint64),
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0, 2)])
def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path, dtype, shape):
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    some_bytes = np.random.default_rng(0).integers(0, 2, size, np.uint8).tobytes()
    array = np.frombuffer(some_bytes, dtype).reshape(shape)
    write_arrays(tmp_path / "arrays", {"model/0:kernel of a [b]": array, "other": np.ones(2)})
    received = read_arrays(tmp_path / "arrays")
    assert list(received) == ["model/0:kernel of a [b]", "other"]
    back = received["model/0:kernel of a [b]"]
    assert isinstance(back, np.ndarray)
    assert (back.dtype, back.shape, back.tobytes()) == (np.dtype(dtype), shape, some_bytes)


def test_views_and_arrays_not_in_row_order_are_written_as_they_read(tmp_path):
    array = np.arange(12.0).reshape(3, 4).T[::2]
    write_arrays(tmp_path / "arrays", {"a": array})
    np.testing.assert_array_equal(read_arrays(tmp_path / "arrays")["a"], array)


def test_an_array_with_another_checksum_is_named(tmp_path):
    write_arrays(tmp_path / "arrays", {"first": np.zeros(100), "second": np.zeros(100)})
    data = tmp_path / "arrays.data-00000-of-00001"
    content = bytearray(data.read_bytes())
    content[-8] ^= 1
    data.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"array 'second' .* cannot be read"):
        read_arrays(tmp_path / "arrays")


def test_missing_files_are_an_error_of_checkpoints(tmp_path):
    with pytest.raises(CheckpointError, match=r"arrays\.index cannot be read"):
        read_arrays(tmp_path / "arrays")


def test_what_a_disk_refuses_is_an_os_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="Not a directory"):
        write_arrays(tmp_path / "file" / "arrays", {"a": np.zeros(3)})
