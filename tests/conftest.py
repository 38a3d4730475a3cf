"""Devices, marks, and the small real data that tests share."""

import contextlib
import dataclasses
import functools
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# TensorFlow 2.21 ignores memory growth where logical CPU devices are set, as they are below.
os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"

import keras
import numpy as np
import PIL.Image
import pytest
import tensorflow as tf
from tensorflow.python.data.ops import multi_device_iterator_ops
from tensorflow.python.distribute import input_lib
from tensorflow.python.framework import config as tf_config

import tfaccel
from tfaccel.config import StepConfig
from tfaccel.data.placement import untuned
from tfaccel.experiment import run_page
from tfaccel.export import at_start, fresh_process, parity, saved_model
from tfaccel.export import preprocessing as export_preprocessing
from tfaccel.keras_internals import layer_paths, replica
from tfaccel.runtime import devices as runtime
from tfaccel.runtime.cluster import Cluster
from tfaccel.step import compile_model, finite, predict, replica_steps, totals
from tfaccel.training import methods

# As the driver counts, TensorFlow's first one.
FIRST_GPU = int((os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0])


def pytest_configure(config):
    """Settles the devices and the cache, once for all tests of this process."""
    cache = tempfile.TemporaryDirectory()
    config.add_cleanup(cache.cleanup)
    os.environ["XDG_CACHE_HOME"] = cache.name
    if "gpu" not in config.option.markexpr:
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # tests without a mark are of the CPU
    # As the product does it, before TensorFlow looks for GPUs; and three CPU devices to stand for
    # replicas, before it starts them.
    runtime.load_cuda_libraries()
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 3)
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)  # as every setup() here asks
    if "gpu" not in config.option.markexpr:
        compile_quickly()
    # Graphs are many small objects that stay for a while: without this, a quarter of the time goes
    # into looking for unused ones among them and among TensorFlow's own.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    # What tests give to `fit` is not ours to change, but its iterators may take a minute to end.
    distribute = tf.distribute.Strategy.experimental_distribute_dataset

    def untuned_too(strategy, dataset, options=None):
        dataset = untuned(dataset) if isinstance(dataset, tf.data.Dataset) else dataset
        return distribute(strategy, dataset, options)

    tf.distribute.Strategy.experimental_distribute_dataset = untuned_too
    OF_WORKER._create_owned_multi_device_iterator = read_on_host


def compile_quickly():
    """Has XLA compile programs of this process in less time; small ones need not run fast.

    To write each fusion by MLIR, as XLA does by default, is a third of the CPU time of a test that
    compiles a step (2 cores, 2026-11-30); XLA's older writer gives the same fusions. XLA of
    TensorFlow 2.22 has no older writer, and ends a process that sets its flag.

    XLA reads its flags once. So those of tests, and of processes that tests start, are as before.
    """
    before = os.environ.get("XLA_FLAGS")
    quick = [
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
    if tuple(map(int, tf.__version__.split(".")[:2])) < (2, 22):
        quick.append("--xla_cpu_use_fusion_emitters=false")
    os.environ["XLA_FLAGS"] = " ".join((before or "", *quick))
    tf.function(lambda: tf.constant(1) + 1, jit_compile=True, autograph=False)()
    del os.environ["XLA_FLAGS"]
    if before is not None:
        os.environ["XLA_FLAGS"] = before


OF_WORKER = input_lib._SingleWorkerOwnedDatasetIterator
ON_DEVICES = OF_WORKER._create_owned_multi_device_iterator


def read_on_host(iterator):
    """Lets the CPU's replicas draw their batches in turn from one iterator of the host.

    TensorFlow's own, which copies ahead to each device, traces six functions a replica for each
    pass: 0.05 CPU s (2 cores, 2026-11-27). Tests of GPUs have that one, and those that ask for it
    by `read_on_devices`; so have processes that tests start.
    """
    devices = iterator._devices
    if any("GPU" in each for each in devices):
        ON_DEVICES(iterator)
        return
    with tf.device(iterator._worker):
        batches = iter(iterator._dataset)
    iterator._iterator = multi_device_iterator_ops.OwnedMultiDeviceIterator(
        devices=devices,
        source_device=iterator._worker,
        components=[batches._iterator_resource, *[batches] * len(devices)],
        element_spec=iterator._dataset.element_spec,
    )


def pytest_collection_modifyitems(config, items):
    """Skips what the machine has too few GPUs for, and what is slow unless it is asked for."""
    if "slow" not in config.option.markexpr:
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="slow; run it with -m slow"))
    num_gpus = len(tf.config.list_physical_devices("GPU"))
    for item in items:
        needed = 2 if "multi_gpu" in item.keywords else 1 if "gpu" in item.keywords else 0
        if needed > num_gpus:
            reason = f"needs {needed} GPU(s), TensorFlow sees {num_gpus}; run them with -m gpu"
            item.add_marker(pytest.mark.skip(reason=reason))


# A process would look for unused objects among all of TensorFlow's: while it is imported, for half
# a second, and at its end, for a second.
FORGETFUL = "import atexit, gc\natexit.register(gc.freeze)\ngc.set_threshold(1_000_000)\n"


def in_new_process(program):
    """Runs Python as a user's shell would, and returns what it prints.

    TensorFlow fixes memory when devices start, so each setting needs a process.
    """
    done = new_process(program)
    assert done.returncode == 0, done.stderr
    return done.stdout


def new_process(program, *, timeout_s=None, **environment):
    """Runs it likewise, with more in the environment, and returns how it ended."""
    ours = ("LD_LIBRARY_PATH", "TF_FORCE_GPU_ALLOW_GROWTH")
    users = {key: value for key, value in os.environ.items() if key not in ours}
    return subprocess.run(
        [sys.executable, "-c", FORGETFUL + program],
        capture_output=True,
        text=True,
        env=users | environment,
        timeout=timeout_s,
    )


def on_terminal(program, **environment):
    """Runs Python with standard error on a terminal.

    Returns what the terminal shows: (seconds since the text before, text).
    """
    reads, writes = os.openpty()
    shown = []
    with subprocess.Popen(
        [sys.executable, "-c", program], stderr=writes, env=os.environ | environment
    ):
        os.close(writes)
        before = time.monotonic()
        while True:
            try:
                text = os.read(reads, 4096).decode()
            except OSError:  # the end of a terminal
                break
            now = time.monotonic()
            shown.append((now - before, text))
            before = now
    os.close(reads)
    return shown


def in_workers(program, num_workers, *, timeout_s=300, stderr=""):
    """Runs Python in several processes that form one job, and returns what each one's last line is.

    `json`, and `num_workers`, are there for the program; `stderr` is expected in each one's log.
    """
    sockets = [socket.socket() for _ in range(num_workers)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    workers = []
    for index in range(num_workers):
        tf_config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        environment = os.environ | {"TF_CONFIG": json.dumps(tf_config)}
        workers.append(
            subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    f"{FORGETFUL}import json\nnum_workers = {num_workers}\n{program}",
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
        )
    try:
        ends = time.monotonic() + timeout_s
        outputs = [each.communicate(timeout=ends - time.monotonic()) for each in workers]
    finally:
        for each in workers:
            each.kill()
    for worker, (_, log) in zip(workers, outputs, strict=True):
        assert worker.returncode == 0, log[-5000:]
        assert stderr in log
    return [printed.splitlines()[-1] for printed, _ in outputs]


@functools.cache
def strategy_of(num_replicas):
    """A MirroredStrategy on CPU devices; of each number of replicas there is one."""

    class Strategy(tf.distribute.MirroredStrategy):
        # Apart from the others' on the same devices, or TensorFlow takes their groups for one.
        _collective_key_base = 1000 * num_replicas

    return Strategy([f"/cpu:{index}" for index in range(num_replicas)])


def in_replicas(monkeypatch, module, num_replicas):
    """Each `Run` that the module makes has so many replicas on the CPU."""
    make = module.Run

    def run_of(config, cluster=None):
        run = make(config, cluster)
        run.strategy = strategy_of(num_replicas)
        devices = tuple(runtime.Device(f"/cpu:{index}", None) for index in range(num_replicas))
        run.runtime = dataclasses.replace(run.runtime, devices=devices)
        return run

    monkeypatch.setattr(module, "Run", run_of)


def compiled(make, num_replicas, *, optimizer, xla=True, config=None, **compile_args):
    """A model of `make()`, compiled as `run.compile` does, on CPU replicas."""
    config = config or StepConfig()
    strategy = strategy_of(num_replicas)
    with strategy.scope():
        model = make()
    optimizer = optimizer() if callable(optimizer) else optimizer
    compile_model(model, strategy, config, xla=xla, optimizer=optimizer, **compile_args)
    methods.extend(model, config, guard=contextlib.nullcontext, cluster=Cluster())
    return model


def trained_in_bfloat16(
    make, x, labels, num_replicas=1, *, rate, batch_size=12, epochs=3, accumulation_steps=1
):
    """A classifier of `make()`, trained in mixed_bfloat16 by SGD, and the loss of each epoch."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = compiled(
            make,
            num_replicas,
            optimizer=keras.optimizers.SGD(rate),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            config=StepConfig(accumulation_steps=accumulation_steps),
        )
    finally:
        keras.config.set_dtype_policy("float32")
    fit = {"batch_size": batch_size, "epochs": epochs, "shuffle": False, "verbose": 0}
    return model, model.fit(x, labels, **fit).history["loss"]


def compare_here(monkeypatch):
    """Lets exports be compared in this process, which takes no 6 s."""
    monkeypatch.setattr(
        parity, "_run", lambda folder, shared, **_: fresh_process.main(folder, shared)
    )


@pytest.fixture(autouse=True)
def export_compared_here(monkeypatch, request):
    """Exports are compared in this process, unless a test is marked so."""
    if "fresh_process" not in request.keywords:
        compare_here(monkeypatch)


@pytest.fixture
def export_not_saved(monkeypatch):
    """An export's functions answer as they are: no SavedModel is written and loaded, in over 1 s.

    Of a test that shows what is compared, or what is said of it.
    """
    written = {}

    def write(model, folder, images, *, names, xla):
        endpoints = saved_model._endpoints(model, images, names, xla=False)
        written.update(endpoints, serving_default=endpoints["serve"])

    def signature(name):
        function, specs = written[name]
        return lambda **inputs: saved_model.outputs_by_name(
            function(*(tf.constant(inputs[each.name], each.dtype) for each in specs))
        )

    def asked(folder, inputs, encoded, stop):
        signatures = {name: signature(name) for name in written}
        dtypes = {each.name: each.dtype for each in written["serving_default"][1]}
        name = "serving_default"
        answers = fresh_process._asked(name, signatures[name], inputs, dtypes)
        if encoded:
            answers |= fresh_process._of_files(signatures, np.array(encoded, dtype=object))
        return answers

    monkeypatch.setattr(saved_model, "write", write)
    monkeypatch.setattr(parity, "_asked", asked)


def decode_png_alone(monkeypatch):
    """Exports decode PNGs of the right size alone, in one operation: to trace all takes 1 s."""
    monkeypatch.setattr(export_preprocessing, "_checked", lambda _, data: data)
    monkeypatch.setattr(
        export_preprocessing.Preprocessing,
        "_window",
        lambda self, data: tf.io.decode_png(data, channels=self.images.channels),
    )


@pytest.fixture
def export_decodes_png(monkeypatch):
    """Exports decode so, of a test that shows nothing of what is decoded."""
    decode_png_alone(monkeypatch)


class NotRehearsed:
    """Stands for a rehearsal of an export, which takes a second or more."""

    seconds = 0.0

    def __init__(self, asked, prepare=None, **_):
        """Writes nothing."""
        self._prepare = prepare

    def __enter__(self):
        """Returns itself."""
        return self

    def begin(self):
        """Makes the checks before it."""
        if self._prepare:
            self._prepare()

    def __exit__(self, *_):
        """Has nothing to end."""

    def wait(self):
        """Returns at once."""

    def callback(self):
        """A callback that does nothing."""
        return keras.callbacks.Callback()


@pytest.fixture(autouse=True)
def export_not_rehearsed(monkeypatch, request):
    """Runs do not try their export before they train, unless a test is marked so."""
    if "rehearsed" not in request.keywords:
        monkeypatch.setattr(at_start, "Rehearsal", NotRehearsed)


@pytest.fixture(autouse=True)
def page_not_drawn(monkeypatch, request):
    """Runs draw no page at their end, which takes half a second, unless a test is marked so."""
    if "draws_page" not in request.keywords:
        monkeypatch.setattr(run_page, "drawn", lambda *_, **__: contextlib.nullcontext())


@pytest.fixture
def setup():
    """tfaccel.setup on the CPU, unless said otherwise; the dtype policy is put back afterwards."""
    yield lambda **settings: tfaccel.setup(**{"gpu_ids": (), **settings})
    keras.config.set_dtype_policy("float32")
    tf_config.disable_op_determinism()


@pytest.fixture
def in_one_function(monkeypatch):
    """Steps as on GPUs: see `sum_in_one_function`."""
    sum_in_one_function(monkeypatch)


def sum_in_one_function(monkeypatch):
    """Makes steps as on GPUs, whose sums XLA computes, but without XLA, which has none on the CPU.

    TensorFlow's own are none for a loop (it ends the process), so that the loop is unrolled.
    """

    def unrolled(step, make_batch, inputs, shared, *, trains):
        codes = []
        for index in range(next(iter(inputs.values())).shape[0]):
            own = {name: each[index] for name, each in inputs.items()}
            logs = dict(step(make_batch({**own, **shared})))
            codes.append(logs.pop(finite.LOG, tf.constant(finite.FINE, tf.int64)))
        return logs | {finite.LOG: tf.stack(codes)}

    def compiled(_, function):
        # Like `in_xla.checked`, whose function TensorFlow calls by the signature of `function`.
        @functools.wraps(function)
        def traced(*arguments):
            return function(*arguments)

        return tf.function(traced, autograph=False)

    without_xla = lambda **args: layer_paths.layer_paths(**{**args, "xla": False})  # noqa: E731
    monkeypatch.setattr(replica, "_can_wait_in_xla", lambda _: True)
    monkeypatch.setattr(
        replica.Replica, "all_reduce_in_xla", lambda self, values: [*map(self.all_reduce, values)]
    )
    for each in (replica_steps, predict, totals):
        monkeypatch.setattr(each, "layer_paths", without_xla)
    for each in (replica_steps, predict):
        monkeypatch.setattr(each, "compiled", compiled)
    monkeypatch.setattr(replica_steps, "_in_a_row", unrolled)


@pytest.fixture
def read_on_devices(monkeypatch):
    """Data sets are read by TensorFlow's own iterators over the replicas' devices."""
    monkeypatch.setattr(OF_WORKER, "_create_owned_multi_device_iterator", ON_DEVICES)


@pytest.fixture
def terminal(monkeypatch):
    """What is printed is shown by a terminal of 80 columns, so that lines are wrapped."""
    monkeypatch.setattr("tfaccel.common.report.columns", lambda: 80)


@pytest.fixture
def no_collector():
    """Objects end by their last reference alone, in any thread, while a test waits for some to.

    The collector ends what all earlier tests left, in whichever thread it comes, and meanwhile does
    nothing in others: 80 iterators of tf.data with TensorFlow's tuner took 393 s (2 cores that four
    busy loops shared, 2026-11-22).
    """
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def quick_collector():
    """The collector looks through what the tests make, not through what all others left."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()  # and TensorFlow's objects with it, which `pytest_configure` had frozen
    gc.collect()
    gc.freeze()


@pytest.fixture
def small_pieces(monkeypatch):
    """Lets `predict --output` write five rows at a time."""
    monkeypatch.setattr("tfaccel.experiment.predict_many.ROWS_PER_PIECE", 5)


@pytest.fixture(scope="session")
def images():
    """37 grey images of 12 x 10 pixels (a prime number, so that batches come out uneven)."""
    return np.random.default_rng(0).integers(0, 256, (37, 12, 10), dtype=np.uint8)


@pytest.fixture(scope="session")
def folder(images, tmp_path_factory):
    """The images as PNG files in three class folders, `a`, `b` and `c`, in turn."""
    root = tmp_path_factory.mktemp("images")
    for index, image in enumerate(images):
        path = root / "abc"[index % 3] / f"{index:02d}.png"
        path.parent.mkdir(exist_ok=True)
        PIL.Image.fromarray(image).save(path)
    return root


@pytest.fixture(scope="session")
def in_file_order(images):
    """The images and labels in the order in which `folder` is listed."""
    order = [index for start in range(3) for index in range(start, len(images), 3)]
    return images[order], np.array([index % 3 for index in order])
