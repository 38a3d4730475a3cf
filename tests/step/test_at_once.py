"""Training begins without XLA, and goes on with the program that a thread compiled meanwhile."""

import logging
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled, new_process

from tfaccel.step import aside

ROWS = 64


def make():
    keras.utils.set_random_seed(1)
    x = inputs = keras.Input((8,))
    for _ in range(3):
        x = keras.layers.BatchNormalization()(keras.layers.Dense(16, activation="gelu")(x))
    return keras.Model(inputs, keras.layers.Dense(2)(x))


def trained(*, at_once, steps_per_execution=1, epochs=3, callbacks=()):
    model = compiled(
        make,
        1,
        optimizer=keras.optimizers.Adam(1e-2),
        loss="mse",
        steps_per_execution=steps_per_execution,
        begin_without_xla=at_once,
    )
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(ROWS, 8)).astype("f4"), rng.normal(size=(ROWS, 2)).astype("f4")
    history = model.fit(
        x, y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, callbacks=[*callbacks]
    )
    return model, history.history["loss"]


class WaitsInEpoch(keras.callbacks.Callback):
    """Waits for the thread before the second epoch, so that the change is not later.

    `may_compile`, an event for which the thread waits, is set then, so that it is not sooner.
    """

    def __init__(self, may_compile=None):
        super().__init__()
        self._may_compile = may_compile or threading.Event()

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            self._may_compile.set()
            aside = self.model.train_function._step._at_once._aside
            if aside is not None:  # else the change has been
                aside.wait()


@pytest.mark.parametrize("steps_per_execution", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_weights_are_those_of_training_with_xla_alone(steps_per_execution, caplog, monkeypatch):
    may_compile, run = threading.Event(), aside.StandIns.run

    def later(*arguments):
        assert may_compile.wait(timeout=60)
        return run(*arguments)

    monkeypatch.setattr(aside.StandIns, "run", later)
    caplog.set_level(logging.INFO, "tfaccel")
    settings = {"steps_per_execution": steps_per_execution}
    model, losses = trained(at_once=True, callbacks=[WaitsInEpoch(may_compile)], **settings)
    reference, wanted = trained(at_once=False, **settings)
    np.testing.assert_allclose(losses, wanted, rtol=1e-4)
    for one, other in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)
    said = [each.message for each in caplog.records]
    assert len([each for each in said if "training has begun without XLA" in each]) == 1
    num = ROWS // 8 // steps_per_execution
    assert len([each for each in said if f"beside {num} executions without XLA" in each]) == 1


def test_the_compilation_begins_before_the_first_execution(monkeypatch):
    begun, real = [], aside.Aside.__init__

    def begin(self, *arguments):
        begun.append(model.optimizer.iterations.numpy())
        real(self, *arguments)

    monkeypatch.setattr(aside.Aside, "__init__", begin)
    model = compiled(
        make, 1, optimizer=keras.optimizers.SGD(0.1), loss="mse", begin_without_xla=True
    )
    for _ in range(2):
        model.train_on_batch(np.ones((8, 8), "f4"), np.ones((8, 2), "f4"))
    assert begun == [0]


def test_the_change_traces_and_compiles_nothing_again():
    model, _ = trained(at_once=True, callbacks=[WaitsInEpoch()])
    step = model.train_function._step
    (name,) = [each for each in step._made if each[0] != "plain"]
    assert step._made[name].__wrapped__.experimental_get_tracing_count() == 1


def test_a_fault_of_the_thread_is_raised_where_the_step_runs(monkeypatch):
    def fails(*_):
        raise tf.errors.InternalError(None, None, "it broke")

    monkeypatch.setattr(aside.StandIns, "run", fails)
    with pytest.raises(tf.errors.InternalError, match="it broke"):
        trained(at_once=True, callbacks=[WaitsInEpoch()])


def test_an_operation_that_xla_refuses_leaves_the_training_without_xla(monkeypatch, caplog):
    def fails(*_):
        raise tf.errors.InvalidArgumentError(None, None, "x must be a compile-time constant")

    caplog.set_level(logging.INFO, "tfaccel")
    monkeypatch.setattr(aside.StandIns, "run", fails)
    model, losses = trained(at_once=True, callbacks=[WaitsInEpoch()])
    assert not model.train_function.xla
    np.testing.assert_allclose(losses, trained(at_once=False)[1], rtol=1e-4)
    assert "step: without XLA" in caplog.text


def test_without_memory_for_the_first_step_the_training_waits_for_xla(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "tfaccel")
    settings = {"loss": "mse", "begin_without_xla": True}
    model = compiled(make, 1, optimizer=keras.optimizers.SGD(1.0), **settings)
    step = model.train_function._step
    x, y = np.ones((8, 8), "f4"), np.ones((8, 2), "f4")
    real, failed = step._compile, []

    def compile_(made, *, xla=None, **settings):
        function = real(made, xla=xla, **settings)
        if xla is not False:
            return function

        class Lacking:
            get_concrete_function = function.get_concrete_function

            def __call__(self, *arguments):
                function(*arguments)  # changes the variables
                failed.append(1)
                raise tf.errors.ResourceExhaustedError(None, None, "OOM")

        return Lacking()

    monkeypatch.setattr(step, "_compile", compile_)
    before = model.get_weights()
    model.train_on_batch(x, y)
    assert failed == [1]
    assert "training waits for XLA, because memory ran out" in caplog.text
    other = compiled(make, 1, optimizer=keras.optimizers.SGD(1.0), loss="mse")
    np.testing.assert_array_equal(before[0], other.get_weights()[0])
    other.train_on_batch(x, y)
    for one, two in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)


def test_batches_of_another_shape_are_trained_too():
    model, _ = trained(at_once=True, epochs=1)
    step = model.train_function._step
    model.train_on_batch(np.ones((5, 8), "f4"), np.ones((5, 2), "f4"))
    deadline = time.monotonic() + 60
    while not step._at_once.is_over and time.monotonic() < deadline:
        model.train_on_batch(np.ones((8, 8), "f4"), np.ones((8, 2), "f4"))
    assert step._at_once.is_over


def test_a_lack_of_memory_of_the_thread_is_no_fault(monkeypatch):
    def lacks(*_):
        raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")

    monkeypatch.setattr(aside.StandIns, "run", lacks)
    model, _ = trained(at_once=True)  # the thread has ended before the second execution
    assert model.train_function.xla
    assert not model.train_function.is_without_xla_yet


def test_without_xla_nothing_changes(caplog):
    caplog.set_level(logging.INFO, "tfaccel")
    compiled(make, 2, optimizer="sgd", loss="mse", xla=False, begin_without_xla=True)
    assert "begin_without_xla changes nothing, because XLA is off" in caplog.text
    assert "waits for XLA" not in caplog.text


def test_several_replicas_wait_for_xla(caplog):
    caplog.set_level(logging.INFO, "tfaccel")
    model = compiled(make, 2, optimizer="sgd", loss="mse", begin_without_xla=True)
    assert "training waits for XLA, because begin_without_xla is for one replica" in caplog.text
    assert not model.train_function.is_without_xla_yet


def test_a_deterministic_run_waits_for_xla(setup, caplog):
    caplog.set_level(logging.INFO, "tfaccel")
    run = setup(xla=True, begin_without_xla=True, deterministic=True)
    assert not run.runtime.begin_without_xla
    assert "training waits for XLA, because deterministic=True is set" in caplog.text
    assert setup(xla=True, begin_without_xla=True).runtime.begin_without_xla


SHORT = """
import sys, time
import keras, numpy as np, tfaccel
run = tfaccel.setup(xla=True, compile_cache=False, begin_without_xla=True)
with run.scope():
    model = keras.applications.ResNet50(weights=None, input_shape=(32, 32, 3), classes=10)
run.compile(model, "sgd", "sparse_categorical_crossentropy")
x, y = np.ones((8, 32, 32, 3), np.float32), np.zeros(8, np.int32)
model.fit(x, y, batch_size=4, verbose=0)
time.sleep({seconds})  # then XLA is at another place
print("ended", flush=True)
sys.exit(7)
"""


@pytest.mark.parametrize("seconds", [0, 4])
@pytest.mark.parametrize(
    "on", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("gpu", marks=pytest.mark.gpu)]
)
def test_a_process_that_ends_while_xla_compiles_ends_well(on, seconds):
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if on == "cpu" else {}
    done = new_process(SHORT.format(seconds=seconds), timeout_s=300, **hidden)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (7, "ended"), done.stderr


LEAVES = """
import threading, time
from tfaccel.step import aside
aside._threads.append(threading.Thread(target=time.sleep, args=(60,), daemon=True))
aside._threads[0].start()
print("some result")
{then}
"""


CTRL_C = """
import os, signal
def interrupt():
    time.sleep(2)  # until the end of Python, which waits for threads that are no daemons
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt, daemon=True).start()
"""


@pytest.mark.parametrize(
    ("then", "code"),
    [
        # What the command calls at its end.
        pytest.param("aside.leave_at_once(75)", 75, marks=pytest.mark.slow),
        ("import tfaccel.cli.main as m; m.main = lambda a: 3; m.cli()", 3),
        (CTRL_C, 130),
    ],
)
def test_a_command_and_ctrl_c_do_not_wait_for_xla(then, code):
    began = time.monotonic()
    done = new_process(LEAVES.format(then=then), timeout_s=100)
    assert (done.returncode, done.stdout) == (code, "some result\n"), done.stderr
    assert time.monotonic() - began < 50
