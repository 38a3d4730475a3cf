"""Checkpoints are whole or not there, and only what is ours is removed."""

import logging
import math
import os
import pathlib

import ml_dtypes
import numpy as np
import pytest
from snapshots import assert_same, make_store, names, snapshot, warnings

from tfaccel.common.errors import UserError
from tfaccel.training.checkpoint.store import CheckpointError, Snapshot, check_space


def test_the_newest_is_that_of_the_largest_step_whatever_the_clock_says(tmp_path):
    store = make_store(tmp_path / "run" / "checkpoints")
    assert store.newest() is None
    assert store.steps() == []
    for step in (9, 10):
        path = store.write(snapshot(step))
    assert path == tmp_path / "run" / "checkpoints" / "step-00000010"
    os.utime(path, (0, 0))
    assert_same(store.newest(), snapshot(10))
    assert [each.name for each in store.steps()] == ["step-00000009", "step-00000010"]


def test_the_state_before_validation_is_older_than_that_after_it(tmp_path):
    store = make_store(tmp_path)
    store.write(snapshot(5), tested=False)
    assert names(tmp_path) == ["step-00000005-untested"]
    assert_same(store.newest(), snapshot(5))
    after = Snapshot(snapshot(5).arrays, {"step": 5, "val_loss": 0.5})
    store.write(after)
    assert names(tmp_path) == ["step-00000005"]
    assert_same(store.newest(), after)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
def test_a_state_that_is_not_finite_is_never_saved(tmp_path, bad, dtype):
    store = make_store(tmp_path)
    store.write(snapshot(1))
    poisoned = snapshot(2)
    poisoned.arrays["model/2"] = np.array([1, bad], dtype)
    with pytest.raises(CheckpointError, match="after step 2 is not saved: 'model/2' has values"):
        store.write(poisoned, score=1.0)
    assert names(tmp_path) == ["step-00000001"]


def test_a_step_written_again_takes_the_place_of_the_earlier(tmp_path):
    store = make_store(tmp_path, keep_last=1)
    store.write(snapshot(1))
    again = Snapshot({"model/0": np.ones(3)}, {"step": 1})
    store.write(again)
    assert names(tmp_path) == ["step-00000001"]
    assert_same(store.newest(), again)


# The best.


@pytest.mark.parametrize(("largest", "best"), [(True, 2), (False, 4)])
def test_the_best_is_that_of_the_best_score(tmp_path, largest, best):
    store = make_store(tmp_path, keep_last=9, largest_is_best=largest)
    assert store.best() is None
    for step, score in enumerate([None, 0.5, 0.9, math.nan, 0.1, math.inf, None]):
        store.write(snapshot(step), score=score)
    assert_same(store.best(), snapshot(best))
    assert_same(store.newest(), snapshot(6))


def test_of_equal_scores_the_newest_is_the_best_and_without_a_score_none(tmp_path):
    store = make_store(tmp_path)
    store.write(snapshot(1), tested=False)
    assert store.best() is None
    for step in (9, 10):
        store.write(snapshot(step), score=0.5)
    assert_same(store.best(), snapshot(10))


def test_a_best_that_rotation_kept_alone_is_found(tmp_path):
    store = make_store(tmp_path, keep_last=1, keep_best=1)
    for step, score in enumerate([0.5, 0.9, 0.4, 0.3]):
        store.write(snapshot(step), score=score)
    assert names(tmp_path) == ["step-00000001", "step-00000003"]
    assert_same(make_store(tmp_path).best(), snapshot(1))


# Rotation.


def test_rotation_keeps_the_last_and_the_best(tmp_path):
    store = make_store(tmp_path, keep_last=2, keep_best=1)
    for step, score in enumerate([0.5, 0.9, math.nan, None, 0.9, 0.1, 0.2]):
        store.write(snapshot(step), score=score)
    assert names(tmp_path) == ["step-00000004", "step-00000005", "step-00000006"]


def test_rotation_leaves_alone_what_it_cannot_prove_its_own(tmp_path):
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    folder.mkdir()
    make_store(elsewhere).write(snapshot(1))
    (folder / "step-00000001").symlink_to(elsewhere / "step-00000001")  # to a checkpoint of ours
    (folder / "step-00000002").mkdir()  # no manifest
    (folder / "step-00000002" / "arrays.index").write_text("theirs")
    (folder / "step-00000003").write_text("a file")
    (folder / "step-00000004").mkdir()
    (folder / "step-00000004" / "MANIFEST.json").write_text('{"format": "another"}')
    (folder / "step-5").mkdir()
    (folder / "step-00000006.tmp-12").mkdir()
    (folder / "step-00000006.tmp-12" / "thesis.txt").write_text("theirs")
    (folder / "step-00000007.tmp-12").symlink_to(elsewhere)
    (folder / "step-00000008.tmp-12").write_text("a file")
    theirs = names(folder)
    store = make_store(folder, keep_last=1)
    store.write(snapshot(10))
    with_notes = store.write(snapshot(11)) / "notes.txt"
    with_notes.write_text("theirs")
    store.write(snapshot(12))
    store.remove_unfinished()
    assert names(folder) == sorted([*theirs, "step-00000011", "step-00000012"])
    assert with_notes.read_text() == "theirs"
    assert (folder / "step-00000006.tmp-12" / "thesis.txt").exists()
    assert_same(make_store(elsewhere).newest(), snapshot(1))


def test_a_foreign_folder_with_the_name_of_a_new_checkpoint_is_put_aside(tmp_path):
    foreign = tmp_path / "step-00000003"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("theirs")
    make_store(tmp_path).write(snapshot(3))
    assert_same(make_store(tmp_path).newest(), snapshot(3))
    assert (tmp_path / "step-00000003.old-0" / "thesis.txt").read_text() == "theirs"


def test_what_cannot_be_removed_is_said_and_stays(tmp_path, monkeypatch, caplog):
    store = make_store(tmp_path, keep_last=1)
    store.write(snapshot(1))
    rename = os.rename

    def refuse(source, target):
        if pathlib.Path(source).name == "step-00000001":
            raise PermissionError(13, "Permission denied")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    store.write(snapshot(2))
    (line,) = warnings(caplog)
    assert line.endswith("step-00000001 cannot be removed (Permission denied)")
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_a_later_step_of_before_takes_no_place_of_the_last(tmp_path):
    store = make_store(tmp_path, keep_last=1)
    (store.write(snapshot(9)) / "arrays.index").write_bytes(b"")  # damaged, so that 5 is resumed
    for step in (6, 7):
        store.write(snapshot(step))
    assert names(tmp_path) == ["step-00000007", "step-00000009"]
    assert_same(store.newest(), snapshot(7))


def test_a_damaged_one_takes_no_place_of_the_last_and_the_best(tmp_path):
    make_store(tmp_path).write(snapshot(1), score=0.5)
    damaged = make_store(tmp_path).write(snapshot(2), score=0.9)
    (damaged / "arrays.index").write_bytes(b"")
    store = make_store(tmp_path, keep_last=2, keep_best=1)
    assert_same(store.newest(), snapshot(1))
    store.write(snapshot(3), score=0.1)
    assert names(tmp_path) == ["step-00000001", "step-00000003"]
    store.write(snapshot(4))
    assert names(tmp_path) == ["step-00000001", "step-00000003", "step-00000004"]


# Room on the disk.


def test_room_is_checked_before_the_first_step(tmp_path, monkeypatch, caplog):
    usage = type("Usage", (), {"free": 100 * 2**20})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    folder = tmp_path / "run" / "checkpoints"
    check_space(folder, 25 * 2**20, keep=3)
    assert warnings(caplog) == []
    check_space(folder, 30 * 2**20, keep=3)
    (line,) = warnings(caplog)
    assert "up to 4 of 30.0 MiB each exist at a time" in line
    assert "room for only 3" in line
    with pytest.raises(UserError, match=r"needs 101.0 MiB in .*, which has 100.0 MiB free"):
        check_space(folder, 101 * 2**20, keep=3)
    assert not folder.parent.exists()


def test_those_that_are_there_make_room_for_others(tmp_path, monkeypatch, caplog):
    make_store(tmp_path).write(snapshot(1, num_bytes=2**20))
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 2**20}))
    check_space(tmp_path, 2**20, keep=1)
    assert warnings(caplog) == []


def test_a_folder_that_is_not_to_be_read_is_no_reason_to_start_anew(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match=r"cannot be read \(Not a directory\)"):
        make_store(tmp_path / "checkpoints").newest()


def test_log_says_nothing_where_all_is_well(tmp_path, caplog):
    caplog.set_level(logging.DEBUG, "tfaccel")
    store = make_store(tmp_path, keep_last=1, keep_best=1)
    for step in range(3):
        store.write(snapshot(step), score=0.5)
    store.remove_unfinished()
    store.newest()
    assert [each for each in caplog.records if each.name == "tfaccel"] == []
