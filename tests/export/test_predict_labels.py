"""Several classes an image, and numbers, from a list to the lines of `tfaccel predict`."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from listed_images import SIZE, files_of, pixels_of, write_listed

import tfaccel
from tfaccel import UserError, sources
from tfaccel.cli import main
from tfaccel.export.predict import Prediction, Predictor

NUM = 12


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_listed(tmp_path_factory.mktemp("list"), NUM)


def exported(root, folder, task, loss):
    """An export of an untrained model, and the model's outputs for the images of the list."""
    run = tfaccel.setup(gpu_ids=())
    source = sources.image_list(root / "list.csv", label_columns=["a", "b"], task=task)
    loader = run.loader(source, global_batch_size=NUM, **SIZE)
    with run.scope():
        model = keras.Sequential(
            [keras.Input((10, 8, 1)), layers.Flatten(), layers.Dense(2, dtype="float32")]
        )
    run.compile(model, loss=loss)
    run.export(model, folder, loader=loader, samples=4)
    return model.predict(np.stack(list(map(pixels_of, files_of(root, NUM)))), verbose=0)


def test_several_classes(root, tmp_path, capsys):
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    logits = exported(root, tmp_path / "1", "multilabel", loss)
    chances = 1 / (1 + np.exp(-logits))
    card = json.loads((tmp_path / "1" / "tfaccel.json").read_text())
    assert (card["task"], card["class_names"], card["answers"]) == (
        "multilabel",
        ["a", "b"],
        "logits",
    )
    served = tf.saved_model.load(str(tmp_path / "1")).signatures["predict_bytes"]
    files = files_of(root, NUM)
    answers = served(image_bytes=tf.constant([tf.io.read_file(each).numpy() for each in files]))
    np.testing.assert_allclose(answers["probabilities"], chances, atol=1e-5)
    np.testing.assert_array_equal(answers["is_present"], chances >= 0.5)
    threshold = float(np.sort(chances.ravel())[NUM]) - 1e-4  # half of all are above it
    missing = str(root / "missing.png")
    flags = [f"--model={tmp_path / '1'}", f"--threshold={threshold}", "--json"]
    assert main.main(["predict", *flags, *files, missing]) == 1
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(found) == NUM + 1
    for each, own in zip(found[:NUM], chances, strict=True):
        wanted = {name: p for name, p in zip("ab", own.tolist(), strict=True) if p >= threshold}
        said = {one["class"]: one["probability"] for one in each["classes"]}
        assert said == pytest.approx(wanted, abs=1e-5)
        assert list(said) == sorted(said, key=said.get, reverse=True)
    assert (found[NUM]["classes"], found[NUM]["error"]) == ([], "No such file or directory")
    with pytest.raises(UserError, match=r"threshold=2.0; expected a number"):
        main.main(["predict", f"--model={tmp_path / '1'}", "--threshold=2", "x"])


def test_numbers(root, tmp_path, capsys):
    numbers = exported(root, tmp_path / "1", "regression", "mse")
    predictor = Predictor(tmp_path / "1")
    assert (predictor.task, predictor.class_names) == ("regression", ["a", "b"])
    files = files_of(root, NUM)
    assert main.main(["predict", f"--model={tmp_path}", "--json", *files, "missing.png"]) == 1
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for each, own in zip(found[:NUM], numbers.tolist(), strict=True):
        assert each["numbers"] == pytest.approx({"a": own[0], "b": own[1]}, abs=1e-4)
    assert found[NUM] == {
        "path": "missing.png",
        "error": "No such file or directory",
        "numbers": {},
    }


def test_the_lines_that_people_read():
    names, chances = ("a", "b", "c"), np.array([0.125, 0.9, 0.5], np.float32)
    several = Prediction("1.png", chances)
    assert several.line(names, 1, threshold=0.5) == "1.png: b 90.0%, c 50.0%"
    assert several.line(names, 1, threshold=0.95) == "1.png: no class of at least 95%"
    assert several.line(names, 1) == "1.png: b 90.0%"
    numbers = Prediction("1.png", numbers=np.array([12.34567, -0.5]))
    assert numbers.line(("angle", "ink"), 1) == "1.png: angle 12.35, ink -0.5"
