"""Transfer learning beyond tests/programs/transfer.py: what is done between `compile` and `fit`."""

import contextlib
import functools

import keras
import numpy as np
import pytest
from conftest import compiled
from keras import layers
from programs import transfer

from tfaccel import UserError
from tfaccel.config import StepConfig
from tfaccel.keras_internals.variables import components
from tfaccel.runtime.cluster import Cluster
from tfaccel.step import compile_model
from tfaccel.training import methods

FIT = {"batch_size": 6, "epochs": 2, "shuffle": False, "verbose": 0}
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


def trained(model, data, **fit):
    keras.utils.set_random_seed(7)
    return model.fit(*data, **{**FIT, **fit}).history["loss"]


def made(make):
    keras.utils.set_random_seed(7)
    return make()


def stock(make):
    """Its model of stock Keras, compiled, on one device without XLA."""
    model = made(make)
    model.compile(**transfer.of_classes())
    model.jit_compile = False
    return model


def here(make, num_replicas, **settings):
    arguments = {**transfer.of_classes(), **settings}
    return compiled(functools.partial(made, make), num_replicas, xla=False, **arguments)


def again(model, config=None):
    """Compiles a model of ours once more."""
    strategy, config = model.distribute_strategy, config or StepConfig()
    compile_model(model, strategy, config, xla=False, **transfer.of_classes())
    methods.extend(model, config, guard=contextlib.nullcontext, cluster=Cluster())


def check_same(models, losses):
    (wanted, model), (expected, loss) = models, losses
    np.testing.assert_allclose(loss, expected, **TOLERANCE)
    for value, other in zip(model.get_weights(), wanted.get_weights(), strict=True):
        np.testing.assert_allclose(value, other, **TOLERANCE)


@pytest.mark.parametrize(
    "num_replicas",
    [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)],
)
def test_lora_enabled_after_compile_trains_on_every_replica(num_replicas):
    models = [stock(transfer.reader), here(transfer.reader, num_replicas)]
    for model in models:
        keras.utils.set_random_seed(8)
        transfer.wear_lora(model)
    losses = [trained(model, transfer.sentences()) for model in models]
    check_same(models, losses)
    lora = [each for each in models[1].variables if "lora" in each.path]
    assert len(lora) == 6
    for each in lora:
        values = [part.numpy() for part in components(each)]
        assert len(values) == num_replicas
        assert np.abs(values[0]).max() > 0  # lora_b begins with zeros, so it was trained
        for value in values:
            np.testing.assert_array_equal(value, values[0])


def by_arrays(model, folder):
    model.set_weights(made(functools.partial(other_weights, model)))


def other_weights(model):
    return [0.5 * each for each in model.get_weights()]


def by_weights_file(model, folder):
    file = folder / "pretrained.weights.h5"
    if not file.exists():
        other = stock(transfer.headed)
        by_arrays(other, folder)
        other.save_weights(file)
    model.load_weights(file)


def by_layer(model, folder):
    file = folder / "body.weights.h5"
    if not file.exists():
        other = transfer.body()
        by_arrays(other, folder)
        other.save_weights(file)
    model.get_layer("body").load_weights(file)


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("after_a_fit", [False, True])
@pytest.mark.parametrize("load", [by_arrays, by_weights_file, by_layer])
def test_weights_loaded_after_compile_are_trained(tmp_path, load, after_a_fit, num_replicas):
    models = [stock(transfer.headed), here(transfer.headed, num_replicas)]
    losses = []
    for model in models:
        before = trained(model, transfer.images()) if after_a_fit else None
        load(model, tmp_path)
        losses.append(trained(model, transfer.images()))
        assert losses[-1] != before
    check_same(models, losses)
    for each in models[1].trainable_variables:
        for part in components(each):
            np.testing.assert_array_equal(part.numpy(), components(each)[0].numpy())


def called_without_training():
    """A body that is frozen, and called with training=False as Keras's guide says."""
    backbone = transfer.body()
    backbone.trainable = False
    inputs = keras.Input((6, 6, 3))
    return keras.Model(inputs, layers.Dense(3)(backbone(inputs, training=False)))


@pytest.mark.slow
def test_a_thawed_batch_norm_trains_as_with_stock_keras():
    """Keras 3.15 trains it in spite of training=False, so all replicas' statistics are needed."""
    config = StepConfig(sync_batchnorm=True)
    models = [stock(called_without_training), here(called_without_training, 2, config=config)]
    losses = []
    for model in models:
        norm = model.get_layer("body").get_layer("norm")
        frozen = norm.moving_mean.numpy()
        trained(model, transfer.images())
        np.testing.assert_array_equal(norm.moving_mean.numpy(), frozen)
        model.get_layer("body").trainable = True
        if model is models[0]:
            model.compile(**transfer.of_classes())
            model.jit_compile = False
        else:
            again(model, config)
        losses.append(trained(model, transfer.images()))
        assert np.abs(norm.moving_mean.numpy() - frozen).max() > 0.01
    check_same(models, losses)


class Thaws(keras.callbacks.Callback):
    """Thaws the body when an epoch begins, and compiles again if it can."""

    def __init__(self, compile_):
        super().__init__()
        self.compile = compile_

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            self.model.get_layer("body").trainable = True
            self.compile(self.model)


@pytest.mark.slow
def test_a_callback_cannot_compile_with_stock_keras():
    """So we need not let it either. If this fails, look again at `check_is_not_training`."""
    thaws = Thaws(lambda model: model.compile(**transfer.of_classes()))
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        trained(stock(transfer.headed), transfer.images(), callbacks=[thaws])


def test_a_callback_that_compiles_is_told_how_to_go_on(setup):
    run = setup(xla=False)
    with run.scope():
        model = transfer.headed(trained=())
    run.compile(model, **transfer.of_classes())
    thaws = Thaws(lambda model: run.compile(model, **transfer.of_classes()))
    with pytest.raises(UserError, match=r"while its fit runs.*initial_epoch"):
        trained(model, transfer.images(), callbacks=[thaws])
    run.compile(model, **transfer.of_classes())  # the fit has ended


@pytest.mark.parametrize("num_replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_thawed_layer_is_said_if_the_step_does_not_train_it(caplog, num_replicas):
    model = here(functools.partial(transfer.headed, trained=()), num_replicas)
    trained(model, transfer.images())
    trained(model, transfer.images())
    assert "became trainable" not in caplog.text
    before = model.get_layer("body").get_layer("second").kernel.numpy()
    transfer.thaw_last(model)
    trained(model, transfer.images())
    np.testing.assert_array_equal(
        model.get_layer("body").get_layer("second").kernel.numpy(), before
    )
    (said,) = [each for each in caplog.messages if "became trainable" in each]
    assert "2 weights became trainable and 0 weights became frozen" in said
    assert "call run.compile after each change" in said


# Phases.


@pytest.mark.slow
def test_gradual_unfreezing_by_one_fit_a_stage_is_that_of_stock_keras():
    models = [stock(functools.partial(transfer.headed, trained=())), None]
    models[1] = here(functools.partial(transfer.headed, trained=()), 2)
    losses = [[], []]
    for model, own in zip(models, losses, strict=True):
        for stage, name in enumerate([None, "second", "first"]):
            if name is not None:
                model.get_layer("body").get_layer(name).trainable = True
                if model is models[0]:
                    model.compile(**transfer.of_classes())
                    model.jit_compile = False
                else:
                    again(model)
            own += trained(model, transfer.images(), initial_epoch=2 * stage, epochs=2 * stage + 2)
    check_same(models, losses)


@pytest.mark.slow
@pytest.mark.parametrize("change", [transfer.thaw_last, transfer.freeze])
def test_a_run_is_resumed_behind_a_change_of_what_is_trained(setup, tmp_path, change):
    x, y = transfer.images()

    def second_phase(folder, *, epochs, is_resumed=False):
        run = setup(xla=False)
        keras.utils.set_random_seed(7)
        with run.scope():
            model = transfer.headed(trained=("first",))
        loader = run.examples(list(zip(x, y, strict=True)), global_batch_size=6)
        if not is_resumed:
            run.compile(model, **transfer.of_classes())
            model.fit(loader, epochs=1, verbose=0)
            loader = run.examples(list(zip(x, y, strict=True)), global_batch_size=6)
        change(model)
        run.compile(model, **transfer.of_classes())
        model.fit(loader, epochs=epochs, verbose=0, callbacks=[run.checkpoints(folder)])
        return model.get_weights()

    wanted = second_phase(tmp_path / "whole", epochs=3)
    second_phase(tmp_path / "cut", epochs=1)
    resumed = second_phase(tmp_path / "cut", epochs=3, is_resumed=True)
    for value, expected in zip(resumed, wanted, strict=True):
        np.testing.assert_array_equal(value, expected)


@pytest.mark.slow
def test_a_checkpoint_of_other_trained_weights_is_refused_in_words(setup, tmp_path):
    x, y = transfer.images()
    run = setup(xla=False)
    with run.scope():
        model = transfer.headed(trained=())
    examples = list(zip(x, y, strict=True))
    loader = run.examples(examples, global_batch_size=6)
    run.compile(model, **transfer.of_classes())
    model.fit(loader, epochs=1, verbose=0, callbacks=[run.checkpoints(tmp_path)])
    transfer.thaw_last(model)
    run.compile(model, **transfer.of_classes())
    loader = run.examples(examples, global_batch_size=6)
    with pytest.raises(
        UserError, match=r"14 variables, but .* have 16; .* the same weights trainable"
    ):
        model.fit(loader, epochs=2, verbose=0, callbacks=[run.checkpoints(tmp_path)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "change", "data"),
    [
        (transfer.headed, transfer.thaw_last, transfer.images),
        (transfer.reader, transfer.wear_lora, transfer.sentences),
    ],
    ids=["thawed", "LoRA"],
)
def test_what_is_trained_after_a_change_is_exported(setup, tmp_path, make, change, data):
    run = setup(xla=False)
    with run.scope():
        model = make()
    for each in (lambda _: None, change):
        each(model)
        run.compile(model, **transfer.of_classes())
        trained(model, data())
    x = data()[0]
    exported = run.export(model, tmp_path / "1", images=x)
    loaded = keras.saving.load_model(exported / "model.keras")
    np.testing.assert_allclose(
        loaded.predict(x, verbose=0), model.predict(x, verbose=0), **TOLERANCE
    )
