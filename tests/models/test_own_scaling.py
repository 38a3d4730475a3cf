"""A model that scales pixels by itself wants 0..255, at whatever depth it does so."""

import keras
import numpy as np
import PIL.Image
import pytest
from keras import layers

import tfaccel
from tfaccel.models.own_scaling import misfit, own_scaling


def model_of(*first, nested=False):
    inner = [keras.Sequential([keras.Input((6, 5, 1)), *first])] if nested else first
    return keras.Sequential([keras.Input((6, 5, 1)), *inner, layers.Flatten(), layers.Dense(2)])


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: layers.Rescaling(1 / 255),
        lambda: layers.Rescaling(1 / 127.5, -1),
        lambda: layers.Normalization(mean=120.0, variance=64.0**2),
    ],
)
def test_what_scales_is_found_at_any_depth(make, nested):
    model = model_of(make(), nested=nested)
    assert "scaled twice" in misfit(model, (0.0, 1.0))
    assert "scaled twice" in misfit(model, (-1.0, 1.0))
    assert not misfit(model, (0.0, 255.0))
    assert not misfit(model, None)


def test_what_takes_small_numbers_is_let_pass():
    assert (
        own_scaling(model_of(layers.Rescaling(1 / 9), layers.Normalization(mean=0.5, variance=0.1)))
        is None
    )


def test_fit_and_lint_say_it(setup, tmp_path, caplog):
    for index in range(4):
        path = tmp_path / "ab"[index % 2] / f"{index}.png"
        path.parent.mkdir(exist_ok=True)
        PIL.Image.fromarray(np.full((6, 5), 60 * index, np.uint8)).save(path)
    run = setup(xla=False)
    images = {"image_size": (6, 5), "channels": 1, "global_batch_size": 2}
    with run.scope():
        model = model_of(layers.Rescaling(1 / 255))
    run.compile(model, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    whole = run.image_folder(tmp_path, **images, std=1 / 255)
    model.evaluate(whole, verbose=0)
    assert "scaled twice" not in caplog.text
    assert not [each for each in tfaccel.lint(model, whole) if "0 to 255" in each.what]
    small = run.image_folder(tmp_path, **images)
    model.evaluate(small, verbose=0)
    assert caplog.text.count("scaled twice") == 1
    assert [each for each in tfaccel.lint(model, small) if "0 to 255" in each.what]
