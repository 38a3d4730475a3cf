import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled
from keras import layers

from tfaccel import UserError
from tfaccel.common.errors import RunError
from tfaccel.config import ExportConfig
from tfaccel.export import card, parity
from tfaccel.export.export import export_model


def build(run, dtype="float32"):
    with run.scope():
        return keras.Sequential(
            [
                keras.Input((6, 5, 1), name="image"),
                layers.Conv2D(4, 3),
                layers.BatchNormalization(),
                layers.Flatten(),
                layers.Dense(3, dtype=dtype),
            ]
        )


IMAGES = np.random.default_rng(0).random((4, 6, 5, 1), dtype=np.float32)


@pytest.mark.parametrize(
    "precision",
    [
        "mixed_float16",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("float32", "mixed_bfloat16")),
    ],
)
def test_exports_what_answers_alike(setup, tmp_path, precision):
    run = setup(precision=precision)
    model = build(run)
    path = run.export(model, tmp_path / "exported" / "1", images=IMAGES)
    loaded = tf.saved_model.load(path)
    (answer,) = loaded.signatures["serving_default"](image=IMAGES).values()
    assert answer.dtype == tf.float32
    np.testing.assert_allclose(answer, model(IMAGES), atol=parity.TOLERANCE[model.compute_dtype])
    # Another batch size than the one compared.
    assert loaded.serve(IMAGES[:1]).shape == (1, 3)

    restored = keras.models.load_model(path / "model.keras")
    np.testing.assert_allclose(restored(IMAGES), model(IMAGES), atol=1e-6)
    assert restored.dtype_policy.name == precision


def test_each_weight_is_written_once_and_no_training(setup, tmp_path):
    run = setup()
    with run.scope():
        model = keras.Sequential([keras.Input((100,)), layers.Dense(2000), layers.Dense(3)])
    run.compile(model, "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    path = run.export(model, tmp_path / "1")
    weights = sum(each.nbytes for each in model.get_weights())
    for file in ("variables/variables.data-00000-of-00001", "model.keras"):
        assert weights < (path / file).stat().st_size < 1.2 * weights
    assert not keras.models.load_model(path / "model.keras").compiled
    assert model.compiled


def test_tables_are_exported_too(setup, tmp_path):
    run = setup()
    with run.scope():
        number = keras.Input((1,), dtype="int64", name="number")
        kind = layers.IntegerLookup(vocabulary=[3, 5, 9], output_mode="one_hot")(number)
        model = keras.Model(number, layers.Dense(2)(kind))
    numbers = np.array([[3], [5], [1]])
    path = run.export(model, tmp_path / "1", images=numbers)
    loaded = tf.saved_model.load(path)
    np.testing.assert_allclose(loaded.serve(numbers), model(numbers), atol=1e-6)


def test_it_may_compute_in_float32_whatever_it_was_trained_in(setup, tmp_path):
    run = setup(precision="mixed_float16")
    model = build(run)
    path = run.export(model, tmp_path / "1", images=IMAGES, computes_in="float32")
    dtypes = {
        each.dtype
        for function in tf.saved_model.load(path).signatures.values()
        for node in function.graph.get_operations()
        for each in node.outputs
    }
    assert tf.float16 not in dtypes
    assert card.read(path)["computes_in"] == "float32"


def test_outputs_are_float32_whatever_the_last_layer(setup, tmp_path):
    run = setup(precision="mixed_float16")
    path = run.export(build(run, dtype="mixed_float16"), tmp_path / "1")
    assert tf.saved_model.load(path).serve(IMAGES).dtype == tf.float32


def test_inputs_of_several_kinds_keep_their_names(setup, tmp_path):
    run = setup()
    with run.scope():
        inputs = {"left": keras.Input((2,), name="left"), "right": keras.Input((3,), name="right")}
        outputs = {
            "sum": layers.Dense(1)(inputs["left"]) + layers.Dense(1)(inputs["right"]),
            "right": layers.Dense(2)(inputs["right"]),
        }
        model = keras.Model(inputs, outputs)
    path = run.export(model, tmp_path / "1")
    signature = tf.saved_model.load(path).signatures["serving_default"]
    answer = signature(left=tf.ones((5, 2)), right=tf.ones((5, 3)))
    assert {name: value.shape for name, value in answer.items()} == {
        "sum": (5, 1),
        "right": (5, 2),
    }


def test_an_input_without_a_name_has_one_name_in_all_that_is_written(setup, tmp_path):
    """In float32 a copy is written, whose unnamed input Keras calls otherwise."""
    run = setup()
    with run.scope():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
    path = run.export(model, tmp_path / "1", computes_in="float32", onnx=True)
    signature = tf.saved_model.load(path).signatures["serving_default"]
    assert list(signature.structured_input_signature[1]) == [model.inputs[0].name]


@pytest.mark.parametrize(
    ("name", "served"),
    [
        ("my-input.1", "my_input_1"),
        pytest.param("my input", "my_input", marks=pytest.mark.slow),
        ("1é", "arg_1_"),
    ],
)
def test_a_name_that_tensorflow_does_not_take_is_made_one(setup, tmp_path, name, served):
    run = setup()
    with run.scope():
        given = keras.Input((4,), name=name)
        model = keras.Model(given, layers.Dense(3)(given))
    path = run.export(model, tmp_path / "1", onnx=True)
    answer = tf.saved_model.load(path).signatures["serving_default"](**{served: tf.ones((5, 4))})
    np.testing.assert_allclose(answer["output_0"], model(np.ones((5, 4))), atol=1e-6)


def test_names_that_become_the_same_are_refused(setup, tmp_path):
    run = setup()
    with run.scope():
        both = [keras.Input((4,), name="a-b"), keras.Input((4,), name="a.b")]
        model = keras.Model(both, layers.Add()(both))
    with pytest.raises(
        UserError, match=r"inputs 'a-b', 'a\.b', whose .* a_b, a_b; give them names"
    ):
        run.export(model, tmp_path / "1")


def test_text_is_compared_on_a_given_batch(setup, tmp_path):
    run = setup()
    with run.scope():
        words = keras.Input((), dtype="string", name="words")
        number = layers.StringLookup(vocabulary=["a", "ä b"], output_mode="one_hot")
        model = keras.Model(words, layers.Dense(2)(number(words)))
    with pytest.raises(UserError, match="takes text; use images="):
        run.export(model, tmp_path / "1")
    given = np.array(["ä b", "c", "a"])
    loaded = tf.saved_model.load(run.export(model, tmp_path / "1", images=given))
    np.testing.assert_allclose(loaded.serve(given), model(tf.constant(given)), atol=1e-6)


@pytest.mark.parametrize(
    "images",
    [IMAGES[..., 0], IMAGES[:, :5], [IMAGES, IMAGES], IMAGES[:0], {}],
    ids=["rank", "size", "two", "no rows", "nothing"],
)
def test_images_that_the_model_does_not_take_are_refused(setup, tmp_path, images):
    run = setup()
    expected = r"images= has .*, but model \w+ takes \(None, 6, 5, 1\) .*; give one batch of"
    with pytest.raises(UserError, match=expected):
        run.export(build(run), tmp_path / "1", images=images)
    assert list(tmp_path.iterdir()) == []


def test_whole_numbers_stay_whole_numbers(setup, tmp_path):
    run = setup()
    with run.scope():
        words = keras.Input((4,), dtype="int32", name="words")
        model = keras.Model(words, layers.Dense(2)(layers.Embedding(2, 3)(words)))
    signature = tf.saved_model.load(run.export(model, tmp_path / "1")).signatures
    _, inputs = signature["serving_default"].structured_input_signature
    assert inputs["words"].dtype == tf.int32


def test_inputs_of_any_size_are_compared_on_given_images(setup, tmp_path):
    run = setup()
    with run.scope():
        model = keras.Sequential([keras.Input((None, None, 1)), layers.GlobalMaxPooling2D()])
    with pytest.raises(UserError, match="inputs of any size; use images="):
        run.export(model, tmp_path / "1")
    path = run.export(model, tmp_path / "1", images=IMAGES)
    loaded = tf.saved_model.load(path)
    assert loaded.serve(tf.zeros((2, 9, 9, 1))).shape == (2, 1)


def test_a_path_that_cannot_be_made_is_named(setup, tmp_path):
    (tmp_path / "file").touch()
    run = setup()
    with pytest.raises(UserError, match="cannot be created"):
        run.export(build(run), tmp_path / "file" / "1")


def test_nothing_is_overwritten(setup, tmp_path):
    run = setup()
    (tmp_path / "1").mkdir()
    with pytest.raises(UserError, match="exists; use a new path"):
        run.export(build(run), tmp_path / "1")


def test_layers_that_are_not_for_xla_are_exported_without_it(setup, tmp_path, caplog):
    run = setup()
    with run.scope():
        turn = keras.layers.RandomRotation(0.1)  # supports_jit=False
        model = keras.Sequential([keras.Input((4, 4, 1)), turn, keras.layers.Flatten()])
    with caplog.at_level("INFO", logger="tfaccel"):
        run.export(model, tmp_path / "1", xla=True)
    assert (
        caplog.text.count(
            "export: XLA is off, because XLA cannot compile the layer random_rotation"
        )
        == 1
    )
    assert card.read(tmp_path / "1")["xla"] is False


def test_a_model_that_differs_is_not_exported(setup, tmp_path, monkeypatch):
    run = setup()
    monkeypatch.setitem(parity.TOLERANCE, "float32", -1.0)
    model = build(run)
    with pytest.raises(
        RunError, match=r"not answer as the trained.* model: .*not exported; look at it"
    ):
        run.export(model, tmp_path / "1")
    # The work is not lost, and nobody serves it: its name is no version.
    (kept,) = tmp_path.iterdir()
    assert kept.name.startswith("1.")
    assert kept.suffix == ".rejected"
    assert len(keras.models.load_model(kept / "model.keras").weights) == len(model.weights)


def test_a_failed_export_leaves_nothing(setup, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(keras.Sequential, "save", fail)
    run = setup()
    with pytest.raises(
        RunError, match=r"cannot be written .no space left on device.: .* free there; make room"
    ):
        run.export(build(run), tmp_path / "1")
    assert list(tmp_path.iterdir()) == []


class Subclassed(keras.Model):
    """A model of which Keras knows no inputs, and which it can make again."""

    def __init__(self, units=2, **kwargs):
        super().__init__(**kwargs)
        self.units, self.dense, self.dropout = units, layers.Dense(units), layers.Dropout(0.5)

    def call(self, x, training=False):
        return self.dense(self.dropout(x, training=training))

    def get_config(self):
        return super().get_config() | {"units": self.units}


class WithoutConfig(keras.Model):
    """One that Keras cannot make again, of two inputs by name."""

    def __init__(self, first):
        super().__init__()
        self.first, self.second = first, layers.Dense(2)

    def call(self, x):
        return self.first(x["a"]) + self.second(x["b"])


class Steps(keras.Model):
    """One of steps alone, as in Keras's guide to GANs."""

    def train_step(self, data):
        return {}


def test_a_model_of_unknown_inputs_is_refused_until_something_tells_them(setup, tmp_path):
    run = setup()
    with run.scope():
        models = Subclassed(), Steps()
    with pytest.raises(UserError, match=r"no known inputs yet.*keras\.Input"):
        run.export(models[0], tmp_path / "1")
    with pytest.raises(UserError, match=r"has no call\(\)"):
        run.export(models[1], tmp_path / "1", images=np.zeros((2, 3)))
    run.export(models[0], tmp_path / "1", images=np.zeros((2, 3), np.float32))


@pytest.mark.parametrize("num_replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_subclassed_model_is_exported_as_it_was_trained(tmp_path, num_replicas):
    model = compiled(Subclassed, num_replicas, optimizer="sgd", loss="mse", xla=False)
    x = np.random.default_rng(0).random((8, 3), np.float32)
    model.fit(x, np.ones((8, 2)), verbose=0)
    wanted = model(x)
    export_model(model, tmp_path / "1", config=ExportConfig(), runtime=None)
    served = tf.saved_model.load(tmp_path / "1").signatures["serving_default"]
    np.testing.assert_allclose(served(inputs=x)["output_0"], wanted, rtol=1e-5)
    classes = {"Subclassed": Subclassed}
    loaded = keras.models.load_model(tmp_path / "1" / "model.keras", custom_objects=classes)
    np.testing.assert_allclose(loaded(x), wanted, rtol=1e-5)


def test_what_keras_cannot_make_again_is_exported_without_its_file(setup, tmp_path, caplog):
    run = setup(xla=False)
    with run.scope():
        model = WithoutConfig(layers.Dense(2))
    run.compile(model, optimizer="sgd", loss="mse")
    model.evaluate({each: np.ones((4, 3)) for each in "ab"}, np.ones((4, 2)), verbose=0)
    with caplog.at_level("INFO", logger="tfaccel"):
        run.export(model, tmp_path / "1")
    assert (
        "no model.keras, because Keras cannot rebuild WithoutConfig from its config" in caplog.text
    )
    assert not (tmp_path / "1" / "model.keras").exists()
    served = tf.saved_model.load(tmp_path / "1").signatures["serving_default"]
    assert sorted(served.structured_input_signature[1]) == ["a", "b"]


def test_a_path_that_is_a_pattern_is_exported_and_its_servers_are_warned(setup, tmp_path, caplog):
    run = setup()
    with run.scope():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    path = run.export(model, tmp_path / "lr=[0.1]" / "1")  # asked in a process of its own
    assert (path / "saved_model.pb").is_file()
    assert "reads it as a pattern; copy the export" in caplog.text
