"""What is wrong with a call is one sentence, exit code 2, before TensorFlow is imported."""

import dataclasses
import json
import os
import subprocess
import sys

import PIL.Image
import pytest

from tfaccel import UserError
from tfaccel.cli import flags as cli_flags
from tfaccel.cli.asked_experiment import METRICS, check_experiment
from tfaccel.config import default_config, parse
from tfaccel.config.names import NO_OPTIMIZERS, OWN_MODELS, RESNETS_V1_5, exported
from tfaccel.config.segmentation import network_names
from tfaccel.experiment import models
from tfaccel.experiment.metrics import metrics_of_numbers, metrics_of_several
from tfaccel.experiment.models import applications
from tfaccel.experiment.recipe import optimizer
from tfaccel.training.workdir import workdir_of, workdirs_in

DIGITS = "--config=configs/digits.py"
PROGRAM = """
import contextlib, io, json, os, sys
import tfaccel.cli.main
calls, folder = json.loads(sys.argv[1]), sys.argv[2]
for call in calls:
    sys.argv, said, code = ["tfaccel", *call], io.StringIO(), None
    try:
        with contextlib.redirect_stderr(said):
            tfaccel.cli.main.cli()
    except SystemExit as error:
        code = error.code
    started = "tensorflow" in sys.modules or "keras" in sys.modules
    print(json.dumps([code, said.getvalue(), started]))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a text file, an empty folder, a run without a checkpoint, and photographs."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "empty").mkdir()
    (folder / "text.txt").write_text("hello")
    PIL.Image.new("L", (4, 4)).save(folder / "image.png")
    (folder / "nothing.py").write_text("x = 1\n")
    for split in ("train", "test"):
        (folder / "photographs" / split / "a").mkdir(parents=True)
    (folder / "run").mkdir()
    config = dataclasses.asdict(parse(cli_flags.load("configs/digits.py")))
    (folder / "run" / "config.json").write_text(json.dumps(config))
    return folder


# Arguments, with {} for the folder, and words of what is said.
OF_EXPERIMENTS = (
    ([], "no config"),
    (["--config={}/none.py"], "does not exist"),
    (["--config={}/empty"], "is a folder; give a Python file, or the workdir of a run"),
    (["--config={}/text.txt"], "expected a Python file that has get_config()"),
    (["--config={}/image.png"], "expected a Python file that has get_config()"),
    (["--config={}/nothing.py"], "no get_config()"),
    ([DIGITS, "{}/text.txt"], "is not a flag"),
    ([DIGITS, "--config.data.root={}/none"], "none/training does not exist"),
    ([DIGITS, "--config.data.root={}/empty"], "holds no folders"),
    ([DIGITS, "--config.data.root={}/text.txt"], "cannot be listed"),
    ([DIGITS, "--config.data.root={}/run"], "holds no folders"),
    ([DIGITS, "--config.data.root={}/photographs"], "did you mean 'train'?"),
    ([DIGITS, "--config.model.name=resnet5"], "did you mean 'resnet50'?"),
    ([DIGITS, "--config.model.name=vit_tiny"], "vit.patch_size=16 does not divide image_size=8,8"),
    ([DIGITS, "--config.vit.patch_size=2"], "which has no such setting; remove it, or set model."),
    ([DIGITS, "--config.train.optimizer=adamww"], "did you mean 'adamw'?"),
    ([DIGITS, "--config.train.monitor=val_acuracy"], "did you mean 'val_accuracy'?"),
    ([DIGITS, "--config.model.weights={}/empty"], "is a folder, and it has no export with a model"),
    ([DIGITS, "--config.model.weights="], "weights=''; expected a file's path"),
    ([DIGITS, "--config.model.weights={}/none.h5"], "is no file that ends in"),
    ([DIGITS, "--config.train.lr=3"], "did you mean 'train.learning_rate'?"),
)
OF_COMMANDS = (
    (["train", DIGITS, "--workdir={}/text.txt"], "is a file"),
    (["train", DIGITS, "--workdir={}/run", "--config.train.epochs=3"], "holds another run"),
    (["train", DIGITS, "--dry-run", "--workdir={}/x", "--config.model.name=x"], "no model 'x'"),
    (["launch", "train", "--config={}/none.py", "--workdir={}/x"], "does not exist"),
    (["launch", "train", DIGITS, "--workdir={}/x", "--config.model.name=x"], "no model 'x'"),
    (
        ["launch", "--log-dir={}/x", "train", DIGITS, "--dry-run", "--config.model.name=x"],
        "no model 'x'",
    ),
    (
        ["launch", "--log-dir={}/x", "train", DIGITS, "--dry-run", "--workdir={}/text.txt"],
        "is a file",
    ),
    (["launch", "{}/empty"], "cannot launch"),
    (["audit", DIGITS, "--report={}/empty"], "exists; give a new file"),
    (["audit", DIGITS, "--report={}/none/x"], "cannot be written"),
    (["lint", DIGITS, "--script={}/none.py"], "No such file"),
    (["lint", DIGITS, "--script={}/empty"], "Is a directory"),
    (["lint", DIGITS, "--script={}/image.png"], "not text in UTF-8"),
    (["lint", DIGITS, "--script="], "--script= is empty"),
    (["profile", DIGITS, "--seconds=0"], "above 0"),
    (["profile", DIGITS, "--trace={}/text.txt"], "is a file"),
    (["profile", DIGITS, "--search", "--out={}/empty"], "exists"),
    (["profile", "--config={}/run", "--search", "--out={}/x.py"], "use --config=FILE.py"),
    (["compare", DIGITS, "--out={}/run"], "is not empty"),
    (["compare", DIGITS, "--repeats=1"], "repeats=1"),
    (["export"], "no workdir"),
    (["export", "{}/none"], "holds no run"),
    (["export", "{}/empty"], "holds no run"),
    (["export", "--workdir={}/text.txt"], "holds no run"),
    (["export", "{}/run", "{}/empty"], "export takes one workdir"),
    (["export", "{}/run"], "has no checkpoint"),
    (["export", "{}/run/config.json", "--out={}/text.txt"], "is a file"),
    (["export", "{}/run", "--weights=average"], "kept no average"),
    (["evaluate"], "no workdir"),
    (["evaluate", "{}/empty"], "holds no run"),
    (["evaluate", "{}/run", "{}/empty"], "evaluate takes one workdir"),
    (["evaluate", "{}/run"], "has no checkpoint"),
    (["evaluate", "{}/run", "--checkpoint=last"], "expected 'best', 'newest' or the number"),
    (["evaluate", "{}/run", "--export={}/empty"], "has no SavedModel"),
    (["evaluate", "{}/run", "--export={}/run", "--weights=trained"], "remove --weights"),
    (["plot", "{}/none"], "there is no workdir"),
    (["plot", "{}/empty"], "has no metrics"),
    (["selftest", "--output={}/empty"], "exists"),
    (["selftest", "--precision=float64"], "precision='float64'"),
    (["doctor", "--data={}/text.txt"], "is not a folder"),
    (["doctor", "{}/empty"], "did you mean --data="),
    (["predict", "--model={}/run", "{}/image.png"], "has no export yet"),
)
COMMANDS = ("train", "audit", "lint", "profile", "compare", "autobatch")


def test_mistakes_are_told_before_tensorflow_starts(place):
    cases = [([each, *words], said) for each in COMMANDS for words, said in OF_EXPERIMENTS]
    cases += OF_COMMANDS
    calls = [[word.replace("{}", str(place)) for word in words] for words, _ in cases]
    before = sorted(place.rglob("*"))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(calls), str(place)],
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},  # as Python would beside a config
        capture_output=True,
        text=True,
    )
    outcomes = [json.loads(each) for each in done.stdout.splitlines()]
    assert len(outcomes) == len(calls), done.stderr
    for call, (_, expected), (code, said, started) in zip(calls, cases, outcomes, strict=True):
        assert not started, (call, said)
        assert code == 2, (call, said)
        assert expected in said, (call, said)
        assert len(said.splitlines()) == 1, (call, said)
    assert sorted(place.rglob("*")) == before  # and nothing is written


def test_the_names_are_those_that_keras_has():
    assert {each.lower() for each in exported("applications")} == set(applications.architectures())
    assert set(OWN_MODELS) == set(models.OWN)
    backbones = {*applications.architectures(), *RESNETS_V1_5}
    assert set(network_names(backbones)) == set(models._segmentation())
    names = {each.lower() for each in exported("optimizers") if each not in NO_OPTIMIZERS}
    assert names == set(optimizer._known())


@pytest.mark.parametrize(
    ("data", "monitor"),
    [
        ({"source": "csv", "train": "train.csv"}, "val_loss"),
        ({"source": "csv", "train": "train.csv"}, "val_r2_score"),  # the labels will decide
        ({"source": "csv", "train": "train.csv", "task": "multilabel"}, "val_f1_score"),
        ({"source": "tfrecord", "train": "train-*", "task": "regression"}, "mean_absolute_error"),
        ({"source": "tfrecord", "train": "train-*"}, "top5"),
        ({"source": "webdataset", "train": "train-*.tar"}, "val_top5"),
        ({"source": "arrays", "train": "train"}, "val_psnr"),
        ({"source": "pairs", "train_targets": "y", "test_targets": "y"}, "psnr"),
    ],
)
def test_every_source_is_looked_for(tmp_path, data, monitor):
    config = default_config()
    config.data.update(
        {"root": str(tmp_path), "image_size": (8, 8), "channels": 1, "global_batch_size": 8}
    )
    config.model.name, config.train.monitor = "mnist_cnn", monitor
    with config.ignore_type():
        config.data.update(data)
    with pytest.raises(UserError, match=r"does not exist|no shard matches"):
        check_experiment(parse(config))
    config.train.monitor = "val_mae"
    with pytest.raises(UserError, match=r"train.monitor='val_mae' is not a metric of"):
        check_experiment(parse(config))


def test_a_workdir_stands_for_the_config_that_it_was_trained_by(place):
    for given in (place / "run", place / "run" / "config.json"):
        again = cli_flags.load(str(given))
        assert parse(again) == parse(cli_flags.load("configs/digits.py"))
        values, _ = cli_flags.parse_config_flags(
            "lint",
            [
                f"--config={given}",
                "--config.data.image_size=16,16",
                "--config.model.num_outputs=12",
            ],
        )
        assert parse(values.config).data.image_size == (16, 16)
        assert parse(values.config).model.num_outputs == 12


def test_what_is_in_a_workdir_stands_for_it(place, tmp_path):
    run = place / "run"
    (run / "export" / "1").mkdir(parents=True, exist_ok=True)
    for inner in ("", "config.json", "export", "export/1"):
        assert workdir_of(run / inner) == run
    assert workdir_of(tmp_path) == tmp_path
    assert workdirs_in(run / "config.json") == [run]
    assert workdirs_in(place) == [run]  # a folder of runs
    assert workdirs_in(place / "empty") == [place / "empty"]


def test_the_metrics_of_each_task_are_those_of_its_epochs():
    for task, names in (
        ("multilabel", metrics_of_several(3)),
        ("regression", metrics_of_numbers()),
    ):
        assert METRICS[task] == ("loss", *(each.name for each in names))
