"""Programs as people write them (tests/programs), on two processes: as stock Keras on one device.

Batches of 7 rows leave one process with fewer rows than the other, and at the end with none.
"""

import dataclasses
import functools
import json
import os
import pathlib
import pickle
import subprocess
import sys
import time

import pytest
from conftest import in_workers
from programs.harness import PROGRAMS, by_stock_keras

# Workers have one replica each on the CPU. TensorFlow's private method lets them have two.
WORKER = """
import dataclasses, os, pathlib, pickle, sys
sys.path.insert(0, {tests!r})
on_gpu, xla = {gpus}, {xla}
if on_gpu:
    os.environ["CUDA_VISIBLE_DEVICES"] = str(json.loads(os.environ["TF_CONFIG"])["task"]["index"])
import numpy as np, tensorflow as tf
num_local = {num_local}
if num_local > 1:
    from tensorflow.python.distribute import collective_all_reduce_strategy as strategies
    (cpu,) = tf.config.list_physical_devices("CPU")
    devices = [tf.config.LogicalDeviceConfiguration()] * num_local
    tf.config.set_logical_device_configuration(cpu, devices)
    strategies.CollectiveAllReduceExtended._initialize_local_devices = lambda *args: (
        tuple(f"{{args[-1]}}/device:CPU:{{index}}" for index in range(num_local)), "CPU")
import tfaccel
from programs import harness
from tfaccel.data.placement import untuned
# As in conftest.py: iterators with TensorFlow's tuner may take a minute to end.
distribute = tf.distribute.Strategy.experimental_distribute_dataset
tf.distribute.Strategy.experimental_distribute_dataset = lambda strategy, data, options=None: (
    distribute(strategy, untuned(data) if isinstance(data, tf.data.Dataset) else data, options))
from tfaccel.keras_internals.replica import local_replicas
from tfaccel.step import totals
totals.BUCKET_BYTES = 256  # so that gradients are in several vectors
run = tfaccel.setup(gpu_ids=None if on_gpu else (), xla=xla, tf32=False, memory="growth")
assert run.strategy.num_replicas_in_sync == num_workers * num_local
assert local_replicas(run.strategy)[0].reduces_in_xla == (on_gpu and xla)
config = tfaccel.StepConfig(accumulation_steps={parts})

def here(program):
    with run.scope():
        model = harness.made(program)
    for change in harness.changes(program):
        change(model)
        run.compile(model, **program.compile(), step=config)
        model.run_eagerly = {eagerly}
        logs = harness.trained(program, model)
    return logs, [np.array(each) for each in model.variables]

found = {{}}
for name, (batch_size, wanted) in pickle.loads(pathlib.Path({wanted!r}).read_bytes()).items():
    program = dataclasses.replace(harness.PROGRAMS[name], batch_size=batch_size)
    try:
        found[name] = harness.difference(here(program), wanted)
    except Exception as error:
        found[name] = repr(error)[:1000], "error"
print(json.dumps(found))
"""

# Not with batches of 7 rows: two that stock Keras refuses, one whose arithmetic is for 6 rows, one
# whose gradient of a bias is a rounding that RMSprop divides by itself, and one whose last batch
# has a loss that one replica already counts otherwise.
OF_FULL_BATCHES = {
    "stateful LSTM",
    "mixup in the step",
    "sum by x.shape[0]",
    "WGAN with clipped weights",
    "two outputs, two masks",
}


NAMES = sorted(PROGRAMS)
GROUPS = [NAMES[start : start + 15] for start in range(0, len(NAMES), 15)]


@functools.cache
def _wanted(name, batch_size):
    return by_stock_keras(dataclasses.replace(PROGRAMS[name], batch_size=batch_size))


def check(
    folder, names, *, batch_size=None, num_local=1, xla=False, parts=1, eagerly=False, gpus=False
):
    """Raises AssertionError unless each process trains the programs as stock Keras."""
    sizes = {name: batch_size or PROGRAMS[name].batch_size for name in names}
    wanted = folder / "wanted.pickle"
    wanted.write_bytes(pickle.dumps({name: (s, _wanted(name, s)) for name, s in sizes.items()}))
    program = WORKER.format(
        tests=str(pathlib.Path(__file__).parents[1]),
        wanted=str(wanted),
        num_local=num_local,
        xla=xla,
        parts=parts,
        eagerly=eagerly,
        gpus=gpus,
    )
    first, second = map(json.loads, in_workers(program, 2, timeout_s=30 + 30 * len(names)))
    assert first.keys() == second.keys() == sizes.keys()
    for found in (first, second):
        wrong = {
            name: each
            for name, each in found.items()
            if isinstance(each[0], str) or each[0] > PROGRAMS[name].rtol
        }
        assert not wrong


def test_two_processes_train_as_one_device(tmp_path):
    check(tmp_path, ["Barlow twins"], batch_size=7)


@pytest.mark.slow
@pytest.mark.parametrize("names", GROUPS)
@pytest.mark.parametrize("batch_size", [None, 7])
def test_every_program_trains_on_two_processes(tmp_path, names, batch_size):
    names = [each for each in names if not (batch_size and each in OF_FULL_BATCHES)]
    check(tmp_path, names, batch_size=batch_size)


SOME = [
    "SimCLR",
    "BYOL",
    "MoCo",
    "SAM",
    "DCGAN",
    "WGAN-GP",
    "mean teacher",
    "hand-masked loss",
    "mean IoU",
    "AUC and F1",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"num_local": 2}, id="2 replicas each"),
        pytest.param({"parts": 2}, id="in parts"),
        pytest.param({"eagerly": True}, id="eagerly"),
        pytest.param({"xla": True}, id="XLA"),
    ],
)
def test_some_programs_train_on_two_processes_with(tmp_path, settings):
    # At the end of an epoch of batches of 7 rows, one of four replicas has no row. SimCLR's
    # accuracy is of rows that the step gathers itself: tfaccel/step/README.md has the difference.
    names = [each for each in SOME if each != "SimCLR" or settings.get("num_local") != 2]
    check(tmp_path, names, batch_size=7, **settings)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("batch_size", [None, 7])
@pytest.mark.parametrize("xla", [True, False])
def test_a_few_programs_train_on_two_gpus_by_a_process_each(tmp_path, batch_size, xla):
    # XLA compiles each for half a minute, so these are few.
    check(tmp_path, ["DCGAN", "SimCLR", "mean IoU"], batch_size=batch_size, xla=xla, gpus=True)


STATEFUL = """
import keras, numpy as np
import tfaccel
run = tfaccel.setup(gpu_ids=(), xla=False)
with run.scope():
    model = keras.Sequential([keras.Input(batch_shape=(6, 5, 4)),
                              keras.layers.LSTM(3, stateful=True), keras.layers.Dense(1)])
run.compile(model, "sgd", "mse")
try:
    model.fit(np.zeros((7, 5, 4)), np.zeros((7, 1)), batch_size=7, verbose=0)
except tfaccel.UserError as error:
    print(error)
"""


@pytest.mark.slow
def test_states_and_an_uneven_batch_are_refused_on_every_process():
    for line in in_workers(STATEFUL, 2):
        assert "the replicas have [4, 3] rows of a batch; with a stateful" in line


# The step of the fourth batch of rank 1 ends the process, or raises.
FAULT = """
import json, os, pathlib, signal, sys, time
import keras, numpy as np, tensorflow as tf
import tfaccel
fault, marker, eagerly = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3] == "eagerly"
is_mine = json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1
run = tfaccel.setup(gpu_ids=(), xla=False, peer_timeout_s=4)
calls = []

def happen():
    calls.append(None)
    if is_mine and len(calls) == 4:
        marker.write_text("")
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("row 7 is broken")
    return np.float32(0)

class Twice(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.dense.build((None, 4))
        self.built = True
        self.other = keras.optimizers.SGD(0.01)

    def train_step(self, data):
        x, y = data
        weights = self.trainable_variables
        for optimizer in (self.optimizer, self.other):
            with tf.GradientTape() as tape:
                loss = tf.reduce_max(tf.square(self.dense(x) - y))
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
            if optimizer is self.optimizer:
                eager = tf.executing_eagerly()
                zero = happen() if eager else tf.numpy_function(happen, [], tf.float32)
                self.dense.bias.assign_add(tf.reshape(zero, [1]))
        return {"loss": loss}

with run.scope():
    model = Twice()
run.compile(model, "sgd", run_eagerly=eagerly)
x = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
model.fit(x, x[:, :1], batch_size=6, epochs=9, verbose=0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["compiled", "eagerly"])
@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        ("killed", 137, "rank 1 was ended by SIGKILL"),
        ("raises", 1, "its first error: ValueError: row 7 is broken"),
    ],
)
def test_a_fault_of_one_process_within_a_step_ends_both(tmp_path, fault, code, words, how):
    program, marker = tmp_path / "program.py", tmp_path / "happened"
    program.write_text(FAULT)
    launch = [sys.executable, "-m", "tfaccel", "launch", "--nproc-per-node=2", "--grace=3"]
    done = subprocess.run(
        [*launch, f"--log-dir={tmp_path}", str(program), fault, str(marker), how],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert (done.returncode, words in done.stderr) == (code, True), done.stderr[-5000:]
    # The other loses it after peer_timeout_s, here 4 s, and some seconds to be sure.
    assert time.time() - marker.stat().st_mtime < 25
