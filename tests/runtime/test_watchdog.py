"""Workers that are killed, frozen or busy, in processes of their own on this machine's CPU."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import tensorflow as tf

from tfaccel.common.errors import RunError
from tfaccel.runtime import watchdog
from tfaccel.runtime.cluster import Cluster
from tfaccel.runtime.watchdog import Watchdog, WorkerLostError

# An endless training: every step waits for every worker.
WORKER = """
import atexit, gc, sys, time
gc.set_threshold(1_000_000)  # as in conftest.py
atexit.register(gc.freeze)
import tensorflow as tf
import tfaccel
from tfaccel.runtime.watchdog import Watchdog
from tensorflow.python.eager import context

limit_s, heartbeat_s, chief_is_busy_s = map(int, sys.argv[1:])
run = tfaccel.setup(gpu_ids=(), peer_timeout_s=heartbeat_s)
assert context.context().coordination_service.heartbeat_timeout_in_ms == 1000 * heartbeat_s
try:
    tfaccel.setup(gpu_ids=(), peer_timeout_s=heartbeat_s + 1)
except tfaccel.UserError as error:
    print(error, flush=True)

@tf.function
def step():
    return run.strategy.reduce("SUM", run.strategy.run(lambda: tf.constant(1.0)), axis=None)

with Watchdog(run.cluster, peer_timeout_s=limit_s).guard():
    print("replicas:", int(step()), flush=True)
    if run.cluster.is_chief:
        time.sleep(chief_is_busy_s)
    step()
    print("training", flush=True)
    while True:
        step()
"""


class Job:
    """Workers, each with a file of what it prints."""

    def __init__(self, folder, num_workers, *arguments):
        with contextlib.ExitStack() as sockets:
            free = [sockets.enter_context(socket.socket()) for _ in range(num_workers)]
            for each in free:
                each.bind(("localhost", 0))
            self.addresses = [f"localhost:{each.getsockname()[1]}" for each in free]
        self._logs = [folder / f"worker-{index}.log" for index in range(num_workers)]
        self.workers = [self._start(index, arguments) for index in range(num_workers)]

    def _start(self, index, arguments):
        task = {"type": "worker", "index": index}
        tf_config = json.dumps({"cluster": {"worker": self.addresses}, "task": task})
        with open(self._logs[index], "w") as log:
            return subprocess.Popen(
                [sys.executable, "-c", WORKER, *map(str, arguments)],
                env={**os.environ, "TF_CONFIG": tf_config, "CUDA_VISIBLE_DEVICES": "-1"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for worker in self.workers:
            worker.kill()
            worker.wait()

    def log(self, index):
        return self._logs[index].read_text()

    def wait_until_training(self, *, timeout_s=300):
        end = time.monotonic() + timeout_s
        while not all("training" in self.log(index) for index in range(len(self.workers))):
            assert time.monotonic() < end, "\n".join(map(self.log, range(len(self.workers))))
            assert all(worker.poll() is None for worker in self.workers)
            time.sleep(0.1)

    def check_lost(self, lost, *, seen_by, timeout_s=300):
        """Each of these ends by itself, with an ordinary error that names the lost one."""
        for index in seen_by:
            assert self.workers[index].wait(timeout_s) == 1, self.log(index)
            # Not always the last line: TensorFlow's own threads may still write to the log.
            error = self.log(index).rpartition("\ntfaccel.runtime.watchdog.WorkerLostError: ")[2]
            assert error != self.log(index), error
            assert f"worker {lost} ({self.addresses[lost]}) is lost" in error.splitlines()[0]


@pytest.mark.parametrize("num", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_busy_chief_is_waited_for_and_a_killed_worker_is_named(tmp_path, num):
    with Job(tmp_path, num, 3, 3, 5) as job:
        job.wait_until_training()
        for index in range(num):
            log = job.log(index)
            assert log.index(f"waiting for {num} workers") < log.index(f"all {num} workers have")
            assert "this process has already joined its cluster with other settings" in log
            assert f"replicas: {num}" in log
        job.workers[1].kill()
        job.check_lost(1, seen_by={*range(num)} - {1})


@pytest.mark.slow
def test_a_frozen_chief_is_named_and_ends_when_it_thaws(tmp_path):
    # TensorFlow's own heartbeats would take a minute: it is the watchdog that notices.
    with Job(tmp_path, 2, 3, 60, 0) as job:
        job.wait_until_training()
        job.workers[0].send_signal(signal.SIGSTOP)
        job.check_lost(0, seen_by=(1,))
        job.workers[0].send_signal(signal.SIGCONT)
        job.check_lost(1, seen_by=(0,))


def test_a_worker_that_has_started_but_cannot_be_reached_is_named(monkeypatch):
    asked = []

    def ask(task, *, timeout_s):
        asked.append(task)
        if task.endswith("2") or len(asked) < 3:
            raise tf.errors.UnavailableError(None, None, "No route to host\nmore")

    monkeypatch.setattr(watchdog, "ask_worker", ask)
    monkeypatch.setattr(watchdog, "REACH_S", 0.1)
    monkeypatch.setattr(watchdog, "RETRY_S", 0.04)
    watching = Watchdog(Cluster(("a:1", "b:1", "c:1"), worker_index=0))
    with pytest.raises(WorkerLostError, match=r"worker 2 .* at c:1 \(No route to host\); see"):
        watching.check_reach()
    assert [each[-1] for each in asked[:4]] == ["1", "1", "1", "2"]  # the first answered late
    Watchdog(Cluster()).check_reach()


@pytest.mark.parametrize(
    ("trouble", "words"),
    [(None, "Socket closed"), (tf.errors.UnavailableError(None, None, ""), r"worker 0 \(a:1\)")],
)
def test_an_error_of_tensorflow_is_a_lost_worker_if_one_is_lost(monkeypatch, trouble, words):
    monkeypatch.setattr(Watchdog, "_trouble", lambda *_: trouble)
    watching = Watchdog(Cluster(("a:1", "b:1"), worker_index=1))
    error = tf.errors.UnavailableError(None, None, "Socket closed")
    with pytest.raises(WorkerLostError if trouble else type(error), match=words), watching.guard():
        raise error


def test_what_comes_of_a_sum_that_was_broken_off_is_a_lost_worker(monkeypatch):
    broken_off = threading.Event()
    silent = tf.errors.UnavailableError(None, None, "")
    monkeypatch.setattr(Watchdog, "_trouble", lambda *_: silent)
    monkeypatch.setattr(watchdog, "abort_collectives", lambda _: broken_off.set())
    monkeypatch.setattr(watchdog, "GONE_AFTER_S", 0.1)
    watching = Watchdog(Cluster(("a:1", "b:1"), worker_index=1))

    @watching.guard()
    def train():
        assert broken_off.wait(300)
        raise RunError("the gradient of dense/kernel is not finite")

    with pytest.raises(WorkerLostError, match=r"worker 0 \(a:1\) is lost.*kernel is not finite\)"):
        train()


# Nothing is ever put into the queue: a wait that no abort ends, as that of a GPU for a lost worker.
STUCK = """
import sys, threading, time
import tensorflow as tf
from tfaccel.process import leave
from tfaccel.runtime import watchdog
from tfaccel.runtime.cluster import Cluster

def ask(task, *, timeout_s):
    raise tf.errors.UnavailableError(None, None, "gone")

def write():
    print("writing", flush=True)
    time.sleep(2 * watchdog.STUCK_S)
    print("written", flush=True)

watchdog.ask_worker, watchdog.GONE_AFTER_S, watchdog.STUCK_S = ask, 0.1, 1.0
queue = tf.queue.FIFOQueue(1, [tf.float32])
writing = threading.Thread(target=write)
leave.finish_first(writing)
writing.start()
with watchdog.Watchdog(Cluster(("a:1", "b:1"), worker_index=1)).guard():
    sys.stdout.write("waiting")
    queue.dequeue()
"""


def test_a_call_that_waits_for_a_lost_worker_for_ever_ends_the_process():
    done = subprocess.run(
        [sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "waiting" in done.stdout  # what it had not flushed
    assert "written\n" in done.stdout
    assert "tfaccel: error: worker 0 (a:1) is lost: no answer for" in done.stderr


def test_a_worker_that_is_busy_after_a_loss_is_not_ended(monkeypatch):
    monkeypatch.setattr(watchdog, "STUCK_S", 0.2)
    left = threading.Event()
    found = []
    caller = threading.get_ident()
    asking = threading.Thread(target=lambda: found.append(watchdog._is_stuck(caller, left)))
    asking.start()
    end = time.monotonic() + 0.6
    while time.monotonic() < end:  # many short calls of TensorFlow
        tf.constant(1.0) + 1.0
    time.sleep(0.6)
    left.set()
    asking.join()
    assert found == [False]


def test_an_error_of_this_worker_stays_as_it_is(monkeypatch):
    # The others end for the same reason, perhaps before this one.
    monkeypatch.setattr(Watchdog, "_trouble", lambda *_: tf.errors.UnavailableError(None, None, ""))
    with (
        pytest.raises(RunError, match="not finite"),
        Watchdog(Cluster(("a:1", "b:1"), worker_index=1)).guard(),
    ):
        raise RunError("the gradient of dense/kernel is not finite")


def test_one_worker_watches_nobody():
    before = set(threading.enumerate())
    with Watchdog(Cluster()).guard():
        pass
    with pytest.raises(tf.errors.InternalError), Watchdog(Cluster()).guard():
        raise tf.errors.InternalError(None, None, "mine")
    assert set(threading.enumerate()) <= before
