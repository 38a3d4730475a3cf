"""A whole run's own decisions; the rest of it is tests/cli/test_main.py's and test_configs.py's."""

import types

import numpy as np
import pytest

from tfaccel.common.errors import RunError
from tfaccel.config import Config, DataConfig, ModelConfig, TrainConfig
from tfaccel.experiment import train
from tfaccel.runtime.cluster import Cluster
from tfaccel.runtime.devices import Device
from tfaccel.runtime.watchdog import Watchdog

ALONE = types.SimpleNamespace(strategy=None, watchdog=Watchdog(Cluster()))  # of a run


def test_workers_that_do_not_all_see_the_end_of_a_run_end(monkeypatch, tmp_path):
    monkeypatch.setattr(train, "of_workers", lambda own, strategy: np.array([own, [True]]))
    with pytest.raises(RunError, match=r"some workers see the end of this run in .*others do not"):
        train._finished(ALONE, tmp_path, Config())


def test_what_is_not_finished_goes_on(monkeypatch, tmp_path):
    monkeypatch.setattr(train, "of_workers", lambda own, strategy: np.array([own, own]))
    assert train._finished(ALONE, tmp_path, Config()) is None


@pytest.mark.parametrize(
    ("num_steps", "chosen"), [(469, 7), (100, 10), (157, 10), (24, 8), (11, 11), (3, 3), (1, 1)]
)
def test_a_gpu_has_about_ten_steps_in_an_execution(num_steps, chosen):
    gpu, cpu = Device("/gpu:0", 0), Device("/cpu:0", None)
    assert train.steps_in_execution(TrainConfig(), gpu, num_steps=num_steps) == chosen
    assert train.steps_in_execution(TrainConfig(), cpu, num_steps=num_steps) == 1
    asked = TrainConfig(steps_per_execution=2)
    assert train.steps_in_execution(asked, gpu, num_steps=num_steps) == 2


IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
CAFFE = {"mean": (123.68 / 255, 116.779 / 255, 103.939 / 255), "std": 1 / 255}


@pytest.mark.parametrize(
    ("name", "data", "order", "words"),
    [
        ("resnet50", {}, "rgb", "--config.data.mean=0.48502,0.457957,0.407604"),
        ("resnet50", CAFFE, "rgb", "--config.model.weights_order=bgr"),
        ("resnet50", CAFFE, "bgr", ""),
        ("DenseNet121", IMAGENET, "rgb", ""),
        ("DenseNet121", {}, "rgb", "--config.data.std=0.229,0.224,0.225"),
        ("mobilenetv2", {"mean": 0.5, "std": 0.5}, "rgb", ""),
        ("mobilenetv2", {}, "rgb", "--config.data.mean=0.5,0.5,0.5"),
        ("mnist_cnn", {}, "rgb", ""),
        ("efficientnetb0", {}, "rgb", ""),
    ],
)
def test_it_is_said_what_pixels_keras_own_weights_want(caplog, name, data, order, words):
    model = ModelConfig(name=name, weights="a.h5", weights_order=order)
    train._compare_pixels(Config(model=model, data=DataConfig(**data)))
    warned = " ".join(each.message for each in caplog.records if each.levelname == "WARNING")
    assert words in warned
    assert bool(warned) == bool(words)
