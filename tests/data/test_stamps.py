"""What tells data from changed ones, of each source."""

import os
import tarfile

import numpy as np
import PIL.Image
import pytest

from tfaccel import sources
from tfaccel.data import stamps


def _image(path, value=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    PIL.Image.fromarray(np.full((4, 4), value, np.uint8)).save(path)
    os.utime(path, (1, 1))
    return path


def _tar(path):
    image = _image(path.parent / "1.png")
    label = path.parent / "1.cls"
    label.write_text("0")
    with tarfile.open(path, "w") as tar:
        tar.add(image, image.name)
        tar.add(label, label.name)


def _made(kind, root):
    """Returns what opens a source, and the file of it that is replaced."""
    image = _image(root / "images" / "a" / "1.png")
    if kind == "folders":
        return lambda: sources.class_folders(root / "images"), image
    if kind == "csv":
        (root / "train.csv").write_text(f"path,label\n{image},0\n")
        return lambda: sources.image_list(root / "train.csv"), image
    if kind in ("pairs", "targets of pairs"):
        target = _image(root / "sharp" / "a" / "1.png")
        replaced = image if kind == "pairs" else target
        return lambda: sources.image_pairs(root / "images", root / "sharp"), replaced
    if kind == "tar":
        _tar(root / "a.tar")
        return lambda: sources.webdataset(root / "a.tar"), root / "a.tar"
    np.save(root / "images.npy", np.zeros((3, 4, 4, 1), np.uint8))
    np.save(root / "labels.npy", np.zeros(3, np.int32))
    if kind == "arrays files":
        return lambda: sources.arrays(root), root / "images.npy"
    (root / "npy" / "a").mkdir(parents=True)
    np.save(root / "npy" / "a" / "1.npy", np.zeros((4, 4), np.uint8))
    return lambda: sources.npy_folders(root / "npy"), root / "npy" / "a" / "1.npy"


KINDS = ("folders", "csv", "pairs", "targets of pairs", "tar", "arrays files", "npy folders")


@pytest.mark.parametrize("kind", KINDS)
def test_each_source_shows_that_a_file_was_replaced(tmp_path, kind):
    open_source, file = _made(kind, tmp_path)
    before = open_source().stamps()
    assert open_source().stamps() == before
    data = bytearray(file.read_bytes())
    data[-1] ^= 1  # of the same size
    file.write_bytes(data)
    assert open_source().stamps() != before


def test_a_folder_may_move_with_its_times(tmp_path):
    open_source, _ = _made("folders", tmp_path)
    before = open_source().stamps()
    os.rename(tmp_path / "images", tmp_path / "moved")
    assert sources.class_folders(tmp_path / "moved").stamps() == before


def test_they_say_what_changed(tmp_path):
    files = [str(_image(tmp_path / f"{index}.png")) for index in range(3)]
    before = stamps.of_files(files)
    assert before["newest change"] == "1970-01-01T00:00:01+00:00"
    os.utime(files[1], (2, 2))
    after = stamps.of_files(files)
    assert after["bytes"] == before["bytes"]
    assert after["newest change"] == "1970-01-01T00:00:02+00:00"
    os.unlink(files[1])
    assert stamps.of_files(files)["bytes"] < before["bytes"]
    assert stamps.of_files(())["bytes"] == 0


def test_a_large_array_in_memory_is_sampled_and_that_is_said(monkeypatch):
    array = np.arange(1000, dtype=np.uint8)[:, None]
    assert list(stamps.of_array(array)) == ["bytes", "content"]
    monkeypatch.setattr(stamps, "SAMPLED_BYTES", 100)
    before = stamps.of_array(array)
    assert list(before) == ["bytes", "each row of 10"]
    array[500] += 1
    assert stamps.of_array(array) != before
