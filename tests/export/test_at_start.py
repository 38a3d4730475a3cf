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
        at_start, "_check_pixels", lambda *a, of, **b: of == "test" or check(*a, of=of, **b)
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
    with pytest.raises(UserError, match=r"needs about .* MiB below .* 0\.0 MiB are free"):
        check_at_start(*asked, folder=tmp_path)


def test_the_loader_says_what_range_its_pixels_have(setup, root, caplog):
    caplog.set_level("INFO", "tfaccel")
    run = setup()
    images = {"image_size": (6, 5), "channels": 1, "global_batch_size": 2}
    assert run.image_folder(root, **images).pixel_range == (0, 1)
    assert "pixels come as 0 to 1" in caplog.text
    assert run.image_folder(root, **images, mean=0.5, std=0.5).pixel_range == (-1, 1)
    as_keras = run.image_folder(root, **images, std=1 / 255)
    assert as_keras.pixel_range == (0, pytest.approx(255))


# What a script is told as its first `fit` begins.


def script(setup, make, **compiled):
    run = setup(xla=False)
    with run.scope():
        model = make()
    run.compile(model, "sgd", **({"loss": CROSS_ENTROPY} | compiled))
    return run, model


CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
IMAGES = {"image_size": (6, 5), "channels": 1, "global_batch_size": 2, "loader": "memory"}


def of_layers(*some, flat=True):
    given = keras.Input((6, 5, 1))
    outputs = layers.Flatten()(given) if flat else given
    for each in some:
        outputs = each(outputs)
    return keras.Model(given, outputs)


class Unknown(keras.Model):
    """A model of which Keras knows no inputs."""

    def __init__(self):
        super().__init__()
        self.flat, self.dense = layers.Flatten(), layers.Dense(2)

    def call(self, x):
        return self.dense(self.flat(x))


class Nameless(layers.Layer):
    """A layer that says nothing of its arguments."""

    def __init__(self, factor, name=None):
        super().__init__(name=name)
        self.factor = factor

    def call(self, x):
        return x * self.factor

    def get_config(self):
        return {"name": self.name}


def same_names():
    both = [keras.Input((6, 5, 1), name=name) for name in ("a-b", "a.b")]
    return keras.Model(both, layers.Dense(2)(layers.Flatten()(layers.Add()(both))))


def of_lambda():
    return of_layers(layers.Lambda(lambda x: x / 2), layers.Dense(2))


def inner_lambda():
    inner = keras.Sequential([keras.Input((30,)), layers.Lambda(lambda x: x / 2)])
    return of_layers(inner, layers.Dense(2))


def two_outputs():
    given = keras.Input((6, 5, 1))
    flat = layers.Flatten()(given)
    return keras.Model(
        given, [layers.Dense(2, name="one")(flat), layers.Dense(2, name="two")(flat)]
    )


REFUSED = {
    "no known inputs": Unknown,
    "a lambda": of_lambda,
    "a lambda within": inner_lambda,
    "a poor config": lambda: of_layers(Nameless(2.0), layers.Dense(2)),
}


@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED)
def test_a_script_is_told_at_its_first_fit_what_its_end_would_refuse(
    setup, root, tmp_path, caplog, make
):
    run, model = script(setup, make)
    train = run.image_folder(root, shuffle=True, augment="mnist", **IMAGES)
    test = run.image_folder(root, **IMAGES)
    model.fit(train, validation_data=test, epochs=2, verbose=0)
    model.fit(train, validation_data=test, verbose=0)
    told = [each.message for each in caplog.records if "run.export would refuse" in each.message]
    assert len(told) == 1
    with pytest.raises(UserError) as refused:
        run.export(model, tmp_path / "1", loader=test)
    assert str(refused.value) in told[0]


def test_of_several_outputs_and_another_loss_a_script_is_told(setup, root, tmp_path, caplog):
    for make, loss in (
        (two_outputs, [CROSS_ENTROPY] * 2),
        (lambda: of_layers(layers.Dense(1)), "mse"),
    ):
        caplog.clear()
        run, model = script(setup, make, loss=loss)
        test = run.image_folder(root, **IMAGES)
        at_start.warn_at_start(model, None, test, run.runtime)
        with pytest.raises(UserError) as refused:
            run.export(model, tmp_path / "1", loader=test)
        assert str(refused.value) in caplog.text


def test_names_that_become_the_same_are_told(setup, tmp_path, caplog):
    run, model = script(setup, same_names)
    at_start.warn_at_start(model, None, None, run.runtime)
    with pytest.raises(UserError) as refused:
        run.export(model, tmp_path / "1")
    assert str(refused.value) in caplog.text


def test_a_script_whose_export_will_pass_is_told_nothing_bad(setup, root, tmp_path, caplog):
    """A Sequential without an Input, too, whose inputs are known once it is built."""
    run, model = script(setup, lambda: keras.Sequential([layers.Flatten(), layers.Dense(2)]))
    test = run.image_folder(root, **IMAGES)
    with caplog.at_level("INFO", logger="tfaccel"):
        model.fit(test, validation_data=test, verbose=0)
    assert "of 4 images an export makes the pixels" in caplog.text
    assert "refuse" not in caplog.text
    run.export(model, tmp_path / "1", loader=test)


def test_a_script_is_told_of_a_decoder_that_parts(setup, root, caplog, monkeypatch):
    run, model = script(setup, lambda: of_layers(layers.Dense(2)))
    train = run.image_folder(root, shuffle=True, augment="mnist", **IMAGES)
    pixels = Preprocessing.pixels
    monkeypatch.setattr(Preprocessing, "pixels", lambda *a: pixels(*a) // 2)
    model.fit(train, verbose=0)
    assert "the training image" in caplog.text
    assert "would be another in the export" in caplog.text


def test_a_look_that_fails_does_not_end_a_script(setup, root, caplog, monkeypatch):
    def fails(*_):
        raise KeyError("what nobody foresaw")

    run, model = script(setup, lambda: of_layers(layers.Dense(2)))
    monkeypatch.setattr(at_start, "_look", fails)
    model.fit(run.image_folder(root, **IMAGES), verbose=0)
    assert "could not be tried ('what nobody foresaw')" in caplog.text
