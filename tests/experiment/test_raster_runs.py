"""Experiments on 16-bit PNG, 5-channel TIFF and float arrays: training, export and predictions."""

import csv
import json

import keras
import numpy as np
import pytest
from conftest import in_replicas
from raster_files import write_png16, write_tiff
from small_network import as_mnist_cnn

from tfaccel import UserError
from tfaccel.cli import main
from tfaccel.config import default_config, parse
from tfaccel.experiment import train
from tfaccel.experiment.evaluate.asked import Asked
from tfaccel.experiment.evaluate.run import evaluate
from tfaccel.export.predict import Predictor

FORMS = {
    "png": (".png", write_png16, "uint16", 3),
    "tif": (".tif", write_tiff, "uint16", 5),
    "npy": (".npy", np.save, "float32", 2),
}
SIZE = (12, 14)
NAMES = ("bright", "dark")


@pytest.fixture(scope="module", autouse=True)
def _small():
    """A network of two layers, which is quick to build."""
    with as_mnist_cnn():
        yield


def pixels_of(dtype, channels, name, seed):
    """The last channel of a bright image is brighter."""
    pixels = np.random.default_rng(seed).random((*SIZE, channels)) * 0.5
    pixels[..., -1] += 0.4 * (name == "bright")
    return (pixels * 65535).astype(dtype) if dtype == "uint16" else (100 * pixels).astype(dtype)


def config_of(root, form, **changes):
    """An experiment of one epoch on images that it writes."""
    suffix, write, dtype, channels = FORMS[form]
    for split, num in (("training", 12), ("testing", 3)):
        for name in NAMES:
            (root / split / name).mkdir(parents=True)
            for index in range(num):
                pixels = pixels_of(dtype, channels, name, 100 * num + index)
                write(root / split / name / f"{index}{suffix}", pixels)
    config = default_config()
    settings = {
        "data.root": str(root),
        "data.image_size": SIZE,
        "data.channels": channels,
        "data.pixel_dtype": dtype,
        "data.global_batch_size": 8,
        "train_images.horizontal_flip": True,
        "model.name": "mnist_cnn",
        "train.epochs": 1,
        "runtime.xla": False,
    }
    if dtype == "float32":
        settings |= {"data.mean": 30.0, "data.std": 20.0}
    config.update_from_flattened_dict(settings | changes)
    return parse(config)


@pytest.mark.parametrize(
    ("form", "loader"),
    [
        ("tif", "tf_data"),
        pytest.param("png", "auto", marks=pytest.mark.slow),
        pytest.param("npy", "cache", marks=pytest.mark.slow),
    ],
)
def test_it_trains_exports_predicts_and_evaluates(tmp_path, form, loader):
    config = config_of(tmp_path / "images", form, **{"data.loader": loader})
    result = train.run(config, workdir=tmp_path / "run")
    assert np.isfinite(result["metrics"]["loss"])
    export = tmp_path / "run/export/1"
    card = json.loads((export / "tfaccel.json").read_text())
    suffix, _, dtype, channels = FORMS[form]
    assert card["preprocessing"]["formats"] == (["PNG"] if form == "png" else [])
    assert card["preprocessing"]["pixel_dtype"] == dtype
    assert card["class_names"] == list(NAMES)

    # The right answers, slowly: stored pixels are divided and given to the Keras model.
    files, stored = [], []
    for name in NAMES:
        for index in range(3):
            files.append(str(tmp_path / "images/testing" / name / f"{index}{suffix}"))
            stored.append(pixels_of(dtype, channels, name, 300 + index))
    scale, mean, std = (65535, 0, 1) if dtype == "uint16" else (1, 30, 20)
    inputs = (np.stack(stored).astype(np.float64) / scale - mean) / std
    model = keras.saving.load_model(export / "model.keras", compile=False)
    outputs = model(inputs.astype(np.float32), training=False)
    expected = keras.ops.convert_to_numpy(keras.ops.softmax(outputs))

    *answers, wrong = Predictor(export)([*files, __file__])
    found = np.stack([each.probabilities for each in answers])
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert wrong.error.startswith("not a")

    # Predicting into a file goes through a loader.
    output = tmp_path / "rows.csv"
    assert main.main(["predict", f"--model={export}", f"--output={output}", *files]) == 0
    rows = list(csv.DictReader(output.open()))
    assert [each["class_1"] for each in rows] == [NAMES[each] for each in expected.argmax(-1)]
    chances = [float(each["probability_1"]) for each in rows]
    np.testing.assert_allclose(chances, expected.max(-1), atol=1e-4)

    evaluate(tmp_path / "run", Asked(checkpoint="newest"), out=tmp_path / "out")
    assert list((tmp_path / "out").rglob("worst.png"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data.channels": 4}, "has 5 channels of uint16; expected 4 channels of uint16"),
        ({"data.pixel_dtype": "uint8"}, "has 5 channels of uint16; expected 5 channels of uint8"),
        ({"data.loader": "dali_cpu"}, "'dali_cpu' reads images of 8 bits with 1 or 3 channels"),
        ({"train_images.hue_degrees": 9.0}, "hue_degrees=9.0 with channels=5"),
    ],
)
def test_what_does_not_fit_ends_before_training(tmp_path, changes, said):
    config = config_of(tmp_path / "images", "tif", **changes)
    with pytest.raises(UserError, match=said):
        train.run(config, workdir=tmp_path / "run")


@pytest.mark.slow  # tests/data/loaders/test_raster_loaders.py compares the batches
def test_two_replicas_train_as_one(tmp_path, monkeypatch):
    changes = {"data.loader": "tf_data", "train_images.rotation_degrees": 10.0}
    config = config_of(tmp_path / "images", "tif", **changes)
    losses = []
    for num in (1, 2):
        with monkeypatch.context() as patch:
            in_replicas(patch, train, num)
            result = train.run(config, workdir=tmp_path / f"run{num}")
        losses.append([result["metrics"][name] for name in ("loss", "val_loss")])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
