"""The folder of a run: its lock, and what a kill leaves in it."""

import os
import pathlib
import time

import pytest

from tfaccel import workdir
from tfaccel.errors import RunError
from tfaccel.workdir import finished, held, write_config, write_json


def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    reading, writing = os.pipe()
    with held(tmp_path):
        if (child := os.fork()) == 0:
            os.read(reading, 1)  # lives until the test ends
            os._exit(0)
        with pytest.raises(RunError, match="is held by a live run"), held(tmp_path):
            pass
    try:
        ends = time.monotonic() + 10  # the child may not have run yet
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
    assert left == {"result.json": None, "config.json": None}
