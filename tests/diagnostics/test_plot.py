import json
import math
import subprocess
import sys

import numpy as np
import PIL.Image
import pytest
from html_pages import Page

from tfaccel import UserError
from tfaccel.diagnostics.plot import plot
from tfaccel.training.logs.csv import Csv
from tfaccel.training.logs.json_lines import JsonLines
from tfaccel.training.page import curves
from tfaccel.training.page.curves import COLORS, draw, read
from tfaccel.training.page.words import column_head, metric_words, run_words


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


def with_config(folder, **changes):
    """The workdir, with a config.json that has some settings."""
    config = {
        "model": {"name": "mnist_cnn"},
        "train": {"optimizer": "adamw", "learning_rate": 0.1, "ema_momentum": None},
        "data": {"root": None, "image_size": [8, 8]},
        "runtime": {"xla": True},
    }
    for name, value in changes.items():
        section, _, field = name.partition("__")
        config[section][field] = value
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def drawn(runs):
    """The figure of runs, whose workdirs are given by their names."""
    return draw({name: read(each) for name, each in runs.items()}, run_words(runs))


def charts_of(runs):
    return {each.get_title(loc="left"): each for each in drawn(runs).subfigs[1].axes}


def test_a_png_of_two_runs(tmp_path):
    runs = [make_run(tmp_path / "a", 5), make_run(tmp_path / "b", 3)]
    plot(runs, tmp_path / "curves.png")
    with PIL.Image.open(tmp_path / "curves.png") as image:
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3)
        assert image.width > 1000
    for color in ([0x00, 0x72, 0xB2], [0xD5, 0x5E, 0x00]):  # one for each run
        assert (pixels == color).all(axis=1).sum() > 100


def test_the_lines_are_the_numbers(tmp_path):
    run = make_run(tmp_path / "a", 3)
    charts = charts_of({"a": run})
    assert list(charts) == [
        "Loss (lower is better)",
        "Accuracy (higher is better)",
        "Training speed (higher is better)",
    ]
    units = [each.get_ylabel() for each in charts.values()]
    assert units == ["loss", "share of the images, 0 to 1", "images per second"]
    assert {each.get_xlabel() for each in charts.values()} == {"epoch"}
    loss, _, speed = charts.values()
    train, test = (each.get_xydata().tolist() for each in loss.lines)
    assert train == [[1, 1], [2, 1 / 2], [3, 1 / 3]]
    assert test == [[1, 2], [2, 1], [3, 2 / 3]]
    line, _ = speed.lines
    assert line.get_ydata().tolist() == [41, 42, 43]


def test_the_memory_of_gpus_has_a_chart(tmp_path):
    gpus = {"gpu0_memory_mib": 900, "gpu1_memory_mib": 1000, "gpu0_utilisation": 0.5}
    run = make_run(tmp_path / "a", 2, **gpus)
    assert [each["gpu_memory_mib"] for each in read(run)] == [1000, 1000]
    memory = charts_of({"a": run})["GPU memory (lower is better)"]
    assert memory.get_ylim()[0] == 0
    assert memory.lines[0].get_ydata().tolist() == [1000, 1000]


def test_runs_of_other_metrics_share_a_picture(tmp_path):
    a = make_run(tmp_path / "a", 2)
    b = make_run(tmp_path / "b", 2, psnr=30.0, val_psnr=29.0, loss=math.nan)
    names = curves.charts_of({"a": read(a), "b": read(b)})
    assert names == ["loss", "accuracy", "psnr", "images_per_second"]
    plot([a, b], tmp_path / "curves.png")


def test_a_page_needs_nothing_else_and_has_the_last_numbers(tmp_path):
    runs = [make_run(tmp_path / "a<b>&c", 4), make_run(tmp_path / "b", 1)]
    plot(runs, tmp_path / "curves.html")
    page = Page(tmp_path / "curves.html")
    assert "svg" in page.tags
    assert not {"script", "img", "link", "b"} & set(page.tags)
    assert page.links == []
    names = [
        "Loss, in training",
        "Accuracy, in training",
        "Loss, test images",
        "Accuracy, test images",
        "images per second",
    ]
    assert page.cells[:7] == ["run", "epoch", *names]
    assert "".join(page.cells[7:]).startswith(f"{runs[0]}40.250.750.50.544")
    assert "<h1>2 runs</h1>" in (tmp_path / "curves.html").read_text()


def test_any_name_stands_in_the_legend(tmp_path):
    run = make_run(tmp_path / "a", 2)
    names = ["_a", "$b$ $", "c" * 100]
    figure = drawn(dict.fromkeys(names, run))
    legend, styles = figure.subfigs[0].legends
    shown = [each.get_text() for each in legend.get_texts()]
    assert shown == ["_a", "$b$ $", "c" * 22 + "..." + "c" * 22]
    assert [each.get_text() for each in styles.get_texts()] == ["test images", "in training"]
    figure.savefig(tmp_path / "curves.png")


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
from tfaccel.diagnostics.plot import plot
plot([pathlib.Path({str(run)!r})], pathlib.Path({str(tmp_path / "curves.html")!r}))
print("tensorflow" in sys.modules, "matplotlib.pyplot" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("False False\n", 0), done.stderr


# What is said of the runs.


def test_the_heading_and_the_legend_say_what_differs(tmp_path):
    a = with_config(make_run(tmp_path / "a", 2))
    b = with_config(make_run(tmp_path / "b", 2), train__learning_rate=0.01, runtime__xla=False)
    words = run_words({"runs/a": a, "runs/b": b})
    assert words.heading == "2 runs that differ in train.learning_rate and runtime.xla"
    assert words.labels == (
        "runs/a: train.learning_rate=0.1, runtime.xla=on",
        "runs/b: train.learning_rate=0.01, runtime.xla=off",
    )
    # Beside it, what a reader asks first, of what all have.
    assert words.alike == (
        "model.name=mnist_cnn, data.root=the embedded digits, train.optimizer=adamw"
    )
    top, _ = drawn({"runs/a": a, "runs/b": b}).subfigs
    assert [each.get_text() for each in top.texts] == [words.heading, words.alike]
    assert [each.get_text() for each in top.legends[0].get_texts()] == [*words.labels]
    plot([a, b], tmp_path / "curves.html")
    page = Page(tmp_path / "curves.html")
    assert page.cells[:3] == ["run", "train.learning_rate", "runtime.xla"]
    assert (
        "<title>2 runs that differ in train.learning_rate" in (tmp_path / "curves.html").read_text()
    )


def test_the_heading_of_one_run_of_equal_runs_and_of_scripts(tmp_path):
    a, b = (with_config(make_run(tmp_path / each, 1)) for each in "ab")
    script = make_run(tmp_path / "script", 1)
    assert run_words({"runs/a": a}).heading == "Training run runs/a"
    assert "train.learning_rate=0.1" in run_words({"runs/a": a}).alike
    assert run_words({"a": a, "b": b}).heading == "2 runs with the same settings"
    of_script = run_words({"script": script, "a": a})
    assert (of_script.heading, of_script.labels) == ("2 runs", ("script", "a"))
    for damaged in ("{", "[]", '{"train": 3}', "null"):
        (b / "config.json").write_text(damaged)
        assert run_words({"b": b}).alike == ""


def test_many_differences_are_counted_and_in_the_pages_table(tmp_path):
    a, b = make_run(tmp_path / "a", 1), make_run(tmp_path / "b", 1)
    for folder, value in ((a, 1), (b, 2)):
        fields = {f"field_{index}": value for index in range(9)}
        (folder / "config.json").write_text(json.dumps({"train": fields}))
    words = run_words({"a": a, "b": b})
    assert words.heading.endswith("train.field_5 and 3 other settings")
    assert words.labels[0].endswith("train.field_5=1 and 3 more")
    assert len(words.differing) == 9
    assert words.settings[1] == ("2",) * 9


def test_secrets_and_escapes_of_others_are_not_drawn(tmp_path):
    a = with_config(make_run(tmp_path / "a", 1), data__root="x\x1b[2J")
    b = with_config(make_run(tmp_path / "b", 1), data__root="https://me:PASS@host/x")
    words = run_words({"a": a, "b": b})
    assert words.labels[0] == r"a: data.root=x\x1b[2J"
    assert "PASS" not in words.labels[1]


def test_long_names_stay_apart(tmp_path):
    run = make_run(tmp_path / "a", 1)
    folder = "/a/long/way/to/the/folder/in/which/all/the/runs/are/kept"
    assert run_words({f"{folder}/a": run, f"{folder}/b": run}).labels == ("a", "b")
    one, other = run_words({f"{'x' * 90}{each}": run for each in "ab"}).labels
    assert one != other
    assert max(len(one), len(other)) <= 48


def test_each_of_many_runs_has_a_look_of_its_own(tmp_path):
    run = make_run(tmp_path / "a", 2)
    charts = charts_of({str(index): run for index in range(20)})
    lines = charts["Loss (lower is better)"].lines
    looks = {(each.get_color(), each.get_marker(), each.get_linestyle()) for each in lines}
    assert len(looks) == 40
    assert len(set(COLORS)) == 7


def test_in_a_picture_with_tests_each_training_line_is_dashed(tmp_path):
    tested, untested = make_run(tmp_path / "a", 2), make_run(tmp_path / "b", 2)
    file = untested / "metrics.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    kept = [{k: v for k, v in each.items() if not k.startswith("val_")} for each in records]
    file.write_text("".join(json.dumps(each) + "\n" for each in kept))
    loss = charts_of({"a": tested, "b": untested})["Loss (lower is better)"]
    styles = [each.get_linestyle() for each in loss.lines if len(each.get_xdata())]
    assert styles == ["--", "-", "--"]
    alone = charts_of({"b": untested})["Loss (lower is better)"]
    assert [each.get_linestyle() for each in alone.lines if len(each.get_xdata())] == ["-"]


def test_names_of_metrics_are_words():
    assert metric_words("top5").title == "Top-5 accuracy (higher is better)"
    assert metric_words("f1_score").title == "F1 score (higher is better)"
    assert metric_words("r2_score").unit == "R squared, at most 1"
    # Of several classes an image, a share of all answers, not of the images.
    assert metric_words("binary_accuracy").unit == "share of the answers, 0 to 1"
    assert metric_words("my_own_metric") == ("My own metric", "my own metric")
    assert column_head("val_psnr") == "PSNR, test images"
    assert column_head("epoch") == "epoch"
