"""A checkpoint that cannot be written, in the background: said once, and in time."""

import errno
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfaccel.common.errors import UserError
from tfaccel.config import CheckpointConfig
from tfaccel.training.callbacks import checkpoints
from tfaccel.training.checkpoint import folder as folder_lib
from tfaccel.training.checkpoint.store import CheckpointError

STEPS = 10  # of an epoch
FIRST_THAT_FAILS = 4


class Settled(keras.callbacks.Callback):
    """Lets each step end once all that was begun before is written, or has failed."""

    def __init__(self, loader, *, fails_at=None):
        super().__init__()
        self.loader, self.fails_at, self.seen = loader, fails_at, []

    def on_train_batch_end(self, batch, logs=None):
        for each in threading.enumerate():
            if each.name == "tfaccel checkpoint":
                each.join()
        self.seen.append(self.loader.position)
        if self.loader.position == self.fails_at:
            raise ZeroDivisionError("of the user's own")


@pytest.fixture
def train(setup, tmp_path, monkeypatch):
    """Trains while the disk takes no more; returns what there is of the run when it ends."""
    fill = folder_lib.fill

    def full(unfinished, write):
        if int(unfinished.name[5:13]) >= FIRST_THAT_FAILS:
            raise OSError(errno.ENOSPC, "No space left on device")
        fill(unfinished, write)

    monkeypatch.setattr(folder_lib, "fill", full)

    def train(*, fails_at=None, epochs=1, **config):
        run = setup(xla=False)
        rows = [(np.ones(3, np.float32), np.ones(1, np.float32))] * STEPS
        loader = run.examples(rows, global_batch_size=1)
        with run.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        run.compile(model, "sgd", "mse")
        settled = Settled(loader, fails_at=fails_at)
        checkpoints = run.checkpoints(tmp_path, CheckpointConfig(**config), monitor="loss")
        error = None
        try:
            model.fit(loader, epochs=epochs, callbacks=[settled, checkpoints], verbose=0)
        except Exception as raised:
            error = raised
        return error, settled.seen

    return train


def test_p7_nothing_is_saved_once_the_workers_cannot_answer_each_other(
    train, tmp_path, monkeypatch
):
    # As after a sum that NCCL broke off: what is in the weights then is anything.
    together, saves = checkpoints.together, []

    def broken_off(strategy, failure):
        if failure == "could not copy its state":
            saves.append(failure)
            if len(saves) == 2:
                raise tf.errors.UnavailableError(None, None, "worker 1 is lost")
        return together(strategy, failure)

    monkeypatch.setattr(checkpoints, "together", broken_off)
    error, seen = train(every_steps=1)
    assert isinstance(error, tf.errors.UnavailableError)
    assert seen == [1, 2]
    assert [each.name for each in tmp_path.glob("step-*")] == ["step-00000001"]


@pytest.mark.parametrize("is_tested", [True, False])
def test_to_stop_early_by_what_is_no_log_is_an_error_once_all_logs_are_there(
    setup, tmp_path, is_tested
):
    run = setup(xla=False)
    rows = [(np.ones(3, np.float32), np.ones(1, np.float32))] * 2
    train, test = (run.examples(rows, global_batch_size=1) for _ in range(2))
    with run.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    run.compile(model, "sgd", "mse")
    config = CheckpointConfig(every_epochs=10)  # long after the first epoch
    saves = run.checkpoints(tmp_path, config, monitor="val_los")
    stops = keras.callbacks.EarlyStopping("val_los", mode="min")
    settings = {"epochs": 2, "callbacks": [stops, saves], "verbose": 0}
    if not is_tested:  # in this epoch: it may be in another
        assert len(model.fit(train, **settings).epoch) == 2
        return
    with pytest.raises(
        UserError, match=r"early stopping monitors 'val_los', .*did you mean 'val_loss'"
    ):
        model.fit(train, validation_data=test, **settings)
    assert train.position == 2


def said(caplog):
    return [each for each in caplog.messages if "No space left" in each]


def test_p3_a_failed_write_ends_training_at_the_next_step_and_is_said_once(train, caplog):
    error, seen = train(every_steps=2)
    assert isinstance(error, CheckpointError)
    assert "step-00000004 cannot be written (No space left on device)" in str(error)
    assert seen == list(range(1, FIRST_THAT_FAILS + 2))
    assert said(caplog) == []  # the error says it


def test_p3_the_last_of_all_that_fails_is_an_error_too(train, caplog):
    error, seen = train(every_steps=100)
    assert isinstance(error, CheckpointError)
    assert seen == list(range(1, STEPS + 1))
    assert said(caplog) == []


def test_p3_where_training_goes_on_each_is_said_once_and_at_once(train, caplog):
    error, seen = train(every_steps=3, on_error="continue")
    assert error is None
    assert seen == list(range(1, STEPS + 1))
    assert [int(each.partition("step-")[2][:8]) for each in said(caplog)] == [6, 9, 10]
    assert all(each.endswith("; training continues") for each in said(caplog))


def test_p3_beside_another_error_it_is_a_warning(train, caplog):
    error, _ = train(every_steps=2, fails_at=FIRST_THAT_FAILS + 1)
    assert isinstance(error, ZeroDivisionError)
    assert len(said(caplog)) == 1


def test_the_size_of_a_checkpoint_is_said_with_the_optimizers_part(setup, tmp_path, caplog):
    caplog.set_level("INFO", "tfaccel")
    run = setup(xla=False)
    rows = [(np.ones(512, np.float32), np.ones(512, np.float32))] * 2
    loader = run.examples(rows, global_batch_size=2)
    with run.scope():
        model = keras.Sequential([keras.Input((512,)), keras.layers.Dense(512)])
    run.compile(model, "adam", "mse")
    saved = run.checkpoints(tmp_path, CheckpointConfig(), monitor="loss")
    model.fit(loader, callbacks=[saved], verbose=0)
    weights = (512 + 1) * 512 * 4 / 2**20  # 1.002 MiB, and Adam's two averages of each
    expected = f"checkpoint: {3 * weights:.1f} MiB each, including {weights:.1f} MiB of weights; up"
    assert expected in caplog.text
    on_disk = sum(each.stat().st_size for each in tmp_path.glob("step-*/*"))
    assert on_disk / 2**20 == pytest.approx(3 * weights, rel=0.02)
