"""Sampling by class through `run.loader`: the same epochs in every loader, on replicas, resumed."""

import dataclasses
import logging

import numpy as np
import PIL.Image
import pytest

from tfaccel import UserError, sources
from tfaccel.data.proof import proof
from tfaccel.data.proof.epochs import Epoch
from tfaccel.data.sampling import ClassSampling
from tfaccel.data.shards import Plan
from tfaccel.data.source import ArraySource

COUNTS = {"a": 23, "b": 6, "c": 2}
SETTINGS = {"image_size": (8, 8), "channels": 1, "global_batch_size": 8}
LOADERS = (
    "tf_data",
    "memory",
    "cache",
    "dali_cpu",
    pytest.param("dali_gpu", marks=pytest.mark.gpu),
)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    """Class folders of grey images, each of its own level, from 0 on."""
    root, level = tmp_path_factory.mktemp("uneven"), 0
    for name, count in COUNTS.items():
        (root / name).mkdir()
        for index in range(count):
            PIL.Image.new("L", (8, 8), level).save(root / name / f"{index:02d}.png")
            level += 1
    return root


def levels_of(loader, run, first_step=0, num_epochs=1):
    """The level of each real row of the next epochs, [rows], and the labels."""
    local = run.strategy.experimental_local_results
    levels, labels = [], []
    for _ in range(num_epochs):
        for image, label, weight in loader:
            for x, y, real in zip(*map(local, (image, label, weight)), strict=True):
                real = real.numpy() > 0
                levels += (x.numpy()[real, 0, 0, 0] * 255).round().astype(int).tolist()
                labels += y.numpy()[real].tolist()
    return levels, labels


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("how", ["balanced", "square_root"])
def test_every_loader_gives_the_epochs_of_the_sampling(setup, uneven, name, how):
    run = setup(xla=False, seed=5)
    source = sources.class_folders(uneven)
    loader = run.loader(source, shuffle=True, sampling=how, loader=name, **SETTINGS)
    sampling = ClassSampling(how, source.labels)
    wanted = np.concatenate([sampling.order(seed=5, epoch=each) for each in (0, 1)])
    levels, labels = levels_of(loader, run, num_epochs=2)
    assert levels == wanted.tolist()
    assert labels == source.labels[wanted].tolist()
    if how == "balanced":
        assert sorted(np.bincount(labels[: len(source)])) == [10, 10, 11]
    # From the middle of an epoch, as a resumed run begins.
    again = run.loader(source, shuffle=True, sampling=how, loader=name, **SETTINGS)
    again.start_at(epoch=1, step=2)
    assert levels_of(again, run)[0] == wanted[len(source) + 2 * 8 :].tolist()


@pytest.mark.parametrize("num_replicas", [2, 4])
def test_replicas_share_the_epoch_of_one(setup, uneven, num_replicas, monkeypatch):
    source = sources.class_folders(uneven)
    sampling = ClassSampling("balanced", source.labels)
    run = setup(xla=False, seed=5)
    loader = run.loader(source, shuffle=True, sampling="balanced", **SETTINGS)
    plan = dataclasses.replace(loader.data.plan, num_replicas=num_replicas)
    data = dataclasses.replace(loader.data, plan=plan)
    for step in range(plan.num_steps):
        rows = [data.feed(index, first=plan.num_steps).rows(step) for index in range(num_replicas)]
        found = np.concatenate([each.ids[each.real] for each in rows])
        wanted = sampling.order(seed=5, epoch=1)[8 * step : 8 * step + 8]
        assert found.tolist() == wanted.tolist()


def test_the_log_has_the_counts_before_and_after(setup, uneven, caplog):
    run = setup(xla=False)
    with caplog.at_level(logging.INFO, "tfaccel"):
        loader = run.image_folder(uneven, shuffle=True, sampling="balanced", **SETTINGS)
    assert "data: sampling=balanced: images of each class, in the data -> in an epoch: " in (
        caplog.text
    )
    assert "a: 23 -> 10, b: 6 -> 10, c: 2 -> 11; an image of the rarest class comes 5.5 times" in (
        caplog.text
    )
    assert "sampling: balanced" in repr(loader)
    caplog.clear()
    with loader.class_weights({0: 2.0}):
        assert "rare classes count more by both" in caplog.text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sampling": "balance"}, "sampling='balance'; did you mean 'balanced'?"),
        ({"shuffle": False}, "sampling='balanced' without shuffle=True; it is for training"),
    ],
)
def test_what_cannot_be_sampled_is_refused(setup, uneven, changes, words):
    run = setup(xla=False)
    with pytest.raises(UserError, match=words):
        run.image_folder(uneven, **{"shuffle": True, "sampling": "balanced", **SETTINGS, **changes})


@pytest.mark.parametrize("kind", ["pairs", "several", "numbers"])
def test_images_without_one_class_each_are_refused(setup, kind):
    run, images = setup(xla=False), np.zeros((4, 8, 8, 1), np.uint8)
    labels = {"pairs": None, "several": np.zeros((4, 2), np.float32), "numbers": np.zeros((4, 1))}
    targets = images if kind == "pairs" else None
    names = ("a", "b") if kind == "several" else ()
    source = ArraySource(images, labels[kind], names, targets)
    have = {"pairs": "target images", "several": "several classes", "numbers": "numbers"}[kind]
    with pytest.raises(UserError, match=f"one class each, but these have {have}"):
        run.loader(source, shuffle=True, sampling="balanced", **SETTINGS)


@pytest.mark.parametrize("last_batch", ["pad", "drop", "repeat"])
def test_the_audit_proves_a_sampled_loader(setup, uneven, last_batch):
    run = setup(xla=False)
    source = sources.class_folders(uneven)
    settings = {"shuffle": True, "sampling": "balanced", "last_batch": last_batch, **SETTINGS}
    found = run.audit(source, **settings)
    assert found.ok, str(found)
    said = {each.name: each.text for each in found.findings}
    assert "as many images of each class as sampling=balanced says" in said["classes"]
    assert "coverage" not in said


def planted(epochs, faulty):
    """The same epochs, with the ids of the last one changed by a function."""
    return [*epochs[:-1], dataclasses.replace(epochs[-1], ids=faulty(epochs[-1].ids.copy()))]


def test_planted_faults_of_a_sampled_loader_are_found():
    labels = np.repeat([0, 1], [36, 12])
    sampling = ClassSampling("balanced", labels)
    plan = Plan(48, 8, 2, 0, True, sampling=sampling)
    epochs = [
        Epoch.of([[_rows_of(plan, epoch, step, index) for index in (0, 1)] for step in range(6)])
        for epoch in (0, 1)
    ]
    settings = {"num_examples": 48, "shuffle": True, "last_batch": "pad", "sampling": sampling}

    def other_class(ids):
        ids[0, 0, 0] = 0 if ids[0, 0, 0] >= 36 else 47
        return ids

    def same_image(ids):
        own = np.argwhere(ids < 36)
        ids[tuple(own[0])] = ids[tuple(own[1])]
        return ids

    assert proof.verdict(epochs, **settings).ok
    for faulty, words in ((other_class, "expected 24"), (same_image, "come again before all")):
        found = proof.verdict(planted(epochs, faulty), **settings)
        assert [each.name for each in found.findings if each.ok is False] == ["classes"]
        assert words in str(found)


def _rows_of(plan, epoch, step, index):
    rows = plan.rows(epoch=epoch, step=step, replica_index=index)
    return rows.ids, rows.real, None
