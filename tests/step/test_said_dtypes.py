"""`run.compile` warns of outputs and weights in half precision."""

import keras
import pytest
from keras import layers


def dense_with(head):
    return keras.Sequential([keras.Input((8, 8, 1)), layers.Flatten(), head])


@pytest.mark.parametrize(("dtype", "is_said"), [("mixed_float16", True), ("float32", False)])
def test_outputs_in_half_precision_are_said(setup, caplog, dtype, is_said):
    run = setup(xla=False)
    with run.scope():
        model = dense_with(layers.Dense(3, dtype=dtype))
    run.compile(model, "sgd", "mse")
    assert (f"an output of model {model.name} is float16" in caplog.text) is is_said


@pytest.mark.parametrize(
    ("reverse_dtype", "is_said"), [(None, False), ("float32", False), ("bfloat16", True)]
)
def test_outputs_that_only_keras_says_are_in_half_precision(setup, caplog, reverse_dtype, is_said):
    """Without a `reverse_dtype`, the product of a ReversibleEmbedding in a model is float32."""
    run = setup(xla=False, precision="mixed_bfloat16")
    with run.scope():
        tokens = layers.ReversibleEmbedding(5, 4, reverse_dtype=reverse_dtype)
        ids = keras.Input((2,), dtype="int32")
        model = keras.Model({"ids": ids}, {"next": tokens(tokens(ids), reverse=True)})
    assert model.outputs[0].dtype == "bfloat16"
    run.compile(model, "sgd", "mse")
    assert (f"an output of model {model.name} is bfloat16" in caplog.text) is is_said


def test_weights_in_half_precision_are_said(setup, caplog):
    run = setup(xla=False)
    with run.scope():
        model = dense_with(layers.Dense(3, dtype="float16"))
    run.compile(model, "sgd", "mse")
    assert "/kernel and 1 more keep their weights in half precision" in caplog.text
