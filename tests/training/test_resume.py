"""A run that was cut short and started again is the run that was not: bit for bit on the CPU."""

import contextlib
import copy
import dataclasses
import errno
import functools
import json
import os
import pathlib
import shutil
import signal
import time
from unittest import mock

import keras
import numpy as np
import pytest
from conftest import strategy_of
from tensorflow.python.framework import config as tf_config

import tfaccel
from tfaccel.config import CheckpointConfig, StepConfig, TrainConfig
from tfaccel.experiment import recipe
from tfaccel.runtime.devices import Device
from tfaccel.training.callbacks.checkpoints import Stopped
from tfaccel.training.checkpoint import folder as folder_lib
from tfaccel.training.checkpoint import state as state_lib
from tfaccel.training.checkpoint.store import CheckpointError, Snapshot, Store

STEPS = 5  # of an epoch: 37 images in batches of 8
IMAGES = {"image_size": (12, 10), "channels": 1, "global_batch_size": 8, "loader": "dali_cpu"}
TRAIN = TrainConfig(
    epochs=3, optimizer="sgd", learning_rate=0.05, momentum=0.9, decay="cosine", warmup_epochs=1
)


FACTS = {"model": "small", "runtime.xla": None}  # as `tfaccel train` notes more of them


class CutError(Exception):
    """What stands for a SIGKILL, so that one process can be killed often."""


class Cutter(keras.callbacks.Callback):
    """Cuts at a step, in the tests of an epoch, or before any step; notes the images of steps."""

    def __init__(self, loader, *, step=None, test_of=None, signals=(), at_once=False):
        super().__init__()
        self.loader, self.step, self.test_of, self.signals = loader, step, test_of, signals
        self.at_once = at_once
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

    def on_train_batch_begin(self, batch, logs=None):
        if self.at_once:
            self._cut()

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
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(3, dtype="float32"),
        ]
    )


@dataclasses.dataclass
class Trained:
    """What a `fit` left: the model, a log's value for each epoch, and the images of each step.

    `begun_at` is the step after which it began.
    """

    model: keras.Model
    history: dict
    seen: list
    begun_at: int
    folder: pathlib.Path


def train_in(
    images_folder,
    folder,
    *,
    num_replicas=1,
    precision="float32",
    xla=False,
    every_steps=None,
    recipe_=TRAIN,
    epochs=None,
    validate=True,
    facts=None,
    look=False,
    **settings,
):
    """Trains from the newest checkpoint in `folder` on."""
    run = tfaccel.setup(gpu_ids=(), precision=precision, deterministic=True, xla=xla)
    if num_replicas > 1:
        run.strategy = strategy_of(num_replicas)
        devices = tuple(Device(f"/cpu:{index}", None) for index in range(num_replicas))
        run.runtime = dataclasses.replace(run.runtime, devices=devices)
    batch = settings.pop("batch", 8)
    images = IMAGES | {"global_batch_size": batch}
    loader = run.image_folder(images_folder, **images, shuffle=True, augment="mnist")
    if settings.pop("peek", False):
        next(iter(loader))
    test = run.image_folder(images_folder, **IMAGES) if validate else None
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
    of_cutter = ("step", "test_of", "signals", "at_once")
    cutter = Cutter(loader, **{key: settings.pop(key) for key in of_cutter if key in settings})
    stopper = keras.callbacks.EarlyStopping(
        patience=settings.pop("patience", 9), restore_best_weights=True
    )
    extra = settings.pop("callbacks", [])
    config = CheckpointConfig(every_steps=every_steps, **settings.pop("config", {}))
    checkpoints = run.checkpoints(folder, config, facts=FACTS | (facts or {}), **settings)
    # A look at the export, of which little is shown here, takes a quarter of the time.
    quick = contextlib.nullcontext() if look else mock.patch("tfaccel.run.warn_at_start")
    ends = pytest.raises(CutError) if cutter.at_once else contextlib.nullcontext()
    history = {}
    with quick, ends:
        history = model.fit(
            loader,
            validation_data=test,
            epochs=epochs or recipe_.epochs,
            callbacks=[checkpoints, cutter, stopper, *extra],
            verbose=0,
        ).history
    return Trained(model, history, cutter.seen, loader.position - len(cutter.seen), folder)


@contextlib.contextmanager
def as_before():
    """Puts back what `tfaccel.setup` changes for the whole process."""
    yield
    keras.config.set_dtype_policy("float32")
    tf_config.disable_op_determinism()


@pytest.fixture
def train(folder, tmp_path):
    """Trains from the newest checkpoint on, in a folder of the test's own."""
    with as_before():
        yield lambda name, **settings: train_in(folder, tmp_path / name, **settings)


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """Returns the run that nothing interrupts; of the same settings it is trained once.

    Each of its checkpoints stays. `cut_short` makes of them what a SIGKILL leaves.
    """

    @functools.cache
    def train(key):
        # Neither changes what is trained: a batch that the loader gave before, and a look.
        settings = {"every_steps": 1, "peek": True, "look": not key, "config": {"keep_last": 99}}
        return train_in(
            folder, tmp_path_factory.mktemp("whole") / "lr=[0.1]", **settings, **dict(key)
        )

    with as_before():
        yield lambda **settings: train(tuple(sorted(settings.items())))


def cut_short(run, target, *steps):
    """Copies only the checkpoints of these steps."""
    for step in steps:
        shutil.copytree(run.folder / f"step-{step:08d}", target / f"step-{step:08d}")
    return target


def newest(folder):
    return Store(folder, keep_last=99, keep_best=0, largest_is_best=False).newest()


def changed(run, target, step, change):
    """Writes a checkpoint that differs from one of the run's in its state."""
    found = newest(cut_short(run, target, step))
    state = copy.deepcopy(found.state)
    change(state)
    Store(target, keep_last=1, keep_best=0, largest_is_best=False).write(
        Snapshot(found.arrays, state)
    )


def assert_alike(one, other, *, rtol=0.0):
    """Both models have the same bits, optimizer and all, and the same history."""
    for of in (lambda model: model.variables, lambda model: model.optimizer.variables):
        for ours, theirs in zip(of(one.model), of(other.model), strict=True):
            np.testing.assert_array_equal(ours.numpy(), theirs.numpy(), err_msg=ours.path)
    assert one.history.keys() == other.history.keys()
    for name, values in one.history.items():
        np.testing.assert_allclose(values, other.history[name], rtol=rtol, err_msg=name)


def assert_same_arrays(ours, theirs):
    """Both have the same at each place; names are others, since layers are numbered anew."""
    assert ("trained" in ours) == ("trained" in theirs)
    by_place = [sorted(each, key=lambda name: (name != "trained", name)) for each in (ours, theirs)]
    for name, other in zip(*by_place, strict=True):
        np.testing.assert_array_equal(ours[name], theirs[other], err_msg=name)


def assert_same_state(one, other):
    """From two checkpoints training goes on alike."""
    assert one.state == other.state
    assert_same_arrays(one.arrays, other.arrays)


def assert_begins_with(begun, snapshot):
    """What is about to train is what the checkpoint holds."""
    assert (begun.begun_at, begun.seen) == (snapshot.step, [])
    kept = {
        name: each
        for name, each in snapshot.arrays.items()
        if name.startswith(("variable/", "trained"))
    }
    assert_same_arrays(state_lib.variables(begun.model), kept)


FIRST = {"step": 1}
CUTS = [
    pytest.param({"step": 2 * STEPS + 3}, id="mid-epoch"),
    pytest.param(FIRST, id="first step", marks=pytest.mark.slow),
    pytest.param({"step": 2 * STEPS}, id="last step of an epoch", marks=pytest.mark.slow),
    pytest.param({"test_of": 1}, id="in the tests", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("cut", CUTS)
def test_p2_resumed_is_uninterrupted(train, whole, cut):
    reference = whole()
    with pytest.raises(CutError):
        train("cut", every_steps=2, **cut)
    resumed = train("cut", every_steps=2)
    assert_alike(resumed, reference)
    assert resumed.seen == reference.seen[-len(resumed.seen) :]
    assert len(resumed.seen) < len(reference.seen) or cut == FIRST


@pytest.mark.parametrize(
    ("precision", "num_replicas"),
    [
        ("mixed_float16", 1),
        pytest.param("float32", 2, marks=pytest.mark.slow),
        pytest.param("mixed_float16", 2, marks=pytest.mark.slow),
    ],
)
def test_p2_loss_scale_and_replicas(train, whole, precision, num_replicas, tmp_path):
    settings = {"precision": precision, "num_replicas": num_replicas, "epochs": 2}
    settings |= {"step_config": StepConfig(loss_scale_growth_steps=3), "validate": False}
    reference = whole(**settings)
    cut_short(reference, tmp_path / "cut", STEPS + 3)
    resumed = train("cut", **settings)
    assert resumed.begun_at == STEPS + 3
    # Sums of metrics over replicas come back as one: another order of float32 additions.
    assert_alike(resumed, reference, rtol=1e-6)


def test_p2_early_stopping_goes_on_counting(train, whole, tmp_path):
    # Its second and third epoch are no better: the rate is much too high.
    recipe_ = dataclasses.replace(TRAIN, learning_rate=5.0, decay="constant", epochs=8)
    reference = whole(recipe_=recipe_, patience=2)
    assert 3 <= len(reference.history["loss"]) < 8
    last_but_one = (len(reference.history["loss"]) - 1) * STEPS
    cut_short(reference, tmp_path / "cut", last_but_one)
    resumed = train("cut", recipe_=recipe_, patience=2)
    assert resumed.begun_at == last_but_one
    assert_alike(resumed, reference)
    # It has ended: the same once more trains nothing, and ends with the same.
    again = train("cut", recipe_=recipe_, patience=2)
    assert again.seen == []
    assert_alike(again, reference)


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGUSR1, signal.SIGINT)),
    ],
)
def test_p5_a_signal_saves_within_a_step_and_exits(train, whole, number, tmp_path, caplog):
    with pytest.raises(Stopped) as stopped:
        train("cut", step=STEPS + 2, signals=[number])
    assert stopped.value.code == 143
    step = newest(tmp_path / "cut").step
    assert step in (STEPS + 2, STEPS + 3)
    assert f"{number.name}: training saves its state after this step and stops" in caplog.text
    assert (
        f"stopped by {number.name} after step {step}, which is saved; the same command continues "
        f"after step {step - STEPS} of {STEPS} of epoch 2"
    ) in caplog.text
    expected = newest(cut_short(whole(), tmp_path / "expected", step))
    assert_same_state(newest(tmp_path / "cut"), expected)


def test_p5_a_signal_in_the_tests_saves_what_is_trained(train, whole, tmp_path, caplog):
    with pytest.raises(Stopped) as stopped:
        train("cut", test_of=1, signals=[signal.SIGTERM], config={"exit_code": 75})
    assert stopped.value.code == 75
    assert (tmp_path / "cut" / f"step-{2 * STEPS:08d}-untested").is_dir()
    assert "SIGTERM: the validation stops at its next batch" in caplog.text
    assert "epoch 2 is trained but not yet tested: the same command tests it" in caplog.text
    resumed = train("cut")
    assert_alike(resumed, whole())
    assert resumed.seen == whole().seen[2 * STEPS :]


def test_p5_a_signal_in_an_epochs_last_step_begins_no_validation(train, tmp_path):
    tested = []
    looks = keras.callbacks.LambdaCallback()
    looks.on_test_batch_begin = lambda batch, logs=None: tested.append(batch)
    with pytest.raises(Stopped):
        train("cut", step=STEPS, signals=[signal.SIGTERM], callbacks=[looks])
    assert tested == []
    assert (tmp_path / "cut" / f"step-{STEPS:08d}-untested").is_dir()


@pytest.mark.slow
def test_p5_on_two_replicas(train, whole):
    with pytest.raises(Stopped):
        train("cut", num_replicas=2, step=STEPS + 2, signals=[signal.SIGTERM])
    assert_alike(train("cut", num_replicas=2), whole(num_replicas=2), rtol=1e-6)


def test_another_number_of_replicas_sees_the_same_images(train, whole, caplog):
    settings = {"epochs": 2, "validate": False}
    with pytest.raises(Stopped):
        train("cut", **settings, num_replicas=2, step=STEPS + 2, signals=[signal.SIGTERM])
    with caplog.at_level("WARNING", logger="tfaccel"):
        resumed = train("cut", **settings, num_replicas=1)
    assert "made on 2 replicas, resumed on 1 (images, order and augmentation stay)" in caplog.text
    assert resumed.begun_at in (STEPS + 2, STEPS + 3)
    assert resumed.seen == whole().seen[resumed.begun_at : 2 * STEPS]


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
    settings = {"every_steps": 2, "step_config": config, "callbacks": [counted, spoil]}
    with caplog.at_level("WARNING", logger="tfaccel"):
        rolled = train("rolled", **settings, validate=False)
    positions = [position for position, _ in rolled.seen]
    # The weights were spoiled after step 8: step 9 finds it, and 10 follows.
    assert positions == sorted(set(positions))
    assert "rolled back to step 7" in caplog.text
    assert all(np.isfinite(each).all() for each in rolled.model.get_weights())
    assert len(rolled.history["loss"]) == TRAIN.epochs


@pytest.mark.parametrize("on_error", ["stop", pytest.param("continue", marks=pytest.mark.slow)])
def test_p3_a_full_disk_leaves_the_older_ones(
    train, whole, tmp_path, monkeypatch, caplog, on_error
):
    fill = folder_lib.fill

    def full(unfinished, write):
        if int(unfinished.name[5:13]) > STEPS + 2 and "cut" in unfinished.parts:
            raise OSError(errno.ENOSPC, "No space left on device")
        fill(unfinished, write)

    monkeypatch.setattr(folder_lib, "fill", full)
    context = pytest.raises(CheckpointError, match=r"No space left .* are free there; make room")
    with context if on_error == "stop" else contextlib.nullcontext():
        train("cut", every_steps=2, config={"on_error": on_error})
    names = sorted(each.name for each in (tmp_path / "cut").glob("step-*"))
    assert names == ["step-00000004", "step-00000005", "step-00000007"]
    assert ("training continues" in caplog.text) == (on_error == "continue")
    assert caplog.text.count("step-00000009 cannot be written") == (on_error == "continue")
    expected = newest(cut_short(whole(), tmp_path / "expected", STEPS + 2))
    assert_same_state(newest(tmp_path / "cut"), expected)


def test_p5_what_cannot_be_saved_is_not_said_to_be(train, monkeypatch, caplog):
    def full(unfinished, write):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(folder_lib, "fill", full)
    settings = {"step": 2, "signals": [signal.SIGTERM], "validate": False}
    with pytest.raises(CheckpointError, match="No space left"):
        train("cut", **settings, config={"on_error": "continue"})
    assert "is saved" not in caplog.text


def test_p4_a_damaged_newest_checkpoint_is_passed_over(train, whole, tmp_path, caplog):
    cut = cut_short(whole(), tmp_path / "cut", STEPS + 2, STEPS + 4)
    data = cut / f"step-{STEPS + 4:08d}" / "arrays.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[:-7])
    with caplog.at_level("WARNING", logger="tfaccel"):
        begun = train("cut", at_once=True)
    assert f"{data.parent} is skipped" in caplog.text
    assert_begins_with(begun, newest(cut_short(whole(), tmp_path / "expected", STEPS + 2)))


def test_replaced_images_are_refused_unless_they_are_accepted(
    train, whole, folder, tmp_path, caplog
):
    cut_short(whole(), tmp_path / "cut", STEPS)
    settings = {"epochs": 2, "validate": False}
    image = sorted(folder.rglob("*.png"))[3]
    before = image.stat()
    try:
        os.utime(image, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
        with pytest.raises(tfaccel.UserError, match=r"the data have changed.*sizes and times"):
            train("cut", **settings)
        train("cut", **settings, accept_changes=True)
        assert "resumed with changed data" in caplog.text
        assert train("cut", **settings).seen == []  # which is what it was made with now
    finally:
        os.utime(image, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_checkpoint_without_sizes_and_times_is_gone_on_with(train, whole, tmp_path):
    def as_before_they_were_kept(state):
        assert state.pop("stamps")

    changed(whole(), tmp_path / "cut", STEPS, as_before_they_were_kept)
    assert_begins_with(train("cut", at_once=True), newest(tmp_path / "cut"))


def test_a_run_below_brackets_goes_on(train, whole, tmp_path):
    cut_short(whole(), tmp_path / "lr=[0.1]", 2 * STEPS + 3)
    begun = train("lr=[0.1]", at_once=True)
    assert_begins_with(begun, newest(tmp_path / "lr=[0.1]"))
    assert begun.begun_at == 2 * STEPS + 3


def test_what_does_not_fit_is_refused_in_a_sentence(train, whole, tmp_path, caplog):
    with pytest.raises(tfaccel.UserError, match="has no checkpoint to resume from"):
        train("cut", resume="required")
    cut_short(whole(), tmp_path / "cut", STEPS)
    with pytest.raises(tfaccel.UserError, match="has a checkpoint of step 5; give another folder"):
        train("cut", resume="never")
    with pytest.raises(tfaccel.UserError, match="model 'small' -> 'large'"):
        train("cut", facts={"model": "large"})
    with pytest.raises(
        tfaccel.UserError, match=r"with the callbacks .*Cutter, EarlyStopping, but rece"
    ):
        train("cut", callbacks=[keras.callbacks.EarlyStopping()])
    begun = train("cut", facts={"model": "large"}, accept_changes=True, at_once=True)
    assert_begins_with(begun, newest(tmp_path / "cut"))
    assert "resumed with changes: model 'small' -> 'large'" in caplog.text


def test_fewer_epochs_than_are_trained_are_refused(train, whole, tmp_path):
    cut_short(whole(), tmp_path / "cut", STEPS + 1)
    one = dataclasses.replace(TRAIN, epochs=1)
    with pytest.raises(
        tfaccel.UserError,
        match=r"epochs=1, but .* has trained 1 epoch and .*; set epochs to 2 or more",
    ):
        train("cut", recipe_=one, accept_changes=True)


def test_settings_of_the_step_that_decide_are_compared(train, whole, tmp_path, caplog):
    cut_short(whole(), tmp_path / "cut", STEPS)
    changed = StepConfig(accumulation_steps=2)
    with pytest.raises(
        tfaccel.UserError, match=r"another run: step.accumulation_steps 1 -> 2; undo"
    ):
        train("cut", step_config=changed)
    free = StepConfig(nonfinite="skip", audit_steps=7)
    begun = train("cut", step_config=free, at_once=True)
    assert_begins_with(begun, newest(tmp_path / "cut"))
    settings = {"step_config": changed, "epochs": 2, "validate": False}
    resumed = train("cut", **settings, accept_changes=True)
    assert "resumed with changes: step.accumulation_steps 1 -> 2" in caplog.text
    assert resumed.seen == whole().seen[STEPS : 2 * STEPS]


def test_a_setting_that_a_checkpoint_does_not_know_was_at_its_default(train, whole, tmp_path):
    def as_before_they_were_kept(state):
        names = [name for name in state["facts"] if name.startswith("step.")]
        assert names
        for name in names:
            del state["facts"][name]

    changed(whole(), tmp_path / "cut", STEPS, as_before_they_were_kept)
    with pytest.raises(
        tfaccel.UserError, match=r"another run: step.accumulation_steps 1 -> 2; undo"
    ):
        train("cut", step_config=StepConfig(accumulation_steps=2))
    assert_begins_with(train("cut", at_once=True), newest(tmp_path / "cut"))


def test_a_fresh_run_begins_at_the_start_whatever_the_loader_gave_before(whole):
    run = whole()  # whose loader gave a batch
    assert [position for position, _ in run.seen] == [*range(1, TRAIN.epochs * STEPS + 1)]
    assert newest(run.folder).step == TRAIN.epochs * STEPS


def test_changes_that_are_accepted_hold_and_names_of_checkpoints_rise(train, tmp_path, caplog):
    first = dataclasses.replace(TRAIN, decay="constant", warmup_epochs=0)
    with pytest.raises(CutError):
        train("cut", recipe_=first, every_steps=2, step=STEPS + 3, validate=False)
    changed = dataclasses.replace(first, learning_rate=0.02)
    with pytest.raises(tfaccel.UserError, match=r"another run: optimizer\.1\.learning_rate 0.0"):
        train("cut", recipe_=changed)
    settings = {"recipe_": changed, "batch": 20, "validate": False}
    with caplog.at_level("WARNING", logger="tfaccel"):
        resumed = train("cut", **settings, accept_changes=True)
    assert "so epoch 2 restarts at its first step" in caplog.text
    assert [position for position, _ in resumed.seen] == [3, 4, 5, 6]  # of 2 steps an epoch
    assert len(resumed.history["loss"]) == TRAIN.epochs
    names = sorted(each.name for each in (tmp_path / "cut").glob("step-*"))
    assert names[-1] == "step-00000011"  # 7, and 4 more
    assert float(resumed.model.optimizer.learning_rate.numpy()) == pytest.approx(0.02)


def test_every_steps_counts_where_an_execution_is_an_epoch(train, tmp_path):
    config = {"every_epochs": 100, "keep_last": 9}
    settings = {"every_steps": STEPS, "steps_per_execution": STEPS, "validate": False}
    train("run", **settings, config=config)
    names = sorted(each.name for each in (tmp_path / "run").glob("step-*"))
    assert names == [f"step-{STEPS * epoch:08d}" for epoch in range(1, TRAIN.epochs + 1)]


def test_all_of_the_state_is_plain_json_and_arrays(whole):
    last = sorted(whole().folder.glob("step-*"))[-1]
    state = json.loads((last / "state.json").read_text())["state"]
    assert state["step"] == TRAIN.epochs * STEPS
    assert state["epoch"] == TRAIN.epochs
    assert len(state["history"]["val_loss"]) == TRAIN.epochs
    assert {each["class"] for each in state["callbacks"]} >= {"EarlyStopping", "Cutter"}


def test_what_the_default_of_xla_chose_may_change(train, whole, tmp_path, caplog):
    cut_short(whole(), tmp_path / "cut", STEPS)
    train("cut", xla=True, at_once=True)
    assert "made without XLA, resumed with it" in caplog.text

    def when_xla_was_on_by_default_on_a_cpu(state):
        assert state["xla"] is False
        state["xla"] = state["facts"]["runtime.xla"] = True

    changed(whole(), tmp_path / "older", STEPS, when_xla_was_on_by_default_on_a_cpu)
    begun = train("older", at_once=True)
    assert "made with XLA, resumed without it" in caplog.text
    assert_begins_with(begun, newest(tmp_path / "older"))


def test_another_xla_that_is_asked_for_is_refused(train, whole, tmp_path):
    cut_short(whole(), tmp_path / "cut", STEPS)
    with pytest.raises(tfaccel.UserError, match=r"runtime\.xla False -> True"):
        train("cut", facts={"runtime.xla": True})
