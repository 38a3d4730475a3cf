"""Weights that a model begins with, from files that other models were saved in."""

import json

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfaccel import UserError
from tfaccel.experiment import models
from tfaccel.experiment.models.weights import begin_from

save_model_to_hdf5 = keras.src.legacy.saving.legacy_h5_format.save_model_to_hdf5


@pytest.fixture(autouse=True)
def each_line(caplog):
    caplog.set_level("INFO", "tfaccel")


def build(num_outputs=3, *, seed=0, first="first", hidden=5, extra=False):
    """Returns a dense layer and batch norm in a model of their own, and a head: 3 layers."""
    keras.utils.set_random_seed(seed)
    inner = [keras.Input((4,)), layers.Dense(hidden, name=first), layers.BatchNormalization()]
    x = keras.Input((4,))
    y = keras.Sequential(inner, name="inner")(x)
    y = layers.Dense(5, name="extra")(y) if extra else y
    return keras.Model(x, layers.Dense(num_outputs, name="logits")(y), name="small")


def save(model, path):
    """Writes the file that its name asks for."""
    if path.name.endswith(".weights.json"):
        model.save_weights(path, max_shard_size=2e-7)  # 215 bytes, so several files
    elif path.name.endswith(".weights.h5"):
        model.save_weights(path)
    elif path.suffix == ".keras":
        model.save(path)
    else:
        save_model_to_hdf5(model, path)
    return str(path)


def values(model):
    return [keras.ops.convert_to_numpy(each) for each in model.weights]


def expect_equal(model, wanted):
    for mine, other in zip(values(model), values(wanted), strict=True):
        np.testing.assert_array_equal(mine, other)


FILES = ["a.keras", "a.weights.h5", "a.weights.json", "a.h5", "a.hdf5"]
files = pytest.mark.parametrize(
    "name",
    [*FILES[:-1], pytest.param(FILES[-1], marks=pytest.mark.slow)],  # its reader is .h5's
)


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_the_same_model_gives_all_layers(tmp_path, caplog, name):
    saved, model = build(seed=1), build()
    begin_from(save(saved, tmp_path / name), model)
    expect_equal(model, saved)
    assert "model: 3 of 3 layers from" in caplog.text
    assert not [each for each in caplog.records if each.levelname == "WARNING"]


@files
def test_a_models_own_file_gives_all_layers(tmp_path, caplog, name):
    model = build()
    wanted = values(model)
    begin_from(save(model, tmp_path / name), model)
    for mine, other in zip(values(model), wanted, strict=True):
        np.testing.assert_array_equal(mine, other)
    assert "model: 3 of 3 layers from" in caplog.text
    assert not [each for each in caplog.records if each.levelname == "WARNING"]


@files
def test_a_file_of_zeros_and_ones_alone_gives_all_layers(tmp_path, caplog, name):
    saved, model = build(), build()
    for each in (saved, model):
        each.set_weights([np.full_like(value, 1) for value in each.get_weights()])
    begin_from(save(saved, tmp_path / name), model)
    assert "model: 3 of 3 layers from" in caplog.text


@files
def test_of_other_classes_the_head_is_as_it_was_and_is_named(tmp_path, caplog, name):
    saved, model = build(num_outputs=7, seed=1), build()
    head = values(model)[-2:]
    begin_from(save(saved, tmp_path / name), model)
    np.testing.assert_array_equal(values(model)[0], values(saved)[0])
    for mine, other in zip(values(model)[-2:], head, strict=True):
        np.testing.assert_array_equal(mine, other)
    assert "model: 2 of 3 layers from" in caplog.text
    assert "with other shapes in that file, so they start from random values: logits" in caplog.text


@pytest.mark.parametrize("name", [each for each in FILES if "json" not in each])  # lacks names
def test_a_layer_that_the_file_lacks_is_named(tmp_path, caplog, name):
    saved, model = build(seed=1), build(extra=True)
    extra = model.get_layer("extra").get_weights()
    begin_from(save(saved, tmp_path / name), model)
    assert "not in that file, so they start from random values: extra" in caplog.text
    np.testing.assert_array_equal(values(model)[0], values(saved)[0])
    for mine, other in zip(model.get_layer("extra").get_weights(), extra, strict=True):
        np.testing.assert_array_equal(mine, other)
    assert "model: 3 of 4 layers from" in caplog.text


class Two(layers.Layer):
    """Two variables, of which the second alone may have another shape."""

    def __init__(self, number, **settings):
        super().__init__(**settings)
        self.number = number

    def build(self, _):
        self.one = self.add_weight(shape=(4,), initializer="zeros", name="one")
        self.two = self.add_weight(shape=(self.number,), initializer="zeros", name="two")

    def call(self, x):
        return x * self.one + keras.ops.sum(self.two)


@files
def test_a_layer_takes_all_of_its_weights_or_none(tmp_path, caplog, name):
    def make(number):
        head = layers.Dense(2, name="head")
        return keras.Sequential([keras.Input((4,)), Two(number, name="two"), head], name="small")

    saved, model = make(3), make(2)
    saved.layers[0].set_weights([np.ones(4), np.ones(3)])
    begin_from(save(saved, tmp_path / name), model)
    for each in model.layers[0].get_weights():
        np.testing.assert_array_equal(each, np.zeros_like(each))
    assert "with other shapes in that file, so they start from random values: two" in caplog.text


@pytest.mark.parametrize("name", ["a.keras", "a.weights.h5", "a.h5"])
def test_frozen_layers_whole_numbers_seeds_and_nan_are_taken(tmp_path, caplog, name):
    class Counted(layers.Layer):
        def build(self, _):
            zero = {"initializer": "zeros", "trainable": False}
            self.count = self.add_weight(shape=(), dtype="int32", name="count", **zero)

        def call(self, x):
            return x + keras.ops.cast(self.count, x.dtype)

    def make():
        first = layers.Dense(3, name="first", trainable=False)
        norm = layers.BatchNormalization(name="norm", trainable=False)
        parts = [first, norm, layers.Dropout(0.5), Counted(name="counted")]
        return keras.Sequential([keras.Input((4,)), *parts, layers.Dense(2, name="head")])

    saved, model = make(), make()
    saved.get_layer("head").bias.assign([np.nan, 1.0])
    saved.get_layer("counted").count.assign(7)
    begin_from(save(saved, tmp_path / name), model)
    expect_equal(model, saved)
    assert "model: 4 of 4 layers from" in caplog.text
    assert "that file has infinite or NaN weights for: head" in caplog.text


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("a.keras", "bfloat16"),
        ("a.h5", "float16"),
        ("a.keras", "mixed_bfloat16"),
        pytest.param("a.h5", "bfloat16", marks=pytest.mark.slow),
        pytest.param("a.keras", "float16", marks=pytest.mark.slow),
        pytest.param("a.h5", "mixed_bfloat16", marks=pytest.mark.slow),
    ],
)
def test_a_file_of_float32_is_rounded_to_what_the_model_holds(tmp_path, caplog, name, policy):
    saved = build(seed=1)
    keras.config.set_dtype_policy(policy)
    try:
        model = build()
    finally:
        keras.config.set_dtype_policy("float32")
    begin_from(save(saved, tmp_path / name), model)
    assert "model: 3 of 3 layers from" in caplog.text
    held = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}.get(policy, np.float32)
    for mine, other in zip(values(model), values(saved), strict=True):
        np.testing.assert_array_equal(mine, other.astype(held).astype(mine.dtype))


@pytest.mark.parametrize("name", ["a.weights.h5", "a.h5"])
def test_every_replica_has_the_weights_of_the_file(tmp_path, caplog, name):
    saved = build(seed=1)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    file = save(saved, tmp_path / name)
    with strategy.scope():
        model = build()
        begin_from(file, model)
    assert "model: 3 of 3 layers from" in caplog.text
    for mine, other in zip(model.weights, saved.weights, strict=True):
        for each in strategy.experimental_local_results(mine.value):
            np.testing.assert_array_equal(each, other)


def test_names_that_keras_made_count_for_nothing_where_the_order_fits(tmp_path, caplog):
    def make():
        dense = [layers.Dense(4) for _ in range(3)]
        return keras.Sequential([keras.Input((4,)), *dense])

    saved = make()
    model = make()  # its layers are dense_3 to dense_5, say
    begin_from(save(saved, tmp_path / "a.h5"), model)
    expect_equal(model, saved)
    assert "model: 3 of 3 layers from" in caplog.text
    assert "matched by order, because the file has other names" in caplog.text


def test_of_a_body_with_another_head_what_is_not_used_is_named(tmp_path, caplog):
    x = keras.Input((4,))
    body = keras.Sequential([x, layers.Dense(5, name="body")])
    top = keras.Sequential([keras.Input((4,)), *body.layers, layers.Dense(3, name="predictions")])
    model = keras.Sequential([keras.Input((4,)), layers.Dense(5, name="body")])
    model.add(layers.Dense(2, name="logits"))
    begin_from(save(top, tmp_path / "a.h5"), model)
    np.testing.assert_array_equal(values(model)[0], values(body)[0])
    assert "not in that file, so they start from random values: logits" in caplog.text
    assert "in that file, but not in the model: predictions" in caplog.text


def chain(names):
    dense = [layers.Dense(4, name=each) for each in names]
    return keras.Sequential([keras.Input((4,)), *dense, layers.Dense(2, name="logits")])


@pytest.mark.parametrize("name", ["a.keras", "a.weights.h5", "a.h5"])
def test_a_deeper_network_of_the_same_widths_is_another_architecture(tmp_path, name):
    """As VGG19's file for VGG16, or ResNet101's for ResNet50."""
    deep = chain(["block1_1", "block1_2", "block1_3", "block2_1", "block2_2"])
    model = chain(["block1_1", "block1_2", "block2_1", "block2_2"])
    with pytest.raises(UserError, match="is of another architecture than sequential") as caught:
        begin_from(save(deep, tmp_path / name), model)
    assert "block1_3" in str(caught.value)


@files
def test_a_file_without_a_layer_that_fits_is_refused(tmp_path, name):
    other = keras.Sequential([keras.Input((2,)), layers.Dense(9, name="else")])
    with pytest.raises(UserError, match="fits no layer of small; use a file of the same"):
        begin_from(save(other, tmp_path / name), build())


def test_a_file_of_keras_applications_gives_the_body(tmp_path):
    arguments = {"weights": None, "pooling": "avg", "input_shape": (32, 32, 3)}
    keras.utils.set_random_seed(1)
    body = keras.applications.MobileNetV3Small(include_top=False, minimalistic=True, **arguments)
    file = save(body, tmp_path / "notop.h5")
    model = models.build("MobileNetV3Small", image_shape=(32, 32, 3), num_outputs=3)
    names = [each.name for each in model.layers if each.weights]
    same = next(each for each in body.layers if each.weights and each.name in names)
    begin_from(file, model)
    for mine, wanted in zip(model.get_layer(same.name).weights, same.weights, strict=True):
        np.testing.assert_array_equal(mine, wanted)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "none.keras",
            "is no file that ends in .keras, .weights.h5, .weights.json, .h5, .hdf5, .safetensors;",
        ),
        ("a.txt", "is no file that ends in"),
        ("broken.weights.h5", "cannot be read for small"),
        ("broken.weights.json", "cannot be read for small"),
        ("broken.keras", "cannot be read for small"),
        ("broken.h5", "cannot be read for small"),
    ],
)
def test_what_is_no_weights_is_refused_in_a_sentence(tmp_path, name, words):
    file = tmp_path / name
    if name != "none.keras":
        file.write_text("nothing")
    with pytest.raises(UserError, match=r"model\.weights=") as caught:
        begin_from(str(file), build())
    assert words in str(caught.value)


def test_a_run_stands_for_its_newest_export(tmp_path, caplog):
    for number in (9, 10):
        (tmp_path / f"export/{number}").mkdir(parents=True)
        save(build(seed=number), tmp_path / f"export/{number}/model.keras")
    model = build()
    begin_from(str(tmp_path), model)
    expect_equal(model, build(seed=10))
    assert "3 of 3 layers from" in caplog.text
    assert "export/10/model.keras" in caplog.text


def test_a_folder_without_an_export_is_refused_with_the_way_to_one(tmp_path):
    folder = tmp_path / "a run/checkpoints/step-00000012"
    folder.mkdir(parents=True)
    with pytest.raises(UserError, match=r"no export .*; give a run's workdir, the folder of an ex"):
        begin_from(str(folder), build())
    (tmp_path / "a run/config.json").touch()
    for each in (folder, folder.parents[0], folder.parents[1]):
        with pytest.raises(UserError, match=r"`tfaccel export --workdir='[^']*/a run'`, and then"):
            begin_from(str(each), build())


@pytest.mark.parametrize(
    ("of_file", "of_data", "num_outputs", "warns"),
    [
        (["a", "b", "c"], ["x", "y", "z"], 3, True),
        (["a", "b", "c"], ["a", "c", "b"], 3, True),
        (["a", "b", "c"], ["a", "b", "c"], 3, False),
        (["a", "b", "c"], ["w", "x", "y", "z"], 4, False),  # the head does not fit, so it is new
        (["a", "b", "c"], [], 3, False),
        ([], ["x", "y", "z"], 3, False),
    ],
)
def test_a_head_for_other_classes_is_told(tmp_path, caplog, of_file, of_data, num_outputs, warns):
    file = save(build(seed=1), tmp_path / "model.keras")
    (tmp_path / "tfaccel.json").write_text(json.dumps({"class_names": of_file}))
    begin_from(file, build(num_outputs), class_names=of_data)
    assert ("--config.model.new_layers=head" in caplog.text) == warns
    assert ("are a, b, c, and the data's are " + ", ".join(of_data) in caplog.text) == warns
    caplog.clear()
    begin_from(file, build(num_outputs), class_names=of_data, new_layers=["head"])
    assert "other classes" not in caplog.text


def picture_network(name="small"):
    """A network of pictures whose first layers are those of EfficientNetB0."""
    x = keras.Input((6, 5, 3))
    y = layers.Normalization(name="normalization")(layers.Rescaling(1 / 255)(x))
    return keras.Model(x, layers.Conv2D(2, 3, name="conv")(y), name=name)


@pytest.mark.parametrize("name", ["a.keras", "a.h5"])
def test_weights_of_blue_green_red_answer_alike_from_red_green_blue(tmp_path, name):
    images = np.random.default_rng(0).random((2, 6, 5, 3), np.float32)
    saved, model = picture_network(), picture_network()
    begin_from(save(saved, tmp_path / name), model, order="bgr")
    np.testing.assert_allclose(model(images), saved(images[..., ::-1]), rtol=0, atol=1e-6)


def test_there_must_be_a_convolution_to_turn_round(tmp_path):
    model = build()
    with pytest.raises(UserError, match=r"weights_order='bgr', but small loaded no first conv"):
        begin_from(save(model, tmp_path / "a.keras"), model, order="bgr")


def test_keras_own_efficientnet_weights_are_divided_by_the_deviation(tmp_path, caplog):
    """Keras's file has the deviation for the variance; its model divides by the root once more."""
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    saved, model = picture_network(), picture_network()
    saved.get_layer("normalization").set_weights([mean, std, np.array(0)])
    begin_from(save(saved, tmp_path / "a.h5"), model)
    pixels = np.random.default_rng(0).integers(0, 256, (1, 6, 5, 3)).astype(np.float32)
    truth = (pixels / 255 - mean) / std
    np.testing.assert_allclose(model.get_layer("normalization")(pixels / 255), truth, atol=1e-5)
    assert "normalization divides by the deviation" in caplog.text
    again = picture_network()
    begin_from(save(model, tmp_path / "b.h5"), again)  # not a second time
    np.testing.assert_allclose(again.get_layer("normalization")(pixels / 255), truth, atol=1e-5)


@files
def test_new_layers_keep_their_random_weights(tmp_path, caplog, name):
    saved, model = build(seed=1), build()
    head = values(model)[-2:]
    begin_from(save(saved, tmp_path / name), model, new_layers=["head"])
    np.testing.assert_array_equal(values(model)[0], values(saved)[0])
    for mine, other in zip(values(model)[-2:], head, strict=True):
        np.testing.assert_array_equal(mine, other)
    assert "random weights, as asked: logits" in caplog.text


def test_a_new_layer_must_be_there(tmp_path):
    model = build()
    with pytest.raises(UserError, match=r"new_layers: small has no layer 'logist'.*'logits'"):
        begin_from(save(model, tmp_path / "a.keras"), model, new_layers=["logist"])
