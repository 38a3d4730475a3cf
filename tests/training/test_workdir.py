"""The folder of a run: its lock, and what a kill leaves in it."""

import os
import pathlib
import time

import pytest

from tfaccel.common.errors import RunError, UserError
from tfaccel.config import default_config
from tfaccel.training import workdir
from tfaccel.training.page import curves
from tfaccel.training.workdir import check_usable, finished, held, write_config, write_json


def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    reading, writing = os.pipe()
    with held(tmp_path):
        if (child := os.fork()) == 0:
            os.read(reading, 1)  # lives until the test ends
            os._exit(0)
        with pytest.raises(RunError, match="is used by a live run"), held(tmp_path):
            pass
    try:
        ends = time.monotonic() + 300  # the child may not have run yet
        while True:
            try:
                with held(tmp_path):
                    break
            except RunError:
                assert time.monotonic() < ends
    finally:
        os.write(writing, b".")
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)


def test_a_kill_while_a_config_is_written_leaves_no_result_of_another(tmp_path, monkeypatch):
    write_config(tmp_path, {"seed": 1})
    write_json(tmp_path / "result.json", {"loss": 0.1})
    (tmp_path / "checkpoints" / "step-1").mkdir(parents=True)  # else another config is refused
    assert finished(tmp_path, {"seed": 1}) == {"loss": 0.1}
    left = {}

    def noted(function):
        def call(path, *args, **kwargs):
            done = function(path, *args, **kwargs)
            left[path.name] = finished(tmp_path, {"seed": 2})
            return done

        return call

    monkeypatch.setattr(workdir, "write_json", noted(workdir.write_json))
    monkeypatch.setattr(pathlib.Path, "unlink", noted(pathlib.Path.unlink))
    write_config(tmp_path, {"seed": 2})
    assert left == {"result.json": None, "report.html": None, "config.json": None}


def test_a_name_that_no_disk_takes_is_a_sentence(tmp_path):
    path = tmp_path / ("x" * 300)
    with pytest.raises(UserError, match="File name too long"), held(path):
        pass
    assert check_usable(path, resume="never") == path
    with pytest.raises(UserError, match="there is no workdir"):
        curves.read(path)


def test_a_folder_that_may_not_be_searched_is_none(tmp_path, monkeypatch):
    """As of another user; for root every folder may be."""
    asked = os.stat

    def refuse(path, **how):
        if "closed" in os.fspath(path):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return asked(path, **how)

    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(UserError, match="no checkpoints to resume from"):
        check_usable(tmp_path / "closed" / "a", resume="required")
    with pytest.raises(UserError, match="there is no workdir"):
        curves.read(tmp_path / "closed" / "a")


@pytest.mark.parametrize(
    ("source", "targets", "expected"),
    [("pairs", "image", "auto"), ("pairs", "mask", "cross_entropy"), ("folders", "image", None)],
)
def test_the_loss_that_earlier_versions_wrote_for_target_images_has_no_effect(
    tmp_path, source, targets, expected
):
    config = default_config()
    config.data.update({"source": source, "targets": targets, "root": "data"})
    config.data.update({"train_targets": "t", "test_targets": "t"} if source == "pairs" else {})
    config.train.loss = "cross_entropy"
    workdir.write_config(tmp_path, config.to_dict())
    assert workdir.read_config(tmp_path).train.loss == (expected or "cross_entropy")
