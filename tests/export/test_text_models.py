"""Exports of models that take dicts of whole numbers of any length, with LoRA and without."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from programs import transfer

from tfaccel import UserError
from tfaccel.keras_internals.copies import check_made_again, without_training_state

LIMIT = {"float32": 1e-5, "mixed_bfloat16": 5e-2, "mixed_float16": 1e-2}
NUM_TOKENS, DIM = 9, 4


def reader() -> keras.Model:
    """A model of texts of any length, whose attention wears LoRA and whose table is frozen."""
    inputs = {
        "token_ids": keras.Input((None,), dtype="int32", name="token_ids"),
        "padding_mask": keras.Input((None,), dtype="bool", name="padding_mask"),
    }
    x = layers.Embedding(NUM_TOKENS, DIM, trainable=False)(inputs["token_ids"])
    attend = layers.MultiHeadAttention(2, 2, name="attention")
    x = attend(x, x, attention_mask=layers.Reshape((1, -1))(inputs["padding_mask"]))
    for each in attend._flatten_layers(include_self=False):
        if each.name in ("query", "value"):
            each.enable_lora(2)
    x = layers.Dense(3, dtype="float32", name="head")(layers.GlobalAveragePooling1D()(x))
    return keras.Model(inputs, x)


class OfDict(keras.Model):
    """A subclassed model of a dict, which a first fit builds."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table, self.head = layers.Embedding(NUM_TOKENS, DIM), layers.Dense(3)

    def call(self, inputs):
        weight = keras.ops.cast(inputs["padding_mask"], "float32")[..., None]
        return self.head(keras.ops.mean(self.table(inputs["token_ids"]) * weight, axis=1))


def texts() -> tuple[dict, np.ndarray]:
    words, is_token = transfer.padded()
    return {"token_ids": words, "padding_mask": is_token}, transfer.for_bert()[1]


def trained(run, make, data, **compile_args):
    with run.scope():
        model = transfer_made(make)
    run.compile(model, **transfer.of_classes(**compile_args))
    model.fit(*data, batch_size=6, verbose=0)
    return model


def transfer_made(make):
    keras.utils.set_random_seed(7)
    return make()


def check(model, path, x, *, lengths=(3, 5), rows=(1, 12), limit=1e-5) -> None:
    """Checks the SavedModel, and model.keras if there is one, on other rows and lengths."""
    served = tf.saved_model.load(path).signatures["serving_default"]
    takes = {name: each.dtype for name, each in served.structured_input_signature[1].items()}

    def answer(given):
        (answer,) = served(**{name: tf.cast(given[name], takes[name]) for name in takes}).values()
        return answer.numpy()

    models = [answer]
    if (path / "model.keras").exists():
        again = keras.saving.load_model(
            path / "model.keras", compile=False, custom_objects={"OfDict": OfDict}
        )
        models.append(lambda given: np.asarray(again(given, training=False), np.float32))
    for num_rows in rows:
        for length in lengths:
            given = {name: tf.constant(each[:num_rows, :length]) for name, each in x.items()}
            wanted = np.asarray(model(given, training=False), np.float32)
            for answers in models:
                np.testing.assert_allclose(answers(given), wanted, rtol=limit, atol=limit)


def lora_of(model) -> list:
    return [each for each in model.weights if "lora_kernel_b" in each.path]


def test_a_copy_has_the_lora_that_its_config_lacks():
    model, (x, _) = transfer_made(reader), texts()
    assert len(lora_of(model)) == 2
    for each in lora_of(model):
        each.assign(np.random.default_rng(0).normal(size=each.shape))
    copy = without_training_state(model)
    np.testing.assert_array_equal(copy(x), model(x))
    assert [each.trainable for each in copy.weights] == [each.trainable for each in model.weights]
    check_made_again(model, lambda _: None)


@pytest.mark.slow
def test_attention_with_lora_is_exported_for_any_rows_and_length(setup, tmp_path):
    run = setup()
    (x, y) = texts()
    model = trained(run, reader, (x, y))
    assert all(np.abs(each.numpy()).max() > 0 for each in lora_of(model))
    path = run.export(model, tmp_path / "1", images=x)
    assert (path / "model.keras").exists()
    check(model, path, x)


def test_a_text_of_any_length_needs_a_batch_to_compare_on(setup, tmp_path):
    run = setup()
    with run.scope():
        model = reader()
    with pytest.raises(UserError, match="takes inputs of any size; use images="):
        run.export(model, tmp_path / "1")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["mixed_float16", "mixed_bfloat16"])
def test_it_may_compute_in_float32_with_lora(setup, tmp_path, precision):
    run = setup(precision=precision)
    (x, y) = texts()
    model = trained(run, reader, (x, y))
    path = run.export(model, tmp_path / "1", images=x, computes_in="float32")
    check(model, path, x, limit=LIMIT[precision])


@pytest.mark.slow
def test_a_subclassed_model_of_a_dict_is_exported(setup, tmp_path):
    run = setup()
    (x, y) = texts()
    model = trained(run, OfDict, (x, y))
    path = run.export(model, tmp_path / "1", images=x)
    check(model, path, x)
    path = run.export(model, tmp_path / "2")  # on what `fit` gave
    check(model, path, x, lengths=(5,))


OF_HUB = {"bert": transfer.for_bert, "gpt": transfer.for_gpt}
IMAGES_OF_HUB = {"vit": lambda: transfer.images(8), "resnet": lambda: transfer.images(8, seed=5)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "computes_in"),
    [*((each, "policy") for each in LIMIT), ("mixed_float16", "float32")],
)
@pytest.mark.parametrize("kind", list(OF_HUB))
def test_text_models_of_kerashub_with_lora_are_exported(
    setup, tmp_path, kind, precision, computes_in
):
    run = setup(precision=precision)
    x, *y = OF_HUB[kind]()
    model = trained(run, getattr(transfer, kind), (x, y[0]))
    model.backbone.enable_lora(2)
    run.compile(model, **transfer.of_classes(keras.optimizers.Adam(0.05)))
    model.fit(x, y[0], batch_size=6, verbose=0)
    assert all(np.abs(each.numpy()).max() > 0 for each in lora_of(model))
    path = run.export(model, tmp_path / "1", images=x, computes_in=computes_in)
    check(model, path, x, limit=LIMIT[precision])


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(IMAGES_OF_HUB))
def test_image_models_of_kerashub_are_exported(setup, tmp_path, kind):
    run = setup()
    x, y = IMAGES_OF_HUB[kind]()
    model = trained(run, getattr(transfer, kind), (x, y))
    path = run.export(model, tmp_path / "1", images=x)
    served = tf.saved_model.load(path).signatures["serving_default"]
    (name,) = served.structured_input_signature[1]
    for rows in (1, 12):
        (answer,) = served(**{name: tf.constant(x[:rows])}).values()
        np.testing.assert_allclose(answer, model(x[:rows], training=False), atol=1e-5)
