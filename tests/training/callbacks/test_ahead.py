"""A fit whose batches nobody wants to see looks at each execution while the next one runs."""

import threading
import time

import keras
import numpy as np
import pytest
from conftest import compiled
from tensorflow.python.framework import op_callbacks

from tfaccel.config import StepConfig
from tfaccel.training.callbacks import ahead
from tfaccel.training.callbacks.finite import NonFiniteError
from tfaccel.training.replica_checksums import Audit

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
    settings = {"optimizer": "sgd", "loss": "mse", **settings}
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
            assert len(reads) != 2 or may_be_read.wait(timeout=300)
            return to_host(tensors)

        return slow

    monkeypatch.setattr(ahead, "make_to_host", make_slow)
    launched = launches(model)
    thread = threading.Thread(target=fit, args=(model,))
    thread.start()
    try:
        ends = time.monotonic() + 300
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
    assert "because these callbacks read them: Counts;" in caplog.text


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"num_replicas": 2, "steps_per_execution": 4}, marks=pytest.mark.slow),
        pytest.param(
            {"config": StepConfig(nonfinite="skip"), "x": spoilt(3)}, marks=pytest.mark.slow
        ),
        {"config": StepConfig(nonfinite="skip"), "x": spoilt(STEPS)},
    ],
)
def test_history_and_weights_are_the_same(settings, caplog):
    x, settings = settings.get("x", X), {k: v for k, v in settings.items() if k != "x"}
    data = {"x": x, "epochs": 2, "validation_data": (X, X[:, :1])}
    model, results = model_of(**settings), []
    start = model.get_weights()
    for callbacks in ([], [Sees()]):
        model.set_weights(start)
        caplog.clear()
        history = fit(model, callbacks=callbacks, **data)
        # What is said of steps that are not finite: in time only where the last one is looked at.
        said = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
        results.append((history, said, model.get_weights()))
    (mine, said, weights), (wanted, wanted_said, wanted_weights) = results
    assert mine == wanted
    assert said == wanted_said
    assert bool(said) == (x is not X)
    assert not np.array_equal(weights[0], start[0])
    for one, other in zip(weights, wanted_weights, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("callbacks", "further"), [([], 1), pytest.param([Sees()], 0, marks=pytest.mark.slow)]
)
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
    model, seen = model_of(metrics=["mae"]), []

    def test(batch, logs):
        if batch == 3:
            seen.append(model.evaluate(X, X[:, :1], verbose=0, return_dict=True))

    history = fit(model, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_begin=test)])
    assert seen[0].keys() == {"loss", "mae"}
    assert seen[0]["loss"] != history["loss"][0]


def test_audits_are_made_between_the_same_steps(monkeypatch):
    audits = []
    monkeypatch.setattr(Audit, "check", lambda self, *, when: audits.append(when))
    model = model_of(2, StepConfig(audit_steps=4))
    for callbacks in ([], [Sees()]):
        model.optimizer.iterations.assign(0)
        fit(model, epochs=2, callbacks=callbacks)
    each = ["at step 4", "at step 8", "at step 12", "at the end of training"]
    assert audits == [*each, *each]


def test_a_callback_list_has_ours_once():
    model = model_of()
    for callbacks, is_ahead in (([], True), ([Sees()], False)):
        given = keras.callbacks.CallbackList(callbacks, add_history=True, model=model, epochs=1)
        for _ in range(2):
            model.fit(X, X[:, :1], batch_size=2, verbose=0, callbacks=given)
            kinds = [type(each) for each in given.callbacks]
            assert (ahead.Ahead in kinds) == is_ahead
            assert len(kinds) == len(set(kinds))


def test_a_progress_bar_shows_numbers(capsys):
    fit(model_of(), verbose=1)
    assert f"{STEPS}/{STEPS}" in capsys.readouterr().out


def with_own_logs(own, **settings):
    """A model whose steps log also what the function of its optimizer's iterations gives."""

    class Own(keras.Model):
        def train_step(self, data):
            return super().train_step(data) | own(self.optimizer.iterations._value)

    inputs = keras.Input((3,))
    return compiled(
        lambda: Own(inputs, keras.layers.Dense(1)(inputs)),
        *(1,),
        optimizer="sgd",
        loss="mse",
        xla=False,
        **settings,
    )


@pytest.fixture(scope="module")
def own_history():
    """The history of a fit whose steps log also what is nested, and None."""
    return fit(with_own_logs(lambda step: {"inner": {"deep": step}, "nothing": None}))


def test_the_last_steps_own_logs_are_the_epochs(own_history):
    assert own_history["deep"] == [STEPS]


def test_a_log_of_none_stays(own_history):
    assert own_history["nothing"] == [None]


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("callbacks", [[], pytest.param([Sees()], marks=pytest.mark.slow)])
def test_epochs_without_data_have_the_last_steps_logs(callbacks):
    batches = ((X[:2], X[:2, :1]) for _ in range(6))
    model = with_own_logs(lambda step: {"step": step})
    history = model.fit(batches, steps_per_epoch=3, epochs=3, callbacks=callbacks, verbose=0)
    assert history.history["step"] == [3, 6, 6]


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_no_audit_is_made_for_a_batch_that_was_not_there(monkeypatch):
    audits = []
    monkeypatch.setattr(Audit, "check", lambda self, *, when: audits.append(when))
    batches = ((X[:2], X[:2, :1]) for _ in range(3))
    model_of(2, StepConfig(audit_steps=1)).fit(batches, verbose=0)
    assert audits == ["at step 1", "at step 2", "at step 3", "at the end of training"]


def test_the_audit_of_the_last_execution_comes_before_the_validation(monkeypatch):
    def check(self, *, when):
        raise ArithmeticError(when)

    monkeypatch.setattr(Audit, "check", check)
    model = model_of(2, StepConfig(audit_steps=STEPS))
    model.test_function = lambda iterator: pytest.fail("tested")
    with pytest.raises(ArithmeticError, match=f"at step {STEPS}"):
        fit(model, validation_data=(X, X[:, :1]))


class Trains(keras.callbacks.Callback):
    """Trains the model in the first epoch's fourth batch, and at its end, and notes the logs."""

    def __init__(self, train):
        super().__init__()
        self._train, self.seen = train, []

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 3 and not self.seen:
            self.seen.append(self._train(self.model))

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            self.seen.append(self._train(self.model))


def on_batch(model):
    return model.train_on_batch(X[:2], X[:2, :1], return_dict=True)


def within(model):
    history = model.history
    within_fit = model.fit(X, X[:, :1], batch_size=2, shuffle=False, verbose=0).history
    model.history = history  # as of stock Keras, the model's is that of the last `fit`
    return within_fit


@pytest.mark.parametrize("train", [pytest.param(on_batch, marks=pytest.mark.slow), within])
def test_what_a_callback_trains_has_its_own_logs(train):
    model, trained = model_of(), []
    start = model.get_weights()
    for others in ([], [Sees()]):
        model.set_weights(start)
        trains, before = Trains(train), model._get_metrics_result_or_logs
        trained.append([fit(model, epochs=2, callbacks=[trains, *others]), trains.seen])
        assert model.train_function.launched is None
        assert model._get_metrics_result_or_logs == before
    assert trained[0] == trained[1]
    assert len(trained[0][1]) == 2


def test_after_a_fit_within_it_the_outer_one_is_still_watched():
    model, trains = model_of(), Trains(lambda model: within(model))
    with pytest.raises(NonFiniteError):
        fit(model, spoilt(STEPS), callbacks=[trains])
    assert len(trains.seen) == 1


def test_a_users_progress_bar_sees_each_batch():
    class Bar(keras.callbacks.ProgbarLogger):
        def on_train_batch_end(self, batch, logs=None):
            super().on_train_batch_end(batch, logs)
            seen.append(logs["loss"])

    seen = []
    fit(model_of(), callbacks=[Bar()])
    assert len(set(seen)) == STEPS


def test_nothing_is_computed_to_look(monkeypatch):
    # On a GPU that would be queued behind the next execution, and waited for.
    computed, check = [], ahead.Ahead._check

    def note(operation, *_, **__):
        computed.append(operation)

    def watched(self, *begun):
        op_callbacks.add_op_callback(note)
        try:
            return check(self, *begun)
        finally:
            op_callbacks.remove_op_callback(note)

    monkeypatch.setattr(ahead.Ahead, "_check", watched)
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01))
    # An execution of four steps, and one of a single step.
    fit(model_of(optimizer=optimizer, steps_per_execution=4), X[:10])
    assert not computed
