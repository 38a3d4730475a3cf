"""What the export would refuse at the end is refused before training."""

import shutil

import keras
import numpy as np
import PIL.Image
import pytest
import tensorflow as tf
from keras import layers

from tfaccel.errors import UserError
from tfaccel.export import at_start
from tfaccel.export.at_start import check_at_start
from tfaccel.export.preprocessing import Preprocessing


@pytest.fixture
def root(tmp_path):
    random = np.random.default_rng(0)
    for index in range(4):
        path = tmp_path / "images" / "ab"[index % 2] / f"{index}.png"
        path.parent.mkdir(exist_ok=True, parents=True)
        PIL.Image.fromarray(random.integers(0, 256, (6, 5), dtype=np.uint8)).save(path)
    return tmp_path / "images"


def job(setup, root, *, loss=None, loader="memory"):
    run = setup()
    with run.scope():
        model = keras.Sequential([keras.Input((6, 5, 1)), layers.Flatten(), layers.Dense(2)])
    run.compile(model, loss=loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    images = {"image_size": (6, 5), "channels": 1, "global_batch_size": 2, "loader": loader}
    train = run.image_folder(root, shuffle=True, augment="mnist", **images)
    return model, train, run.image_folder(root, **images), run.runtime


@pytest.mark.parametrize("loader", ["memory", "tf_data"])
def test_what_suits_passes(setup, root, tmp_path, loader):
    check_at_start(*job(setup, root, loader=loader), folder=tmp_path)


def test_a_decoder_that_parts_is_named_with_the_file(setup, root, tmp_path, monkeypatch):
    asked = job(setup, root)
    pixels = Preprocessing.pixels
    monkeypatch.setattr(Preprocessing, "pixels", lambda *a: pixels(*a) // 2)
    with pytest.raises(UserError, match=r"test image .*0\.png would be another.*in the decoder"):
        check_at_start(*asked, folder=tmp_path)


def test_a_file_that_the_export_cannot_decode_is_named(setup, root, tmp_path, monkeypatch):
    def fails(*_):
        raise tf.errors.InvalidArgumentError(None, None, "not a JPEG or PNG file")

    asked = job(setup, root)
    monkeypatch.setattr(Preprocessing, "pixels", fails)
    with pytest.raises(UserError, match=r"test images .*0\.png and .*are read by the loader, but"):
        check_at_start(*asked, folder=tmp_path)


def test_a_training_image_alone_is_found_too(setup, root, tmp_path, monkeypatch):
    asked = job(setup, root)
    check = at_start._check_pixels
    monkeypatch.setattr(
        at_start, "_check_pixels", lambda *a, of: 0 if of == "test" else check(*a, of=of)
    )
    pixels = Preprocessing.pixels
    monkeypatch.setattr(Preprocessing, "pixels", lambda *a: pixels(*a) // 2)
    with pytest.raises(UserError, match=r"training image .*0\.png would be another"):
        check_at_start(*asked, folder=tmp_path)


def test_a_loss_that_says_nothing_of_the_outputs_is_refused(setup, root, tmp_path):
    with pytest.raises(UserError, match="was compiled with the loss"):
        check_at_start(*job(setup, root, loss=keras.losses.MeanSquaredError()), folder=tmp_path)


def test_too_little_room_is_said(setup, root, tmp_path, monkeypatch):
    asked = job(setup, root)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 0))
    with pytest.raises(UserError, match=r"needs about .* MiB below .* 0 MiB are free"):
        check_at_start(*asked, folder=tmp_path)


def test_the_loader_says_what_range_its_pixels_have(setup, root, caplog):
    caplog.set_level("INFO", "tfaccel")
    run = setup()
    images = {"image_size": (6, 5), "channels": 1, "global_batch_size": 2}
    assert run.image_folder(root, **images).pixel_range == (0, 1)
    run.image_folder(root, **images)
    assert caplog.text.count("data: pixels come as 0 to 1 (0 to 255 by mean=0, std=1/255)") == 1
    assert run.image_folder(root, **images, mean=0.5, std=0.5).pixel_range == (-1, 1)
    assert "data: pixels come as -1 to 1 (0 to 255" in caplog.text
    as_keras = run.image_folder(root, **images, std=1 / 255)
    assert as_keras.pixel_range == (0, pytest.approx(255))
    assert caplog.messages[-2] == "data: pixels come as 0 to 255"
