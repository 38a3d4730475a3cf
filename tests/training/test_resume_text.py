"""A fit of a model of dicts, with LoRA and frozen layers, that is cut and resumed, ends alike."""

import dataclasses

import keras
import numpy as np
import pytest
from conftest import strategy_of
from cut_fit import Cut, CutError
from keras import layers
from programs import transfer

from tfaccel import UserError
from tfaccel.config import CheckpointConfig
from tfaccel.runtime.devices import Device

NUM_TOKENS, DIM = 9, 4


def reader() -> keras.Model:
    inputs = {
        "token_ids": keras.Input((None,), dtype="int32", name="token_ids"),
        "padding_mask": keras.Input((None,), dtype="bool", name="padding_mask"),
    }
    table = layers.Embedding(NUM_TOKENS, DIM, name="table")
    x = layers.Dropout(0.2)(table(inputs["token_ids"]))
    hidden = layers.Dense(DIM, "tanh", name="hidden")
    x = hidden(x) * layers.Reshape((-1, 1))(inputs["padding_mask"])
    model = keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))
    table.trainable = False
    hidden.enable_lora(2)
    return model


def bert_with_lora() -> keras.Model:
    model = transfer.bert()
    model.backbone.enable_lora(2)
    return model


def run_of(setup, num_replicas, precision="float32"):
    run = setup(precision=precision, deterministic=True)
    if num_replicas > 1:
        run.strategy = strategy_of(num_replicas)
        devices = tuple(Device(f"/cpu:{index}", None) for index in range(num_replicas))
        run.runtime = dataclasses.replace(run.runtime, devices=devices)
    return run


def examples(run, names):
    x, y = transfer.for_bert()
    rows = [({name: x[name][row] for name in names}, y[row]) for row in range(len(y))]
    return run.examples(rows, global_batch_size=4, shuffle=True)


def fit(run, make, folder, *, cut=None, change=lambda _: None, epochs=2):
    """Trains from the newest checkpoint on; returns the model and the losses of all epochs."""
    keras.utils.set_random_seed(7)
    with run.scope():
        model = make()
    change(model)
    run.compile(model, **transfer.of_classes(keras.optimizers.Adam(0.01)))
    loader = examples(run, list(model.input))
    saves = run.checkpoints(folder, CheckpointConfig(every_steps=1))
    callbacks = [saves, Cut(cut or 10**6)]
    # A task of KerasHub has a `fit` of its own, which takes no loader.
    ended = keras.Model.fit(model, loader, epochs=epochs, callbacks=callbacks, verbose=0)
    return model, ended.history["loss"]


def check_resumes(run, make, tmp_path, *, cuts):
    wanted, losses = fit(run, make, tmp_path / "whole")
    for cut in cuts:
        folder = tmp_path / f"cut{cut}"
        with pytest.raises(CutError):
            fit(run, make, folder, cut=cut)
        model, resumed = fit(run, make, folder)
        np.testing.assert_array_equal(resumed, losses)
        for one, other in zip(model.get_weights(), wanted.get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize(("num_replicas", "cuts"), [(1, [4]), (2, [2, 4])])
def test_a_model_of_dicts_with_lora_resumes(setup, tmp_path, num_replicas, cuts):
    check_resumes(run_of(setup, num_replicas), reader, tmp_path, cuts=cuts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_replicas", "precision"), [(1, "mixed_bfloat16"), (2, "float32"), (2, "mixed_float16")]
)
def test_bert_of_kerashub_with_lora_resumes(setup, tmp_path, num_replicas, precision):
    run = run_of(setup, num_replicas, precision)
    check_resumes(run, bert_with_lora, tmp_path, cuts=[4])


def two_alike() -> keras.Model:
    inputs = {"token_ids": keras.Input((5,), dtype="int32", name="token_ids")}
    x = layers.Embedding(NUM_TOKENS, DIM, name="table")(inputs["token_ids"])
    x = layers.GlobalAveragePooling1D()(x)
    for name in ("first", "second"):
        x = layers.Dense(DIM, "tanh", name=name)(x)
    return keras.Model(inputs, layers.Dense(3)(x))


def freezing(*names):
    def change(model):
        for name in names:
            model.get_layer(name).trainable = False

    return change


def test_other_frozen_layers_than_before_are_refused(setup, tmp_path):
    run = run_of(setup, 1)
    fit(run, two_alike, tmp_path, change=freezing("first"), epochs=1)
    # As many variables of the same shapes: Adam's would belong to other weights.
    with pytest.raises(
        UserError, match=r"4 of 7 weights .* first/kernel was frozen and is trained"
    ):
        fit(run, two_alike, tmp_path, change=freezing("second"))
    with pytest.raises(UserError, match=r"2 of 7 weights .* a folder of its own"):
        fit(run, two_alike, tmp_path)


@pytest.mark.slow
def test_a_fit_with_other_layers_frozen_resumes_from_a_folder_of_its_own(setup, tmp_path):
    run = run_of(setup, 1)

    def both(folder, cut=None):
        keras.utils.set_random_seed(7)
        with run.scope():
            model = two_alike()
        for name, trainable in (("frozen", False), ("thawed", True)):
            model.get_layer("table").trainable = trainable
            run.compile(model, **transfer.of_classes(keras.optimizers.Adam(0.01)))
            saves = run.checkpoints(folder / name, CheckpointConfig(every_steps=1))
            cutter = Cut(cut if cut and trainable else 10**6)
            loader = examples(run, ["token_ids"])
            model.fit(loader, epochs=2, callbacks=[saves, cutter], verbose=0)
        return model.get_weights()

    wanted = both(tmp_path / "whole")
    with pytest.raises(CutError):
        both(tmp_path / "cut", cut=4)
    for one, other in zip(both(tmp_path / "cut"), wanted, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_a_task_of_kerashub_names_the_call_that_takes_a_loader(setup):
    run = run_of(setup, 2)
    with run.scope():
        model = transfer.bert()
    run.compile(model, **transfer.of_classes())
    loader = examples(run, list(model.input))
    for method in (model.fit, model.evaluate, model.predict):
        with pytest.raises(UserError, match=r"keras.Model.fit\(model, loader\)"):
            method(loader, verbose=0)
    x, y = transfer.for_bert()
    with pytest.raises(UserError, match=r"keras.Model.fit\(model, loader\)"):
        model.fit(x, y, validation_data=loader, verbose=0)
    keras.Model.fit(model, loader, validation_data=loader, verbose=0)
    wanted = model.evaluate(x, y, verbose=0)
    # The same 12 rows, in batches of 4.
    np.testing.assert_allclose(keras.Model.evaluate(model, loader, verbose=0), wanted, atol=1e-5)
    assert keras.Model.predict(model, loader, verbose=0).shape == (12, 3)
