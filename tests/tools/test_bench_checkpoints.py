"""What checkpoints cost, of a small model on the CPU: whether a slow one is seen."""

import json
import time

import pytest
from loaded_tool import loaded

import tfaccel
from tfaccel.training.callbacks import checkpoints

SMALL = ("--model=mnist_cnn", "--image-size=8", "--batch=4", "--precision=float32")


@pytest.fixture(scope="module")
def tool():
    with loaded("bench_checkpoints") as module:
        yield module


def test_the_time_that_a_checkpoint_takes_is_counted(tool, setup, tmp_path, capsys, monkeypatch):
    setup = tfaccel.setup
    quick = {"gpu_ids": (), "xla": False}
    monkeypatch.setattr(tfaccel, "setup", lambda **given: setup(**given, **quick), raising=False)
    monkeypatch.setattr("tfaccel.run.warn_at_start", lambda *_: None)  # of an export
    snapshot, places = checkpoints.Checkpoints._snapshot, []

    def slow(self, epoch, step, *rest):
        places.append((epoch, step))
        time.sleep(0.1)
        return snapshot(self, epoch, step, *rest)

    monkeypatch.setattr(checkpoints.Checkpoints, "_snapshot", slow)
    output = tmp_path / "found.json"
    flags = [*SMALL, "--steps=14", "--every=5", "--rounds=1", f"--output={output}"]
    assert tool.main(flags) == 0
    assert places == [(0, 5), (1, 3), (2, 0)]  # two of them within an epoch
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found == json.loads(output.read_text())
    with_, without = (found["images_per_second"][name][0] for name in ("with", "without"))
    assert 14 * 4 / with_ > 3 * 0.1
    assert found["with / without"] == with_ / without


@pytest.mark.parametrize("number", [2, 3])
def test_both_are_as_often_first(tool, tmp_path, number):
    options, order = tool.parse([f"--rounds={number}", f"--dir={tmp_path}"]), []

    def stretch(callbacks):
        order.append("with" if callbacks else "without")
        return 1.0

    rates = tool.measure(stretch, lambda folder: folder, options)
    assert order[1:] == ["without", "with", "with", "without", "without", "with"][: 2 * number]
    assert rates == {"without": [1.0] * number, "with": [1.0] * number}


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("--foo", "unrecognized arguments: --foo"),
        ("--every=0", "--every: '0'; expected a whole number of at least 1"),
        ("--output=/no/where/x.json", "x.json has no folder; give a new file"),
        (f"--output={__file__}", "exists; give a new file"),
    ],
)
def test_a_mistake_in_the_call_is_said_before_anything_is_measured(tool, capsys, flag, sentence):
    with pytest.raises(SystemExit, match="2"):
        tool.main([flag])
    assert sentence in capsys.readouterr().err
