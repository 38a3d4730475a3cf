"""Runs of networks for masks by a config: the loss falls, and the export gives masks."""

import functools
import pathlib
import runpy

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfaccel.config import parse
from tfaccel.data.digit_scenes import ensure_digit_scenes
from tfaccel.experiment import models, train
from tfaccel.experiment.models import segmentation
from tfaccel.experiment.models.frozen import backbone_of

CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "segmentation.py"
SIZE = (50, 44)  # no multiples of 32


def small_body(image, *, image_shape):
    """Five halvings of a few channels each."""
    x = image
    for level in range(5):
        x = layers.Conv2D(16, 3, strides=2, padding="same", name=f"half_{level}")(x)
        x = layers.BatchNormalization(momentum=0.8, name=f"norm_{level}")(x)
        x = layers.ReLU(name=f"relu_{level}")(x)
    return keras.Model(keras.utils.get_source_inputs(image)[0], x, name="small")


@pytest.fixture(autouse=True)
def _small(monkeypatch, tmp_path):
    """The scenes are in the test's own folder, and both networks have a small backbone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    networks = {
        f"{decoder}_mobilenetv2": functools.partial(segmentation.build, decoder, small_body)
        for decoder in ("unet", "deeplab")
    }
    monkeypatch.setattr(models, "_segmentation", lambda: networks)
    yield
    keras.config.set_dtype_policy("float32")


def config(name, **changes):
    config = runpy.run_path(str(CONFIG))["get_config"]("smoke")
    settings = {
        "runtime.xla": False,
        "runtime.gpu_ids": (),
        "data.image_size": SIZE,
        "model.name": name,
        "train.learning_rate": 1e-2,
        "train.epochs": 3,
        "train.warmup_epochs": 0.0,
    }
    with config.ignore_type():
        config.update_from_flattened_dict(settings | changes)
    return parse(config)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unet_mobilenetv2", "deeplab_mobilenetv2"])
def test_the_loss_falls(name, setup):
    keras.utils.set_random_seed(0)
    asked = config(name, **{"data.image_size": (32, 32)})
    data, _, model = train.prepare(setup(xla=False, gpu_ids=()), asked)
    losses = model.fit(data, epochs=3, verbose=0).history["loss"]
    assert losses[0] > 1.1 * losses[1] > 1.1 * losses[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unet_mobilenetv2", "deeplab_mobilenetv2"])
def test_the_export_answers_masks_of_the_images_size(name, tmp_path):
    result = train.run(config(name), workdir=tmp_path / "run")
    images = sorted((ensure_digit_scenes() / "test" / "images").iterdir())[:3]
    files = tf.constant([each.read_bytes() for each in images])
    served = tf.saved_model.load(result["export"]).signatures["predict_bytes"](image=files)
    assert served["probabilities"].shape == (3, *SIZE, 11)
    np.testing.assert_allclose(np.sum(served["probabilities"], -1), 1, rtol=0, atol=1e-5)
    model = keras.saving.load_model(pathlib.Path(result["export"]) / "model.keras", compile=False)
    assert model.output_shape == (None, *SIZE, 11)


def test_a_frozen_backbone_thaws_and_learns_with_its_own_rate(setup, caplog):
    caplog.set_level("INFO", "tfaccel")
    settings = {
        "model.freeze": "backbone",
        "model.thaw_epochs": "1",
        "train.backbone_factor": 0.1,
        "data.image_size": (32, 32),
    }
    asked = config("unet_mobilenetv2", **settings)
    _, _, model = train.prepare(setup(xla=False, gpu_ids=()), asked)
    assert [each.name for each in backbone_of(model)] == [
        f"{kind}_{level}" for level in range(5) for kind in ("half", "norm")
    ]
    assert not any(each.trainable_weights for each in backbone_of(model))
    assert any("decoder_" in each.path for each in model.trainable_weights)
