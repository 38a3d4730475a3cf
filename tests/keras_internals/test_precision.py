"""Layers of a model of half precision compute in float32, by name."""

import keras
import numpy as np
import pytest
from conftest import compiled
from keras import layers

import tfaccel
from tfaccel.common.errors import UserError
from tfaccel.config import ModelConfig, default_config, parse
from tfaccel.experiment.train import make_model
from tfaccel.keras_internals.float32_layers import layers_by_name, with_float32_layers

X = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
Y = np.arange(16) % 3


@pytest.fixture
def half():
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


def nested(**of_deep):
    """Returns a model in a model."""
    inner = keras.Sequential(
        [keras.Input((8,)), layers.Dense(8, "relu", name="deep", **of_deep), layers.Dense(8)]
    )
    x = inner(inputs := keras.Input((8,)))
    return keras.Model(inputs, layers.Dense(3, dtype="float32", name="logits")(x), name="nested")


def deep_of(model):
    return next(each for each in model._flatten_layers() if each.name == "deep")


def test_the_named_layers_compute_in_float32_and_the_others_do_not(half):
    model = nested()
    copy = with_float32_layers(model, ["de*p", "log*"])
    assert deep_of(copy).compute_dtype == "float32"
    assert deep_of(copy).output.dtype == "float32"  # no other dtype is left in its graph
    assert deep_of(model).compute_dtype == "float16"
    (within,) = [each for each in copy.layers if isinstance(each, keras.Sequential)]
    assert [each.compute_dtype for each in within.layers] == ["float32", "float16"]
    assert copy.get_layer("logits").compute_dtype == "float32"
    for old, new in zip(model.get_weights(), copy.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_it_is_the_model_that_was_built_so(half):
    built = nested(dtype="float32")
    model = nested()
    model.set_weights(built.get_weights())
    copy = with_float32_layers(model, ["deep"])
    np.testing.assert_array_equal(copy(X), built(X))
    assert not np.array_equal(copy(X), model(X))  # as float16 rounds what float32 does not


def test_what_overflows_in_float16_does_not(half):
    model = nested()
    deep = deep_of(model)
    deep.set_weights([np.full((8, 8), 1e4, "float32"), np.zeros(8, "float32")])
    last = model.layers[1].layers[-1]
    last.set_weights([np.full((8, 8), 1e-6, "float32"), np.zeros(8, "float32")])
    images = np.full((1, 8), 100, "float32")
    assert not np.isfinite(model(images)).all()
    assert np.isfinite(with_float32_layers(model, ["deep", last.name])(images)).all()


def test_inputs_keep_their_dtype_and_wrappers_pass_it_on(half):
    words = keras.Input((4,), dtype="int32", name="words")
    x = layers.Embedding(10, 8, name="embed")(words)
    x = layers.Bidirectional(layers.LSTM(4, name="lstm"), name="both")(x)
    model = keras.Model(words, layers.Dense(3, name="logits")(x))
    copy = with_float32_layers(model, ["*"])
    assert copy.inputs[0].dtype == "int32"
    both = copy.get_layer("both")
    assert both.forward_layer.compute_dtype == both.backward_layer.compute_dtype == "float32"
    assert copy(np.zeros((2, 4), "int32")).dtype == "float32"


def test_wrong_names_and_models_are_said(half):
    class Mine(keras.Model):
        pass

    with pytest.raises(UserError, match=r"nested has no layer 'dep'; did you mean 'deep'\?"):
        with_float32_layers(nested(), ["logits", "dep"])
    with pytest.raises(UserError, match="is a subclassed model, which cannot be copied; give its"):
        with_float32_layers(Mine(), ["deep"])
    with pytest.raises(UserError, match="is not built; begin it with"):
        with_float32_layers(keras.Sequential([layers.Dense(3)]), ["*"])
    with_lambda = keras.Sequential([keras.Input((8,)), layers.Lambda(lambda x: 2 * x)])
    with pytest.raises(UserError, match="cannot be made again from its config"):
        with_float32_layers(with_lambda, ["*"])
    many = keras.Sequential([keras.Input((8,)), *(layers.Dense(1) for _ in range(50))])
    with pytest.raises(
        UserError, match=r"no layer 'zzz'; model.summary\(expand_nested=True\) lists"
    ):
        with_float32_layers(many, ["zzz"])


def small_inner():
    """Returns a model with a residual, layers without weights and operations of its own."""
    x = y = layers.Conv2D(8, 3, strides=2)(image := keras.Input((32, 32, 3)))
    y = layers.BatchNormalization()(layers.DepthwiseConv2D(3, padding="same")(y))
    y = layers.Multiply()([y, layers.Activation("hard_sigmoid")(y)])
    return keras.Model(image, layers.GlobalAveragePooling2D()((x + y) * 2), name="inner")


def mobile_net():
    return keras.applications.MobileNetV3Small(weights=None, input_shape=(32, 32, 3), pooling="avg")


@pytest.mark.parametrize(
    "make_inner", [small_inner, pytest.param(mobile_net, marks=pytest.mark.slow)]
)
def test_a_model_within_means_all_its_layers_and_operations_are_left_as_they_are(half, make_inner):
    inner = make_inner()
    x = inner(image := keras.Input((32, 32, 3)))
    whole = keras.ops.cast(keras.ops.cast(x * 10, "int32"), "float32")
    model = keras.Model(image, layers.Dense(3, name="logits")(whole))
    images = np.random.default_rng(0).random((2, 32, 32, 3), np.float32)
    for names in (inner.name, ["*"]):
        copy = with_float32_layers(model, names)
        within = copy.get_layer(inner.name)
        assert {each.compute_dtype for each in layers_by_name(within)} == {"float32"}
        assert copy(images).shape == (2, 3)
    assert copy.get_layer("logits").compute_dtype == "float32"
    casts = [each for each in copy.operations if type(each).__name__ == "Cast"]
    assert [each.dtype for each in casts] == ["int32", "float32"]


def test_a_model_within_may_be_of_a_class_of_its_own(half):
    class Block(keras.Model):
        def __init__(self, **kwargs):
            image = keras.Input((8,))
            deep = layers.Dense(8, name="deep")(image)
            super().__init__(inputs=image, outputs=deep, **kwargs)

    model = keras.Sequential([keras.Input((8,)), Block(name="block"), layers.Dense(3)])
    for names in ("deep", "block"):
        assert deep_of(with_float32_layers(model, names)).compute_dtype == "float32"


def test_words_are_no_floats(half, caplog):
    number = layers.IntegerLookup(vocabulary=[1, 2], name="words")(
        word := keras.Input((4,), dtype="int64")
    )
    model = keras.Model(word, layers.Embedding(4, 2, name="embed")(number))
    with caplog.at_level("INFO", "tfaccel"):
        with_float32_layers(model, "*")
    assert "in float32 by name: embed" in caplog.text
    assert "words" not in caplog.text


def test_cells_and_wrapped_models_are_reached(half):
    deep = keras.Sequential([keras.Input((8,)), layers.Dense(4, name="deep")])
    model = keras.Sequential(
        [
            keras.Input((5, 8)),
            layers.TimeDistributed(deep, name="each"),
            layers.RNN(layers.LSTMCell(4), name="rnn"),
        ]
    )
    copy = with_float32_layers(model, ["each", "rnn"])
    assert copy.get_layer("rnn").cell.compute_dtype == "float32"
    assert copy.get_layer("each").layer.get_layer("deep").compute_dtype == "float32"


def test_what_a_layer_made_without_its_dtype_is_said(half, caplog):
    class Two(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.inner = layers.Dense(4, name="inner")

        def call(self, x):
            return self.inner(x)

    model = keras.Sequential([keras.Input((8,)), Two(name="two")])
    with caplog.at_level("WARNING", "tfaccel"):
        with_float32_layers(model, ["two"])
    assert "two is in float32, but not inner, which it made without its own dtype" in caplog.text


def test_the_config_s_layers_are_those_of_the_model_that_is_trained(setup, folder):
    config = default_config()
    config.data.root = str(folder)
    config.data.image_size = (8, 8)
    config.data.global_batch_size = 4
    config.model.float32_layers = "dense*"
    run = setup(precision="mixed_float16", xla=False)
    model = make_model(run, parse(config), num_outputs=3)
    computed = {each.name: each.compute_dtype for each in model.layers if each.weights}
    assert {name: dtype for name, dtype in computed.items() if dtype == "float32"}.keys() == {
        name for name in computed if name.startswith("dense") or name == "logits"
    }
    assert "float16" in computed.values()


@pytest.mark.parametrize(
    ("given", "names"),
    [(None, None), ("conv5_*, logits", ("conv5_*", "logits")), (["a"], ("a",)), ((), ())],
)
def test_names_as_config_and_command_line_give_them(given, names):
    assert ModelConfig(float32_layers=given).float32_layers == names


@pytest.mark.parametrize("given", [",", 3, ("a", 1)])
def test_what_is_no_name_is_refused(given):
    with pytest.raises(UserError, match="expected names of layers"):
        ModelConfig(float32_layers=given)


@pytest.mark.parametrize("xla", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_replicas_train_it(half, xla):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def make():
        return with_float32_layers(nested(), ["deep"])

    model = compiled(make, 2, optimizer="sgd", xla=xla, loss=loss)
    losses = model.fit(X, Y, epochs=3, batch_size=8, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    assert deep_of(model).compute_dtype == "float32"
    assert len(deep_of(model).kernel._value.values) == 2


def test_it_is_offered():
    assert tfaccel.with_float32_layers is with_float32_layers
