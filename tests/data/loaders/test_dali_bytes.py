"""Encoded images and their sizes, as DALI reads them: on the CPU always."""

import pathlib

import numpy as np
import PIL.Image
import pytest

from tfaccel.data.loaders.dali_bytes import make_file_reader
from tfaccel.data.source import Blobs
from tfaccel.data.sources.kinds import HEAD_BYTES


@pytest.fixture
def files(tmp_path):
    """Five images, of 10 to 14 pixels in height and 30 in width."""
    files = [str(tmp_path / ("x" * index) / f"{index}.png") for index in range(5)]
    for index, file in enumerate(files):
        pathlib.Path(file).parent.mkdir(exist_ok=True)
        pixels = np.random.default_rng(index).integers(0, 256, (10 + index, 30, 3), np.uint8)
        PIL.Image.fromarray(pixels).save(file)
    return files


@pytest.fixture(params=["files", "ranges"])
def blobs(request, files, tmp_path):
    if request.param == "files":
        return Blobs(tuple(files))
    data = [pathlib.Path(file).read_bytes() for file in files]
    (tmp_path / "all").write_bytes(b"".join(data))
    sizes = np.array([len(each) for each in data])
    return Blobs((str(tmp_path / "all"),), np.zeros(5, np.int32), np.cumsum(sizes) - sizes, sizes)


def reader(blobs, *, with_sizes=True):
    return make_file_reader(blobs, rows=3, num_threads=2, with_sizes=with_sizes)


def as_bytes(encoded):
    return [np.asarray(encoded.at(row)).tobytes() for row in range(len(encoded))]


def test_batches_stay_as_they_were_read(blobs):
    read, batches = reader(blobs), ([0, 1, 2], [4, 3, 3], [2, 0, 4], [1, 1, 1])
    found = [read(np.array(ids)) for ids in batches]  # all are held, as a pipeline holds some
    for ids, (encoded, heads, sizes) in zip(batches, found, strict=True):
        assert as_bytes(encoded) == [blobs.read(index) for index in ids]
        begins = [blobs.read(index)[:HEAD_BYTES] for index in ids]
        assert [bytes(each) for each in heads] == begins
        np.testing.assert_array_equal(sizes, [(10 + index, 30) for index in ids])
        assert sizes.dtype == np.int32


def test_sizes_are_not_asked_for_in_vain(blobs):
    blobs_read, _, sizes = reader(blobs, with_sizes=False)(np.array([3, 0, 1]))
    assert as_bytes(blobs_read) == [blobs.read(index) for index in (3, 0, 1)]
    assert sizes is None


@pytest.mark.parametrize("spoil", [pathlib.Path.unlink, lambda file: file.write_bytes(b"text")])
def test_a_file_without_a_header_raises(files, spoil):
    spoil(pathlib.Path(files[4]))
    read = reader(Blobs(tuple(files)))
    read(np.array([0, 1, 2]))
    with pytest.raises(RuntimeError):
        read(np.array([2, 3, 4]))


def test_short_and_empty_files_have_zeros_behind_their_first_bytes(tmp_path):
    files = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    for file, data in zip(files, (b"", b"abc", bytes(range(100))), strict=True):
        file.write_bytes(data)
    read = reader(Blobs(tuple(map(str, files))), with_sizes=False)
    _, heads, _ = read(np.arange(3))
    assert heads.shape == (3, HEAD_BYTES)
    assert bytes(heads[1]) == b"abc".ljust(HEAD_BYTES, b"\0")
    assert not heads[0].any()
