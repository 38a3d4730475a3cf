import logging
import os
import pathlib

import numpy as np
import PIL.Image
import pytest

from tfaccel import UserError
from tfaccel.data.loaders import kept as kept_room
from tfaccel.data.loaders.kept import kept
from tfaccel.data.loaders.memory import decode_all
from tfaccel.data.source import Blobs, ImageSource

SETTINGS = {"stored_size": (9, 7), "channels": 3, "targets": "image", "num_threads": 2}


@pytest.fixture(autouse=True)
def slow(monkeypatch, caplog):
    """As if decoding took long."""
    monkeypatch.setattr(kept_room, "LEAST_S", 0)
    caplog.set_level(logging.INFO)


@pytest.fixture
def source(tmp_path):
    random = np.random.default_rng(0)
    files = [str(tmp_path / f"{index:02d}.png") for index in range(40)]
    for file in files:
        PIL.Image.fromarray(random.integers(0, 256, (12, 10, 3), np.uint8)).save(file)
    return ImageSource(Blobs(files), np.arange(40, dtype=np.int32), class_names=("a",))


@pytest.fixture
def homes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return lambda: sorted(each for each in (tmp_path / "cache/tfaccel/kept").glob("*/"))


def test_a_second_start_decodes_nothing(source, homes, caplog, monkeypatch):
    wanted, first = decode_all(source, **SETTINGS), kept(source, **SETTINGS)
    assert len(homes()) == 1
    monkeypatch.setattr("tfaccel.data.loaders.cache._build", None)  # an error if it is called
    caplog.clear()
    second = kept(source, **SETTINGS)
    for each in (first, second):
        np.testing.assert_array_equal(each.images, wanted.images)
        assert each.labels is source.labels
    assert "40 decoded images, 0 MiB, are mapped from" in caplog.text
    assert "kept because decoding takes about" in caplog.text


def test_a_changed_file_is_decoded_anew(source, homes):
    before = kept(source, **SETTINGS).images
    PIL.Image.new("RGB", (10, 12), "red").save(source.images.files[3])
    after = kept(source, **SETTINGS).images
    assert (after[3] == (255, 0, 0)).all()
    np.testing.assert_array_equal(np.delete(after, 3, 0), np.delete(before, 3, 0))


def test_what_is_decoded_quickly_is_not_kept(source, homes, monkeypatch):
    monkeypatch.setattr(kept_room, "LEAST_S", 60)
    kept(source, **SETTINGS)
    assert homes() == []


def test_what_was_used_longest_ago_makes_room(source, homes, monkeypatch, caplog):
    size = 40 * 9 * 7 * 3 + 128
    monkeypatch.setattr(kept_room, "MOST_BYTES", int(2.5 * size))
    sources = [source.without(np.array([index])) for index in range(3)]
    for number, each in enumerate(sources[:2]):
        kept(each, **SETTINGS)
        for home in homes():
            if home.stat().st_mtime > 100:
                os.utime(home, (number, number))
    old, used = sorted(homes(), key=lambda home: home.stat().st_mtime)
    kept(sources[0], **SETTINGS)  # is now the newest
    kept(sources[2], **SETTINGS)
    assert old in homes()
    assert used not in homes()
    assert len(homes()) == 2
    assert f"removed {used}" in caplog.text


@pytest.mark.parametrize("limit", ["most", "free", "folder"])
def test_without_room_every_start_decodes_and_says_so(source, homes, monkeypatch, caplog, limit):
    if limit == "most":
        monkeypatch.setattr(kept_room, "MOST_BYTES", 100)
    elif limit == "free":
        usage = type("Usage", (), {"free": 100})
        monkeypatch.setattr(kept_room.shutil, "disk_usage", lambda path: usage)
    else:
        pathlib.Path(os.environ["XDG_CACHE_HOME"]).touch()
    found = kept(source, **SETTINGS)
    np.testing.assert_array_equal(found.images, decode_all(source, **SETTINGS).images)
    assert "cannot be kept in" in caplog.text
    assert "every start decodes them" in caplog.text


def test_a_bad_file_is_named_as_ever(source, homes):
    pathlib.Path(source.images.files[4]).write_text("no image")
    with pytest.raises(UserError, match="1 of 40 images cannot be decoded"):
        kept(source, **SETTINGS)
    assert homes() == []
