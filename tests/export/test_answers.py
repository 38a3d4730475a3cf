import os
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfaccel import UserError
from tfaccel.config import ImageConfig
from tfaccel.data.source import ArraySource
from tfaccel.export.answers import Answers, answers_of
from tfaccel.keras_internals.model_view import losses_of
from tfaccel.training.losses import BinaryCrossentropy, Crossentropy, Dice, Sum

pytestmark = pytest.mark.usefixtures("export_decodes_png")

OUTPUTS = np.array([[1.0, -2.0, 0.5]], np.float16)


def test_logits_and_their_probabilities():
    answers = Answers("logits", class_names=("a", "b"))(tf.constant(OUTPUTS))
    assert list(answers) == ["logits", "probabilities"]
    assert {each.dtype for each in answers.values()} == {tf.float32}
    exponents = np.exp(OUTPUTS.astype(np.float64))
    np.testing.assert_allclose(answers["probabilities"], exponents / exponents.sum(), atol=1e-6)


def test_probabilities_are_given_as_they_are():
    given = tf.constant([[0.25, 0.75]])
    answers = Answers("probabilities")(given)
    assert list(answers) == ["probabilities"]
    np.testing.assert_array_equal(answers["probabilities"], given)


def test_one_output_is_how_likely_the_second_of_two_classes_is():
    of_logits = Answers("logits")(tf.constant([[0.0], [100.0]]))
    np.testing.assert_allclose(of_logits["probabilities"], [[0.5, 0.5], [0, 1]], atol=1e-6)
    of_sigmoid = Answers("probabilities")(tf.constant([[0.25]]))
    np.testing.assert_allclose(of_sigmoid["probabilities"], [[0.75, 0.25]], atol=1e-6)


def test_classes_that_are_each_likely_by_themselves():
    answers = Answers("logits", exclusive=False)(tf.constant([[0.0, 100.0, 100.0]]))
    np.testing.assert_allclose(answers["probabilities"], [[0.5, 1, 1]], atol=1e-6)


@pytest.mark.parametrize(
    ("loss", "kind", "exclusive"),
    [
        (keras.losses.BinaryCrossentropy(from_logits=True), "logits", False),
        (keras.losses.CategoricalFocalCrossentropy(from_logits=True), "logits", True),
        ("binary_crossentropy", "probabilities", False),
        ("sparse_categorical_crossentropy", "probabilities", True),
        (Crossentropy(gamma=2.0), "logits", True),
        (Sum([Crossentropy(ignore_class=255), Dice()]), "logits", True),
        (BinaryCrossentropy(target_threshold=0.2, of_probabilities=True), "logits", False),
    ],
)
def test_what_a_loss_says(loss, kind, exclusive):
    model = keras.Sequential([keras.Input((8,)), layers.Dense(4)])
    model.compile(loss=loss)
    answers = answers_of(model, _labelled(("a",)), losses=losses_of(model))
    assert (answers.kind, answers.exclusive) == (kind, exclusive)


@pytest.mark.parametrize("name", [b"caf\xe9", "café".encode()])
def test_a_folders_name_may_be_of_any_bytes(name):
    answers = Answers("logits", class_names=(os.fsdecode(name), "b"))
    named = answers.named(answers(tf.constant([[1.0, 0.0]])))
    assert named["class_name"].numpy().tolist() == [name]


@pytest.mark.parametrize(
    ("names", "completed"),
    [(("a", "b"), ("a", "b", "class 2", "class 3")), (("0", "1"), ("0", "1", "2", "3")), ((), ())],
)
def test_outputs_beyond_the_classes_have_a_name_of_their_own(names, completed):
    model = _padded()
    found = answers_of(model, _labelled(names), losses=losses_of(model))
    assert found.class_names == completed


def _padded():
    model = keras.Sequential([keras.Input((8,)), layers.Dense(4)])
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def _labelled(class_names):
    """What `answers_of` looks at of a loader's data."""
    source = ArraySource(np.zeros((1, 2, 2, 1), np.uint8), np.zeros(1, np.int32), class_names)
    return types.SimpleNamespace(source=source, class_names=class_names, images=ImageConfig())


def _listed(columns, **names):
    """The same for several labels an image."""
    source = ArraySource(
        np.zeros((1, 2, 2, 1), np.uint8), np.zeros((1, columns), np.float32), **names
    )
    names = source.class_names
    return types.SimpleNamespace(source=source, class_names=names, images=ImageConfig())


@pytest.mark.parametrize("classes", [1, 3])
def test_several_classes_have_a_probability_each(classes):
    model = keras.Sequential([keras.Input((8,)), layers.Dense(classes)])
    model.compile(loss=keras.losses.BinaryCrossentropy(from_logits=True))
    data = _listed(classes, class_names=tuple("abc"[:classes]))
    answers = answers_of(model, data, losses=losses_of(model))
    assert (answers.task, answers.class_names) == ("multilabel", tuple("abc"[:classes]))
    logits = np.array([[0.0, 2.0, -2.0], [-1.0, 0.5, 9.0]], np.float32)[:, :classes]
    named = answers.named(answers(tf.constant(logits)))
    np.testing.assert_allclose(named["probabilities"], 1 / (1 + np.exp(-logits)), rtol=1e-6)
    np.testing.assert_array_equal(named["is_present"], logits >= 0)
    assert set(named) == {"logits", "probabilities", "is_present"}


def test_numbers_are_answered_as_they_are():
    model = keras.Sequential([keras.Input((8,)), layers.Dense(2)])
    model.compile(loss="mse")
    answers = answers_of(model, _listed(2, target_names=("x", "y")), losses=losses_of(model))
    assert (answers.task, answers.target_names) == ("regression", ("x", "y"))
    numbers = tf.constant([[1.5, -2.0]], tf.float16)
    given = answers.named(answers(numbers))
    assert list(given) == ["numbers"]
    assert given["numbers"].dtype == tf.float32
    np.testing.assert_array_equal(given["numbers"], [[1.5, -2.0]])


def test_the_likeliest_class_is_named():
    answers = Answers("logits", class_names=("a", "b", "c"))
    named = answers.named(answers(tf.constant([[0.0, 1.0, 2.0], [3.0, 1.0, 2.0]])))
    assert named["class_name"].numpy().tolist() == [b"c", b"a"]


def test_an_image_is_in_grey_levels_and_cut_to_them():
    answers = Answers("image", mean=(0.5,), std=(0.5,))
    image = answers(tf.constant([-1.0, 0.0, 1.0, 1.5], shape=(1, 2, 2, 1)))["image"]
    np.testing.assert_allclose(tf.reshape(image, [-1]), [0, 127.5, 255, 255])


def classifier(run, activation, num_outputs):
    with run.scope():
        return keras.Sequential(
            [
                keras.Input((12, 10, 1)),
                layers.Flatten(),
                layers.Dense(num_outputs, activation=activation, dtype="float32"),
            ]
        )


@pytest.mark.parametrize(
    ("loss", "activation", "num_outputs", "names"),
    [
        ("sparse_categorical_crossentropy", "softmax", 3, {"probabilities", "class_name"}),
        pytest.param(
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            None,
            3,
            {"logits", "probabilities", "class_name"},
            marks=pytest.mark.slow,  # tests/export/test_saved_model.py has these, too
        ),
    ],
)
def test_the_loss_says_what_the_outputs_are(
    setup, tmp_path, folder, loss, activation, num_outputs, names
):
    run = setup()
    model = classifier(run, activation, num_outputs)
    run.compile(model, loss=loss)
    loader = run.image_folder(
        folder, image_size=(12, 10), channels=1, global_batch_size=4, loader="memory"
    )
    path = run.export(model, tmp_path / "1", loader=loader)
    signature = tf.saved_model.load(path).signatures["predict_bytes"]
    assert set(signature.structured_outputs) == names


def test_a_model_without_a_loss_is_refused(setup, tmp_path, folder):
    run = setup()
    loader = run.image_folder(folder, image_size=(12, 10), channels=1, global_batch_size=4)
    model = classifier(run, None, 3)
    with pytest.raises(UserError, match=r"compiled with no loss, but.*run\.compile"):
        run.export(model, tmp_path / "1", loader=loader)
    run.compile(model, loss=lambda y, z: keras.ops.mean(z, axis=-1))
    with pytest.raises(
        UserError, match=r"with a loss of your own, but .* a cross-entropy of keras\.los"
    ):
        run.export(model, tmp_path / "1", loader=loader)


@pytest.mark.parametrize("loss", ["mse", keras.losses.CategoricalHinge()])
def test_a_loss_that_says_nothing_of_classes_is_refused(loss):
    model = keras.Sequential([keras.Input((8,)), layers.Dense(1)])
    model.compile(loss=loss)
    with pytest.raises(
        UserError, match=r"with the loss (mean_squared_error|CategoricalHinge), but"
    ):
        answers_of(model, _labelled(("a", "b")), losses=losses_of(model))


@pytest.mark.parametrize("targets", ["image", "mask"])
def test_restoration_and_masks(setup, tmp_path, targets):
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (6, 12, 10, 3), dtype=np.uint8)
    masks = random.integers(0, 4, (6, 12, 10, 1), dtype=np.uint8)
    run = setup()
    channels = 3 if targets == "image" else 4
    with run.scope():
        model = keras.Sequential([keras.Input((12, 10, 3)), layers.Conv2D(channels, 1)])
    is_mask = targets == "mask"
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True) if is_mask else "mae"
    run.compile(model, loss=loss)
    loader = run.loader(
        ArraySource(images, None, targets=masks if is_mask else images),
        image_size=(12, 10),
        mean=0.5,
        std=0.5,
        global_batch_size=4,
        targets=targets,
    )
    loaded = tf.saved_model.load(run.export(model, tmp_path / "1", loader=loader))
    answers = loaded.signatures["serving_default"](image=tf.constant(images, tf.float32))
    outputs = model(images / np.float32(127.5) - 1).numpy()
    if is_mask:
        assert answers["probabilities"].shape == (6, 12, 10, 4)
        np.testing.assert_allclose(answers["logits"], outputs, atol=1e-4)
    else:
        wanted = np.clip(127.5 * outputs + 127.5, 0, 255)
        np.testing.assert_allclose(answers["image"], wanted, atol=1e-2)
