import errno
import os
import pathlib
import resource
import types

import pytest
import tensorflow as tf

from tfaccel.cli import main
from tfaccel.common.disk_errors import from_tensorflow, not_written
from tfaccel.training.checkpoint.store import CheckpointError, Snapshot, Store
from tfaccel.training.workdir import held, write_json


def _said(number, folder, **how):
    return not_written(OSError(number, os.strerror(number)), folder, **how)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EDQUOT, "quota"),
        (errno.EFBIG, "ulimit -f"),
        (errno.EROFS, "read-only"),
        (errno.ESTALE, "lost"),
        (errno.EPERM, "no permission"),
        (errno.EACCES, "no permission"),
        (errno.EIO, "fails; see the system's log"),
        (errno.EMFILE, "ulimit -n"),
        (errno.ENAMETOOLONG, "shorter"),
    ],
)
def test_each_cause_has_its_own_cure(tmp_path, number, words):
    said = _said(number, tmp_path / "not" / "there", num_bytes=2**20)
    assert said.startswith(f"cannot be written ({os.strerror(number)}): ")
    assert words in said
    assert "free there" not in said
    assert "make room" not in said


def test_a_full_disk_has_its_figures(tmp_path):
    said = _said(errno.ENOSPC, tmp_path, num_bytes=3 * 2**20)
    assert "it needs 3.0 MiB, and" in said
    assert said.endswith("MiB are free there; make room")


def test_a_disk_without_inodes_is_told_from_a_full_one(tmp_path, monkeypatch):
    full = types.SimpleNamespace(f_files=100, f_favail=0, f_bavail=2**30, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    said = _said(errno.ENOSPC, tmp_path, num_bytes=2**20)
    assert "has no inodes left" in said
    assert "MiB" not in said


def test_tensorflows_words_become_the_systems_numbers():
    path = pathlib.Path("x")
    for number in (errno.EFBIG, errno.EROFS, errno.ESTALE, errno.EDQUOT):
        text = f"{{{{function_node __wrapped__SaveV2}}}} x.tempstate1; {os.strerror(number)} [Op:]"
        assert from_tensorflow(tf.errors.UnknownError(None, None, text), path).errno == number
    full = tf.errors.ResourceExhaustedError(None, None, "no words")
    assert from_tensorflow(full, path).errno == errno.ENOSPC
    other = from_tensorflow(tf.errors.InternalError(None, None, "{{function_node f}} why"), path)
    assert (other.errno, other.strerror) == (errno.EIO, "why")


@pytest.fixture
def small_files():
    """No file of this process becomes larger than 64 KiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_limit_of_a_files_size_is_named_at_a_checkpoint(tmp_path, small_files):
    import numpy as np

    store = Store(tmp_path / "c", keep_last=1, keep_best=0, largest_is_best=True)
    with pytest.raises(CheckpointError) as raised:
        store.write(Snapshot({"a": np.zeros(2**18, np.float32)}, {"step": 1}))
    assert "(File too large): it needs 1.0 MiB; the file would" in str(raised.value)
    assert "function_node" not in str(raised.value)
    assert list((tmp_path / "c").iterdir()) == []


def test_a_limit_of_a_files_size_is_named_at_an_export(tmp_path, small_files):
    import keras

    import tfaccel

    run = tfaccel.setup()
    with run.scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(1024)])
    with pytest.raises(RuntimeError, match=r"1 cannot be written \(File too large\): .*ulimit -f"):
        run.export(model, tmp_path / "1")
    assert list(tmp_path.iterdir()) == []


def test_other_files_of_a_run_name_the_cause(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(RuntimeError, match=r"Read-only file system.*mounted read-only"):
        write_json(tmp_path / "config.json", {})
    with (
        pytest.raises(ValueError, match=r"Read-only file system.*mounted read-only"),
        held(tmp_path),
    ):
        pass


def test_the_command_has_a_sentence_for_any_full_disk(monkeypatch, capsys):
    def refuse(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/x/y")

    monkeypatch.setattr(main, "main", refuse)
    with pytest.raises(SystemExit) as raised:
        main.cli()
    assert raised.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("tfaccel: error: /x/y cannot be used (No space left on device): ")
