"""An export that is tried at the start of training, which ends if the end would refuse it."""

import sys
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfaccel.common import temporary
from tfaccel.common.errors import RunError, UserError
from tfaccel.config import ExportConfig
from tfaccel.export import asked as asked_room
from tfaccel.export import parity
from tfaccel.export.asked import ask
from tfaccel.export.rehearsal import Rehearsal
from tfaccel.process import child


def begun(*args, **settings):
    rehearsal = Rehearsal(*args, **settings)
    rehearsal.begin()
    return rehearsal


def of(*some, **config):
    model = keras.Sequential([keras.Input((4,)), *some])
    return ask(model, ExportConfig(**config))


def test_what_answers_alike_passes_and_leaves_nothing(tmp_path):
    with begun(of(layers.Dense(3)), parent=tmp_path) as rehearsal:
        rehearsal.wait()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fresh_process
def test_python_in_the_graph_is_found_before_training(tmp_path):
    """The model trains and is written, but no server has its Python."""

    @keras.saving.register_keras_serializable("test_rehearsal")
    class Halved(layers.Layer):
        def call(self, x):
            half = tf.numpy_function(lambda each: each / np.float32(2), [x], tf.float32)
            return tf.ensure_shape(half, (None, 4))

        def compute_output_spec(self, x):
            return keras.KerasTensor(x.shape, x.dtype)

    with begun(of(Halved(), layers.Dense(2)), parent=tmp_path) as rehearsal:
        with pytest.raises(RunError, match=r"not answer in a process of its own .*start of tr"):
            rehearsal.wait()
        with pytest.raises(RunError, match="not answer"):
            rehearsal.callback().on_train_batch_begin(0)


def test_what_draws_when_it_is_served_is_found_before_training(tmp_path):
    class Draws(layers.Dropout):
        def call(self, x, training=False):
            return super().call(x, training=True)

    keras.saving.register_keras_serializable("test_rehearsal")(Draws)
    with pytest.raises(UserError, match=r"another answer for the same input each time, in out"):
        begun(of(layers.Dense(8), Draws(0.5)), parent=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_is_lost_in_a_copy_is_found_before_training(tmp_path):
    """In float32 a copy is exported, of which each layer is made again from its config."""

    @keras.saving.register_keras_serializable("test_rehearsal")
    class Scaled(layers.Layer):
        factor = 1.0

        def call(self, x):
            return x * self.factor

    scaled = Scaled()
    scaled.factor = 3.0
    with (
        begun(of(layers.Dense(2), scaled, computes_in="float32"), parent=tmp_path) as rehearsal,
        pytest.raises(RunError, match=r"not answer as the untrained model does: model: "),
    ):
        rehearsal.wait()


def test_infinite_answers_of_an_untrained_model_say_nothing(tmp_path):
    """Half precision may overflow in a deep model until its statistics are known."""
    infinite = layers.Rescaling(np.inf)
    with begun(of(infinite), parent=tmp_path) as rehearsal:
        rehearsal.wait()


@pytest.mark.parametrize("may_pass", [True, False])
def test_a_process_that_the_machine_ended_does_not_end_training(
    tmp_path, monkeypatch, caplog, may_pass
):
    def ended(*_, **__):
        raise parity.NoAnswerError("ended by SIGKILL", may_pass=may_pass)

    monkeypatch.setattr(parity, "_run", ended)
    with begun(of(layers.Dense(3)), parent=tmp_path) as rehearsal:
        if may_pass:
            rehearsal.wait()
            assert "ended by SIGKILL; the export at the end will show" in caplog.text
        else:
            with pytest.raises(RunError, match="SIGKILL"):
                rehearsal.wait()


def test_a_training_that_ends_first_ends_the_process(tmp_path, monkeypatch):
    entered = threading.Event()

    def waits(*_, stop, **__):
        entered.set()
        assert stop.wait(60)
        raise child.Stopped

    monkeypatch.setattr(parity, "_run", waits)
    rehearsal = begun(of(layers.Dense(3)), parent=tmp_path)
    assert entered.wait(60)
    rehearsal.callback().on_train_end()
    rehearsal.close()  # again
    rehearsal.check()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_no_file_is_named(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(asked_room.Asked, "_write", full)
    with pytest.raises(
        RunError, match=r"trial export at the start of training, in .*No space left .*set TMPDIR"
    ):
        begun(of(layers.Dense(3)), parent=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_it_changes_no_seed_of_what_is_made_afterwards(tmp_path):
    def weights(rehearse):
        keras.utils.set_random_seed(3)
        asked = of(layers.Dropout(0.5), layers.Dense(3))
        keras.random.normal((2,))
        if rehearse:
            begun(asked, parent=tmp_path).close()
        again = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
        return [keras.random.normal((2,)).numpy(), np.random.rand(2), *again.get_weights()]

    assert [each.tolist() for each in weights(True)] == [each.tolist() for each in weights(False)]


def test_a_stopped_process_has_ended(tmp_path):
    program, stop = tmp_path / "stuck.py", threading.Event()
    program.write_text("import time; time.sleep(1000)")
    threading.Timer(0.3, stop.set).start()
    began = time.monotonic()
    with pytest.raises(child.Stopped):
        child.run([sys.executable, str(program)], environment={}, limit_s=100, stop=stop)
    assert time.monotonic() - began < 60


def test_the_folder_is_one_that_a_later_process_clears():
    with begun(of(layers.Dense(3))) as rehearsal:
        assert temporary._OURS.fullmatch(rehearsal._folder.path.name)


def test_training_begins_the_trial_with_its_second_execution(monkeypatch):
    seen = []

    class Told:
        def begin(self):
            seen.append("begin")

        def check(self):
            seen.append("check")

        def close(self):
            seen.append("close")

    told = Told()
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
    model.compile("sgd", "mse")
    notes = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(batch)
    )
    x, y = np.ones((6, 4)), np.ones((6, 3))
    watch = Rehearsal.callback(told)
    model.fit(x, y, batch_size=2, epochs=1, verbose=0, callbacks=[watch, notes])
    assert seen == ["check", 0, "begin", "check", 1, "check", 2, "begin", "check", "close"]


def test_an_epoch_of_one_execution_begins_it_too(tmp_path):
    asked = of(layers.Dense(3))
    with Rehearsal(asked, parent=tmp_path) as rehearsal:
        asked.model.compile("sgd", "mse")
        checked = []
        rehearsal.check = lambda: checked.append(list(tmp_path.iterdir()))
        x, y = np.ones((2, 4)), np.ones((2, 3))
        asked.model.fit(x, y, verbose=0, callbacks=[rehearsal.callback()])
        assert [len(each) for each in checked] == [0, 1]
    assert list(tmp_path.iterdir()) == []


def test_a_second_call_begins_nothing(tmp_path):
    prepared = []
    with Rehearsal(of(layers.Dense(3)), lambda: prepared.append(1), parent=tmp_path) as rehearsal:
        for _ in range(2):
            rehearsal.begin()
    assert prepared == [1]


def test_what_it_finds_before_the_trial_ends_training(tmp_path):
    def refuses():
        raise UserError("the pixels differ")

    asked = of(layers.Dense(3))
    asked.model.compile("sgd", "mse")
    with Rehearsal(asked, refuses, parent=tmp_path) as rehearsal:
        x, y = np.ones((6, 4)), np.ones((6, 3))
        with pytest.raises(UserError, match="the pixels differ"):
            asked.model.fit(x, y, batch_size=2, verbose=0, callbacks=[rehearsal.callback()])
    assert list(tmp_path.iterdir()) == []


def test_a_trial_without_memory_beside_the_training_does_not_end_it(monkeypatch, caplog, tmp_path):
    def lacks():
        raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")

    asked = of(layers.Dense(3))
    asked.model.compile("sgd", "mse")
    with Rehearsal(asked, lacks, parent=tmp_path) as rehearsal:
        x, y = np.ones((6, 4)), np.ones((6, 3))
        asked.model.fit(x, y, batch_size=2, verbose=0, callbacks=[rehearsal.callback()])
    assert "the trial at the start found no memory beside the training" in caplog.text
    assert list(tmp_path.iterdir()) == []
