import fcntl
import json
import logging
import os
import pathlib
import subprocess
import sys

import numpy as np
import PIL.Image
import pytest

from tfaccel.common.errors import UserError
from tfaccel.data.loaders import cache
from tfaccel.data.loaders.cache import cached
from tfaccel.data.loaders.memory import decode_all
from tfaccel.data.source import Blobs, ImageSource, UnreadableError

SETTINGS = {"stored_size": (9, 7), "channels": 3, "targets": "image", "num_threads": 2}


@pytest.fixture
def source(tmp_path):
    """Eleven PNG files."""
    random = np.random.default_rng(0)
    names = [str(tmp_path / f"{index:02d}.png") for index in range(11)]
    for index, name in enumerate(names):
        image = random.integers(0, 256, (12 + index, 10, 3), dtype=np.uint8)
        PIL.Image.fromarray(image).save(name)
    return ImageSource(Blobs(tuple(names)), np.arange(11, dtype=np.int32), class_names=("a",))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def _as_in_a_new_process(monkeypatch):
    monkeypatch.setattr(cache, "_checked", set())


def caches(folder):
    return sorted(each for each in folder.iterdir() if each.is_dir())


def test_what_is_cached_is_what_is_decoded(source, folder, caplog):
    caplog.set_level(logging.INFO, "tfaccel")
    wanted = decode_all(source, **SETTINGS)
    found = cached(source, folder=folder, **SETTINGS)
    again = cached(source, folder=folder, **SETTINGS)
    for each in (found, again):
        np.testing.assert_array_equal(each.images, wanted.images)
        assert each.labels is source.labels
        assert (each.class_names, each.targets) == (("a",), None)
        assert isinstance(each.images, np.memmap)
        assert not each.images.flags.writeable
    [home] = caches(folder)
    assert f"decoded 11 images into {home}" in caplog.text
    assert f"{home} is used; checked in" in caplog.text
    assert {each.name for each in home.iterdir()} == {"images.npy", "manifest.json"}


def test_targets_are_cached_too(source, folder, tmp_path):
    masks = [str(tmp_path / f"mask{index}.png") for index in range(11)]
    for name, mask in zip(source.images.files, masks, strict=True):
        PIL.Image.open(name).convert("L").save(mask)
    pairs = ImageSource(source.images, None, targets=Blobs(masks))
    settings = {**SETTINGS, "targets": "mask"}
    wanted, found = decode_all(pairs, **settings), cached(pairs, folder=folder, **settings)
    assert found.targets.shape == (11, 9, 7, 1)
    np.testing.assert_array_equal(found.images, wanted.images)
    np.testing.assert_array_equal(found.targets, wanted.targets)


def test_the_key_is_of_files_and_settings(source, folder):
    def number():
        cached(source, folder=folder, **SETTINGS)
        return len(caches(folder))

    assert [number(), number()] == [1, 1]
    os.utime(source.images.files[3], ns=(0, 10**9))
    assert [number(), number()] == [2, 2]
    other = source.without(np.array([3]))
    for which, changes in (
        (source, {"stored_size": (7, 9)}),
        (source, {"channels": 1}),
        (other, {}),
    ):
        before = len(caches(folder))
        cached(which, folder=folder, **{**SETTINGS, **changes})
        assert len(caches(folder)) == before + 1
    # Labels are the source's own.
    relabelled = ImageSource(source.images, source.labels + 1)
    before = len(caches(folder))
    found = cached(relabelled, folder=folder, **SETTINGS)
    assert (len(caches(folder)), found.labels[0]) == (before, 1)


def test_ranges_of_bytes_are_in_the_key(source, folder, tmp_path):
    data = [pathlib.Path(file).read_bytes() for file in source.images.files]
    (tmp_path / "all").write_bytes(b"".join(data))
    sizes = np.array([len(each) for each in data])
    files, which = (str(tmp_path / "all"),), np.zeros(11, np.int32)
    for order in (np.arange(11), np.arange(11)[::-1]):
        offsets = (np.cumsum(sizes) - sizes)[order]
        ranges = ImageSource(Blobs(files, which, offsets, sizes[order]), source.labels)
        found = cached(ranges, folder=folder, **SETTINGS)
        wanted = decode_all(source, **SETTINGS).images[order]
        np.testing.assert_array_equal(found.images, wanted)
    assert len(caches(folder)) == 2


def flip_a_bit(home):
    with open(home / "images.npy", "r+b") as file:
        file.seek(-5, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-5, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def cut(home):
    os.truncate(home / "images.npy", 500)


def lose_the_array(home):
    (home / "images.npy").unlink()


def lose_the_manifest(home):
    (home / "manifest.json").unlink()


def garble_the_manifest(home):
    (home / "manifest.json").write_text("{")


@pytest.mark.parametrize(
    "damage", [flip_a_bit, cut, lose_the_array, lose_the_manifest, garble_the_manifest]
)
def test_a_damaged_cache_is_named_and_made_anew(source, folder, caplog, monkeypatch, damage):
    wanted = np.array(cached(source, folder=folder, **SETTINGS).images)
    [home] = caches(folder)
    damage(home)
    found = cached(source, folder=folder, **SETTINGS)
    np.testing.assert_array_equal(found.images, wanted)
    assert f"{home} is damaged (" in caplog.text
    monkeypatch.setattr(cache, "_checked", set())
    caplog.clear()
    cached(source, folder=folder, **SETTINGS)
    assert "is damaged (" not in caplog.text  # the folder has the test's name in it


def test_blocks_are_checked_each(source, folder, caplog, monkeypatch):
    monkeypatch.setattr(cache, "BLOCK_BYTES", 100)
    cached(source, folder=folder, **SETTINGS)
    [home] = caches(folder)
    size = (home / "images.npy").stat().st_size
    checksums = json.loads((home / "manifest.json").read_text())["checksums"]
    assert len(checksums["images"]) == -(-size // 100)
    flip_a_bit(home)
    cached(source, folder=folder, **SETTINGS)
    assert "images.npy has changed since it was written" in caplog.text


PROGRAM = """
import logging, sys
import numpy as np
from tfaccel.data.loaders.cache import cached
from tfaccel.data.source import Blobs, ImageSource
logging.basicConfig(level=logging.INFO)
files = tuple(sys.argv[2:])
source = ImageSource(Blobs(files), np.zeros(len(files), np.int32))
print("ready", flush=True)
sys.stdin.readline()
found = cached(source, folder=sys.argv[1], stored_size=(9, 7), channels=3, targets="image",
               num_threads=2)
print(int(found.images.astype(int).sum()))
"""


def start(folder, source):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), *source.images.files],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_of_two_processes_one_decodes_and_the_other_waits(source, folder):
    folder.mkdir()
    processes = [start(folder, source) for _ in range(2)]
    assert [each.stdout.readline() for each in processes] == ["ready\n"] * 2
    # Both are held at the lock until both wait for it.
    key = cache._key(
        source, cache.forms(source, stored_size=(9, 7), channels=3, targets="image"), "image", 2
    )
    with open(folder / f"{key}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for each in processes:
            each.stdin.write("\n")
            each.stdin.flush()
        for each in processes:
            assert "waiting for another process" in each.stderr.readline()
    outputs = [each.communicate(timeout=300) for each in processes]
    assert [each.returncode for each in processes] == [0, 0], outputs
    wanted = decode_all(source, **SETTINGS).images.astype(int).sum()
    assert [int(printed) for printed, _ in outputs] == [wanted] * 2
    logs = "".join(log for _, log in outputs)
    assert (logs.count("decoded 11 images"), logs.count("is used; checked")) == (1, 1)


def test_what_a_dead_process_left_is_no_hindrance(source, folder):
    folder.mkdir()
    key = cache._key(
        source, cache.forms(source, stored_size=(9, 7), channels=3, targets="image"), "image", 2
    )
    (folder / f"{key}.part").mkdir()
    (folder / f"{key}.part" / "images.npy").write_bytes(b"half of it")
    (folder / f"{key}.lock").touch()
    cached(source, folder=folder, **SETTINGS)
    assert [each.name for each in caches(folder)] == [key]


def test_bad_files_leave_nothing_behind(source, folder):
    pathlib.Path(source.images.files[4]).write_text("no image")
    pathlib.Path(source.images.files[7]).unlink()
    with pytest.raises(UnreadableError, match=r"2 of 11 .*first .*04\.png \(") as raised:
        cached(source, folder=folder, **SETTINGS)
    assert raised.value.ids == (4, 7)
    assert caches(folder) == []


def test_a_full_disk_and_a_forbidden_folder_are_said(source, folder, monkeypatch, tmp_path):
    usage = type("Usage", (), {"free": 10 * 2**20})
    with monkeypatch.context() as patch:
        patch.setattr(cache.shutil, "disk_usage", lambda path: usage)
        with pytest.raises(
            UserError, match=r"cannot be kept in .*need 64 MiB, but 10 MiB are free"
        ):
            cached(source, folder=folder, **SETTINGS)
    assert caches(folder) == []

    def full(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(cache.os, "posix_fallocate", full)
        with pytest.raises(UserError, match=r"No space left on device\); set XDG_CACHE_HOME"):
            cached(source, folder=folder, **SETTINGS)
    assert caches(folder) == []
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="Not a directory"):
        cached(source, folder=tmp_path / "file" / "inside", **SETTINGS)


def test_the_default_folder(source, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    found = cached(source, **SETTINGS)
    assert (tmp_path / "xdg" / "tfaccel" / "pixels") in pathlib.Path(found.images.filename).parents
