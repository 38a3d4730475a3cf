"""A fit whose batches nobody wants to see looks at each execution while the next one runs."""

import threading
import time

import keras
import numpy as np
import pytest
from conftest import compiled

from tfaccel.callbacks import ahead
from tfaccel.callbacks.finite import NonFiniteError
from tfaccel.config import StepConfig
from tfaccel.replica_checksums import Audit

STEPS = 6
X = np.random.default_rng(0).normal(size=(2 * STEPS, 3)).astype(np.float32)


class Sees(keras.callbacks.Callback):
    """Is to see each batch, for which it waits."""

    def on_train_batch_end(self, batch, logs=None):
        assert all(isinstance(value, float) for value in logs.values())


def make():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, name="last")])


def model_of(num_replicas=1, config=None, **settings):
    settings = {"optimizer": keras.optimizers.Adam, "loss": "mse", "metrics": ["mae"], **settings}
    return compiled(make, num_replicas, config=config, xla=False, **settings)


def fit(model, x=X, **settings):
    settings = {"batch_size": 2, "shuffle": False, "verbose": 0, **settings}
    return model.fit(x, x[:, :1], **settings).history


def spoilt(step):
    """Images whose step, counted from 1, is not finite."""
    x = X.copy()
    x[2 * (step - 1)] = np.nan
    return x


def launches(model):
    """The executions that the model launches from now on, as they begin."""
    seen, launch = [], model.train_function._launch
    model.train_function._launch = lambda iterator: (seen.append(None), launch(iterator))[1]
    return seen


def test_the_next_execution_is_launched_before_one_is_looked_at(monkeypatch):
    model, may_be_read, reads = model_of(), threading.Event(), []
    make_to_host = ahead.make_to_host

    def make_slow(device):
        to_host = make_to_host(device)

        def slow(tensors):
            reads.append(None)
            assert len(reads) != 2 or may_be_read.wait(timeout=60)
            return to_host(tensors)

        return slow

    monkeypatch.setattr(ahead, "make_to_host", make_slow)
    launched = launches(model)
    thread = threading.Thread(target=fit, args=(model,))
    thread.start()
    try:
        ends = time.monotonic() + 60
        while len(launched) < 3 and time.monotonic() < ends:
            time.sleep(0.01)
        thread.join(timeout=0.3)
        # The first is waited for, as there is none before; the second one is not read yet.
        assert len(launched) == 3
    finally:
        may_be_read.set()
        thread.join()
    assert len(launched) == STEPS


def test_who_sees_each_batch_has_one_launched_at_a_time(caplog):
    model = model_of()
    launched, num_launched = launches(model), []

    class Counts(Sees):
        def on_train_batch_end(self, batch, logs=None):
            super().on_train_batch_end(batch, logs)
            num_launched.append(len(launched))

    with caplog.at_level("INFO"):
        fit(model, callbacks=[Counts()])
    assert num_launched == [*range(1, STEPS + 1)]
    assert "step: the device waits after each execution, for Counts" in caplog.text


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_replicas": 2, "steps_per_execution": 4},
        {"config": StepConfig(nonfinite="skip"), "x": spoilt(3)},
        {"config": StepConfig(nonfinite="skip"), "x": spoilt(STEPS)},
    ],
)
def test_history_and_weights_are_the_same(settings):
    x, settings = settings.get("x", X), {k: v for k, v in settings.items() if k != "x"}
    data = {"x": x, "epochs": 2, "validation_data": (X, X[:, :1])}
    mine, reference = model_of(**settings), model_of(**settings)
    assert fit(mine, **data) == fit(reference, callbacks=[Sees()], **data)
    for one, other in zip(mine.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("callbacks", "further"), [([], 1), ([Sees()], 0)])
def test_a_fault_ends_training_at_most_an_execution_later(callbacks, further):
    model = model_of()
    launched = launches(model)
    with pytest.raises(NonFiniteError, match="at step 3,"):
        fit(model, spoilt(3), callbacks=callbacks)
    assert len(launched) == 3 + further
    assert int(model.optimizer.iterations.numpy()) == 2 + further  # without step 3
    assert model.train_function.launched is None


def test_a_fault_of_the_last_execution_comes_before_the_validation():
    model = model_of()
    model.test_function = lambda iterator: pytest.fail("tested")
    with pytest.raises(NonFiniteError, match=f"at step {STEPS},"):
        fit(model, spoilt(STEPS), validation_data=(X, X[:, :1]))


def test_a_test_within_an_epoch_has_its_own_logs():
    model, seen = model_of(), []

    def test(batch, logs):
        if batch == 3:
            seen.append(model.evaluate(X, X[:, :1], verbose=0, return_dict=True))

    history = fit(model, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_begin=test)])
    assert seen[0].keys() == {"loss", "mae"}
    assert seen[0]["loss"] != history["loss"][0]


def test_audits_are_made_between_the_same_steps(monkeypatch):
    audits = []
    monkeypatch.setattr(Audit, "check", lambda self, *, when: audits.append(when))
    for callbacks in ([], [Sees()]):
        fit(model_of(2, StepConfig(audit_steps=4)), epochs=2, callbacks=callbacks)
    each = ["at step 4", "at step 8", "at step 12", "at the end of training"]
    assert audits == [*each, *each]


def test_a_callback_list_has_ours_once():
    for callbacks, is_ahead in (([], True), ([Sees()], False)):
        model = model_of()
        given = keras.callbacks.CallbackList(callbacks, add_history=True, model=model, epochs=1)
        for _ in range(2):
            model.fit(X, X[:, :1], batch_size=2, verbose=0, callbacks=given)
            kinds = [type(each) for each in given.callbacks]
            assert (ahead.Ahead in kinds) == is_ahead
            assert len(kinds) == len(set(kinds))


def test_a_progress_bar_shows_numbers(capsys):
    fit(model_of(), verbose=1)
    assert f"{STEPS}/{STEPS}" in capsys.readouterr().out


def test_the_last_steps_own_logs_are_the_epochs():
    class Two(keras.Model):
        def train_step(self, data):
            return super().train_step(data) | {"inner": {"deep": self.optimizer.iterations._value}}

    inputs = keras.Input((3,))
    model = compiled(
        lambda: Two(inputs, keras.layers.Dense(1)(inputs)),
        *(1,),
        optimizer="sgd",
        loss="mse",
        xla=False,
    )
    assert fit(model)["deep"] == [STEPS]
