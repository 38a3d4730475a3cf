"""A whole run's own decisions; the rest of it is tests/test_main.py's and test_configs.py's."""

import types

import numpy as np
import pytest

from tfaccel import train
from tfaccel.config import Config
from tfaccel.errors import RunError


def test_workers_that_do_not_all_see_the_end_of_a_run_end(monkeypatch, tmp_path):
    monkeypatch.setattr(train, "of_workers", lambda own, strategy: np.array([own, [True]]))
    this_run = types.SimpleNamespace(strategy=None)
    with pytest.raises(RunError, match=r"some workers see the end of this run in .*others do not"):
        train._finished(this_run, tmp_path, Config())


def test_what_is_not_finished_goes_on(monkeypatch, tmp_path):
    monkeypatch.setattr(train, "of_workers", lambda own, strategy: np.array([own, own]))
    assert train._finished(types.SimpleNamespace(strategy=None), tmp_path, Config()) is None
