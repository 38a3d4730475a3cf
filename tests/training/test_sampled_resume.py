"""A run with sampling by class that is cut in the middle of an epoch goes on bit for bit."""

import dataclasses
import os
import signal

import keras
import numpy as np
import PIL.Image
import pytest
import test_killed_runs as killed
from conftest import strategy_of
from cut_fit import Cut, CutError
from tensorflow.python.framework import config as tf_config

import tfaccel
from tfaccel import UserError, sources
from tfaccel.config import CheckpointConfig
from tfaccel.data.source import NAMES, ArraySource, ImageSource
from tfaccel.runtime.devices import Device
from tfaccel.training.checkpoint.store import Store

STEPS = 5  # of an epoch: 36 images in batches of 8
NEVER = 10**6
COUNTS = {"a": 25, "b": 8, "c": 3}


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    root, random = tmp_path_factory.mktemp("uneven"), np.random.default_rng(0)
    for name, count in COUNTS.items():
        (root / name).mkdir()
        for index in range(count):
            pixels = random.integers(0, 256, (8, 8), dtype=np.uint8)
            PIL.Image.fromarray(pixels).save(root / name / f"{index:02d}.png")
    return root


@pytest.fixture
def train(uneven, tmp_path, monkeypatch):
    """Trains for three epochs from the newest checkpoint in the test's folder on."""
    monkeypatch.setattr("tfaccel.run.warn_at_start", lambda *args, **kwargs: None)

    def train(
        name,
        *,
        cut=NEVER,
        num_replicas=1,
        classes="abc",
        names=None,
        sampling="balanced",
        **settings,
    ):
        run = tfaccel.setup(gpu_ids=(), deterministic=True, xla=False)
        if num_replicas > 1:
            run.strategy = strategy_of(num_replicas)
            devices = tuple(Device(f"/cpu:{index}", None) for index in range(num_replicas))
            object.__setattr__(run.runtime, "devices", devices)
        source = sources.select_classes(sources.class_folders(uneven), classes)
        if names:
            source = dataclasses.replace(source, class_names=tuple(names))
        loader = run.loader(
            source,
            **{"image_size": (8, 8), "channels": 1, "global_batch_size": 8},
            **{"shuffle": True, "sampling": sampling, "augment": "mnist", "loader": "tf_data"},
        )
        layers = [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(3)]
        with run.scope():
            model = keras.Sequential(layers)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        run.compile(model, keras.optimizers.SGD(0.05, 0.9), loss)
        config = CheckpointConfig(every_steps=2, keep_last=99)
        checkpoints = run.checkpoints(tmp_path / name, config, **settings)
        model.fit(loader, epochs=3, callbacks=[checkpoints, Cut(cut)], verbose=0)
        return [each.numpy() for each in (*model.variables, *model.optimizer.variables)]

    yield train
    tf_config.disable_op_determinism()


@pytest.mark.parametrize("num_replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_cut_run_ends_as_the_whole_one(train, num_replicas):
    whole = train("whole", num_replicas=num_replicas)
    with pytest.raises(CutError):
        train("cut", cut=STEPS + 3, num_replicas=num_replicas)
    for ours, theirs in zip(train("cut", num_replicas=num_replicas), whole, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    if num_replicas == 1:  # the sampling decides what is trained
        uniform = train("uniform", sampling="uniform")
        assert any((ours != theirs).any() for ours, theirs in zip(uniform, whole, strict=True))


def test_another_sampling_and_other_classes_are_refused(train):
    with pytest.raises(CutError):
        train("cut", cut=STEPS + 3)
    for changes, words in (
        ({"sampling": "uniform"}, "sampling 'balanced' -> None"),
        ({"sampling": "square_root"}, "sampling 'balanced' -> 'square_root'"),
        ({"classes": "cab"}, "labels"),
        ({"classes": "ab"}, "number of examples"),
        ({"names": "adc"}, "of another run: label names.1 'b' -> 'd'; undo"),
    ):
        with pytest.raises(UserError, match="is of another run") as refused:
            train("cut", **changes)
        assert words in str(refused.value)
    train("cut", sampling="uniform", accept_changes=True)


def test_a_checkpoint_of_an_earlier_version_knows_no_names(train, monkeypatch):
    facts = ImageSource.facts

    def without_names(source):
        return {name: each for name, each in facts(source).items() if name != NAMES}

    with monkeypatch.context() as before:
        before.setattr(ImageSource, "facts", without_names)
        with pytest.raises(CutError):
            train("cut", cut=3)
    train("cut")


def test_the_names_of_masks_are_facts():
    images = np.zeros((2, 4, 4, 3), np.uint8)
    data = ArraySource(images, None, targets=images[..., :1], target_names=("road", "sky"))
    assert data.facts()[NAMES] == {"0": "road", "1": "sky"}


def test_the_facts_without_sampling_are_those_of_earlier_versions(train, tmp_path):
    with pytest.raises(CutError):
        train("cut", cut=3, sampling="uniform")
    store = Store(tmp_path / "cut", keep_last=99, keep_best=0, largest_is_best=False)
    assert "sampling" not in store.newest().state["facts"]


@pytest.mark.slow  # the test above sees the same without a process of its own
def test_a_killed_command_ends_as_the_whole_one(tmp_path):
    every = [*killed.EVERY, "--config.data.classes=8,1,3", "--config.data.sampling=square_root"]
    whole, _ = killed.finish(tmp_path / "whole", every=every)
    run = killed.start(tmp_path / "cut", every=every)
    killed.wait_until(lambda: killed.last_step(tmp_path / "cut") >= 8, run)
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate()
    result, err = killed.finish(tmp_path / "cut", every=every)
    assert "resumed from step" in err
    assert result["metrics"] == whole["metrics"]
    reference, found = (killed.newest(tmp_path / each) for each in ("whole", "cut"))
    for name, array in reference.arrays.items():
        np.testing.assert_array_equal(found.arrays[name], array, err_msg=name)
