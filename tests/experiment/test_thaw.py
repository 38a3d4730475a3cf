"""Runs whose frozen layers are trained from a later epoch on."""

import contextlib
import dataclasses
import shutil

import keras
import numpy as np
import pytest
from conftest import compiled
from cut_fit import Cut, CutError

from tfaccel import UserError
from tfaccel.config import ExportConfig, default_config, parse
from tfaccel.experiment import recipe, thaw
from tfaccel.experiment import train as train_room
from tfaccel.experiment.export_run import export_run
from tfaccel.experiment.models.frozen import freeze
from tfaccel.experiment.thaw import Stage
from tfaccel.training.checkpoint import state

layers = keras.layers
STEPS = 6  # of an epoch: 1,437 images in batches of 256


def digits(**changes):
    config = default_config()
    config.data.image_size, config.data.channels = (8, 8), 1
    config.train.epochs, config.train.decay = 3, "cosine"
    config.train.learning_rate, config.train.weight_decay = 5e-3, 0.1
    config.model.freeze, config.model.thaw_epochs = "backbone", "1"
    config.runtime.xla, config.runtime.gpu_ids = False, ()
    config.runtime.deterministic = True
    config.checkpoint.every_steps, config.checkpoint.keep_last = 2, 20
    config.update_from_flattened_dict(changes)
    return parse(config)


# ----- The config.


@pytest.mark.parametrize(
    ("given", "stages"),
    [
        (None, [Stage(0, 9)]),
        ("2", [Stage(0, 2), Stage(2, 9)]),
        (2, [Stage(0, 2), Stage(2, 9)]),
        ("1:conv5_*,4", [Stage(0, 1), Stage(1, 4, "conv5_*"), Stage(4, 9)]),
        (("1:conv5_*", "4"), [Stage(0, 1), Stage(1, 4, "conv5_*"), Stage(4, 9)]),
    ],
)
def test_a_config_names_epochs_and_layers(given, stages):
    config = digits(**{"model.thaw_epochs": given, "train.epochs": 9})
    assert thaw.stages_of(config) == stages
    again = default_config()  # as config.json has it
    again.update(dataclasses.asdict(config))
    assert thaw.stages_of(parse(again)) == stages


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.freeze": None}, "thaw_epochs=1 without freeze"),
        ({"model.thaw_epochs": "conv5_*"}, "expected epochs, with a layer or without"),
        ({"model.thaw_epochs": "-1"}, "expected epochs, with a layer or without"),
        ({"model.thaw_epochs": "0"}, "expected increasing epochs from 1 on"),
        ({"model.thaw_epochs": "2,2"}, "expected increasing epochs from 1 on"),
        ({"model.thaw_epochs": "3"}, "thaw_epochs has epoch 3, but train.epochs=3"),
        ({"step.nonfinite": "rollback"}, "could not go back over a thaw"),
    ],
)
def test_mistakes_are_one_sentence(changes, words):
    with pytest.raises(UserError) as error:
        digits(**changes)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("epoch", "step", "begins"),
    [(0, 3, None), (1, 0, None), (1, 1, 1), (3, 5, 1), (4, 0, 1), (4, 2, 4), (9, 0, 4)],
)
def test_a_checkpoint_belongs_to_the_stage_that_made_it(epoch, step, begins):
    config = digits(**{"model.thaw_epochs": "1:dense*,4", "train.epochs": 9})
    stage = thaw.stage_of(config, {"epoch": epoch, "step_in_epoch": step})
    assert (stage.begins if stage else None) == begins


# ----- The layers.


def network():
    x = keras.Input((5,))
    inner = [layers.Dense(4, name="c"), layers.BatchNormalization(name="d")]
    parts = [layers.Dense(4, name="a"), layers.MultiHeadAttention(2, 2, name="b")]
    y = layers.Reshape((4, 1))(parts[0](x))
    y = layers.Flatten()(parts[1](y, y))
    y = keras.Sequential(inner, name="inner")(y)
    return keras.Model(x, layers.Dense(3, name="logits")(layers.Dense(4, name="e")(y)))


@pytest.mark.parametrize(
    ("freezes", "first", "trained"),
    [
        ("backbone", None, "abcdel"),
        ("backbone", "e", "el"),
        ("backbone", "d", "del"),
        ("backbone", "inner", "cdel"),
        ("backbone", "b", "bcdel"),
        ("a,inner", "c", "bcdel"),
        ("a,c", None, "abcdel"),
    ],
)
def test_layers_from_one_on_are_thawed(freezes, first, trained):
    given = "1" if first is None else f"1:{first}"
    config = digits(**{"model.freeze": freezes, "model.thaw_epochs": given})
    model = network()
    freeze(model, config.model.freeze)
    thaw.check_thaws(model, config)
    thaw.enter(thaw.stages_of(config)[1], model, config)
    tops = {id(w): "b" for w in model.get_layer("b").weights}  # of layers in the attention
    names = {tops.get(id(w)) or w.path.split("/")[-2] for w in model.trainable_weights}
    assert "".join(sorted(each[0] for each in names)) == trained


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("1:f", "has no layer 'f'"),
        ("1:logits", "thaws nothing more after epoch 1"),
        ("1:inner,2:d", "thaws nothing more after epoch 2"),
    ],
)
def test_a_stage_that_thaws_nothing_is_refused_at_the_start(given, words):
    config = digits(**{"model.thaw_epochs": given})
    model = network()
    freeze(model, config.model.freeze)
    with pytest.raises(UserError) as error:
        thaw.check_thaws(model, config)
    assert words in str(error.value)


def test_in_a_resnet_the_layers_are_in_the_order_of_the_network():
    model = keras.applications.MobileNetV2(weights=None, input_shape=(32, 32, 3), alpha=0.35)
    config = digits(**{"model.thaw_epochs": "1:block_15_*"})
    freeze(model, config.model.freeze)
    thaw.enter(thaw.stages_of(config)[1], model, config)
    blocks = {w.path.split("/")[-2].split("_")[1] for w in model.trainable_weights[:-2]}
    assert blocks == {"15", "16", "1"}  # Conv_1 and its batch norm come last


# ----- Whole runs.


class NoRehearsal(contextlib.nullcontext):
    """Stands for the trial of the export, which other tests see."""

    seconds = 0.0

    def __enter__(self):
        return self

    def callback(self):
        return keras.callbacks.Callback()


@pytest.fixture
def weights_after(monkeypatch):
    """Runs an experiment without an export; returns the model's weights."""
    models = []
    fit, cut = train_room.fit, []

    def fit_and_cut(*args, watches, **settings):
        outcome = fit(*args, watches=[*watches, *cut], **settings)
        if "boundary" in cut_at:
            raise CutError
        return outcome

    cut_at = []

    def run_once(config, workdir, at=None):
        cut[:] = [Cut(at if isinstance(at, int) else 10**9)]
        cut_at[:] = [at] if at == "boundary" else []
        train_room.run(config, workdir=workdir)
        return models[-1].get_weights()

    def exported(workdir, out):
        export_run(workdir, out, ExportConfig(samples=8))
        return models[-1].get_weights()

    run_once.exported = exported
    monkeypatch.setattr(train_room, "rehearse", lambda *_, **__: NoRehearsal())
    monkeypatch.setattr(train_room, "fit", fit_and_cut)
    monkeypatch.setattr(
        train_room.Run, "export", lambda _, model, path, **__: models.append(model) or path
    )
    return run_once


@pytest.fixture
def by_hand(setup):
    """The weights after the same stages in a script: `fit`, `run.compile`, `fit`."""
    config = digits()
    this_run = setup(xla=False, deterministic=True)
    train, _, model = train_room.prepare(this_run, config)
    model.fit(train, epochs=1, verbose=0)
    frozen = model.layers[1].get_weights()
    for each in model.layers:
        each.trainable = True
    schedule = recipe.make_schedule(config.train, global_batch_size=256, num_steps=STEPS)
    again = recipe.make_optimizer(config.train, schedule)
    rates = [float(schedule(step)) for step in range(3 * STEPS)]
    # The rate goes on where the first optimizer ended, though this one counts from 0.
    again = recipe.make_optimizer(config.train, schedule.begun_at(STEPS))
    assert [float(again._learning_rate(step)) for step in range(3)] == rates[STEPS : STEPS + 3]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    this_run.compile(model, again, loss)
    model.fit(train, epochs=3, initial_epoch=1, verbose=0)
    assert np.abs(model.layers[1].get_weights()[0] - frozen[0]).max() > 1e-3
    return model.get_weights()


def expect_equal(mine, wanted):
    for one, other in zip(mine, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_run_that_is_killed_between_its_stages_ends_as_two_fits_in_a_script(
    weights_after, by_hand, tmp_path
):
    with pytest.raises(CutError):
        weights_after(digits(), tmp_path / "cut", at="boundary")
    expect_equal(weights_after(digits(), tmp_path / "cut"), by_hand)


@pytest.mark.slow
def test_so_does_a_run_that_is_not_killed(weights_after, by_hand, tmp_path):
    expect_equal(weights_after(digits(), tmp_path / "whole"), by_hand)


def test_all_but_the_optimizer_is_restored_on_every_replica():
    def made():
        keras.utils.set_random_seed(0)
        parts = [layers.Dense(4, name="a"), layers.BatchNormalization(), layers.Dense(3)]
        model = keras.Sequential([keras.Input((5,)), *parts])
        model.layers[0].trainable = False
        return model

    x = np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32)
    how = {"optimizer": keras.optimizers.Adam, "loss": "mse", "xla": False}
    model = compiled(made, 2, **how)
    model.fit(x, x[:, :3], batch_size=4, verbose=0)
    saved, wanted = state.variables(model), model.get_weights()
    other = compiled(made, 2, **how)
    other.layers[0].trainable = True
    with other.distribute_strategy.scope():
        other.optimizer = keras.optimizers.Adam()
        other.optimizer.build(other.trainable_variables)
    with pytest.raises(UserError, match="another `trainable`"):
        state.put_variables(other, saved)
    state.put_variables(other, saved, anew=True)
    for variable, value in zip(other.weights, wanted, strict=True):
        for each in other.distribute_strategy.experimental_local_results(variable.value):
            np.testing.assert_array_equal(each, value)
    assert int(other.optimizer.iterations) == 0
    assert not any(each.numpy().any() for each in other.optimizer.variables[2:])


@pytest.mark.slow
@pytest.mark.parametrize("at", [3, STEPS, STEPS + 1, STEPS + 5])
def test_a_run_killed_at_any_step_ends_alike(weights_after, tmp_path, at):
    whole = weights_after(digits(), tmp_path / "whole")
    with pytest.raises(CutError):
        weights_after(digits(), tmp_path / "cut", at=at)
    expect_equal(weights_after(digits(), tmp_path / "cut"), whole)


@pytest.mark.slow
def test_checkpoints_of_each_stage_are_exported(weights_after, tmp_path):
    workdir = tmp_path / "run"
    whole = weights_after(digits(), workdir)
    assert [each.name[-2:] for each in sorted(workdir.glob("checkpoints/step-*"))][-1] == "18"
    last = weights_after.exported(workdir, tmp_path / "out")
    expect_equal(last, whole)
    for each in workdir.glob("checkpoints/step-*"):
        if int(each.name.removeprefix("step-")) > STEPS:
            shutil.rmtree(each)
    frozen = weights_after.exported(workdir, tmp_path / "out")
    assert np.abs(frozen[0] - whole[0]).max() > 1e-3


@pytest.mark.slow
def test_three_stages_average_weights_and_two_rates_work_together(weights_after, tmp_path):
    more = {
        "model.thaw_epochs": "1:dense*,2",
        "train.backbone_factor": 0.5,
        "model.freeze": "conv*,dense*",
        "train.ema_momentum": 0.9,
        "train.early_stopping_epochs": 3,
    }
    whole = weights_after(digits(**more), tmp_path / "whole")
    with pytest.raises(CutError):
        weights_after(digits(**more), tmp_path / "cut", at=STEPS + 3)
    expect_equal(weights_after(digits(**more), tmp_path / "cut"), whole)
