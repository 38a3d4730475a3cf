"""report.html: the page of a run of `tfaccel train`, as parsed and as a browser shows it."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import types

import keras
import pytest
from html_pages import Page, seen_in_browser
from small_network import as_mnist_cnn

from tfaccel.cli.flags import load
from tfaccel.common.tables import in_figures
from tfaccel.config import parse
from tfaccel.experiment import fit, run_page, train
from tfaccel.training.page import page
from tfaccel.training.page.page import FIGURES
from tfaccel.training.workdir import finished

DIGITS = f"{pathlib.Path(__file__).parents[2]}/configs/digits.py:smoke"

pytestmark = pytest.mark.draws_page


class Stopping(keras.callbacks.Callback):
    """Asks the run to stop after its first epoch."""

    def on_epoch_end(self, epoch, logs=None):
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def config():
    config = load(DIGITS)
    config.train.epochs = 2
    with as_mnist_cnn():
        yield config


def epochs_of(workdir):
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [each for each in map(json.loads, lines) if each["record"] == "epoch"]


def table_of(cells, epochs):
    """The rows of the page's table of epochs, without its figures of speed."""
    first = cells.index("epoch")
    width = cells.index("images per second") - first
    last = cells[first : first + width + 4]
    columns = width + sum(each in last for each in ("images per second", "input wait"))
    rows = cells[first + columns :]
    return [rows[index * columns :][:width] for index in range(epochs)]


def expected_rows(epochs):
    """The same from the log, to as many digits."""
    names = ("epoch", "step", "loss", "accuracy", "top5", "val_loss", "val_accuracy", "val_top5")
    names += ("learning_rate",)
    return [[in_figures(each[name], FIGURES) for name in names] for each in epochs]


def test_a_resumed_runs_page_has_its_whole_history(config, tmp_path, monkeypatch, export_not_saved):
    workdir = tmp_path / "a<b>"
    whole = train.fit
    stopping = lambda *args, **kwargs: whole(  # noqa: E731
        *args, **kwargs | {"watches": [Stopping()]}
    )
    with monkeypatch.context() as patch:
        patch.setattr(train, "fit", stopping)
        with pytest.raises(SystemExit):
            train.run(parse(config), workdir=workdir)
    assert not (workdir / page.FILE).exists()
    train.run(parse(config), workdir=workdir)
    assert finished(workdir, dataclasses.asdict(parse(config)))

    parsed, epochs = Page(workdir / page.FILE), epochs_of(workdir)
    assert len(epochs) == 2
    assert parsed.links == []
    assert not {"script", "link", "iframe", "b"} & set(parsed.tags)
    assert parsed.headings == [
        "Curves",
        "The first images of training",
        "Confusion matrix of the test images",
        "Every epoch",
        "Settings",
        "Hardware and versions",
    ]
    assert (parsed.tags.count("svg"), parsed.tags.count("img")) == (2, 1)
    assert table_of(parsed.cells, 2) == expected_rows(epochs)
    assert "model.name" in parsed.cells
    assert any(each.endswith(" MiB at most") for each in parsed.cells)

    seen = seen_in_browser(workdir / page.FILE, tmp_path)  # or the test is skipped from here
    assert seen["shown"] == [True]
    assert all(seen["drawn"])
    assert (seen["fetched"], seen["console"]) == ([], [])
    assert seen["width"][0] <= seen["width"][1]  # wide tables scroll by themselves
    rows = [each[:9] for each in seen["cells"] if len(each) > 9]
    assert rows == expected_rows(epochs)


def test_a_page_that_cannot_be_made_is_a_warning(
    config, tmp_path, monkeypatch, export_not_saved, caplog
):
    def no_font(*_, **__):
        raise ValueError("no font")

    config.train.epochs = 1
    monkeypatch.setattr(page, "draw", no_font)
    monkeypatch.setattr(run_page, "scored", no_font)
    result = train.run(parse(config), workdir=tmp_path / "a")
    assert "val_loss" in result["metrics"]
    assert "export" in result
    assert "report: report.html cannot be written (ValueError: no font)" in caplog.text
    assert "the confusions cannot be counted (ValueError: no font)" in caplog.text


def outcome(**changes):
    known = {"metrics": {}, "images_per_second": 100.0, "steps": 9, "seconds": 60.0}
    return fit.Outcome(**known | {"first_execution_seconds": 1.0} | changes)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (outcome(first_execution_seconds=20.0), "about 9 s, more than 2 s"),
        (outcome(images_per_second=1.0), "about 360 s, more than 2 s"),
    ],
)
def test_a_matrix_that_would_cost_much_is_left_to_evaluate(tmp_path, found, said):
    run = types.SimpleNamespace(cluster=types.SimpleNamespace(num_workers=1))
    source = types.SimpleNamespace(task="classes")
    test = types.SimpleNamespace(num_examples=360, data=types.SimpleNamespace(source=source))
    missing = run_page._confusions(run, None, test, found, tmp_path / "a b")
    assert said in missing.as_html()
    assert f"tfaccel evaluate --workdir=&#x27;{tmp_path}/a b&#x27;" in missing.as_html()


def test_matplotlib_is_loaded_when_a_page_is_drawn():
    program = "import sys, tfaccel.training.page.page; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
