"""The export of a run's checkpoint is the export that training itself makes."""

import dataclasses
import json
import pathlib
import runpy
import shutil
import types

import keras
import numpy as np
import PIL.Image
import pytest
from conftest import NotRehearsed
from small_network import as_mnist_cnn

from tfaccel import UserError
from tfaccel.cli import main
from tfaccel.config import ExportConfig, parse
from tfaccel.experiment import export_run as from_workdir
from tfaccel.experiment import train
from tfaccel.experiment.export_run import export_run
from tfaccel.experiment.trained import snapshot_of
from tfaccel.export import at_start, card, parity, saved_model
from tfaccel.training.checkpoint import store as store_lib
from tfaccel.training.checkpoint.store import Store
from tfaccel.training.workdir import read_config

DIGITS = pathlib.Path(__file__).parents[2] / "configs" / "digits.py"
EXPORT = ExportConfig(samples=8)


@pytest.fixture(scope="module", autouse=True)
def _small():
    """The digits' model has two layers, which is all that the weights' order needs."""
    with as_mnist_cnn():
        yield


def config(root, **changes):
    """The digits, of which a few train: `changes` are of the flattened config."""
    config = runpy.run_path(str(DIGITS))["get_config"]("smoke")
    settings = {
        "data.root": str(root),
        "data.loader": "dali_cpu",
        "runtime.precision": "float32",
        "runtime.xla": False,
        "data.global_batch_size": 16,  # two steps
        "train.epochs": 2,
    }
    config.update_from_flattened_dict(settings | changes)
    return parse(config)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """As many classes as there are digits: of each two images to train on, one to test on."""
    root, random = tmp_path_factory.mktemp("digits"), np.random.default_rng(0)
    for split, num in (("training", 2), ("testing", 1)):
        for label in range(10):
            (root / split / str(label)).mkdir(parents=True)
            for index in range(num):
                image = PIL.Image.fromarray(random.integers(0, 256, (8, 8), dtype=np.uint8))
                image.save(root / split / str(label) / f"{index}.png")
    return root


def compare_nothing(monkeypatch):
    """Exports hold model.keras and the card alone; to write and compare the rest takes over 1 s.

    Of tests that show which checkpoint, weights or data an export takes.
    """
    monkeypatch.setattr(at_start, "Rehearsal", NotRehearsed)
    monkeypatch.setattr(at_start, "_check_pixels", lambda *_, **__: None)
    monkeypatch.setattr(saved_model, "write", lambda *_, **__: None)

    def question(model, images, samples, litert):
        own = parity.Parity(len(samples), ())
        return types.SimpleNamespace(inputs={}, ask=lambda _: own)

    monkeypatch.setattr(parity, "about_images", question)


@pytest.fixture
def nothing_compared(monkeypatch):
    compare_nothing(monkeypatch)


@pytest.fixture(scope="module")
def trained(root, tmp_path_factory):
    """The workdir of a run that averages its weights, and the folder of its own export."""
    workdir = tmp_path_factory.mktemp("runs") / "a"
    averaging = {"train.ema_momentum": 0.5, "checkpoint.keep_last": 5, "checkpoint.keep_best": 1}
    with pytest.MonkeyPatch.context() as patch:
        compare_nothing(patch)
        result = train.run(config(root, **averaging), workdir=workdir)
    return workdir, pathlib.Path(result["export"])


@pytest.fixture
def workdir(trained, tmp_path):
    """A copy of it, which tests may change."""
    return shutil.copytree(trained[0], tmp_path / "run")


@pytest.fixture(autouse=True)
def _tidy():
    yield
    keras.config.set_dtype_policy("float32")


def weights(export):
    return keras.models.load_model(export / "model.keras").get_weights()


def assert_same_weights(one, other):
    for mine, theirs in zip(weights(one), weights(other), strict=True):
        assert mine.tobytes() == theirs.tobytes()


def content(folder):
    """Each file below it, with its bytes and when it was written; folders likewise."""
    return {
        str(each.relative_to(folder)): (
            each.stat().st_mtime_ns,
            each.read_bytes() if each.is_file() else None,
        )
        for each in folder.rglob("*")
    }


def change_config(workdir, section, **changes):
    path = workdir / "config.json"
    values = json.loads(path.read_text())
    values[section] |= changes
    path.write_text(json.dumps(values))


def snapshots_of(workdir):
    """Each checkpoint, the newest last."""
    return [store_lib._read(each) for each in store_of(workdir).steps()]


def store_of(workdir):
    return Store(workdir / "checkpoints", keep_last=5, keep_best=1, largest_is_best=False)


def weights_of(snapshot):
    """The checkpoint's kernels and offsets, in their order."""
    names = [each for each in sorted(snapshot.arrays) if each.endswith(("/kernel", "/bias"))]
    return [snapshot.arrays[name] for name in names]


# Which weights.


def test_the_newest_checkpoint_is_what_training_exported(trained, tmp_path):
    workdir, by_training = trained
    average = dataclasses.replace(EXPORT, weights="average")
    path = export_run(workdir, tmp_path / "served", average)
    assert path == tmp_path / "served" / "1"
    assert_same_weights(path, by_training)
    mine, theirs = card.read(path), card.read(by_training)
    for name in ("class_names", "preprocessing", "answers", "model", "computes_in"):
        assert mine[name] == theirs[name]
    assert mine["weights"] == "average"
    assert mine["parity"]["samples"] == 8


@pytest.mark.usefixtures("nothing_compared")
def test_trained_weights_are_the_checkpoints_own(trained, tmp_path):
    workdir, by_training = trained
    path = export_run(workdir, tmp_path / "served", EXPORT, checkpoint="newest")
    received, expected = weights(path), weights_of(store_of(workdir).newest())
    assert len(received) == len(expected)
    for mine, theirs in zip(received, expected, strict=True):
        assert mine.tobytes() == theirs.tobytes()
    averages = weights(by_training)
    assert not any(np.array_equal(*pair) for pair in zip(received, averages, strict=True))


@pytest.mark.parametrize(
    ("monitor", "best"), [("val_loss", 0), ("loss", 0), ("val_accuracy", 1), ("psnr", 1)]
)
def test_the_best_checkpoint_is_that_of_the_best_monitor(workdir, monitor, best):
    snapshots = snapshots_of(workdir)
    assert len(snapshots) == 2
    for snapshot, score in zip(snapshots, (0.1, 0.9), strict=True):
        store_of(workdir).write(snapshot, score=score)
    change_config(workdir, "train", monitor=monitor)
    chosen = snapshot_of(workdir, read_config(workdir), "best")
    assert chosen.step == snapshots[best].step


@pytest.mark.usefixtures("nothing_compared")
def test_the_best_checkpoint_is_exported_where_it_is_asked_for(workdir, tmp_path):
    first, newest = snapshots_of(workdir)
    store_of(workdir).write(first, score=0.1)
    store_of(workdir).write(newest, score=0.9)
    path = export_run(workdir, tmp_path / "served", EXPORT, checkpoint="best")
    for mine, theirs in zip(weights(path), weights_of(first), strict=True):
        assert mine.tobytes() == theirs.tobytes()


@pytest.mark.usefixtures("nothing_compared")
def test_a_run_that_stopped_early_is_exported_with_its_best_epochs_weights(root, tmp_path):
    # So low a rate that the accuracy stays: of equal epochs the first is best, and no checkpoint
    # of it need be left.
    stopping = {"train.early_stopping_epochs": 1, "train.monitor": "val_accuracy"}
    changes = {"train.learning_rate": 1e-6, "train.epochs": 5, "checkpoint.keep_last": 1}
    result = train.run(
        config(root, **stopping, **changes, **{"checkpoint.keep_best": 0}), workdir=tmp_path / "a"
    )
    assert result["steps"] == 4  # two epochs
    path = export_run(tmp_path / "a", tmp_path / "served", EXPORT)
    assert_same_weights(path, pathlib.Path(result["export"]))
    newest = weights_of(store_of(tmp_path / "a").newest())
    pairs = zip(weights(path), newest, strict=True)
    assert not all(mine.tobytes() == theirs.tobytes() for mine, theirs in pairs)


@pytest.mark.usefixtures("nothing_compared")
@pytest.mark.parametrize(
    "changes",
    [
        {
            "runtime.precision": "mixed_float16",
            "step.mixup_alpha": 0.2,
            "train.optimizer": "lamb",
            "train.decay": "cosine",
        },
        pytest.param(
            {
                "runtime.precision": "mixed_bfloat16",
                "step.accumulation_steps": 2,
                "step.label_smoothing": 0.1,
                "train.optimizer": "sgd",
                "train.momentum": 0.9,
                "train.ema_momentum": 0.9,
            },
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {
                "runtime.precision": "mixed_float16",
                "step.loss_scale": 128.0,
                "step.cutmix_alpha": 1.0,
            },
            marks=pytest.mark.slow,
        ),
    ],
)
def test_whatever_the_step_keeps_the_weights_are_those_of_training(root, tmp_path, changes):
    result = train.run(config(root, **changes, **{"train.epochs": 1}), workdir=tmp_path / "a")
    which = "average" if "train.ema_momentum" in changes else "trained"
    export = dataclasses.replace(EXPORT, weights=which)
    path = export_run(tmp_path / "a", tmp_path / "served", export)
    assert_same_weights(path, pathlib.Path(result["export"]))
    assert card.read(path)["computes_in"] == changes["runtime.precision"].removeprefix("mixed_")


# What is there, and what is not.


@pytest.mark.usefixtures("nothing_compared")
def test_nothing_but_the_export_changes_in_the_workdir(workdir):
    before = content(workdir)
    path = export_run(workdir, workdir / "export", EXPORT)
    assert path == workdir / "export" / "2"
    after = content(workdir)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert {pathlib.PurePath(name).parts[0] for name in changed} == {"export"}
    assert all(after[name] == each for name, each in before.items() if name.startswith("export/1"))


@pytest.mark.usefixtures("nothing_compared")
def test_the_loader_is_that_of_all_images_and_not_of_the_few_that_are_compared(
    workdir, root, tmp_path, monkeypatch
):
    seen = []
    choose = from_workdir.choose_loader

    def noted(source, *args, **kwargs):
        seen.append(len(source))
        return choose(source, *args, **kwargs)._replace(loader="dali_cpu")

    monkeypatch.setattr(from_workdir, "choose_loader", noted)
    path = export_run(workdir, tmp_path / "served", EXPORT)
    assert seen[0] > EXPORT.samples
    assert card.read(path)["parity"]["loader"] == "dali_cpu"


@pytest.mark.usefixtures("nothing_compared")
def test_another_loader_may_be_named(workdir, tmp_path):
    path = export_run(workdir, tmp_path / "served", EXPORT, loader="memory")
    assert card.read(path)["parity"]["loader"] == "memory"


@pytest.mark.usefixtures("nothing_compared")
def test_moved_data_are_found_below_another_root(workdir, root, tmp_path):
    change_config(workdir, "data", root=str(tmp_path / "gone"))
    with pytest.raises(UserError, match=r"gone/training"):
        export_run(workdir, tmp_path / "served", EXPORT)
    export_run(workdir, tmp_path / "served", EXPORT, root=str(root))
    assert [each.name for each in (tmp_path / "served").iterdir()] == ["1"]


@pytest.mark.usefixtures("nothing_compared")
def test_test_images_that_are_fewer_than_a_batch_are_enough(workdir, tmp_path):
    change_config(workdir, "data", last_batch="drop", global_batch_size=512)
    path = export_run(workdir, tmp_path / "served", EXPORT)
    assert card.read(path)["parity"]["samples"] == 8


@pytest.mark.usefixtures("export_not_saved")
def test_classes_that_the_test_images_lack_are_the_models_all_the_same(workdir, root, tmp_path):
    moved = shutil.copytree(root, tmp_path / "moved")
    shutil.rmtree(moved / "testing" / "3")  # the last would be made up for by its number
    path = export_run(workdir, tmp_path / "served", EXPORT, root=str(moved))
    assert card.read(path)["class_names"] == [str(each) for each in range(10)]


@pytest.mark.usefixtures("export_not_saved")
def test_numbered_classes_that_the_test_images_lack_are_the_models_all_the_same(workdir, tmp_path):
    random = np.random.default_rng(0)
    for split, num_classes in (("training", 10), ("testing", 9)):
        folder = tmp_path / "data" / split
        folder.mkdir(parents=True)
        np.save(folder / "images.npy", random.integers(0, 256, (30, 8, 8, 1), dtype=np.uint8))
        np.save(folder / "labels.npy", np.arange(30, dtype=np.int32) % num_classes)
    change_config(workdir, "data", source="arrays", loader="memory", root=str(tmp_path / "data"))
    path = export_run(workdir, tmp_path / "served", EXPORT)
    assert card.read(path)["class_names"] == [str(each) for each in range(10)]


def test_a_run_without_a_checkpoint_is_refused(workdir, tmp_path):
    shutil.rmtree(workdir / "checkpoints")
    for which in (None, "newest", "best"):
        with pytest.raises(UserError, match=r"checkpoints has no checkpoint; use the workdir"):
            export_run(workdir, tmp_path / "served", EXPORT, checkpoint=which)


def test_checkpoints_without_a_score_have_no_best(workdir, tmp_path):
    for snapshot in snapshots_of(workdir):
        store_of(workdir).write(snapshot)
    with pytest.raises(UserError, match=r"no checkpoint with a val_loss; use --checkpoint=newest"):
        export_run(workdir, tmp_path / "served", EXPORT, checkpoint="best")


def test_damaged_checkpoints_are_named(workdir, tmp_path):
    for folder in store_of(workdir).steps():
        (folder / "state.json").write_text("{}")
    with pytest.raises(RuntimeError, match=r"none of the checkpoints in .* can be used: step-"):
        export_run(workdir, tmp_path / "served", EXPORT)


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"holds no run .*; give the workdir of a `tfaccel train`"):
        export_run(tmp_path, tmp_path / "served", EXPORT)
    assert not (tmp_path / "served").exists()


@pytest.mark.parametrize(
    ("section", "change", "says"),
    [
        (
            "train",
            {"optimizer": "sgd"},
            r"the checkpoint has \d+ variables, but this model and its",
        ),
        (
            "data",
            {"image_size": [12, 12]},
            "of the checkpoint is float32 .* build the same model and",
        ),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(workdir, tmp_path, section, change, says):
    change_config(workdir, section, **change)
    with pytest.raises(UserError, match=says):
        export_run(workdir, tmp_path / "served", EXPORT)
    assert not (tmp_path / "served").exists()


def test_averages_that_a_run_does_not_keep_are_refused(workdir, tmp_path):
    change_config(workdir, "train", ema_momentum=None)
    for snapshot in snapshots_of(workdir):  # as of a run that never kept any
        kept = {name: each for name, each in snapshot.arrays.items() if "average" not in name}
        store_of(workdir).write(dataclasses.replace(snapshot, arrays=kept), score=0.5)
    average = dataclasses.replace(EXPORT, weights="average")
    with pytest.raises(UserError, match=r"keeps no average of the weights; set ema_momentum"):
        export_run(workdir, tmp_path / "served", average)


def test_one_of_several_workers_is_refused(workdir, tmp_path, monkeypatch):
    hosts = {"worker": ["127.0.0.1:2001", "127.0.0.1:2002"]}
    job = {"cluster": hosts, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(job))
    with pytest.raises(UserError, match="export needs one process"):
        export_run(workdir, tmp_path / "served", EXPORT)


# The command.


@pytest.fixture
def asked(monkeypatch):
    """What the command asks `export_run` for, which it is kept from."""
    calls = []

    def take(workdir, out, export, **which):
        calls.append((workdir, out, export, which))
        return out / "1"

    monkeypatch.setattr(from_workdir, "export_run", take)
    return calls


def test_the_command_exports_the_average_where_there_is_one(workdir, asked, capsys):
    assert main.main(["export", f"--workdir={workdir}"]) == 0
    export = ExportConfig(weights="average")
    nothing_else = {"checkpoint": None, "root": None, "loader": None}
    assert asked == [(workdir, workdir / "export", export, nothing_else)]
    assert capsys.readouterr().out == f"{workdir}/export/1\n"


def test_the_command_exports_the_trained_weights_where_there_is_no_average(workdir, asked):
    change_config(workdir, "train", ema_momentum=None)
    main.main(["export", f"--workdir={workdir}"])
    assert asked[0][2] == ExportConfig()


def test_every_flag_of_the_command_is_passed_on(workdir, root, asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ["--workdir=run", "--out=served/a", "--checkpoint=best", "--weights=trained"]
    flags += ["--samples=9", "--computes-in=float32", "--pixel-dtype=uint8", "--xla", "--onnx"]
    main.main(["export", *flags, f"--root={root}", "--loader=tf_data"])
    ((workdir, out, export, which),) = asked
    assert (workdir, out) == (tmp_path / "run", pathlib.Path("served/a"))
    assert export == ExportConfig(9, "uint8", "float32", "trained", xla=True, onnx=True)
    assert which == {"checkpoint": "best", "root": str(root), "loader": "tf_data"}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "no workdir; give a run's, e.g. `tfaccel export --workdir=runs/a`"),
        (["--workdir=nowhere"], "nowhere holds no run"),
        (["--workdir=run", "--sample=3"], "there is no flag --sample of `tfaccel export`"),
        (["--workdir=run", "--samples=0"], "samples=0; expected"),
        (["--workdir=run", "--samples=some"], "samples"),
        (["--workdir=run", "--checkpoint=last"], "checkpoint"),
        (["--workdir=run", "more"], "export takes one workdir, but the command line has 'more'"),
    ],
)
def test_mistakes_in_the_call_are_one_sentence(workdir, asked, tmp_path, monkeypatch, flags, says):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as raised:
        main.main(["export", *flags])
    assert says in str(raised.value)
    assert "\n" not in str(raised.value).strip()
    assert asked == []


def test_the_help_is_within_the_terminal(capsys):
    assert main.main(["export", "--help"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


def test_a_run_that_exports_nothing_may_export_later(root, tmp_path, export_not_saved):
    without = config(root, **{"train.export": False, "train.epochs": 1})
    result = train.run(without, workdir=tmp_path / "a")
    assert "export" not in result
    assert not (tmp_path / "a" / "export").exists()
    assert train.run(without, workdir=tmp_path / "a") == result  # it has ended
    later = train.run(config(root, **{"train.epochs": 1}), workdir=tmp_path / "a")
    assert later["export"] == str(tmp_path / "a" / "export" / "1")
    assert later["steps"] == result["steps"]
