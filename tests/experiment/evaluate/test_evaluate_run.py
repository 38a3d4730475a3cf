"""A run is evaluated from its workdir, and the figures are those of its own predictions."""

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
from tfaccel.experiment import models, tasks, train
from tfaccel.experiment.evaluate import class_report, pictures
from tfaccel.experiment.evaluate import run as run_lib
from tfaccel.experiment.evaluate import scores as scores_lib
from tfaccel.experiment.evaluate.asked import Asked
from tfaccel.experiment.evaluate.run import evaluate
from tfaccel.export import at_start, parity, saved_model

CONFIGS = pathlib.Path(__file__).parents[3] / "configs"
CLASSES = ("ant", "bee", "cat", "dog", "elk", "fox", "gnu")


def compare_nothing(monkeypatch):
    """Exports have model.keras and the card alone, because the rest takes over a second."""
    monkeypatch.setattr(at_start, "Rehearsal", NotRehearsed)
    monkeypatch.setattr(at_start, "_check_pixels", lambda *_, **__: None)
    monkeypatch.setattr(saved_model, "write", lambda *_, **__: None)
    question = types.SimpleNamespace(inputs={}, ask=lambda _: parity.Parity(1, ()))
    monkeypatch.setattr(parity, "about_images", lambda *_, **__: question)


def save(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    PIL.Image.fromarray(pixels).save(path)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Seven classes; the test images lack one, and are a prime number."""
    root, random = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for split, num in (("training", 4), ("testing", 3)):
        for label, name in enumerate(CLASSES):
            for index in range(num if (split, name) != ("testing", "elk") else 0):
                if (split, name, index) == ("testing", "ant", 0):
                    continue
                pixels = random.integers(0, 90, (8, 8), dtype=np.uint8) + 20 * label
                save(root / split / name / f"{index}.png", pixels.astype(np.uint8))
    return root


def small(*, image_shape, num_outputs):
    """Few weights, and one of them moves while it trains."""
    image = keras.Input(image_shape, name="image")
    x = layers.BatchNormalization()(layers.Conv2D(4, 3, activation="relu")(image))
    logits = layers.Dense(num_outputs, dtype="float32")(layers.Flatten()(x))
    return keras.Model(image, logits, name="small")


def config_of(root, **changes):
    config = runpy.run_path(str(CONFIGS / "digits.py"))["get_config"]("smoke")
    settings = {
        "data.root": str(root),
        "data.loader": "dali_cpu",
        "data.global_batch_size": 8,
        "runtime.xla": False,
        "train.epochs": 2,
    }
    config.update_from_flattened_dict(settings | changes)
    return parse(config)


@pytest.fixture(scope="module")
def trained(photos, tmp_path_factory):
    """The workdir of a run of two epochs."""
    workdir = tmp_path_factory.mktemp("runs") / "a"
    with pytest.MonkeyPatch.context() as patch:
        compare_nothing(patch)
        patch.setitem(models.OWN, "mnist_cnn", small)
        train.run(config_of(photos), workdir=workdir)
        yield workdir


@pytest.fixture(scope="module")
def evaluated(trained, tmp_path_factory):
    """The report of its newest checkpoint, with all pictures, and its folder."""
    out = tmp_path_factory.mktemp("evaluated")
    return evaluate(trained, Asked(checkpoint="newest"), out=out)


@pytest.fixture
def undrawn(monkeypatch):
    """Pictures are empty, because drawing takes half of the time. Of tests of figures alone."""
    for name in ("confusion_figure", "reliability_figure"):
        monkeypatch.setattr(pictures, name, lambda *_: None)
    monkeypatch.setattr(class_report, "write_figure", lambda path, *_, **__: path.write_bytes(b""))
    monkeypatch.setattr(run_lib, "_write_worst", lambda *given: given[-1].write_bytes(b""))


@pytest.fixture
def workdir(trained, tmp_path):
    """A copy of it, which tests may change."""
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture(autouse=True)
def _tidy():
    yield
    keras.config.set_dtype_policy("float32")


def rows_of(folder, name="images.csv"):
    with open(folder / name, newline="") as file:
        return list(csv.DictReader(file))


def figures_of(folder):
    return json.loads((folder / "metrics.json").read_text())


def logits_of(workdir, photos, split="testing"):
    """A slow reference: Keras's export of the run, one image at a time, in the order of paths."""
    model = keras.saving.load_model(workdir / "export" / "1" / "model.keras", compile=False)
    data = json.loads((workdir / "config.json").read_text())["data"]
    mean, std = np.ravel(data["mean"]), np.ravel(data["std"])
    paths = sorted((photos / split).glob("*/*.png"))
    pixels = [np.asarray(PIL.Image.open(each), np.float32)[..., None] / 255 for each in paths]
    logits = [model((each[None] - mean) / std, training=False).numpy()[0] for each in pixels]
    labels = [CLASSES.index(each.parent.name) for each in paths]
    return paths, np.array(labels), np.array(logits, np.float64)


def test_the_figures_are_those_of_the_models_own_answers(trained, evaluated, photos):
    report, folder = evaluated
    assert folder.name == "1"
    paths, labels, logits = logits_of(trained, photos)
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    rows = rows_of(folder)
    assert [row["image"] for row in rows] == [str(each) for each in paths]
    assert len(rows) == 17
    for row, label, own in zip(rows, labels, chances, strict=True):
        assert row["true"] == CLASSES[label]
        assert row["predicted"] == CLASSES[own.argmax()]
        assert float(row["probability"]) == pytest.approx(own.max(), rel=1e-4)
        assert float(row["true_probability"]) == pytest.approx(own[label], rel=1e-4)
        assert float(row["loss"]) == pytest.approx(-np.log(own[label]), rel=1e-3, abs=1e-5)
        assert row["right"] == str(int(own.argmax() == label))
    found = figures_of(folder)["overall"]
    assert found["accuracy"] == pytest.approx((chances.argmax(1) == labels).mean())
    assert found["log_loss"] == pytest.approx(-np.log(chances[range(17), labels]).mean(), rel=1e-4)
    best = np.argsort(-chances, axis=1)[:, :5]
    assert found["top5"] == pytest.approx((best == labels[:, None]).any(axis=1).mean())
    # What training itself measured after its last epoch.
    result = json.loads((trained / "result.json").read_text())["metrics"]
    assert found["accuracy"] == pytest.approx(result["val_accuracy"], abs=1e-6)
    assert found["log_loss"] == pytest.approx(result["val_loss"], rel=1e-4)
    assert report.overall.images == 17


def test_the_folder_has_tables_pictures_and_one_page(evaluated):
    report, folder = evaluated
    assert {each.name for each in folder.iterdir()} == {
        *("calibration.csv", "classes.csv", "confused_pairs.csv", "confusion.csv", "images.csv"),
        *("confusion.png", "reliability.png", "worst.png", "metrics.json", "report.html"),
    }
    page = (folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3
    assert "http" not in page.replace("http-equiv", "")
    for each in ("macro F1", "expected calibration error", "elk", "highest loss"):
        assert each in page
    text = str(report)
    assert "1 of 7 classes have no image here: elk" in " ".join(text.split())
    classes = {row["class"]: row for row in rows_of(folder, "classes.csv")}
    assert classes["elk"]["images"] == "0"
    assert classes["elk"]["recall"] == ""
    matrix = rows_of(folder, "confusion.csv")
    assert sum(int(row[name]) for row in matrix for name in CLASSES) == 17
    losses = [float(row["loss"]) for row in rows_of(folder)]
    worst = np.argsort(-np.array(losses), kind="stable")
    assert report.worst.tolist() == worst.tolist()
    with PIL.Image.open(folder / "worst.png") as sheet:
        assert sheet.width > 128


@pytest.mark.usefixtures("undrawn")
def test_each_report_is_a_new_version_in_the_workdir(workdir):
    _, first = evaluate(workdir, Asked(split="train"))
    _, second = evaluate(workdir, Asked(split="train"))
    assert first == workdir / "evaluation" / "1"
    assert second == workdir / "evaluation" / "2"
    assert figures_of(first)["overall"]["images"] == 28
    assert not list((workdir / "evaluation").glob(".*"))


@pytest.mark.parametrize("loader", ["dali_cpu", "memory"])
@pytest.mark.usefixtures("undrawn")
def test_two_replicas_give_what_one_gives(workdir, evaluated, monkeypatch, loader):
    one = evaluated[1]
    in_replicas(monkeypatch, run_lib, 2)
    report, two = evaluate(workdir, Asked(checkpoint="newest", loader=loader))
    assert report.about.num_replicas == 2
    mine, theirs = rows_of(one), rows_of(two)
    assert len(mine) == len(theirs) == 17
    for row, other in zip(mine, theirs, strict=True):
        for name in ("image", "true", "predicted", "right", "note"):
            assert row[name] == other[name]
        for name in ("probability", "true_probability", "loss"):
            assert float(row[name]) == pytest.approx(float(other[name]), rel=1e-4, abs=1e-6)
    assert rows_of(one, "classes.csv") == rows_of(two, "classes.csv")


def change_config(workdir, section, **changes):
    path = workdir / "config.json"
    values = json.loads(path.read_text())
    values[section] |= changes
    path.write_text(json.dumps(values))


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("which", ["trained", pytest.param("segmented", marks=pytest.mark.slow)])
def test_xla_gives_what_is_computed_without_it(request, which, tmp_path):
    workdir = shutil.copytree(request.getfixturevalue(which), tmp_path / "run")
    plain, _ = evaluate(workdir, Asked())
    change_config(workdir, "runtime", xla=True)
    report, _ = evaluate(workdir, Asked())
    for name, each in plain.scores.items():
        np.testing.assert_allclose(report.scores[name], each, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("undrawn")
def test_a_checkpoint_is_chosen_by_its_score_its_age_or_its_step(workdir, evaluated):
    steps = sorted(each.name for each in (workdir / "checkpoints").glob("step-*"))
    assert steps == ["step-00000004", "step-00000008"]
    report, _ = evaluate(workdir, Asked(checkpoint="4"))
    assert report.about.weights == "the checkpoint of step 4"
    newest, _ = evaluated
    assert newest.about.weights == "the checkpoint of step 8, the newest"
    assert not np.array_equal(report.scores["loss"], newest.scores["loss"])
    best, _ = evaluate(workdir, Asked())
    assert "the best by val_loss" in best.about.weights
    with pytest.raises(UserError, match="no checkpoint of step 5; expected one of 4, 8"):
        evaluate(workdir, Asked(checkpoint="5"))


@pytest.mark.usefixtures("undrawn")
def test_an_export_is_evaluated_as_its_weights(workdir, evaluated):
    newest, _ = evaluated
    report, _ = evaluate(workdir, Asked(export=workdir / "export" / "1"))
    np.testing.assert_allclose(report.scores["loss"], newest.scores["loss"], rtol=1e-4, atol=1e-6)
    (workdir / "export" / "1" / "model.keras").unlink()
    with pytest.raises(UserError, match=r"has no model\.keras"):
        evaluate(workdir, Asked(export=workdir / "export" / "1"))


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_has_not_finished_says_so(workdir, evaluated):
    report, _ = evaluated
    assert all("not finished" not in each for each in report.about.notes)
    (workdir / "result.json").unlink()
    report, folder = evaluate(workdir, Asked())
    assert "The run has not finished" in report.about.notes[0]
    assert "The run has not finished" in (folder / "report.html").read_text()


def test_no_checkpoint_is_an_error(workdir):
    shutil.rmtree(workdir / "checkpoints")
    with pytest.raises(UserError, match="has no checkpoint"):
        evaluate(workdir, Asked())
    assert not (workdir / "evaluation").exists()


# Other data.


def moved(photos, tmp_path):
    return shutil.copytree(photos, tmp_path / "moved")


@pytest.mark.usefixtures("undrawn")
def test_another_folder_has_the_runs_classes_without_the_training_images(workdir, photos, tmp_path):
    others = tmp_path / "others"
    shutil.copytree(photos / "testing" / "fox", others / "fox")
    shutil.copytree(photos / "testing" / "bee", others / "bee")
    change_config(workdir, "data", root=str(tmp_path / "gone"))
    report, folder = evaluate(workdir, Asked(data=others))
    assert [row["true"] for row in rows_of(folder)] == ["bee"] * 3 + ["fox"] * 3
    assert report.names == CLASSES
    (others / "yak").mkdir()
    shutil.copy(others / "fox" / "0.png", others / "yak")
    with pytest.raises(UserError, match="has the class 'yak'"):
        evaluate(workdir, Asked(data=others))


@pytest.mark.usefixtures("undrawn")
def test_a_list_of_images_takes_the_place_of_folders(workdir, photos, tmp_path):
    table = tmp_path / "some.csv"
    files = [photos / "testing" / each for each in ("dog/2.png", "cat/1.png")]
    table.write_text("path,label\n" + "".join(f"{each},{each.parent.name}\n" for each in files))
    _, folder = evaluate(workdir, Asked(data=table))
    rows = rows_of(folder)
    assert [(row["image"], row["true"]) for row in rows] == [
        (str(files[0]), "dog"),
        (str(files[1]), "cat"),
    ]


@pytest.mark.usefixtures("undrawn")
def test_changed_classes_are_an_error(workdir, photos, tmp_path):
    root = moved(photos, tmp_path)
    (root / "training" / "fox").rename(root / "training" / "emu")
    (root / "testing" / "fox").rename(root / "testing" / "emu")
    with pytest.raises(UserError, match="classes of the training images have changed"):
        evaluate(workdir, Asked(root=str(root)))
    shutil.rmtree(workdir / "export")  # then the numbers of classes alone can tell
    shutil.copytree(root / "training" / "emu", root / "training" / "yak")
    with pytest.raises(UserError, match="the data now have 8 classes"):
        evaluate(workdir, Asked(root=str(root)))


@pytest.mark.usefixtures("undrawn")
def test_a_corrupt_image_is_an_error_or_left_out_by_name(workdir, photos, tmp_path):
    root = moved(photos, tmp_path)
    bad = root / "testing" / "bee" / "1.png"
    bad.write_bytes(bad.read_bytes()[:40])
    with pytest.raises(UserError, match=r"bee/1\.png"):
        evaluate(workdir, Asked(root=str(root)))
    report, folder = evaluate(workdir, Asked(root=str(root), bad_files="skip"))
    assert report.overall.images == 16
    rows = rows_of(folder)
    assert len(rows) == 17
    assert (rows[-1]["image"], rows[-1]["note"]) == (str(bad), "cannot be read")
    assert [row["image"] for row in rows[:-1]] == sorted(
        str(each) for each in (root / "testing").glob("*/*.png") if each != bad
    )
    assert "1 image cannot be read" in report.about.notes[0]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("loader", ["dali_cpu", "tf_data"])
def test_an_image_that_vanishes_meanwhile_is_left_out_too(
    workdir, photos, tmp_path, monkeypatch, loader
):
    root, scored = moved(photos, tmp_path), run_lib.scored
    gone = root / "testing" / "cat" / "2.png"

    def removing(*given, **others):
        gone.unlink()
        return scored(*given, **others)

    monkeypatch.setattr(run_lib, "scored", removing)
    report, folder = evaluate(workdir, Asked(root=str(root), bad_files="skip", loader=loader))
    assert report.about.unread == (str(gone),)
    rows = rows_of(folder)
    assert [row["image"] for row in rows[:-1]] == sorted(
        str(each) for each in (root / "testing").glob("*/*.png")
    )
    assert all(row["true"] == pathlib.Path(row["image"]).parent.name for row in rows[:-1])
    assert (rows[-1]["image"], rows[-1]["note"]) == (str(gone), "cannot be read")


@pytest.mark.usefixtures("undrawn")
def test_outputs_that_are_nan_are_counted_and_named(workdir, monkeypatch):
    own = scores_lib.Classes.__call__

    def spoilt(self, inputs, targets, outputs):
        first = keras.ops.arange(keras.ops.shape(outputs)[0])[:, None] == 0
        return own(self, inputs, targets, keras.ops.where(first, float("nan"), outputs))

    monkeypatch.setattr(scores_lib.Classes, "__call__", spoilt)
    report, folder = evaluate(workdir, Asked())
    found = figures_of(folder)["overall"]
    assert found["not_finite"] == 3  # of three batches
    assert np.isfinite(found["log_loss"])
    rows = rows_of(folder)
    assert (rows[0]["predicted"], rows[0]["loss"], rows[0]["right"]) == ("", "", "0")
    assert "outputs for 3 images are infinite or NaN" in report.about.notes[0]
    assert report.worst[:3].tolist() == [0, 8, 16]


# Masks and pairs.


@pytest.fixture(scope="module")
def street(tmp_path_factory):
    """Masks with pixels that have no class, for two epochs of training."""
    root, random = tmp_path_factory.mktemp("street"), np.random.default_rng(0)
    for split, num in (("train", 4), ("test", 5)):
        for index in range(num):
            mask = np.zeros((16, 16), np.uint8)
            mask[4 : 9 + index, 4:12] = 1
            image = np.stack([mask * 120] * 3, -1) + random.integers(0, 90, (16, 16, 3))
            mask[: 1 + index] = 255
            save(root / split / "images" / f"{index}.png", image.astype(np.uint8))
            save(root / split / "sharp" / f"{index}.png", np.stack([mask // 2] * 3, -1))
            save(root / split / "masks" / f"{index}.png", mask)
    return root


def pairs_config(root, **changes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tfaccel.data.blurred.ensure_blurred", lambda: root)
        config = runpy.run_path(str(CONFIGS / "restoration.py"))["get_config"]("smoke")
    settings = {
        "data.root": str(root),
        "data.train": "train/images",
        "data.train_targets": "train/masks",
        "data.test": "test/images",
        "data.test_targets": "test/masks",
        "data.image_size": (16, 16),
        "data.loader": "dali_cpu",
        "runtime.xla": False,
    }
    config.update_from_flattened_dict(settings | changes)
    return parse(config)


@pytest.fixture(scope="module")
def segmented(street, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "masks"
    masks = {"data.targets": "mask", "data.ignore_class": 255, "model.num_outputs": 3}
    masks["data.classes"] = "road,sky"  # two of the three, as earlier versions accepted
    with pytest.MonkeyPatch.context() as patch:
        compare_nothing(patch)
        patch.setattr("tfaccel.experiment.tasks.check_names", lambda *args: None)
        train.run(pairs_config(street, **masks), workdir=workdir)
    return workdir


def test_masks_have_the_figures_of_the_models_own_answers(segmented, street, monkeypatch, tmp_path):
    report, folder = evaluate(segmented, Asked(), out=tmp_path / "one")
    model = keras.saving.load_model(segmented / "export" / "1" / "model.keras", compile=False)
    both, either, of_images, losses = np.zeros(3), np.zeros(3), [], []
    for index in range(5):
        image = np.asarray(PIL.Image.open(street / "test/images" / f"{index}.png"), np.float32)
        mask = np.asarray(PIL.Image.open(street / "test/masks" / f"{index}.png"))
        logits = model((image[None] / 255 - 0.5) / 0.5, training=False).numpy()[0]
        found, own = logits.argmax(axis=-1), []
        for each in range(3):
            pairs = (mask == each) & (mask != 255), (found == each) & (mask != 255)
            hit, union = (pairs[0] & pairs[1]).sum(), (pairs[0] | pairs[1]).sum()
            both[each] += hit
            either[each] += union
            own += [hit / union] if union else []
        of_images.append(np.mean(own))
        valid = mask != 255
        log = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        losses += (-np.take_along_axis(log, (mask % 255)[..., None].astype(int), -1)[..., 0])[
            valid
        ].tolist()
    there = either > 0
    np.testing.assert_allclose(report.figures.iou[there], both[there] / either[there])
    found = figures_of(folder)["overall"]
    assert found["mean_iou"] == pytest.approx(np.mean(both[there] / either[there]))
    assert found["log_loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    named = figures_of(folder)["classes"]
    assert [row["class"] for row in named] == ["road", "sky", "class 2"]
    rows = rows_of(folder)
    np.testing.assert_allclose([float(row["iou"]) for row in rows], of_images)
    assert report.worst.tolist() == np.argsort(of_images, kind="stable").tolist()
    assert {each.name for each in folder.iterdir()} == {
        *("classes.csv", "images.csv", "metrics.json", "report.html", "worst.png")
    }
    with PIL.Image.open(folder / "worst.png") as sheet:
        assert sheet.width > 3 * 128  # image, mask and prediction
    in_replicas(monkeypatch, run_lib, 2)
    _, other = evaluate(segmented, Asked(), out=tmp_path / "two")
    assert figures_of(other)["overall"]["mean_iou"] == found["mean_iou"]


@pytest.mark.usefixtures("undrawn")
def test_a_mask_with_a_value_that_is_no_class_is_named(segmented, street, tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "NUM_MASKS", 1)  # the first alone is checked at the start
    root = shutil.copytree(street, tmp_path / "street")
    mask = np.array(PIL.Image.open(root / "test/masks/3.png"))
    mask[10:12, :4] = 7
    save(root / "test" / "masks" / "3.png", mask)
    asked = Asked(data=root / "test" / "images", targets=root / "test" / "masks")
    with pytest.raises(UserError, match=r"above 2, .*images/3\.png \(8 pixels\)"):
        evaluate(segmented, asked, out=tmp_path / "out")


def test_pairs_have_the_psnr_of_training(street, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        compare_nothing(patch)
        targets = {"data.train_targets": "train/sharp", "data.test_targets": "test/sharp"}
        train.run(pairs_config(street, **targets), workdir=tmp_path / "run")
    report, folder = evaluate(tmp_path / "run", Asked(checkpoint="newest"))
    result = json.loads((tmp_path / "run" / "result.json").read_text())["metrics"]
    assert figures_of(folder)["overall"]["psnr"] == pytest.approx(result["val_psnr"], rel=1e-4)
    ratios = [float(row["psnr"]) for row in rows_of(folder)]
    assert report.worst.tolist() == np.argsort(ratios, kind="stable").tolist()
    assert (folder / "worst.png").is_file()
