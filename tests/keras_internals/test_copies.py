"""A copy is in the state of its model; one that cannot be made is one sentence, whichever it is."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfaccel.common.errors import UserError
from tfaccel.diagnostics.lint.padded_head import with_padded_heads
from tfaccel.keras_internals.copies import check_config, in_float32, without_training_state

COPIED = pytest.mark.parametrize(
    "copied",
    [in_float32, without_training_state, lambda model: with_padded_heads(model, ["head"])],
    ids=["float32", "plain", "padded"],
)


class WithoutConfig(layers.Layer):
    """Of which Keras says, with a page of code, that get_config is lacking."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def call(self, x):
        return x


class WithoutKwargs(layers.Layer):
    """Which does not take what its config says."""

    def __init__(self):
        super().__init__()

    def call(self, x):
        return x


class WithoutWidth(layers.Layer):
    """Whose copy has other weights, as its config does not say how many."""

    def __init__(self, width=1, **kwargs):
        super().__init__(**kwargs)
        self.width = width

    def build(self, shape):
        self.scale = self.add_weight(shape=(self.width,))

    def call(self, x):
        return x * self.scale[0]

    def get_config(self):
        return super().get_config()


@pytest.mark.parametrize("copied", [in_float32, without_training_state])
@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (lambda: WithoutConfig(object()), "must override `get_config()`"),
        (WithoutKwargs, "unexpected keyword argument"),
        (lambda: WithoutWidth(3), "not compatible with provided weight shape (3,)"),
        (lambda: layers.Lambda(lambda x: x), "`Lambda` layer"),
    ],
    ids=["no config", "no kwargs", "no width", "lambda"],
)
def test_what_cannot_be_made_again_is_one_sentence(copied, layer, why):
    model = keras.Sequential([keras.Input((2,)), layer()], name="mine")
    with pytest.raises(UserError) as raised:
        copied(model)
    said = str(raised.value)
    assert said.startswith("model mine cannot be made again from its config (")
    assert why in said
    assert "from get_config() and accept **kwargs, and register its classes" in said
    assert "\n" not in said
    assert "class CustomLayer" not in said


def adapted():
    """Layers whose state is not their weights alone."""
    scaled = layers.Normalization(name="scaled")
    scaled.adapt(np.arange(12, dtype="float32").reshape(4, 3))
    words = layers.IntegerLookup(name="words")
    words.adapt(np.array([5, 7, 9]))
    number, word = keras.Input((3,)), keras.Input((1,), dtype="int64")
    embedded = layers.Flatten()(layers.Embedding(8, 2)(words(word)))
    frozen = layers.Dense(3, trainable=False, name="frozen")(scaled(number))
    both = layers.Concatenate()([frozen, embedded])
    return keras.Model([number, word], layers.Dense(2, name="head")(both))


@COPIED
def test_a_copy_has_what_was_adapted_and_what_was_frozen(copied):
    model = adapted()
    given = [np.array([[1.0, 2, 3], [4, 5, 6]], "float32"), np.array([[7], [9]])]
    copy = copied(model)
    np.testing.assert_allclose(copy(given), model(given), atol=1e-6)
    assert not copy.get_layer("frozen").trainable
    assert len(copy.trainable_variables) == len(model.trainable_variables)


@COPIED
def test_a_copy_trains_what_is_trained_and_nothing_else(copied):
    inner = layers.Dense(4, name="inner")
    head = layers.Dense(3, trainable=False, name="head")
    model = keras.Sequential([keras.Input((2,)), inner, head])
    inner.bias.trainable = False
    assert len(copied(model).trainable_variables) == 1


@COPIED
def test_a_layer_shared_by_models_within_and_one_beside_the_graph_are_no_matter(copied):
    shared = layers.ReLU()
    first = keras.Sequential([keras.Input((2,)), layers.Dense(2), shared])
    second = keras.Sequential([keras.Input((2,)), shared, layers.Dense(2)])
    x = second(first(image := keras.Input((2,))))
    model = keras.Model(image, layers.Dense(3, name="head")(x))
    model.augment = keras.Sequential([layers.RandomFlip()])
    given = np.array([[1.0, -2], [3, 4]], "float32")
    np.testing.assert_allclose(copied(model)(given), model(given), atol=1e-6)


@COPIED
@pytest.mark.parametrize("output_mode", ["int", "tf_idf"])
@pytest.mark.parametrize("has_adapted", [True, False])
def test_a_copy_knows_the_words(copied, output_mode, has_adapted):
    vectors = layers.TextVectorization(output_mode=output_mode)
    if has_adapted:
        vectors.adapt(["a b c", "a d"])
    elif output_mode == "tf_idf":
        pytest.skip("Keras calls none that has not adapted")
    text = keras.Input((), dtype="string")
    x = vectors(text)
    x = x if output_mode == "tf_idf" else layers.Embedding(8, 2)(x)
    x = x if output_mode == "tf_idf" else layers.GlobalAveragePooling1D()(x)
    model = keras.Model(text, layers.Dense(3, name="head")(x))
    copy = copied(model)
    if has_adapted:
        given = tf.constant(["a c", "d d"])
        np.testing.assert_allclose(copy(given), model(given), atol=1e-6)


def test_what_a_model_was_compiled_with_is_no_matter():
    class Own(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return y_pred

    model = keras.Sequential([keras.Input((2,)), layers.Dense(3, name="head")])
    model.compile("sgd", Own())
    assert not with_padded_heads(model, ["head"]).compiled
    assert model.compiled


def test_a_subclassed_model_is_said_to_be_one():
    class Mine(keras.Model):
        pass

    with pytest.raises(UserError, match="mine is a subclassed model, which cannot be made again"):
        in_float32(Mine(name="mine"))


def test_a_frozen_sequential_model_stays_frozen():
    model = keras.Sequential([keras.Input((2,)), layers.Dense(2)], name="mine")
    model.trainable = False
    assert not in_float32(model).trainable


def test_an_export_to_onnx_says_the_same_and_leaves_nothing(setup, tmp_path):
    run = setup()
    with run.scope():
        model = keras.Sequential([keras.Input((2,)), WithoutKwargs()], name="mine")
    for how in ({"onnx": True}, {"computes_in": "float32"}, {}):
        with pytest.raises(UserError, match=r"^model mine cannot be made again from its config"):
            run.export(model, tmp_path / "1", images=np.zeros((1, 2), np.float32), **how)
    assert list(tmp_path.iterdir()) == []


class OfOneNumber(keras.Model):
    """As a model of KerasHub: its config is a number, and never that of its layers."""

    def __init__(self, units=3, **kwargs):
        inputs = keras.Input((4,))
        super().__init__(inputs, layers.Dense(units)(WithoutKwargs()(inputs)), **kwargs)
        self.units = units

    def get_config(self):
        return {"units": self.units}

    @classmethod
    def from_config(cls, config):
        return cls(**config)


@pytest.mark.parametrize("is_within", [False, True])
def test_layers_that_a_model_never_makes_from_their_configs_are_no_matter(is_within):
    model = OfOneNumber()
    if is_within:
        model = keras.Sequential([keras.Input((4,)), model, layers.Dense(2)])
    with keras.utils.custom_object_scope({"OfOneNumber": OfOneNumber}):
        check_config(model)
        copy = without_training_state(model)
    np.testing.assert_array_equal(copy.get_weights()[0], model.get_weights()[0])
    plain = keras.Sequential([keras.Input((4,)), WithoutKwargs()])
    with pytest.raises(UserError, match="cannot be made again from its config"):
        check_config(plain)
