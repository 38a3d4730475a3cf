"""Planted jobs, really trained: one that its loader bounds and one that its step bounds."""

import itertools
import time
import types

import keras
import numpy as np
import PIL.Image
import pytest
import tensorflow as tf
from conftest import compiled, strategy_of

import tfaccel
from tfaccel.common.errors import UserError
from tfaccel.config import DaliConfig, ImageConfig
from tfaccel.config.presets import preset
from tfaccel.data.distribute import Loader
from tfaccel.data.images import ImageData
from tfaccel.data.shards import Plan
from tfaccel.data.source import ArraySource, Blobs, ImageSource
from tfaccel.diagnostics.profile import ceilings
from tfaccel.diagnostics.profile.ceilings import beside, real_rate, step_rate
from tfaccel.diagnostics.profile.rates import LEAST_LAPS, Stopwatch
from tfaccel.diagnostics.profile.resident import Resident
from tfaccel.diagnostics.profile.trace import trace
from tfaccel.runtime.devices import Device
from tfaccel.step import functions

SHORT_S = 0.01  # of a stretch, which has at least LEAST_LAPS all the same


class Rows:
    """Examples of zeros, each of which takes a while to make."""

    def __init__(self, width, *, seconds):
        self.row, self.seconds = np.zeros(width, np.float32), seconds

    def __len__(self):
        return 96

    def __getitem__(self, index):
        if self.seconds:
            time.sleep(self.seconds)
        return self.row, np.int32(index % 2)


class Sleeps(keras.layers.Layer):
    """Passes its input on, a while later."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def call(self, x):
        slept = tf.py_function(lambda: time.sleep(self.seconds), [], [])
        with tf.control_dependencies([slept]):
            return tf.identity(x)


def job(run, *, seconds, of_step=0, steps_per_execution=1):
    """A loader whose rows take `seconds` each, and a model whose step takes `of_step` and more."""
    loader = run.examples(Rows(8, seconds=seconds), global_batch_size=32)
    with run.scope():
        model = keras.Sequential(
            [keras.Input((8,)), *([Sleeps(of_step)] if of_step else []), keras.layers.Dense(8)]
        )
    run.compile(
        model,
        "sgd",
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        steps_per_execution=steps_per_execution,
    )
    return model, loader


@pytest.fixture(scope="module")
def starved():
    """A profile of a loader that sleeps for 10 ms and more at each row.

    There are 3 steps an epoch, and 2 an execution: the last of each epoch has one alone.
    """
    run = tfaccel.setup(gpu_ids=(), precision="float32", xla=False)
    return tfaccel.profile(*job(run, seconds=0.01, steps_per_execution=2), seconds=0.2)


def test_a_slow_loader_and_a_slow_step_are_told_apart(setup, starved):
    """One sleeps where the other has next to nothing to do, on a busy machine too."""
    assert starved.verdict.bound == "loader", str(starved)
    assert starved.ceilings.real.waited_s > 0.5 * 32 / starved.ceilings.real.median
    assert starved.ceilings.step.median > 5 * starved.ceilings.real.median
    slow = tfaccel.profile(*job(setup(xla=False), seconds=0, of_step=0.1), seconds=0.2)
    assert slow.verdict.bound == "step", str(slow)


def test_executions_of_several_steps_are_counted_as_such(starved):
    assert starved.setup.steps_per_execution == 2
    assert starved.setup.epoch_steps == 3
    # Of steps or executions there are 32 times fewer than of rows.
    most = 64 / 0.01
    assert 15 < starved.ceilings.loader.median < most
    assert 15 < starved.ceilings.real.median < most


def test_a_batch_that_stays_trains_as_it_does_one_by_one():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 4)).astype("float32"), np.arange(8) % 2
    weight = np.array([1.0] * 6 + [0.0] * 2, np.float32)
    batch = tf.constant(x), tf.constant(y), tf.constant(weight)
    weights = []
    for parts in (None, [batch]):
        keras.utils.set_random_seed(0)
        model = compiled(
            lambda: keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]),
            1,
            xla=False,
            optimizer=keras.optimizers.SGD(0.1),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            steps_per_execution=3,
        )
        model.optimizer.build(model.trainable_variables)
        model.train_function(Resident(batch, pads=True, parts=parts, most=3))
        assert model.optimizer.iterations.numpy() == 3
        weights.append(model.get_weights())
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def random_pixels(number):
    return np.random.default_rng(0).integers(0, 256, (number, 8, 8, 3), dtype=np.uint8)


def in_memory(replicas):
    """A loader whose batches the step makes, as on GPUs: its devices pass for such."""
    pixels = random_pixels(24 * replicas + 3)
    source = ArraySource(pixels, np.zeros(len(pixels), np.int32), class_names=("a", "b"))
    devices = [Device(f"/cpu:{each}", each) for each in range(replicas)]
    return loader_of(source, "memory", devices)


def by_dali(folder):
    """A loader whose batches the step is given together, as from files on a GPU."""
    names = [str(folder / f"{index:02d}.png") for index in range(27)]
    for name, pixels in zip(names, random_pixels(27), strict=True):
        PIL.Image.fromarray(pixels).save(name)
    source = ImageSource(Blobs(tuple(names)), np.zeros(27, np.int32), class_names=("a", "b"))
    return loader_of(source, "dali_gpu", [Device("/cpu:0", None)])


def loader_of(source, kind, devices):
    replicas = len(devices)
    plan = Plan(len(source), 8 * replicas, replicas, seed=0, shuffle=True, last_batch="pad")
    images = ImageConfig(image_size=(8, 8))
    data = ImageData(source, images, preset("none"), plan, kind, "float32", DaliConfig(), source)
    return Loader(
        data,
        devices=devices,
        seed=0,
        num_threads=1,
        first_replica=0,
        strategy=strategy_of(replicas),
    )


def small_model(replicas, **settings):
    return compiled(
        lambda: keras.Sequential(
            [keras.Input((8, 8, 3)), keras.layers.Flatten(), keras.layers.Dense(2)]
        ),
        replicas,
        optimizer=lambda: keras.optimizers.SGD(0.1),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        **settings,
    )


@pytest.fixture(scope="module")
def made_in_the_step():
    """Ceilings of such steps, and the length of each launch: of those of `fit`, and of the rest.

    An execution is more than an epoch has.
    """
    lengths, in_a_row = [], functions._Step.in_a_row

    def noted(step, deferred, **padded):
        lengths.append(len(deferred[0]))
        return in_a_row(step, deferred, **padded)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(functions._Step, "in_a_row", noted)
        model, loader = small_model(1, steps_per_execution=9, xla=False), in_memory(1)
        rate = real_rate(model, loader, seconds=SHORT_S)
        of_run = len(lengths)
        found = beside(rate, model, loader, seconds=SHORT_S)
    return found, lengths[:of_run], lengths[of_run:]


def test_steps_that_make_their_own_batches(made_in_the_step):
    found, of_run, of_step_alone = made_in_the_step
    assert min(len(of_run), len(of_step_alone)) > 5
    assert min(found.step.steps, found.loader.steps) > 5


def test_the_step_alone_has_launches_no_longer_than_an_epoch(made_in_the_step):
    _, *lengths = made_in_the_step
    assert [set(each) for each in lengths] == [{in_memory(1).num_batches}] * 2


def test_steps_that_are_given_their_batches_together(tmp_path, monkeypatch):
    # More than an epoch has: so many are counted as were made.
    model, loader = small_model(1, steps_per_execution=9), by_dali(tmp_path)
    rate = real_rate(model, loader, seconds=SHORT_S)
    (program,) = model.train_function._step._made.values()
    before, steps = int(model.optimizer.iterations.numpy()), []

    class Counted(Stopwatch):
        def add(self, lap):
            steps.append(lap.steps)
            super().add(lap)

    with monkeypatch.context() as patched:
        patched.setattr(ceilings, "Stopwatch", Counted)
        found = step_rate(model, loader, seconds=SHORT_S)
    assert sum(steps) == int(model.optimizer.iterations.numpy()) - before
    assert LEAST_LAPS * steps[0] <= found.steps < sum(steps)  # of the steady stretch alone
    assert program.__wrapped__.experimental_get_tracing_count() == 1
    assert (
        min(each.steps for each in vars(beside(rate, model, loader, seconds=SHORT_S)).values()) > 4
    )


def stepping(replicas, *, steps, take):
    """A model that is asked how its step takes batches, and does not train."""
    return types.SimpleNamespace(
        distribute_strategy=strategy_of(replicas),
        steps_per_execution=steps,
        train_function=types.SimpleNamespace(xla=True, take=take),
    )


def test_two_replicas_whose_batches_are_made_together(monkeypatch):
    """In one call for both, over the ends of epochs of 4 batches, of which 3 are an execution."""
    sums, sums_of_all = [], ceilings._Drawing._sums
    monkeypatch.setattr(
        ceilings._Drawing, "_sums", lambda *args: sums.append(sums_of_all(*args)) or sums[-1]
    )
    model = stepping(2, steps=3, take=lambda iterator: iterator.take(3, may_wait=True))
    with ceilings._Drawing(model, in_memory(2)) as draw:
        assert [draw() for _ in range(5)] == [3, 1, 3, 1, 3]
    assert [len(each) for each in sums] == [2] * 5
    assert all(float(each) > 0 for each in sums[0])


def test_a_loader_goes_on_while_the_device_makes_its_last_batches(monkeypatch):
    drawn, numbers, batch = [], itertools.count(1), (tf.zeros((4, 2)), tf.zeros(4))

    def endless():
        while True:
            drawn.append(1)
            yield batch

    def wait_for_the_next_one(sample):
        number, ends = next(numbers), time.monotonic() + 30
        while len(drawn) == number:
            assert time.monotonic() < ends, "waited for its own before the next one was drawn"
            time.sleep(1e-3)

    monkeypatch.setattr(ceilings, "make_to_host", lambda device: wait_for_the_next_one)
    model = stepping(1, steps=1, take=lambda iterator: None)
    with ceilings._Drawing(model, endless()) as draw:
        assert [draw() for _ in range(4)] == [1] * 4
        drawn.append(1)  # as if one more were


@pytest.fixture(scope="module")
def of_two_replicas():
    """A profile of two, and what was drawn of both together: without XLA each has launches of its
    own, though their batches could be one.
    """
    together = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ceilings._Drawing, "_sums", lambda *_: together.append(1))
        model = small_model(2, xla=False, steps_per_execution=2)
        return tfaccel.profile(model, in_memory(2), seconds=SHORT_S), together


def test_two_replicas_whose_batches_come_one_by_one(of_two_replicas):
    found, _ = of_two_replicas
    assert found.setup.global_batch_size == 16
    assert found.ceilings.real.median > 0


def test_the_loader_alone_is_drawn_as_the_step_draws_it(of_two_replicas):
    found, together = of_two_replicas
    assert found.ceilings.loader.median > 0
    assert not together


def test_a_trace_is_written(setup, tmp_path):
    run = setup(xla=False)
    trace(*job(run, seconds=0), tmp_path / "new")
    assert list((tmp_path / "new").rglob("*.xplane.pb"))


def test_what_cannot_be_profiled_is_a_sentence(setup):
    run = setup(xla=False)
    model, loader = job(run, seconds=0)
    with pytest.raises(UserError, match="loader is of type ndarray; expected a loader"):
        tfaccel.profile(model, np.zeros((8, 8)))
    plain = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
    with pytest.raises(UserError, match=r"run\.compile did not compile"):
        tfaccel.profile(plain, loader)
    with pytest.raises(UserError, match="seconds=0; expected a number above 0"):
        tfaccel.profile(model, loader, seconds=0)
