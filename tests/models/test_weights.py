"""Weights that a model begins with, from files that other models were saved in."""

import keras
import numpy as np
import pytest
from keras import layers

from tfaccel import UserError, models
from tfaccel.models.weights import begin_from


def build(num_outputs=3, *, seed=0):
    keras.utils.set_random_seed(seed)
    inner = keras.Sequential([keras.Input((4,)), layers.Dense(5), layers.BatchNormalization()])
    x = keras.Input((4,))
    return keras.Model(x, layers.Dense(num_outputs, name="logits")(inner(x)), name="small")


def values(model):
    return [keras.ops.convert_to_numpy(each) for each in model.weights]


@pytest.mark.parametrize("name", ["a.keras", "a.weights.h5"])
def test_a_file_of_the_same_model_gives_all_layers(tmp_path, caplog, name):
    saved, model = build(seed=1), build()
    (saved.save if name == "a.keras" else saved.save_weights)(tmp_path / name)
    caplog.set_level("INFO", "tfaccel")
    begin_from(str(tmp_path / name), model)
    for mine, wanted in zip(values(model), values(saved), strict=True):
        np.testing.assert_array_equal(mine, wanted)
    # Of batch norm the values are those that it begins with, so that nothing shows.
    assert "model: 2 of 3 layers from" in caplog.text


def test_of_other_classes_the_head_is_as_it_was_and_is_named(tmp_path, caplog):
    saved, model = build(num_outputs=7, seed=1), build()
    saved.save_weights(tmp_path / "a.weights.h5")
    head = values(model)[-2]
    begin_from(str(tmp_path / "a.weights.h5"), model)
    np.testing.assert_array_equal(values(model)[0], values(saved)[0])
    np.testing.assert_array_equal(values(model)[-2], head)
    assert "not in that file, so as they were: " in caplog.text
    assert "logits" in caplog.text


def test_a_file_of_keras_applications_gives_the_body(tmp_path):
    arguments = {"weights": None, "pooling": "avg", "input_shape": (32, 32, 3)}
    keras.utils.set_random_seed(1)
    body = keras.applications.MobileNetV3Small(include_top=False, minimalistic=True, **arguments)
    file = tmp_path / "notop.h5"
    keras.src.legacy.saving.legacy_h5_format.save_model_to_hdf5(body, file)
    model = models.build("MobileNetV3Small", image_shape=(32, 32, 3), num_outputs=3)
    names = [each.name for each in model.layers if each.weights]
    same = next(each for each in body.layers if each.weights and each.name in names)
    begin_from(str(file), model)
    for mine, wanted in zip(model.get_layer(same.name).weights, same.weights, strict=True):
        np.testing.assert_array_equal(mine, wanted)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("none.keras", "is no file that ends in .keras, .weights.h5, .h5; give one"),
        ("a.txt", "is no file that ends in"),
        ("broken.weights.h5", "cannot be read for small"),
        ("broken.keras", "cannot be read for small"),
        ("broken.h5", "cannot be read for small"),
        ("other.h5", "fits no layer of small; give a file of the same architecture"),
    ],
)
def test_what_is_no_weights_is_refused_in_a_sentence(tmp_path, name, words):
    file = tmp_path / name
    if name == "other.h5":
        other = keras.Sequential([keras.Input((2,)), layers.Dense(9, name="else")])
        keras.src.legacy.saving.legacy_h5_format.save_model_to_hdf5(other, file)
    elif name != "none.keras":
        file.write_text("nothing")
    with pytest.raises(UserError, match=r"model\.weights=") as caught:
        begin_from(str(file), build())
    assert words in str(caught.value)
