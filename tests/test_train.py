"""A whole run's own decisions; the rest of it is tests/test_main.py's and test_configs.py's."""

import types

import numpy as np
import pytest

from tfaccel import train
from tfaccel.config import Config, TrainConfig
from tfaccel.errors import RunError
from tfaccel.runtime import Device


def test_workers_that_do_not_all_see_the_end_of_a_run_end(monkeypatch, tmp_path):
    monkeypatch.setattr(train, "of_workers", lambda own, strategy: np.array([own, [True]]))
    this_run = types.SimpleNamespace(strategy=None)
    with pytest.raises(RunError, match=r"some workers see the end of this run in .*others do not"):
        train._finished(this_run, tmp_path, Config())


def test_what_is_not_finished_goes_on(monkeypatch, tmp_path):
    monkeypatch.setattr(train, "of_workers", lambda own, strategy: np.array([own, own]))
    assert train._finished(types.SimpleNamespace(strategy=None), tmp_path, Config()) is None


@pytest.mark.parametrize(
    ("num_steps", "chosen"), [(469, 7), (100, 10), (157, 10), (24, 8), (11, 11), (3, 3), (1, 1)]
)
def test_a_gpu_has_about_ten_steps_in_an_execution(num_steps, chosen):
    gpu, cpu = Device("/gpu:0", 0), Device("/cpu:0", None)
    assert train.steps_in_execution(TrainConfig(), gpu, num_steps=num_steps) == chosen
    assert train.steps_in_execution(TrainConfig(), cpu, num_steps=num_steps) == 1
    asked = TrainConfig(steps_per_execution=2)
    assert train.steps_in_execution(asked, gpu, num_steps=num_steps) == 2
