"""The command finds the run, passes on what was asked, and prints tables or JSON."""

import dataclasses
import json
import types

import pytest

from tfaccel import UserError
from tfaccel.cli import evaluate_command, main
from tfaccel.config import default_config
from tfaccel.config.config import parse
from tfaccel.experiment.evaluate import run as run_lib
from tfaccel.training.workdir import write_config


@pytest.fixture
def workdir(tmp_path):
    """A run of the embedded digits that has saved something."""
    config = default_config()
    config.data.image_size = (8, 8)
    config.data.channels = 1
    write_config(tmp_path, dataclasses.asdict(parse(config)))
    (tmp_path / "checkpoints" / "step-00000012").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """What the command asks for, in place of an evaluation."""
    seen = []

    class Report:
        def as_json(self):
            return json.dumps({"overall": {"accuracy": 0.5}})

        def __str__(self):
            return "evaluate: 50.00% of 2 images right"

    def evaluate(workdir, asked, *, out=None):
        seen.append(types.SimpleNamespace(workdir=workdir, asked=asked, out=out))
        return Report(), tmp_path / "evaluation" / "1"

    monkeypatch.setattr(run_lib, "evaluate", evaluate)
    monkeypatch.setattr(evaluate_command, "start_tensorflow", lambda: None)
    return seen


def test_flags_become_what_is_asked(workdir, asked, capsys):
    flags = ["--split=train", "--checkpoint=step-12", "--gpu-ids=", "--global-batch-size=6"]
    assert main.main(["evaluate", str(workdir), *flags, "--bad-files=skip"]) == 0
    (seen,) = asked
    assert seen.workdir == workdir
    assert seen.out is None
    assert (seen.asked.split, seen.asked.checkpoint) == ("train", "12")
    assert seen.asked.gpu_ids == ()
    assert (seen.asked.global_batch_size, seen.asked.bad_files) == (6, "skip")
    printed = capsys.readouterr().out
    assert printed.startswith("evaluate: 50.00%")
    assert printed.splitlines()[-1] == str(workdir / "evaluation" / "1" / "report.html")


def test_a_path_below_the_workdir_stands_for_it_and_json_is_all_that_is_printed(
    workdir, asked, capsys
):
    assert main.main(["evaluate", f"--workdir={workdir}/checkpoints", "--json"]) == 0
    assert asked[0].workdir == workdir
    assert asked[0].asked.checkpoint == "best"
    assert json.loads(capsys.readouterr().out) == {"overall": {"accuracy": 0.5}}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--data=/tmp", "--split=train"], "two sets of images"),
        (["--data=/tmp", "--targets=/tmp"], "the run's images have labels"),
        (["--targets=/tmp"], "without --data"),
        (["--data={}/none"], "does not exist"),
        (["--root={}/none"], "does not exist"),
        (["--weights=average"], "kept no average"),
        (["--split=validation"], "split"),
        (["--global-batch-size=0"], "global-batch-size"),
        (["--gpu-ids=a"], "gpu_ids"),
    ],
)
def test_mistakes_have_one_sentence(workdir, asked, flags, said):
    flags = [each.replace("{}", str(workdir)) for each in flags]
    with pytest.raises(UserError, match=said):
        main.main(["evaluate", str(workdir), *flags])
    assert not asked
