import html.parser
import json
import math
import subprocess
import sys

import numpy as np
import PIL.Image
import pytest

from tfaccel import UserError
from tfaccel.logs.csv import Csv
from tfaccel.logs.json_lines import JsonLines
from tfaccel.plot import _charts, _draw, plot, read


def make_run(folder, num_epochs, *, kind=JsonLines, name="metrics.jsonl", **settings):
    """A workdir with the records of a run; in the file also some within epochs."""
    folder.mkdir(parents=True)
    writer = kind(folder / name)
    for epoch in range(1, num_epochs + 1):
        place = {"step": 10 * epoch, "epoch": epoch, "seconds": 2.0 * epoch, "images": 80 * epoch}
        values = {"accuracy": 1 - 1 / epoch, "loss": 1 / epoch, "images_per_second": 40.0 + epoch}
        tested = {"val_accuracy": 1 - 2 / epoch, "val_loss": 2 / epoch}
        writer.steps(place | {"step": 10 * epoch - 5, "loss": 100.0})
        writer.epoch(place | values | tested | {"learning_rate": 0.1} | settings)
    writer.close()
    return folder


class Page(html.parser.HTMLParser):
    """What a page says, and what it asks the network for."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.cells, self.links = [], [], []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        # Within the page (#...) is no network; names of XML are not fetched.
        self.links += [
            value
            for name, value in attributes
            if name in ("src", "href", "xlink:href") and not value.startswith("#")
        ]

    def handle_data(self, data):
        if self.tags and self.tags[-1] in ("td", "th") and data.strip():
            self.cells.append(data)


def test_a_png_of_two_runs(tmp_path):
    runs = [make_run(tmp_path / "a", 5), make_run(tmp_path / "b", 3)]
    plot(runs, tmp_path / "curves.png")
    with PIL.Image.open(tmp_path / "curves.png") as image:
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3)
        assert image.width > 1000
    for color in ([0x1F, 0x77, 0xB4], [0xFF, 0x7F, 0x0E]):  # one for each run
        assert (pixels == color).all(axis=1).sum() > 100


def test_the_lines_are_the_numbers(tmp_path):
    run = make_run(tmp_path / "a", 3)
    figure = _draw({"a": read(run)})
    charts = {each.get_title(loc="left"): each for each in figure.axes}
    assert list(charts) == ["loss", "accuracy", "images per second"]
    train, test = (each.get_xydata().tolist() for each in charts["loss"].lines)
    assert train == [[1, 1], [2, 1 / 2], [3, 1 / 3]]
    assert test == [[1, 2], [2, 1], [3, 2 / 3]]
    (speed,) = charts["images per second"].lines
    assert speed.get_ydata().tolist() == [41, 42, 43]


def test_runs_of_other_metrics_share_a_picture(tmp_path):
    a = make_run(tmp_path / "a", 2)
    b = make_run(tmp_path / "b", 2, psnr=30.0, val_psnr=29.0, loss=math.nan)
    names = _charts({"a": read(a), "b": read(b)})
    assert names == ["loss", "accuracy", "psnr", "images_per_second"]
    plot([a, b], tmp_path / "curves.png")


def test_a_page_needs_nothing_else_and_has_the_last_numbers(tmp_path):
    runs = [make_run(tmp_path / "a<b>&c", 4), make_run(tmp_path / "b", 1)]
    plot(runs, tmp_path / "curves.html")
    page = Page(tmp_path / "curves.html")
    assert "svg" in page.tags
    assert not {"script", "img", "link", "b"} & set(page.tags)
    assert page.links == []
    names = ["loss", "accuracy", "val_loss", "val_accuracy", "images_per_second"]
    assert page.cells[:7] == ["run", "epoch", *names]
    assert "".join(page.cells[7:]).startswith(f"{runs[0]}40.250.750.50.544")


def test_any_name_stands_in_the_legend(tmp_path):
    epochs = read(make_run(tmp_path / "a", 2))
    names = ["_a", "$b$ $", "c" * 100]
    legend, styles = _draw(dict.fromkeys(names, epochs)).legends
    shown = [each.get_text() for each in legend.get_texts()]
    assert shown == ["_a", "$b$ $", "..." + "c" * 45]
    assert [each.get_text() for each in styles.get_texts()] == ["test", "training"]
    plot([tmp_path / "a"], tmp_path / "curves.png")


def test_a_run_that_has_no_lines_is_read_from_its_table(tmp_path):
    run = make_run(tmp_path / "a", 2, kind=Csv, name="metrics.csv")
    assert [each["val_loss"] for each in read(run)] == [2.0, 1.0]


def test_damaged_lines_are_named_and_left_out(tmp_path, caplog):
    run = make_run(tmp_path / "a", 3)
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:3], '{"record": "epoch", "st', *lines[4:], '{"rec']))
    assert [each["epoch"] for each in read(run)] == [1, 3]
    assert f"{file}: line 4 is damaged" in caplog.text


def test_mistakes_are_sentences(tmp_path):
    run = make_run(tmp_path / "a", 2)
    (tmp_path / "there.png").touch()
    (tmp_path / "empty").mkdir()
    make_run(tmp_path / "begun", 0)
    (tmp_path / "begun" / "metrics.jsonl").write_text(
        json.dumps({"record": "steps", "step": 1, "epoch": 1}) + "\n"
    )
    new = tmp_path / "new.png"
    for workdirs, output, said in (
        ([tmp_path / "none"], new, "there is no workdir"),
        ([run / "metrics.jsonl"], new, "there is no workdir"),
        ([tmp_path / "empty"], new, "has no metrics"),
        ([run, tmp_path / "begun"], new, "has no metrics"),
        ([run], tmp_path / "there.png", "exists; give a new file"),
        ([run], tmp_path / "new.jpg", "ends in '.jpg'; expected .png or .html"),
        ([run], tmp_path / "none" / "new.png", "cannot be written"),
    ):
        with pytest.raises(UserError, match=said):
            plot(workdirs, output)
    assert not new.exists()


def test_it_needs_neither_tensorflow_nor_a_screen(tmp_path):
    run = make_run(tmp_path / "a", 2)
    program = f"""
import pathlib, sys
from tfaccel.plot import plot
plot([pathlib.Path({str(run)!r})], pathlib.Path({str(tmp_path / "curves.html")!r}))
print("tensorflow" in sys.modules, "matplotlib.pyplot" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("False False\n", 0), done.stderr
