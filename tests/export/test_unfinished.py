"""What an export that was killed left is removed by the next; nothing else is."""

import logging
import shutil
import subprocess
import sys

import keras
import pytest

from tfaccel.export import card
from tfaccel.export.unfinished import keep_rejected, whole_or_not_at_all

# Without TensorFlow, which takes 3 s to import and is needed there only to name errors.
KILLED = """
import contextlib, os, pathlib, signal, sys, types
sys.modules["tensorflow"] = types.ModuleType("tensorflow")
from tfaccel.export.unfinished import whole_or_not_at_all
with contextlib.ExitStack() as stack:
    for path in sys.argv[1:]:
        folder = stack.enter_context(whole_or_not_at_all(pathlib.Path(path)))
        (folder / "saved_model.pb").write_bytes(bytes(1000))
        (folder / "variables").mkdir()
        (folder / "variables" / "variables.index").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def fill(path):
    with whole_or_not_at_all(path) as folder:
        (folder / "saved_model.pb").touch()


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A folder in which a killed process has left what was to become 1, and 2."""
    root = tmp_path_factory.mktemp("killed")
    command = [sys.executable, "-c", KILLED, str(root / "1"), str(root / "2")]
    done = subprocess.run(command, capture_output=True)
    assert done.returncode == -9, done.stderr
    return root


@pytest.fixture
def left(killed, tmp_path):
    return shutil.copytree(killed, tmp_path / "left")


def names(folder):
    return sorted(each.name.partition("-")[0] for each in folder.iterdir())


def test_what_a_killed_one_left_is_removed_and_said(left, caplog):
    assert names(left) == [".1.tfaccel", ".2.tfaccel"]
    with caplog.at_level(logging.INFO, logger="tfaccel"):
        fill(left / "1")
    assert names(left) == [".2.tfaccel", "1"]  # what was to be another stays
    assert "which a killed export left" in caplog.text
    assert [each.name for each in (left / "1").iterdir()] == ["saved_model.pb"]


def test_others_files_in_it_stay(left):
    (folder,) = left.glob(".1.*")
    (folder / "notes.txt").touch()
    fill(left / "1")
    assert (folder / "notes.txt").exists()
    assert (folder / "saved_model.pb").exists()


def test_one_of_which_it_is_not_known_who_fills_it_stays(left):
    (folder,) = left.glob(".1.*")
    (folder / "export.lock").unlink()
    fill(left / "1")
    assert (folder / "saved_model.pb").exists()


def test_a_link_stays(left):
    (folder,) = left.glob(".1.*")
    folder.rename(left / "moved")
    folder.symlink_to(left / "moved")
    fill(left / "1")
    assert (folder / "saved_model.pb").exists()


def test_a_live_ones_stays(tmp_path):
    with whole_or_not_at_all(tmp_path / "1") as folder:
        (folder / "saved_model.pb").touch()
        with pytest.raises(KeyError), whole_or_not_at_all(tmp_path / "1"):
            raise KeyError
        assert [each.name for each in tmp_path.iterdir()] == [folder.name]
    assert [each.name for each in tmp_path.iterdir()] == ["1"]


def test_where_there_are_no_locks_all_stays_and_the_export_is_made(left, monkeypatch, caplog):
    def flock(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", flock)
    with caplog.at_level(logging.INFO, logger="tfaccel"):
        fill(left / "1")
    assert names(left) == [".1.tfaccel", ".2.tfaccel", "1"]
    assert [each.name for each in (left / "1").iterdir()] == ["saved_model.pb"]
    assert "which is unfinished" in caplog.text
    assert "export: cannot lock" in caplog.text


def test_a_rejected_one_is_nobodys_any_more(tmp_path):
    path = tmp_path / "1"

    def reject():
        with whole_or_not_at_all(path) as folder:
            (folder / "saved_model.pb").touch()
            raise KeyError(keep_rejected(folder, path))

    with pytest.raises(KeyError) as raised:
        reject()
    (kept,) = raised.value.args
    assert [each.name for each in kept.iterdir()] == ["saved_model.pb"]
    fill(path)
    assert kept.exists()


def test_all_that_an_export_holds_is_known_as_ours(setup, tmp_path, monkeypatch):
    """Or what is left of one would stay."""
    held, write = set(), card.write

    def kill(folder, *args, **kwargs):
        write(folder, *args, **kwargs)
        held.update(each.name for each in folder.iterdir())
        shutil.copytree(folder, folder.with_name(".1.tfaccel-01234567"))

    run = setup()
    with run.scope():
        model = keras.Sequential([keras.Input((2,), name="x"), keras.layers.Dense(1)])
    monkeypatch.setattr(card, "write", kill)
    shutil.rmtree(run.export(model, tmp_path / "1", onnx=True))
    assert held >= {"export.lock", "saved_model.pb", "model.keras", "model.onnx", card.NAME}
    assert [each.name for each in tmp_path.iterdir()] == [".1.tfaccel-01234567"]
    monkeypatch.setattr(card, "write", write)
    path = run.export(model, tmp_path / "1")
    assert list(tmp_path.iterdir()) == [path]
    assert "export.lock" not in {each.name for each in path.iterdir()}
