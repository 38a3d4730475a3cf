"""A run that was cut short and started again is the run that was not: bit for bit on the CPU."""

import contextlib
import dataclasses
import errno
import json
import os
import signal
import time

import keras
import numpy as np
import pytest
from conftest import strategy_of

import tfaccel
from tfaccel import recipe
from tfaccel.callbacks import restore
from tfaccel.callbacks.checkpoints import Stopped
from tfaccel.checkpoint import folder as folder_lib
from tfaccel.checkpoint.store import CheckpointError
from tfaccel.config import CheckpointConfig, StepConfig, TrainConfig
from tfaccel.runtime import Device

STEPS = 5  # of an epoch: 37 images in batches of 8
IMAGES = {"image_size": (12, 10), "channels": 1, "global_batch_size": 8, "loader": "dali_cpu"}
TRAIN = TrainConfig(
    epochs=4, optimizer="sgd", learning_rate=0.05, momentum=0.9, decay="cosine", warmup_epochs=1
)


class CutError(Exception):
    """What stands for a SIGKILL, so that one process can be killed often."""


class Cutter(keras.callbacks.Callback):
    """Cuts at a step, or in the tests of an epoch; notes which images the others see."""

    def __init__(self, loader, *, step=None, test_of=None, signals=()):
        super().__init__()
        self.loader, self.step, self.test_of, self.signals = loader, step, test_of, signals
        self.seen = []

    def get_state(self):
        return {}

    def set_state(self, state):
        pass

    def _cut(self):
        if not self.signals:
            raise CutError
        for each in self.signals:
            os.kill(os.getpid(), each)
            time.sleep(0.2)  # until the thread that hears it has had its turn

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        position = self.loader.position
        self.seen.append((position, self.loader.data.feed(0).rows(position - 1).ids.tolist()))
        if position == self.step:
            self._cut()

    def on_test_batch_end(self, batch, logs=None):
        if self.epoch == self.test_of and batch == 1:
            self._cut()


def build():
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((12, 10, 1)),
            layers.Conv2D(4, 3),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(3, dtype="float32"),
        ]
    )


@pytest.fixture
def train(setup, folder, tmp_path):
    """Trains from the newest checkpoint on; returns the model, its history and the images seen."""

    def train(
        name,
        *,
        num_replicas=1,
        precision="float32",
        xla=False,
        every_steps=None,
        recipe_=TRAIN,
        **settings,
    ):
        run = setup(precision=precision, deterministic=True, xla=xla)
        if num_replicas > 1:
            run.strategy = strategy_of(num_replicas)
            devices = tuple(Device(f"/cpu:{index}", None) for index in range(num_replicas))
            run.runtime = dataclasses.replace(run.runtime, devices=devices)
        batch = settings.pop("batch", 8)
        images = IMAGES | {"global_batch_size": batch}
        loader = run.image_folder(folder, **images, shuffle=True, augment="mnist")
        if settings.pop("peek", False):
            next(iter(loader))
        test = run.image_folder(folder, **IMAGES)
        with run.scope():
            model = build()
        schedule = recipe.make_schedule(recipe_, global_batch_size=batch, num_steps=len(loader))
        run.compile(
            model,
            recipe.make_optimizer(recipe_, schedule),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=settings.pop("steps_per_execution", 1),
            step=settings.pop("step_config", StepConfig()),
        )
        cuts = {key: settings.pop(key) for key in ("step", "test_of", "signals") if key in settings}
        cutter = Cutter(loader, **cuts)
        stopper = keras.callbacks.EarlyStopping(
            patience=settings.pop("patience", 9), restore_best_weights=True
        )
        extra = settings.pop("callbacks", [])
        config = CheckpointConfig(every_steps=every_steps, **settings.pop("config", {}))
        checkpoints = run.checkpoints(tmp_path / name, config, **settings)
        history = model.fit(
            loader,
            validation_data=test,
            epochs=recipe_.epochs,
            callbacks=[checkpoints, cutter, stopper, *extra],
            verbose=0,
        )
        return model, history.history, cutter.seen

    return train


_WHOLE = {}


def whole(train, **settings):
    """The run that nothing interrupts; of the same settings it is trained once."""
    key = repr(settings)
    if key not in _WHOLE:
        _WHOLE[key] = train("whole", **settings)
    return _WHOLE[key]


def assert_alike(one, other, *, rtol=0.0):
    """Both models have the same bits, optimizer and all, and the same history."""
    for ours, theirs in zip(one[0].variables, other[0].variables, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy(), err_msg=ours.path)
    optimizers = (each[0].optimizer.variables for each in (one, other))
    for ours, theirs in zip(*optimizers, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy(), err_msg=ours.path)
    assert one[1].keys() == other[1].keys()
    for name, values in one[1].items():
        np.testing.assert_allclose(values, other[1][name], rtol=rtol, err_msg=name)


FIRST = {"step": 1}
CUTS = [
    pytest.param({"step": 2 * STEPS + 3}, id="mid-epoch"),
    pytest.param(FIRST, id="first step", marks=pytest.mark.slow),
    pytest.param({"step": 2 * STEPS}, id="last step of an epoch", marks=pytest.mark.slow),
    pytest.param({"test_of": 1}, id="in the tests", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("cut", CUTS)
def test_p2_resumed_is_uninterrupted(train, cut):
    reference = whole(train)
    with pytest.raises(CutError):
        train("cut", every_steps=2, **cut)
    resumed = train("cut", every_steps=2)
    assert_alike(resumed, reference)
    assert resumed[2] == reference[2][-len(resumed[2]) :]
    assert len(resumed[2]) < len(reference[2]) or cut == FIRST


@pytest.mark.parametrize(
    ("precision", "num_replicas"),
    [
        ("mixed_float16", 1),
        pytest.param("float32", 2, marks=pytest.mark.slow),
        pytest.param("mixed_float16", 2, marks=pytest.mark.slow),
    ],
)
def test_p2_loss_scale_and_replicas(train, precision, num_replicas):
    settings = {"precision": precision, "num_replicas": num_replicas}
    settings["step_config"] = StepConfig(loss_scale_growth_steps=3)
    reference = whole(train, **settings)
    with pytest.raises(CutError):
        train("cut", **settings, every_steps=3, step=STEPS + 4)
    # Sums of metrics over replicas come back as one: another order of float32 additions.
    assert_alike(train("cut", **settings, every_steps=3), reference, rtol=1e-6)


def test_p2_early_stopping_goes_on_counting(train):
    # Its second and third epoch are no better: the rate is much too high.
    recipe_ = dataclasses.replace(TRAIN, learning_rate=5.0, decay="constant", epochs=8)
    reference = whole(train, recipe_=recipe_, patience=2)
    assert 3 <= len(reference[1]["loss"]) < 8
    with pytest.raises(CutError):
        train("cut", recipe_=recipe_, patience=2, step=2 * STEPS + 2)
    resumed = train("cut", recipe_=recipe_, patience=2)
    assert_alike(resumed, reference)
    # It has ended: the same once more trains nothing, and ends with the same.
    again = train("cut", recipe_=recipe_, patience=2)
    assert again[2] == []
    assert_alike(again, reference)


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGUSR1, signal.SIGINT)),
    ],
)
def test_p5_a_signal_saves_within_a_step_and_exits(train, number, tmp_path, caplog):
    with pytest.raises(Stopped) as stopped:
        train("cut", step=STEPS + 2, signals=[number])
    assert stopped.value.code == 143
    (_, newest) = sorted((tmp_path / "cut").glob("step-*"))
    assert (step := int(newest.name[5:])) in (STEPS + 2, STEPS + 3)
    assert f"{number.name}: training saves its state after this step and stops" in caplog.text
    assert (
        f"stopped by {number.name} after step {step}, which is saved; the same command goes on "
        f"after step {step - STEPS} of {STEPS} of epoch 2"
    ) in caplog.text
    assert_alike(train("cut"), whole(train))


def test_p5_a_signal_in_the_tests_saves_what_is_trained(train, tmp_path, caplog):
    with pytest.raises(Stopped) as stopped:
        train("cut", test_of=1, signals=[signal.SIGTERM], config={"exit_code": 75})
    assert stopped.value.code == 75
    assert (tmp_path / "cut" / f"step-{2 * STEPS:08d}-untested").is_dir()
    assert "SIGTERM: the validation stops at its next batch" in caplog.text
    assert "epoch 2 is trained and not yet tested: the same command tests it" in caplog.text
    resumed, reference = train("cut"), whole(train)
    assert_alike(resumed, reference)
    assert resumed[2] == reference[2][2 * STEPS :]


def test_p5_a_signal_in_an_epochs_last_step_begins_no_validation(train, tmp_path):
    tested = []
    looks = keras.callbacks.LambdaCallback()
    looks.on_test_batch_begin = lambda batch, logs=None: tested.append(batch)
    with pytest.raises(Stopped):
        train("cut", step=STEPS, signals=[signal.SIGTERM], callbacks=[looks])
    assert tested == []
    assert (tmp_path / "cut" / f"step-{STEPS:08d}-untested").is_dir()


@pytest.mark.slow
def test_p5_on_two_replicas(train):
    with pytest.raises(Stopped):
        train("cut", num_replicas=2, step=STEPS + 2, signals=[signal.SIGTERM])
    assert_alike(train("cut", num_replicas=2), whole(train, num_replicas=2), rtol=1e-6)


def test_another_number_of_replicas_sees_the_same_images(train, caplog):
    with pytest.raises(Stopped):
        train("cut", num_replicas=2, step=STEPS + 2, signals=[signal.SIGTERM])
    with caplog.at_level("WARNING", logger="tfaccel"):
        resumed = train("cut", num_replicas=1)
    assert "made on 2 replicas, resumed on 1: images, order and augmentation stay" in caplog.text
    assert resumed[2] == whole(train)[2][-len(resumed[2]) :]


def test_p8_roll_back_goes_on_after_the_bad_step(train, monkeypatch, caplog):
    config = StepConfig(nonfinite="rollback", max_rollbacks=1)
    spoil = keras.callbacks.LambdaCallback()
    weights_at = {}

    def on_train_batch_end(batch, logs=None):
        position = spoil.loader_position()
        weights_at.setdefault(position, spoil.model.get_weights())
        if position == STEPS + 3 and not spoil.spoiled:
            spoil.spoiled = True
            kernel = spoil.model.trainable_variables[0]
            kernel.assign(kernel * np.nan)

    spoil.spoiled = False
    spoil.on_train_batch_end = on_train_batch_end
    spoil.loader_position = lambda: int(spoil.counted)
    counted = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: setattr(spoil, "counted", epoch * STEPS),
        on_train_batch_begin=lambda batch, logs: setattr(spoil, "counted", spoil.counted + 1),
    )
    with caplog.at_level("WARNING", logger="tfaccel"):
        model, history, seen = train(
            "rolled", every_steps=2, step_config=config, callbacks=[counted, spoil]
        )
    positions = [position for position, _ in seen]
    # The weights were spoiled after step 8: step 9 finds it, and 10 follows.
    assert positions == sorted(set(positions))
    assert "back to step 7" in caplog.text
    assert all(np.isfinite(each).all() for each in model.get_weights())
    assert len(history["loss"]) == TRAIN.epochs


@pytest.mark.parametrize("on_error", ["stop", pytest.param("continue", marks=pytest.mark.slow)])
def test_p3_a_full_disk_leaves_the_older_ones(train, tmp_path, monkeypatch, caplog, on_error):
    fill = folder_lib.fill

    def full(unfinished, write):
        if int(unfinished.name[5:13]) > STEPS + 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        fill(unfinished, write)

    monkeypatch.setattr(folder_lib, "fill", full)
    context = pytest.raises(CheckpointError, match=r"No space left .* are free there; make room")
    with context if on_error == "stop" else contextlib.nullcontext():
        train("cut", every_steps=2, config={"on_error": on_error})
    names = sorted(each.name for each in (tmp_path / "cut").glob("step-*"))
    assert names == ["step-00000004", "step-00000005", "step-00000007"]
    assert ("training goes on" in caplog.text) == (on_error == "continue")
    assert caplog.text.count("step-00000009 cannot be written") == (on_error == "continue")
    monkeypatch.undo()
    assert_alike(train("cut", every_steps=2), whole(train))


def test_p5_what_cannot_be_saved_is_not_said_to_be(train, monkeypatch, caplog):
    def full(unfinished, write):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(folder_lib, "fill", full)
    with pytest.raises(CheckpointError, match="No space left"):
        train("cut", step=STEPS + 2, signals=[signal.SIGTERM], config={"on_error": "continue"})
    assert "is saved" not in caplog.text


def test_p4_a_damaged_newest_checkpoint_is_passed_over(train, tmp_path, caplog):
    with pytest.raises(CutError):
        train("cut", every_steps=2, step=STEPS + 4)
    newest = sorted((tmp_path / "cut").glob("step-*"))[-1]
    data = newest / "arrays.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[:-7])
    with caplog.at_level("WARNING", logger="tfaccel"):
        resumed = train("cut", every_steps=2)
    assert f"{newest} is passed over" in caplog.text
    assert_alike(resumed, whole(train))


def test_replaced_images_are_refused_unless_they_are_accepted(train, folder, caplog):
    with pytest.raises(CutError):
        train("cut", step=STEPS + 1)
    image = sorted(folder.rglob("*.png"))[3]
    before = image.stat()
    try:
        os.utime(image, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
        with pytest.raises(tfaccel.UserError, match=r"the data were changed.*sizes and times"):
            train("cut")
        train("cut", accept_changes=True)
        assert "resumed with changed data" in caplog.text
        train("cut")  # which is what it was made with now
    finally:
        os.utime(image, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_checkpoint_without_sizes_and_times_is_gone_on_with(train, monkeypatch):
    monkeypatch.setattr(restore.Origin, "_note_stamps", lambda *_: None)  # as before they were kept
    with pytest.raises(CutError):
        train("cut", step=STEPS + 1)
    monkeypatch.undo()
    train("cut")


def test_a_run_below_brackets_goes_on(train):
    with pytest.raises(CutError):
        train("lr=[0.1]", every_steps=2, step=2 * STEPS + 3)
    assert_alike(train("lr=[0.1]", every_steps=2), whole(train))


def test_what_does_not_fit_is_refused_in_a_sentence(train, tmp_path):
    with pytest.raises(tfaccel.UserError, match="has no checkpoint to resume from"):
        train("cut", resume="required")
    with pytest.raises(CutError):
        train("cut", step=STEPS + 1, facts={"model": "small"})
    with pytest.raises(tfaccel.UserError, match="has a checkpoint of step 5; give another folder"):
        train("cut", resume="never")
    with pytest.raises(tfaccel.UserError, match="model 'small' -> 'large'"):
        train("cut", facts={"model": "large"})
    with pytest.raises(
        tfaccel.UserError, match=r"with the callbacks .*Cutter, EarlyStopping; rece"
    ):
        train("cut", facts={"model": "small"}, callbacks=[keras.callbacks.EarlyStopping()])
    train("cut", facts={"model": "large"}, accept_changes=True)


def test_fewer_epochs_than_are_trained_are_refused(train):
    with pytest.raises(CutError):
        train("cut", step=STEPS + 2, every_steps=1)
    one = dataclasses.replace(TRAIN, epochs=1)
    with pytest.raises(
        tfaccel.UserError, match=r"epochs=1, but .* is of 1 epochs .*; give 2 or more"
    ):
        train("cut", recipe_=one, accept_changes=True)


def test_settings_of_the_step_that_decide_are_compared(train, caplog):
    with pytest.raises(CutError):
        train("cut", step=STEPS + 1)
    changed = StepConfig(accumulation_steps=2)
    with pytest.raises(tfaccel.UserError, match=r"another run: step.accumulation_steps 1 -> 2; c"):
        train("cut", step_config=changed)
    free = StepConfig(nonfinite="skip", audit_steps=7)
    with pytest.raises(CutError):
        train("cut", step=2 * STEPS + 1, step_config=free)
    train("cut", step_config=changed, accept_changes=True)
    assert "resumed with changes: step.accumulation_steps 1 -> 2" in caplog.text


def test_a_setting_that_a_checkpoint_does_not_know_was_at_its_default(train, monkeypatch):
    monkeypatch.setattr(restore, "_step_facts", lambda config: {})  # as before they were kept
    with pytest.raises(CutError):
        train("cut", step=STEPS + 1)
    monkeypatch.undo()
    with pytest.raises(tfaccel.UserError, match=r"another run: step.accumulation_steps 1 -> 2; c"):
        train("cut", step_config=StepConfig(accumulation_steps=2))
    assert_alike(train("cut"), whole(train))


def test_a_fresh_run_begins_at_the_start_whatever_the_loader_gave_before(train, tmp_path):
    train("run", peek=True)
    newest = sorted((tmp_path / "run").glob("step-*"))[-1]
    assert newest.name == f"step-{TRAIN.epochs * STEPS:08d}"


def test_changes_that_are_accepted_hold_and_names_of_checkpoints_rise(train, tmp_path, caplog):
    first = dataclasses.replace(TRAIN, decay="constant", warmup_epochs=0)
    with pytest.raises(CutError):
        train("cut", recipe_=first, every_steps=2, step=STEPS + 4)
    changed = dataclasses.replace(first, learning_rate=0.02)
    with pytest.raises(tfaccel.UserError, match=r"another run: optimizer\.1\.learning_rate 0.0"):
        train("cut", recipe_=changed)
    with caplog.at_level("WARNING", logger="tfaccel"):
        model, history, seen = train("cut", recipe_=changed, accept_changes=True, batch=20)
    assert "epoch 2 begins anew" in caplog.text
    assert [position for position, _ in seen] == [3, 4, 5, 6, 7, 8]  # of 2 steps an epoch
    assert len(history["loss"]) == TRAIN.epochs
    names = sorted(each.name for each in (tmp_path / "cut").glob("step-*"))
    assert names[-1] == "step-00000013"  # 7, and 6 more
    assert float(model.optimizer.learning_rate.numpy()) == pytest.approx(0.02)


def test_every_steps_counts_where_an_execution_is_an_epoch(train, tmp_path):
    config = {"every_epochs": 100, "keep_last": 9}
    train("run", every_steps=STEPS, config=config, steps_per_execution=STEPS)
    names = sorted(each.name for each in (tmp_path / "run").glob("step-*"))
    assert names == [f"step-{STEPS * epoch:08d}" for epoch in range(1, TRAIN.epochs + 1)]


def test_all_of_the_state_is_plain_json_and_arrays(train, tmp_path):
    train("run", every_steps=3)
    newest = sorted((tmp_path / "run").glob("step-*"))[-1]
    state = json.loads((newest / "state.json").read_text())["state"]
    assert state["step"] == TRAIN.epochs * STEPS
    assert state["epoch"] == TRAIN.epochs
    assert len(state["history"]["val_loss"]) == TRAIN.epochs
    assert {each["class"] for each in state["callbacks"]} >= {"EarlyStopping", "Cutter"}


def test_what_the_default_of_xla_chose_may_change(train, caplog):
    # As a checkpoint of the time when XLA was on by default on a CPU, too.
    with pytest.raises(CutError):
        train("cut", every_steps=2, step=5, xla=True, facts={"runtime.xla": True})
    train("cut", facts={"runtime.xla": None})
    assert "made with XLA, resumed without it" in caplog.text


def test_another_xla_that_is_asked_for_is_refused(train):
    with pytest.raises(CutError):
        train("cut", every_steps=2, step=5, facts={"runtime.xla": None})
    with pytest.raises(tfaccel.UserError, match=r"runtime\.xla False -> True"):
        train("cut", facts={"runtime.xla": True})
