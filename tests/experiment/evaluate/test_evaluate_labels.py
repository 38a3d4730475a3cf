"""Runs with several classes an image, or numbers, are evaluated as their own export answers."""

import csv
import json
import pathlib
import runpy
import shutil
import types

import keras
import numpy as np
import PIL.Image
import pytest
from conftest import NotRehearsed, in_replicas
from keras import layers

from tfaccel import UserError
from tfaccel.config import parse
from tfaccel.experiment import models, train
from tfaccel.experiment.evaluate import (
    multilabel_report,
    pictures,
    regression_report,
)
from tfaccel.experiment.evaluate import run as run_lib
from tfaccel.experiment.evaluate import scores as scores_lib
from tfaccel.experiment.evaluate.asked import Asked
from tfaccel.experiment.evaluate.run import evaluate
from tfaccel.export import at_start, parity, saved_model

CONFIGS = pathlib.Path(__file__).parents[3] / "configs"
TAGS, NUMBERS = ("left", "top", "rare"), ("x", "level")
NUM_TRAIN, NUM_TEST = 16, 11


def compare_nothing(monkeypatch):
    """Exports have model.keras and the card alone, because the rest takes over a second."""
    monkeypatch.setattr(at_start, "Rehearsal", NotRehearsed)
    monkeypatch.setattr(at_start, "_check_pixels", lambda *_, **__: None)
    monkeypatch.setattr(saved_model, "write", lambda *_, **__: None)
    question = types.SimpleNamespace(inputs={}, ask=lambda _: parity.Parity(1, ()))
    monkeypatch.setattr(parity, "about_images", lambda *_, **__: question)


def small(*, image_shape, num_outputs):
    image = keras.Input(image_shape, name="image")
    outputs = layers.Dense(num_outputs, dtype="float32")(layers.Flatten()(image))
    return keras.Model(image, outputs, name="small")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Spots in grey images, with both kinds of labels. No test image is rare."""
    root, random = tmp_path_factory.mktemp("spots"), np.random.default_rng(0)
    for split, num in (("training", NUM_TRAIN), ("testing", NUM_TEST)):
        (root / split).mkdir()
        lines = [["path", *TAGS, *NUMBERS]]
        for index in range(num):
            x, y, level = *random.integers(0, 7, 2), int(random.integers(80, 250))
            pixels = random.integers(0, 60, (8, 8), dtype=np.uint8)
            pixels[y : y + 2, x : x + 2] = level
            PIL.Image.fromarray(pixels).save(root / split / f"{index:02d}.png")
            rare = int(split == "training" and index % 5 == 0)
            row = (int(x < 4), int(y < 4), rare, float(x), level / 100)
            lines.append([f"{split}/{index:02d}.png", *map(str, row)])
        text = "".join(",".join(line) + "\n" for line in lines)
        (root / f"{split}.csv").write_text(text)
    return root


def config_of(root, name, **changes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tfaccel.data.digits.ensure_listed_digits", lambda: root)
        config = runpy.run_path(str(CONFIGS / f"{name}.py"))["get_config"]("smoke")
    columns = TAGS if name == "digit_tags" else NUMBERS
    settings = {
        "data.label_columns": columns,
        "data.loader": "dali_cpu",
        "data.global_batch_size": 4,
        "runtime.xla": False,
    }
    config.update_from_flattened_dict(settings | changes)
    return parse(config)


def trained(root, name, workdir, **changes):
    with pytest.MonkeyPatch.context() as patch:
        compare_nothing(patch)
        patch.setitem(models.OWN, "mnist_cnn", small)
        train.run(config_of(root, name, **changes), workdir=workdir)
    return workdir


@pytest.fixture(scope="module")
def tags(root, tmp_path_factory):
    """The workdir of a run of several classes an image."""
    return trained(root, "digit_tags", tmp_path_factory.mktemp("runs") / "tags")


@pytest.fixture(scope="module")
def numbers(root, tmp_path_factory):
    """The workdir of a run of numbers, whose loss and unit have nothing to do with the report."""
    workdir = tmp_path_factory.mktemp("runs") / "numbers"
    return trained(root, "digit_numbers", workdir, **{"train.loss": "huber"})


@pytest.fixture(autouse=True)
def _in_the_small(monkeypatch):
    monkeypatch.setitem(models.OWN, "mnist_cnn", small)
    yield
    keras.config.set_dtype_policy("float32")


@pytest.fixture
def undrawn(monkeypatch):
    """Pictures are empty, because drawing takes half of the time. Of tests of figures alone."""
    for name in ("scatter_figure", "reliability_figure"):
        monkeypatch.setattr(pictures, name, lambda *_, **__: None)
    for room in (multilabel_report, regression_report):
        monkeypatch.setattr(room, "write_figure", lambda path, *_, **__: path.write_bytes(b""))
    monkeypatch.setattr(run_lib, "_write_worst", lambda *given: given[-1].write_bytes(b""))


def rows_of(folder, name="images.csv"):
    with open(folder / name, newline="") as file:
        return list(csv.DictReader(file))


def figures_of(folder):
    return json.loads((folder / "metrics.json").read_text())


def answers_of(workdir, root, columns):
    """A slow reference: labels and Keras's export, one image at a time, in the list's order."""
    model = keras.saving.load_model(workdir / "export" / "1" / "model.keras", compile=False)
    data = json.loads((workdir / "config.json").read_text())["data"]
    mean, std = np.ravel(data["mean"]), np.ravel(data["std"])
    rows = rows_of(root, "testing.csv")
    pixels = [np.asarray(PIL.Image.open(root / row["path"]), np.float32) / 255 for row in rows]
    outputs = [model((each[None, ..., None] - mean) / std).numpy()[0] for each in pixels]
    labels = [[float(row[name]) for name in columns] for row in rows]
    return rows, np.array(labels), np.array(outputs, np.float64)


# Several classes an image.


def test_several_classes_have_the_figures_of_the_models_own_answers(tags, root):
    report, folder = evaluate(tags, Asked(checkpoint="newest"))
    listed, labels, logits = answers_of(tags, root, TAGS)
    chances = 1 / (1 + np.exp(-logits))
    losses = -(labels * np.log(chances) + (1 - labels) * np.log(1 - chances)).mean(axis=1)
    rows = rows_of(folder)
    assert [row["image"] for row in rows] == [str(root / each["path"]) for each in listed]
    for row, own, chance, loss in zip(rows, labels, chances, losses, strict=True):
        there = [name for name, each in zip(TAGS, own, strict=True) if each]
        said = [name for name, each in zip(TAGS, chance, strict=True) if each >= 0.5]
        assert (row["true"], row["predicted"]) == (";".join(there), ";".join(said))
        assert row["right"] == str(int(there == said))
        assert float(row["loss"]) == pytest.approx(loss, rel=1e-4)
        for name, each, is_there in zip(TAGS, chance, own, strict=True):
            assert float(row[f"probability_{name}"]) == pytest.approx(each, rel=1e-4)
            assert row[f"true_{name}"] == str(int(is_there))
    found = figures_of(folder)["overall"]
    assert found["images"] == NUM_TEST
    assert found["log_loss"] == pytest.approx(losses.mean(), rel=1e-4)
    right = ((chances >= 0.5) == labels).all(axis=1)
    assert found["subset_accuracy"] == pytest.approx(right.mean())
    assert report.worst.tolist() == np.argsort(-losses, kind="stable").tolist()
    # What training itself measured after its last epoch.
    result = json.loads((tags / "result.json").read_text())["metrics"]
    assert found["binary_accuracy"] == pytest.approx(result["val_binary_accuracy"], abs=1e-6)
    assert found["log_loss"] == pytest.approx(result["val_loss"], rel=1e-4)


def test_the_report_of_several_classes_has_tables_pictures_and_one_page(tags, tmp_path):
    report, folder = evaluate(tags, Asked(), out=tmp_path)
    assert {each.name for each in folder.iterdir()} == {
        *("calibration.csv", "classes.csv", "images.csv", "metrics.json", "report.html"),
        *("reliability.png", "worst.png"),
    }
    page = (folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    for each in ("mean average precision", "no confusion matrix: an image may have several"):
        assert each in page
    text = " ".join(str(report).split())
    assert "1 of 3 classes have no image here: rare." in text
    classes = {row["class"]: row for row in rows_of(folder, "classes.csv")}
    assert classes["rare"]["images"] == "0"
    for name in ("average_precision", "auc", "recall", "best_threshold", "best_f1"):
        assert classes["rare"][name] == ""
        assert 0 <= float(classes["left"][name]) <= 1
    assert figures_of(folder)["classes"][2]["auc"] is None
    bins = rows_of(folder, "calibration.csv")
    assert sum(int(row["answers"]) for row in bins) == 3 * NUM_TEST


@pytest.mark.usefixtures("undrawn")
def test_a_report_of_very_many_classes_says_what_it_leaves_out(tags, tmp_path, monkeypatch):
    monkeypatch.setattr(multilabel_report, "MOST_IN_ROWS", 2)
    monkeypatch.setattr(multilabel_report, "MOST_ON_TERMINAL", 2)
    report, folder = evaluate(tags, Asked(), out=tmp_path)
    assert list(rows_of(folder)[0]) == ["image", "true", "predicted", "loss", "right", "note"]
    assert "images.csv has no probabilities" in " ".join(report.about.notes)
    assert "the 2 classes of the lowest average precision" in str(report)
    assert len(rows_of(folder, "classes.csv")) == 3


# Numbers.


def test_numbers_have_the_figures_of_the_models_own_answers(numbers, root):
    report, folder = evaluate(numbers, Asked(checkpoint="newest"))
    listed, labels, said = answers_of(numbers, root, NUMBERS)
    rows = rows_of(folder)
    assert [row["image"] for row in rows] == [str(root / each["path"]) for each in listed]
    for row, own, one in zip(rows, labels, said, strict=True):
        for name, true, answer in zip(NUMBERS, own, one, strict=True):
            assert float(row[f"true_{name}"]) == pytest.approx(true)
            assert float(row[f"predicted_{name}"]) == pytest.approx(answer, rel=1e-4, abs=1e-5)
    found = figures_of(folder)
    for each, name in enumerate(NUMBERS):
        error, own = said[:, each] - labels[:, each], labels[:, each]
        assert found["targets"][each].pop("target") == name
        assert found["targets"][each] == pytest.approx(
            {
                "mae": np.abs(error).mean(),
                "rmse": np.sqrt((error**2).mean()),
                "r2": 1 - (error**2).sum() / ((own - own.mean()) ** 2).sum(),
                "mean": own.mean(),
                "std": own.std(),
            },
            rel=1e-4,
        )
    errors = (np.abs(said - labels) / labels.std(axis=0)).mean(axis=1)
    assert report.worst.tolist() == np.argsort(-errors, kind="stable").tolist()
    np.testing.assert_allclose([float(row["error"]) for row in rows], errors, rtol=1e-4)
    result = json.loads((numbers / "result.json").read_text())["metrics"]
    wanted = result["val_mean_absolute_error"]
    assert found["overall"]["mean_absolute_error"] == pytest.approx(wanted, rel=1e-4)
    assert found["overall"]["mean_r2"] == pytest.approx(result["val_r2_score"], rel=1e-3)


def test_the_report_of_numbers_has_tables_pictures_and_one_page(numbers, tmp_path):
    report, folder = evaluate(numbers, Asked(), out=tmp_path)
    assert {each.name for each in folder.iterdir()} == {
        *("images.csv", "metrics.json", "predicted.png", "report.html", "targets.csv"),
        "worst.png",
    }
    page = (folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert "each divided by the standard deviation of the target" in page
    assert "(x)" in report.title
    assert "(level)" in report.title


@pytest.mark.usefixtures("undrawn")
def test_a_target_with_no_spread_and_one_image(numbers, root, tmp_path):
    table = tmp_path / "some.csv"
    files = [(root / "testing" / f"{index:02d}.png", index) for index in range(3)]
    lines = [f"{file},{index},0.1\n" for file, index in files]
    table.write_text("path,x,level\n" + "".join(lines))
    report, folder = evaluate(numbers, Asked(data=table), out=tmp_path / "out")
    targets = rows_of(folder, "targets.csv")
    assert (targets[1]["r2"], targets[1]["std"]) == ("", "0.0")
    assert targets[0]["r2"] != ""
    assert "true number of level is the same in all images" in " ".join(report.about.notes)
    table.write_text("path,x,level\n" + lines[0])
    _, folder = evaluate(numbers, Asked(data=table), out=tmp_path / "out")
    assert [row["r2"] for row in rows_of(folder, "targets.csv")] == ["", ""]
    assert figures_of(folder)["overall"]["mean_r2"] is None


# Both.


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(("which", "loader"), [("tags", "memory"), ("numbers", "dali_cpu")])
def test_two_replicas_give_what_one_gives_for_any_labels(
    which, loader, request, tmp_path, monkeypatch
):
    workdir = request.getfixturevalue(which)
    one, first = evaluate(workdir, Asked(), out=tmp_path)
    in_replicas(monkeypatch, run_lib, 2)
    two, second = evaluate(workdir, Asked(loader=loader), out=tmp_path)
    assert two.about.num_replicas == 2
    for name, each in one.scores.items():
        np.testing.assert_allclose(two.scores[name], each, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(one.labels, two.labels)
    ids = [[row["image"] for row in rows_of(each)] for each in (first, second)]
    assert ids[0] == ids[1]


def spoilt(function):
    """Makes the first row of each batch NaN."""

    def scores(inputs, targets, outputs):
        first = keras.ops.arange(keras.ops.shape(outputs)[0])[:, None] == 0
        return function(inputs, targets, keras.ops.where(first, float("nan"), outputs))

    return scores


@pytest.mark.usefixtures("undrawn")
def test_outputs_of_several_classes_that_are_nan(tags, tmp_path, monkeypatch):
    monkeypatch.setattr(scores_lib, "several", spoilt(scores_lib.several))
    report, folder = evaluate(tags, Asked(), out=tmp_path)
    found = figures_of(folder)["overall"]
    assert found["not_finite"] == 3  # of three batches
    assert np.isfinite(found["log_loss"])
    row = rows_of(folder)[4]
    assert (row["predicted"], row["loss"], row["right"]) == ("", "", "0")
    assert row["probability_left"] == ""
    assert "infinite or NaN" in row["note"]
    assert "outputs for 3 images are infinite or NaN" in report.about.notes[0]
    assert report.worst[:3].tolist() == [0, 4, 8]


def test_numbers_that_are_nan(numbers, tmp_path, monkeypatch):
    monkeypatch.setattr(scores_lib, "numbers", spoilt(scores_lib.numbers))
    report, folder = evaluate(numbers, Asked(), out=tmp_path)
    found = figures_of(folder)
    assert found["overall"]["not_finite"] == 3
    assert all(np.isfinite(each["r2"]) for each in found["targets"])
    row = rows_of(folder)[4]
    assert (row["predicted_x"], row["error"]) == ("", "")
    assert "infinite or NaN" in row["note"]
    assert report.worst[:3].tolist() == [0, 4, 8]


@pytest.mark.usefixtures("undrawn")
def test_other_images_have_the_runs_task_without_the_training_images(tags, root, tmp_path):
    workdir = shutil.copytree(tags, tmp_path / "run")
    config = json.loads((workdir / "config.json").read_text())
    config["data"]["root"] = str(tmp_path / "gone")
    (workdir / "config.json").write_text(json.dumps(config))
    table = tmp_path / "some.csv"
    table.write_text(f"path,left,top,rare\n{root}/testing/03.png,0,0,1\n")
    report, folder = evaluate(workdir, Asked(data=table))
    assert rows_of(folder)[0]["true"] == "rare"
    assert report.about.num_images == 1
    table.write_text(f"path,left,top,rare\n{root}/testing/03.png,0,0,7\n")
    with pytest.raises(UserError, match="expected 0 or 1"):
        evaluate(workdir, Asked(data=table))
    (tmp_path / "folders").mkdir()
    shutil.copytree(root / "testing", tmp_path / "folders" / "left")
    for task in ("auto", "multilabel"):  # the run's export says it, or its config
        config["data"]["task"] = task
        (workdir / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match="a list of the images and their labels"):
            evaluate(workdir, Asked(data=tmp_path / "folders"))


@pytest.mark.usefixtures("undrawn")
def test_whole_numbers_of_other_images_are_still_numbers(numbers, root, tmp_path):
    workdir = shutil.copytree(numbers, tmp_path / "run")
    config = json.loads((workdir / "config.json").read_text())
    config["data"] |= {"root": str(tmp_path / "gone"), "task": "auto"}
    (workdir / "config.json").write_text(json.dumps(config))
    table = tmp_path / "some.csv"
    table.write_text(f"path,x,level\n{root}/testing/03.png,1,0\n{root}/testing/04.png,0,1\n")
    _, folder = evaluate(workdir, Asked(data=table))
    assert [row["true_x"] for row in rows_of(folder)] == ["1.0", "0.0"]
    config["data"]["label_columns"] = "*"  # whose order may differ
    (workdir / "config.json").write_text(json.dumps(config))
    table.write_text(f"path,level,x\n{root}/testing/03.png,1,0\n")
    with pytest.raises(UserError, match="numbers of the test images are level, x"):
        evaluate(workdir, Asked(data=table))


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("which", ["tags", "numbers"])
def test_an_export_of_any_labels_is_evaluated_as_its_weights(which, request, tmp_path):
    workdir = request.getfixturevalue(which)
    newest, _ = evaluate(workdir, Asked(checkpoint="newest"), out=tmp_path)
    report, _ = evaluate(workdir, Asked(export=workdir / "export" / "1"), out=tmp_path)
    for name, each in newest.scores.items():
        np.testing.assert_allclose(report.scores[name], each, rtol=1e-4, atol=1e-5)


@pytest.mark.slow  # XLA compiles for seconds
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("which", ["tags", "numbers"])
def test_xla_gives_any_labels_what_is_computed_without_it(which, request, tmp_path):
    workdir = shutil.copytree(request.getfixturevalue(which), tmp_path / "run")
    plain, _ = evaluate(workdir, Asked())
    config = json.loads((workdir / "config.json").read_text())
    config["runtime"]["xla"] = True
    (workdir / "config.json").write_text(json.dumps(config))
    report, _ = evaluate(workdir, Asked())
    for name, each in plain.scores.items():
        np.testing.assert_allclose(report.scores[name], each, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("which", ["tags", "numbers"])
def test_an_unreadable_image_keeps_the_labels_of_the_others(which, request, root, tmp_path):
    workdir = request.getfixturevalue(which)
    whole, _ = evaluate(workdir, Asked(), out=tmp_path / "out")
    copy = shutil.copytree(root, tmp_path / "copy")
    (copy / "testing" / "02.png").write_bytes(b"no image")
    asked = Asked(root=str(copy), bad_files="skip")
    report, folder = evaluate(workdir, asked, out=tmp_path / "out")
    np.testing.assert_array_equal(report.labels, np.delete(whole.labels, 2, axis=0))
    for name, each in whole.scores.items():
        np.testing.assert_allclose(report.scores[name], np.delete(each, 2, axis=0), rtol=1e-4)
    rows = rows_of(folder)
    assert len(rows) == NUM_TEST
    last = dict(rows[-1])
    assert (last.pop("image"), last.pop("note")) == (
        str(copy / "testing" / "02.png"),
        "cannot be read",
    )
    assert set(last.values()) == {""}
