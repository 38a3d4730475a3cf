"""How far a process has come, in the file that its launcher reads."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import types

import keras
import numpy as np
import pytest

import tfaccel
from tfaccel import UserError
from tfaccel.process import isolate, progress
from tfaccel.process.progress import Progress


@pytest.fixture
def heartbeat(tmp_path, monkeypatch):
    """The file of this process."""
    path = tmp_path / "heartbeat"
    progress.write(path, Progress(since=time.monotonic()))
    monkeypatch.setattr(progress, "_own", progress._Reporter(str(path)))
    return path


def test_what_is_said_is_read(heartbeat):
    assert progress.read(heartbeat).phase == "start"
    progress.beat("train", step=57)
    began = time.monotonic()
    with progress.within("save"):
        inside = progress.read(heartbeat)
    after = progress.read(heartbeat)
    assert (inside.beats, inside.phase, inside.step) == (1, "save", 57)
    assert (after.beats, after.phase, after.step) == (1, "train", 57)
    assert began <= after.since <= time.monotonic()
    assert (after.lost, after.asked) == (None, False)
    progress.lost()
    assert progress.read(heartbeat).lost == -1
    progress.lost(3)
    progress.asked()
    assert (progress.read(heartbeat).lost, progress.read(heartbeat).asked) == (3, True)


def beats_of_child(heartbeat):
    environment = {**os.environ, progress.VARIABLE: str(heartbeat)}
    program = "from tfaccel.process import progress; progress.beat('train', step=4)"
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    return progress.read(heartbeat).beats


def test_a_ranks_child_does_not_speak_for_it(heartbeat):
    progress.beat("train", step=7)
    assert beats_of_child(heartbeat) == 1
    if (pid := os.fork()) == 0:
        try:
            progress._own = progress._Reporter(str(heartbeat))  # as from the environment
            progress.beat("train", step=8)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    progress.beat("train", step=8)
    assert (progress.read(heartbeat).beats, progress.read(heartbeat).step) == (2, 8)


def test_a_child_speaks_for_a_rank_that_never_does_and_has_the_same_clock(heartbeat):
    began = time.monotonic()
    assert beats_of_child(heartbeat) == 1
    assert began <= progress.read(heartbeat).since <= time.monotonic()
    progress.beat("train", step=5)
    assert progress.read(heartbeat).beats == 2


def test_an_isolated_training_speaks_for_the_rank_that_waits_for_it(heartbeat, monkeypatch):
    monkeypatch.setenv(progress.VARIABLE, str(heartbeat))
    progress.beat("start")
    isolate.run_isolated(lambda: progress.beat("train", step=4))
    assert (progress.read(heartbeat).beats, progress.read(heartbeat).step) == (2, 4)
    progress.beat("own")
    assert (progress.read(heartbeat).beats, progress.read(heartbeat).step) == (3, 4)
    assert beats_of_child(heartbeat) == 3


def test_a_launcher_that_has_gone_is_said_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(progress, "_own", progress._Reporter(str(tmp_path / "gone")))
    for step in range(2):
        progress.beat("train", step=step)
    assert [each.message.startswith("progress: no longer reported") for each in caplog.records] == [
        True
    ]


def test_two_threads_lose_nothing_of_each_other(heartbeat, monkeypatch):
    clock = types.SimpleNamespace(monotonic=lambda: time.sleep(0) or time.monotonic())
    monkeypatch.setattr(progress, "time", clock)  # where another thread comes between
    asks = threading.Thread(target=lambda: [progress.asked() for _ in range(500)])
    asks.start()
    for _ in range(500):
        progress.beat("train")
    asks.join()
    assert (progress.read(heartbeat).beats, progress.read(heartbeat).asked) == (500, True)


def test_a_loop_of_ones_own_beats_and_its_first_step_compiles(heartbeat):
    said = []
    for step in (1, np.int64(2), None):
        tfaccel.beat(step=step)
        said.append(progress.read(heartbeat))
    tfaccel.beat(phase="own")
    said.append(progress.read(heartbeat))
    assert [(each.beats, each.phase, each.step) for each in said] == [
        (1, "start", 1),
        (2, "train", 2),
        (3, "train", 2),
        (4, "own", 2),
    ]
    with pytest.raises(UserError, match="step='x'; expected a whole number"):
        tfaccel.beat(step="x")
    with pytest.raises(UserError, match="phase"):
        tfaccel.beat(phase="end")


def test_after_the_outermost_call_a_script_is_at_its_own_work(heartbeat):
    def phases(raises=None):
        progress.beat("train")
        with contextlib.suppress(KeyError), progress.call():
            with progress.call():
                progress.beat("evaluation")
            inside = progress.read(heartbeat).phase
            if raises:
                raise raises
        return inside, progress.read(heartbeat).phase, progress.read(heartbeat).beats

    assert phases() == ("train", "own", 4)
    # No other rank comes to the same place.
    assert phases(KeyError()) == ("train", "own", 7)
    with contextlib.suppress(SystemExit), progress.call():
        progress.beat("end")
        raise SystemExit(143)
    assert progress.read(heartbeat).phase == "end"


def test_a_program_that_takes_the_signal_for_stacks_is_seen_at_the_next_beat(heartbeat):
    def shown_by():
        progress.beat("train")
        return progress.read(heartbeat).shows_stacks

    assert shown_by() == os.getpid()
    assert progress.catches(os.getpid(), progress.STACKS_SIGNAL)
    before = signal.signal(progress.STACKS_SIGNAL, lambda number, frame: None)
    try:
        assert shown_by() == 0
    finally:
        signal.signal(progress.STACKS_SIGNAL, before)
    assert not progress.catches(os.getpid(), progress.STACKS_SIGNAL)  # the default is back


def test_without_a_launcher_nothing_is_said():
    progress.beat("train", step=1)
    with progress.within("save"):
        pass


def test_a_beat_costs_little_more_than_what_it_writes(heartbeat):
    def least_s(function):
        def took_s():
            begun = time.perf_counter()
            for step in range(1000):
                function(step)
            return time.perf_counter() - begun

        return min(took_s() for _ in range(20))  # other processes may be at work here

    packs = least_s(lambda step: progress._packed(Progress(1, "train", step, since=1.0)))
    beats = least_s(lambda step: progress.beat("train", step=step))
    assert beats < 5 * packs  # 2.1, at 2.7 us a beat; a call of the system alone is more


@pytest.fixture
def said(heartbeat, monkeypatch):
    """What was said so far."""
    said, change = [], progress._own.change

    def hear(**changes):
        said.append(changes)
        return change(**changes)

    monkeypatch.setattr(progress._own, "change", hear)
    return said


def test_fit_and_predict_beat_at_each_batch_and_what_compiles_belongs_to_the_start(said, setup):
    run = setup(xla=False)
    assert [each["phase"] for each in said] == ["start", "start"]
    with run.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    run.compile(model, "sgd", "mse")
    x = np.ones((12, 2), np.float32)
    said.clear()
    model.fit(x, x[:, :1], batch_size=4, epochs=2, validation_data=(x, x[:, :1]), verbose=0)
    assert [(each["phase"], each.get("step")) for each in said] == [
        ("start", None),
        ("start", 1),
        ("train", 2),
        ("train", 3),
        ("start", None),  # validation compiles too
        *[("evaluation", None)] * 2,
        ("train", None),
        ("train", 4),
        ("train", 5),
        ("train", 6),
        *[("evaluation", None)] * 3,
        ("train", None),
        ("own", None),
    ]

    def phases(call, *args, **kwargs):
        said.clear()
        call(*args, **kwargs)
        return [each["phase"] for each in said]

    predict = (model.predict, x)
    assert phases(*predict, batch_size=6, verbose=0) == ["start", "evaluation", "own"]
    assert phases(*predict, batch_size=6, verbose=0) == ["evaluation", "evaluation", "own"]
    assert phases(model.evaluate, x, x[:, :1], batch_size=12, verbose=0) == ["evaluation", "own"]
    for call in (model.test_on_batch, model.train_on_batch):
        assert phases(call, x, x[:, :1]) == ["start"]
    assert phases(model.predict_on_batch, x) == ["start"]
    assert phases(model.train_on_batch, x, x[:, :1]) == ["train"]


def test_the_first_execution_of_each_length_compiles(said, setup):
    run = setup(xla=False)
    with run.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    run.compile(model, "sgd", "mse", steps_per_execution=2)
    x = np.ones((12, 2), np.float32)
    own_data = run.examples([(x[0], x[0, :1])] * 5, global_batch_size=1)
    for data in ({"x": x[:10], "y": x[:10, :1], "batch_size": 2}, {"x": own_data}):
        said.clear()
        model.fit(**data, epochs=2, verbose=0)
        steps = [(each["phase"], each["step"]) for each in said if "step" in each]
        first = steps[0][1]
        assert [(phase, step - first + 1) for phase, step in steps] == [
            ("start", 1),
            ("train", 3),
            ("start", 5),
            ("train", 6),
            ("train", 8),
            ("train", 10),
        ]


def test_steps_go_on_from_those_that_a_script_restored_by_itself(said, setup):
    run = setup(xla=False)
    with run.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    run.compile(model, "sgd", "mse")
    x = np.ones((8, 2), np.float32)

    class Restore(keras.callbacks.Callback):
        """As BackupAndRestore."""

        def on_train_begin(self, logs=None):
            self.model.optimizer.iterations.assign(500)

    said.clear()
    model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=[Restore()])
    assert [each["step"] for each in said if "step" in each] == [501, 502]
