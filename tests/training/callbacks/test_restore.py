"""P8: what is rolled back to, and that training goes on as if the steps between had not been."""

import dataclasses
import json
import pathlib
import signal
import time
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import in_workers, strategy_of

from tfaccel import UserError
from tfaccel.config import CheckpointConfig, StepConfig
from tfaccel.data.distribute import Loader
from tfaccel.data.pipeline_plan import PipelinePlan
from tfaccel.data.user_examples import open_examples
from tfaccel.data.user_pipeline import PipelineData
from tfaccel.runtime.devices import Device
from tfaccel.training.callbacks.checkpoints import Stopped
from tfaccel.training.callbacks.restore import Origin
from tfaccel.training.checkpoint import state
from tfaccel.training.checkpoint.store import Snapshot, Store

STEPS, BATCH = 5, 8  # of an epoch
RNG = np.random.default_rng(0)
X = RNG.normal(size=(STEPS * BATCH, 6)).astype(np.float32)
Y = X[:, :1].copy()


class SpoiltOnce:
    """The examples, of which the last of a step, the last replica's, is NaN in one epoch."""

    def __init__(self, step, *, batch=BATCH, begun=0):
        """Takes the step, counted over epochs; 0 for none; and how many epochs are over."""
        epoch, step_of_epoch = divmod(step - 1, len(X) // batch)
        self.row, self.bad_read = (step_of_epoch + 1) * batch - 1, 1 + epoch - begun
        self.reads = 0

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        x = X[index]
        if index == self.row:
            self.reads += 1
            if self.reads == self.bad_read:
                x = x * np.nan
        return x, Y[index]


def build():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(4), keras.layers.Dense(1, dtype="float32")]
    return keras.Sequential([keras.Input((6,)), *layers])


def sgd():
    return keras.optimizers.SGD(0.01, momentum=0.9)


@pytest.fixture
def train(setup, tmp_path):
    """Trains on data of which a step is spoilt; returns the model, its epochs' logs and steps."""

    def train(
        bad,
        *,
        num_replicas=1,
        epochs=4,
        steps_per_execution=1,
        batch=BATCH,
        begun=0,
        extra=(),
        settings=None,
        **config,
    ):
        run = setup(xla=False)
        if num_replicas > 1:
            run.strategy = strategy_of(num_replicas)
            devices = tuple(Device(f"/cpu:{index}", None) for index in range(num_replicas))
            run.runtime = dataclasses.replace(run.runtime, devices=devices)
        loader = run.examples(SpoiltOnce(bad, batch=batch, begun=begun), global_batch_size=batch)
        test = run.examples(SpoiltOnce(0), global_batch_size=BATCH)
        with run.scope():
            model = build()
        step = StepConfig(nonfinite="rollback")
        run.compile(model, sgd(), "mse", steps_per_execution=steps_per_execution, step=step)
        rows, steps = [], []
        kept = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: steps.append(loader.position),
            on_epoch_end=lambda epoch, logs: rows.append((epoch, dict(logs))),
        )
        config = CheckpointConfig(**config)
        checkpoints = run.checkpoints(tmp_path / "checkpoints", config, **settings or {})
        history = model.fit(
            loader,
            validation_data=test,
            epochs=epochs,
            callbacks=[*extra, kept, checkpoints],
            verbose=0,
        )
        return model, history, rows, steps

    return train


def weights_after(steps):
    """The reference: plain Keras on these steps alone."""
    model = build()
    model.compile(sgd(), "mse", jit_compile=False)
    for step in steps:
        rows = slice((step - 1) % STEPS * BATCH, (step - 1) % STEPS * BATCH + BATCH)
        model.train_on_batch(X[rows], Y[rows])
    return model.get_weights()


CASES = {
    # The bad step, what the config says, the steps that were taken back.
    "of the epoch before": (STEPS + 3, {}, {STEPS + 1, STEPS + 2}),
    "of this epoch": (STEPS + 4, {"every_steps": 2}, {STEPS + 3}),
    "in the first steps": (4, {"every_steps": 2}, {3}),
    "the last step, of this epoch": (2 * STEPS, {"every_steps": 3}, {STEPS + 4}),
    "the last step, of the epoch before": (2 * STEPS, {}, set(range(STEPS + 1, 2 * STEPS))),
    "of two epochs before": (3 * STEPS + 2, {"every_epochs": 2}, {*range(11, 15), 15, 16}),
    "the last of all": (4 * STEPS, {}, set(range(3 * STEPS + 1, 4 * STEPS))),
}
SLOW = {
    "of the epoch before",
    "of this epoch",
    "the last step, of the epoch before",
    "the last of all",
}


@pytest.mark.parametrize("num_replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("bad", "config", "taken_back"),
    [
        pytest.param(*each, id=name, marks=pytest.mark.slow if name in SLOW else ())
        for name, each in CASES.items()
    ],
)
def test_p8_a_run_that_goes_back_has_the_other_steps_alone(
    train, bad, config, taken_back, num_replicas
):
    model, history, rows, steps = train(bad, num_replicas=num_replicas, **config)
    every = range(1, 4 * STEPS + 1)
    assert steps == [each for each in every if each != bad]
    wanted = weights_after(each for each in every if each != bad and each not in taken_back)
    for ours, theirs in zip(model.get_weights(), wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    # Each epoch has its row, and each row all its numbers.
    assert [epoch for epoch, _ in rows] == history.epoch == [0, 1, 2, 3]
    for _, row in rows:
        assert row["loss"] > 0
        assert row.keys() >= {"loss", "val_loss"}
    assert history.history["loss"] == [row["loss"] for _, row in rows]
    assert history.history["val_loss"] == [row["val_loss"] for _, row in rows]


@pytest.mark.parametrize("num_replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_p8_an_epoch_that_is_one_execution_is_left_out_as_a_whole(train, num_replicas):
    model, history, rows, _ = train(STEPS + 3, num_replicas=num_replicas, steps_per_execution=STEPS)
    every = [*range(1, STEPS + 1), *range(2 * STEPS + 1, 4 * STEPS + 1)]
    for ours, theirs in zip(model.get_weights(), weights_after(every), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert [row["loss"] > 0 for _, row in rows] == [True] * 4
    assert history.history["loss"] == [row["loss"] for _, row in rows]


class StopInTests(keras.callbacks.Callback):
    """Asks to stop in the validation of the second epoch: once, as twice would end the process."""

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_test_batch_end(self, batch, logs=None):
        if self.epoch == 1 and batch == 0:
            signal.raise_signal(signal.SIGTERM)
            time.sleep(0.2)  # until the thread that hears it has had its turn


def test_p8_p5_a_signal_before_an_epochs_validation_keeps_its_row(train, tmp_path):
    with pytest.raises(Stopped):
        train(2 * STEPS, extra=[StopInTests()])
    assert (tmp_path / f"checkpoints/step-{2 * STEPS:08d}-untested").is_dir()
    _, history, rows, steps = train(0)
    assert steps == list(range(2 * STEPS + 1, 4 * STEPS + 1))
    assert [epoch for epoch, _ in rows] == [1, 2, 3]
    assert rows[0][1]["loss"] > 0
    assert len(history.history["loss"]) == len(history.history["val_loss"]) == 4


def test_p8_it_goes_back_to_its_own_also_where_it_may_not_resume(train):
    _, _, _, steps = train(STEPS + 3, settings={"resume": "never"})
    assert steps == [each for each in range(1, 4 * STEPS + 1) if each != STEPS + 3]


def test_p8_it_goes_back_to_one_of_shorter_epochs_and_on_with_the_data(train):
    train(0, epochs=1)
    settings = {"accept_changes": True}
    _, history, rows, steps = train(
        2 * STEPS + 3, epochs=2, batch=BATCH // 2, begun=1, settings=settings
    )
    assert steps == [11, 12, *range(14, 21)]  # of 10 in each epoch
    assert [epoch for epoch, _ in rows] == [1]
    assert len(history.history["loss"]) == 2


class StandIn(SimpleNamespace):
    """In place of a model with Keras's own steps."""

    train_step, test_step = keras.Model.train_step, keras.Model.test_step


def begin(folder, num_replicas, batch, *, seed=0, accept_changes=False, data=None):
    """Where a run would begin that trains on these replicas, without one; and who says so."""
    data = data or open_examples(
        SpoiltOnce(0),
        global_batch_size=batch,
        num_replicas=num_replicas,
        seed=seed,
        shuffle=True,
        last_batch="pad",
        steps_per_epoch=None,
    )
    workers = SimpleNamespace(worker_devices=range(num_replicas))
    strategy = SimpleNamespace(num_replicas_in_sync=num_replicas, extended=workers)
    where = {"devices": (), "seed": 0, "num_threads": 1, "first_replica": 0, "strategy": strategy}
    loader = Loader(data, **where)
    store = Store(folder, keep_last=1, keep_best=0, largest_is_best=False)
    origin = Origin(store, "auto", accept_changes, {})
    model = StandIn(distribute_strategy=strategy, optimizer=sgd(), train_function=None)
    beginning = origin.newest(model, loader, StepConfig(), {})
    return store, origin.run | beginning.state, loader.position


def stop_within_an_epoch(folder, num_replicas, batch, **settings):
    store, state, _ = begin(folder, num_replicas, batch, **settings)
    at = {"step": 1, "epoch": 0, "step_in_epoch": 1, "stop_training": False}
    store.write(Snapshot({"weight": np.zeros(1, np.float32)}, state | at))


def test_p6_on_fewer_replicas_a_run_goes_on_at_its_step(tmp_path, caplog):
    stop_within_an_epoch(tmp_path, 4, 16)
    *_, position = begin(tmp_path, 2, 16)
    assert position == 1
    assert "made on 4 replicas, resumed on 2 (images, order and augmentation stay)" in caplog.text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ((2, 14), "global_batch_size '28' -> '14'"),  # what batch_per_replica comes to
        ((3, 21), "global_batch_size '28' -> '21'"),  # an epoch has 2 steps, as before
        ((4, 28, 1), "seed '0' -> '1'"),
    ],
)
def test_p6_what_cuts_epochs_otherwise_is_refused_or_begins_one_anew(
    tmp_path, caplog, changes, words
):
    num_replicas, batch, *seed = changes
    now = {"num_replicas": num_replicas, "batch": batch, "seed": sum(seed)}
    stop_within_an_epoch(tmp_path, 4, 28)
    with pytest.raises(UserError, match=words):
        begin(tmp_path, **now)
    *_, position = begin(tmp_path, **now, accept_changes=True)
    assert position == 0  # or some images would come twice in it, and others not at all
    assert "so epoch 1 restarts at its first step" in caplog.text
    assert "order and augmentation stay" not in caplog.text


def test_p6_a_pipeline_of_ones_own_begins_its_epoch_anew_on_fewer_replicas(tmp_path, caplog):
    def pipeline(num_replicas):
        plan = PipelinePlan(40, 16, num_replicas, num_steps=3, last_batch="pad", reader_pads=True)
        spec = tuple(tf.TensorSpec((plan.rows_per_replica, each)) for each in (6, 1))
        return PipelineData(build, {}, plan, spec, prefetch_batches=1)

    stop_within_an_epoch(tmp_path, 4, 16, data=pipeline(4))
    *_, position = begin(tmp_path, 4, 16, data=pipeline(4))
    assert position == 1
    with pytest.raises(UserError, match="shapes"):
        begin(tmp_path, 2, 16, data=pipeline(2))
    *_, position = begin(tmp_path, 2, 16, data=pipeline(2), accept_changes=True)
    assert position == 0
    assert "order and augmentation stay" not in caplog.text


WORKER = """
import sys
sys.path[:0] = {paths}
from test_restore import BATCH, SpoiltOnce, build, sgd
import keras
import tfaccel
from tfaccel.training.callbacks.checkpoints import Stopped
from tfaccel.config import CheckpointConfig, StepConfig
run = tfaccel.setup(gpu_ids=(), xla=False)
loader = run.examples(SpoiltOnce({bad}), global_batch_size=BATCH)
with run.scope():
    model = build()
run.compile(model, sgd(), "mse", step=StepConfig(nonfinite="rollback"))
steps = []
seen = keras.callbacks.LambdaCallback(
    on_train_batch_end=lambda batch, logs: steps.append(loader.position)
)
checkpoints = run.checkpoints({folder!r}, CheckpointConfig(every_steps=2), monitor="loss")
history = model.fit(loader, epochs=3, callbacks=[seen, checkpoints], verbose=0)
print(json.dumps([steps, [each.tolist() for each in model.get_weights()], history.history]))
"""


@pytest.mark.slow
def test_p8_two_workers_go_back_together(tmp_path):
    bad, taken_back = STEPS + 4, STEPS + 3
    program = WORKER.format(
        paths=[str(each) for each in pathlib.Path(__file__).parents[:3]],
        bad=bad,
        folder=str(tmp_path / "checkpoints"),
    )
    first, second = (
        json.loads(each) for each in in_workers(program, 2, stderr="rolled back to step")
    )
    assert first == second
    steps, weights, history = first
    every = range(1, 3 * STEPS + 1)
    assert steps == [each for each in every if each != bad]
    wanted = weights_after(each for each in every if each not in (bad, taken_back))
    for ours, theirs in zip(weights, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert len(history["loss"]) == 3


@pytest.mark.parametrize("value", [np.ones(2), [np.float32(1)], {"a": object()}])
def test_a_state_that_json_has_not_is_named(value):
    class Mine(keras.callbacks.Callback):
        def get_state(self):
            return {"good": 1, "bad": value}

        def set_state(self, state):
            pass

    with pytest.raises(
        UserError, match=r"get_state\(\) of Mine returned a value for 'bad' .*; return numbers"
    ):
        state.of_callbacks([Mine()])


def test_what_a_layer_had_adapted_to_is_back_with_its_weights():
    def make():
        return keras.Sequential([keras.Input((6,)), keras.layers.Normalization()])

    adapted, other = make(), make()
    adapted.layers[0].adapt(3 * X + 1)
    for each in (adapted, other):
        each.compile("sgd", "mse")
    state.put_variables(other, state.variables(adapted))
    np.testing.assert_array_equal(other(X), adapted(X))
