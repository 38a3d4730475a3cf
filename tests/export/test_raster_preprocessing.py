"""An export decodes 16-bit PNG files as they are stored, and takes pixels of TIFF files."""

import keras
import numpy as np
import PIL.Image
import pytest
import tensorflow as tf
from raster_files import noise, write_png16, write_tiff

from tfaccel import UserError
from tfaccel.config import AugmentConfig, ImageConfig
from tfaccel.data import sources
from tfaccel.export.answers import Answers
from tfaccel.export.preprocessing import Preprocessing


def _loader(run, tmp_path, write, suffix, channels, **settings):
    for index in range(4):
        (tmp_path / "all" / "ab"[index % 2]).mkdir(parents=True, exist_ok=True)
        pixels = noise((9, 11, channels), "uint16", index)
        write(tmp_path / "all" / "ab"[index % 2] / f"{index}{suffix}", pixels)
    how = {"image_size": (9, 11), "channels": channels, "global_batch_size": 4}
    source = sources.class_folders(tmp_path / "all")
    return run.loader(source, pixel_dtype="uint16", **how | settings)


def _model(run, channels):
    with run.scope():
        model = keras.Sequential(
            [
                keras.Input((9, 11, channels)),
                keras.layers.GlobalAveragePooling2D(),
                keras.layers.Dense(2, dtype="float32"),
            ]
        )
    run.compile(model, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_png_files_are_decoded_exactly_and_others_are_refused(tmp_path, setup, channels):
    loader = _loader(setup(), tmp_path, write_png16, ".png", channels, mean=0.4, std=0.2)
    how = Preprocessing.of(loader.data)
    assert (how.is_raster, how.takes_files) == (True, True)
    assert Preprocessing.from_dict(how.as_dict()).as_dict() == how.as_dict()
    files = loader.data.found.images
    taken = how.pixels(tf.constant([files.read(0)]))
    assert taken.dtype == "uint16"
    np.testing.assert_array_equal(taken[0], noise((9, 11, channels), "uint16", 0))
    wanted = (taken.numpy().astype(np.float64) / 65535 - 0.4) / 0.2
    np.testing.assert_allclose(how.inputs(taken), wanted, rtol=1e-5, atol=1e-6)

    write_png16(tmp_path / "other.png", noise((9, 11, channels % 4 + 1), "uint16"))
    grey = PIL.Image.fromarray(noise((9, 11), "uint8"))
    grey.save(tmp_path / "eight.png")
    grey.save(tmp_path / "eight.jpg")
    for name in ("other.png", "eight.png", "eight.jpg"):
        with pytest.raises(tf.errors.InvalidArgumentError, match="not a PNG of 16 bits"):
            how.pixels(tf.constant([(tmp_path / name).read_bytes()]))


def test_windows_and_stored_sizes_are_those_of_the_loader(tmp_path, setup):
    settings = {"image_size": (6, 5), "loader": "memory"}
    for stored_size in (None, (8, 8)):
        settings |= {"augment": "imagenet_eval", "stored_size": stored_size}
        how = Preprocessing.of(
            (loader := _loader(setup(), tmp_path, write_png16, ".png", 3, **settings)).data
        )
        assert how.stored_size == stored_size
        encoded = [loader.data.found.images.read(index) for index in range(4)]
        mine = how.inputs(how.pixels(tf.constant(encoded))).numpy()
        theirs = np.concatenate([batch[0].numpy() for batch in loader])
        # Pillow and TensorFlow resize, and each rounds to one of 65,536 levels.
        np.testing.assert_allclose(mine, theirs, atol=3e-5 if stored_size is None else 1e-4)


def test_an_export_of_tiff_files_takes_pixels(tmp_path, setup, caplog):
    run = setup()
    loader, model = _loader(run, tmp_path, write_tiff, ".tif", 5), _model(run, 5)
    with pytest.raises(UserError, match="but the images have pixels of uint16; use"):
        run.export(model, tmp_path / "out/1", loader=loader, pixel_dtype="uint8")
    with caplog.at_level("INFO", logger="tfaccel"):
        path = run.export(model, tmp_path / "out/1", loader=loader, pixel_dtype="uint16")
    assert "the SavedModel takes pixels and no files" in caplog.text
    signatures = tf.saved_model.load(str(path)).signatures
    assert not {"predict_bytes", "preprocess"} & set(signatures)
    pixels = noise((3, 9, 11, 5), "uint16")
    found = signatures["serving_default"](image=tf.constant(pixels))["logits"]
    wanted = model((pixels / 65535).astype(np.float32), training=False)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_restored_images_have_the_scale_of_the_stored_ones():
    outputs = tf.constant(np.linspace(-1, 2, 12, dtype=np.float32).reshape(1, 2, 2, 3))
    how = {"mean": (0.5,) * 3, "std": (0.25,) * 3}
    for scale, limit in ((255.0, 1), (65535.0, 1), (1.0, np.inf)):
        found = Answers("image", **how, scale=scale)(outputs)["image"]
        wanted = outputs.numpy() * 0.25 + 0.5
        wanted = wanted if scale == 1 else wanted.clip(0, limit) * scale
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_a_card_of_an_earlier_version_is_read():
    images = ImageConfig(image_size=(8, 9), channels=1, mean=0.2, std=0.3)
    how = Preprocessing(images, AugmentConfig(window="resized_center_crop", center_fraction=0.9))
    facts = how.as_dict()
    del facts["pixel_dtype"]
    assert Preprocessing.from_dict(facts) == how
