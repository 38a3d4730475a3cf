"""P3: a full disk costs the checkpoint that does not fit, and no other."""

import errno
import os
import subprocess

import pytest
from snapshots import assert_same, make_store, names, snapshot

from tfaccel.training.checkpoint.store import CheckpointError
from tfaccel.training.checkpoint.writer import Writer


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of 3 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs to mount a tmpfs: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_p3_a_full_disk_costs_no_earlier_checkpoint(small_disk):
    store = make_store(small_disk / "checkpoints")
    store.write(snapshot(1, num_bytes=2**20))
    with pytest.raises(CheckpointError) as raised:
        store.write(snapshot(2, num_bytes=2**22))
    assert "step-00000002 cannot be written" in str(raised.value)
    assert "No space left on device" in str(raised.value)
    assert "it needs 4.0 MiB, and 2.0 MiB are free there; make room" in str(raised.value)
    assert names(small_disk / "checkpoints") == ["step-00000001"]
    assert_same(store.newest(), snapshot(1, num_bytes=2**20))
    store.write(snapshot(3, num_bytes=2**20))  # training went on, to one that fits
    assert_same(store.newest(), snapshot(3, num_bytes=2**20))


def test_p3_in_the_background_too(small_disk):
    store = make_store(small_disk / "checkpoints")
    writer = Writer(store, on_error="stop")
    writer.write(snapshot(1))
    writer.write(snapshot(2, num_bytes=2**22))
    writer.write(snapshot(3))
    with pytest.raises(CheckpointError, match="step-00000002 cannot be written"):
        writer.wait()
    assert names(small_disk / "checkpoints") == ["step-00000001", "step-00000003"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("call", ["mkdir", "fsync", "rename"])
@pytest.mark.parametrize("step", [1, 2])  # one that is there, and a new one
def test_p3_whatever_the_disk_refuses(tmp_path, monkeypatch, number, call, step):
    store = make_store(tmp_path)
    store.write(snapshot(1))
    real = getattr(os, call)

    def refuse(*args, **kwargs):
        if call == "rename" and ".old-" in str(args[0]):  # back to its place
            return real(*args, **kwargs)
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        with pytest.raises(CheckpointError) as raised:
            store.write(snapshot(step))
    said = {
        errno.ENOSPC: "it needs 0.0 MiB, and",
        errno.EIO: "the disk or network that holds",
        errno.EDQUOT: "it needs 0.0 MiB; remove some of your files",
    }
    assert f"({os.strerror(number)}): {said[number]}" in str(raised.value)
    assert names(tmp_path) == ["step-00000001"]
    assert_same(store.newest(), snapshot(1))


def test_p3_the_earlier_one_has_its_name_again_where_its_successor_cannot_have_it(
    tmp_path, monkeypatch
):
    store = make_store(tmp_path)
    store.write(snapshot(1))
    rename = os.rename

    def refuse(source, target):
        if ".tmp-" in str(source):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        with pytest.raises(CheckpointError, match="Input/output error"):
            store.write(snapshot(1))
    assert names(tmp_path) == ["step-00000001"]
    assert_same(store.newest(), snapshot(1))


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/checkpoints/step-00000001 cannot be written"):
        make_store(tmp_path / "file" / "checkpoints").write(snapshot(1))
