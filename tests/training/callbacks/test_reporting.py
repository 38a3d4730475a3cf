"""The page of a script's `fit`: `run.report`."""

import json

import keras
import numpy as np
import pytest
from conftest import compiled
from html_pages import Page

from tfaccel import UserError, sources
from tfaccel.training.page.curves import read

X = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)


def make():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])


def fit(model, callbacks, **settings):
    return model.fit(X, X[:, :1], batch_size=2, verbose=0, callbacks=callbacks, **settings)


@pytest.fixture
def model():
    return compiled(make, 1, optimizer=keras.optimizers.SGD(0.25), loss="mse", xla=False)


def test_a_resumed_fit_adds_to_the_page(setup, model, tmp_path):
    folder = tmp_path / "runs" / "a"
    run = setup()
    first = fit(model, [run.report(folder)], epochs=2, validation_data=(X, X[:, :1])).history
    assert [each["step"] for each in read(folder)] == [6, 12]
    again = fit(model, [run.report(folder)], epochs=3, initial_epoch=1)  # epoch 2 is trained again
    losses = [first["loss"][0], *again.history["loss"]]
    epochs = read(folder)
    assert [each["loss"] for each in epochs] == losses
    assert [each["seconds"] for each in epochs] == sorted(each["seconds"] for each in epochs)
    page = Page(folder / "report.html")
    assert page.links == []
    assert page.headings == ["Curves", "Every epoch"]
    assert {"1", "2", "3", "0.25"} <= set(page.cells)
    fit(model, [run.report(folder)], epochs=1)  # begins anew
    assert len(read(folder)) == 1


def test_the_page_shows_the_first_images(setup, tmp_path):
    run = setup()
    pixels = np.random.default_rng(0).integers(0, 256, (8, 4, 4, 1), np.uint8)
    source = sources.arrays(pixels, np.arange(8) % 2)
    train = run.loader(source, image_size=(4, 4), channels=1, global_batch_size=4, shuffle=True)
    with run.scope():
        flat = [keras.layers.Flatten(), keras.layers.Dense(2)]
        model = keras.Sequential([keras.Input((4, 4, 1)), *flat])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    run.compile(model, optimizer="sgd", loss=loss)
    model.fit(train, epochs=1, verbose=0, callbacks=[run.report(tmp_path / "a", train)])
    page = Page(tmp_path / "a" / "report.html")
    assert page.headings == ["Curves", "The first images of training", "Every epoch"]
    (line,) = (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["record"] == "epoch"


def test_a_folder_that_is_a_file_is_refused_before_training(setup, model, tmp_path):
    (tmp_path / "a").touch()
    with pytest.raises(UserError, match="or give another folder"):
        fit(model, [setup().report(tmp_path / "a")], epochs=1)
    with pytest.raises(UserError, match="train"):
        setup().report(tmp_path / "b", X)


def test_a_page_that_cannot_be_drawn_is_a_warning(setup, model, tmp_path, monkeypatch, caplog):
    def no_font(*_, **__):
        raise ValueError("no font")

    monkeypatch.setattr("tfaccel.training.page.page.draw", no_font)
    fit(model, [setup().report(tmp_path)], epochs=1)
    assert "report.html cannot be written (ValueError: no font)" in caplog.text
