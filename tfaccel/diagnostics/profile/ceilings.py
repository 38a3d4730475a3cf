"""Measures the three rates of a compiled model and its loader, in this process.

    real = real_rate(model, loader, seconds=5.0)      # `fit`, as a run calls it
    step = step_rate(model, loader, seconds=5.0)      # trains on one batch that stays on the device
    rate = loader_rate(model, loader, seconds=5.0)    # loads batches, and does not train

Measure the real rate first: its `fit` builds the variables that the other measurements need. All
three rates count the rows that a step computes, so a partial last batch counts as a whole batch.
"""

import concurrent.futures
import functools
import math
import time
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfaccel.data.deferred import Deferred
from tfaccel.data.distribute import Loader
from tfaccel.diagnostics.profile.rates import Lap, Rate, Stopwatch
from tfaccel.diagnostics.profile.resident import Resident, ResidentLaunch
from tfaccel.diagnostics.profile.verdict import Ceilings
from tfaccel.process.to_host import make_to_host

ENDLESS = 10**9  # epochs; a Stopwatch ends the training
HOST = "/cpu:0"


def beside(real: Rate, model: keras.Model, loader: Loader, *, seconds: float) -> Ceilings:
    """Measures the step alone and the loader alone; returns both rates with the real one."""
    step = step_rate(model, loader, seconds=seconds)
    return Ceilings(step=step, loader=loader_rate(model, loader, seconds=seconds), real=real)


def real_rate(
    model: keras.Model,
    loader: Loader,
    *,
    seconds: float,
    callbacks: Sequence[keras.callbacks.Callback] = (),
) -> Rate:
    """Returns the rate of `fit`, without the time between epochs."""
    watch = Stopwatch(seconds=seconds)
    model.fit(loader, epochs=ENDLESS, callbacks=[*callbacks, _Laps(loader, watch)], verbose=0)
    return watch.rate(loader.global_batch_size)


class _Laps(keras.callbacks.Callback):
    """Gives the time of each execution to a Stopwatch, and ends `fit` when the watch is done."""

    def __init__(self, loader: Loader, watch: Stopwatch):
        super().__init__()
        self._loader, self._watch = loader, watch

    def on_epoch_begin(self, epoch, logs=None):
        self._last = time.perf_counter(), self._loader.next_position, self._loader.waited_s

    def on_train_batch_end(self, batch, logs=None):
        # By now, the step's check for infinite and NaN values has waited for the device.
        now = time.perf_counter(), self._loader.position, self._loader.waited_s
        seconds, steps, waited_s = (new - old for new, old in zip(now, self._last, strict=True))
        self._last = now
        self._watch.add(Lap(steps, seconds, waited_s))
        if self._watch.is_done:
            self.model.stop_training = True


def step_rate(model: keras.Model, loader: Loader, *, seconds: float) -> Rate:
    """Returns the rate of the step alone, on a batch that stays on the device.

    Call `real_rate` before.
    """
    again, steps = _resident(model, loader)
    watch = Stopwatch(seconds=seconds)
    while not watch.is_done:
        began = time.perf_counter()
        model.train_function(again)
        model.train_function.nonfinite  # noqa: B018  waits for the device, as `fit` does
        watch.add(Lap(steps, time.perf_counter() - began))
    return watch.rate(loader.global_batch_size)


def _resident(model: keras.Model, loader: Loader) -> tuple[Resident | ResidentLaunch, int]:
    """Returns an iterator that repeats the same batches, and the number of steps per execution."""
    iterator, steps = iter(loader), model.steps_per_execution
    deferred = model.train_function.take(iterator)
    if deferred is None:
        return Resident(next(iterator), pads=loader.pads), steps
    length = len(deferred[0])
    if deferred[0].is_made:
        resident = ResidentLaunch(deferred, pads=loader.pads)
    else:
        parts = [_first_batch(each) for each in deferred]
        batch = _distributed(model.distribute_strategy, parts)
        resident = Resident(batch, pads=loader.pads, parts=parts, most=length)
    # An execution has whole launches, because no launch goes beyond the end of an epoch.
    return resident, length * math.ceil(steps / length)


def loader_rate(model: keras.Model, loader: Loader, *, seconds: float) -> Rate:
    """Returns the rate of the loader alone, which draws batches as the model's step does.

    Call `real_rate` before.
    """
    watch = Stopwatch(seconds=seconds)
    with _Drawing(model, loader) as draw:
        while not watch.is_done:
            began = time.perf_counter()
            num_batches = draw()
            watch.add(Lap(num_batches, time.perf_counter() - began))
    return watch.rate(loader.global_batch_size)


class _Drawing:
    """Draws the batches of one launch per call, also across the ends of epochs.

    A call waits until the batches of the call before are on the device, but not for its own. In the
    same way, a run waits for its step while the loader's threads continue.
    """

    def __init__(self, model: keras.Model, loader: Loader):
        self._model, self._loader = model, loader
        self._iterator, self._made, self._before = iter(loader), {}, None

    def __enter__(self):
        # With two threads, one can wait for a batch while the other queues the next copy.
        self._reader = concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix="drawn")
        return self

    def __exit__(self, *_):
        self._reader.shutdown()

    def __call__(self) -> int:
        """Draws batches, and returns their number."""
        try:
            number, sample = self._draw()
        except StopIteration:
            self._iterator = iter(self._loader)
            number, sample = self._draw()
        before, self._before = self._before, self._reader.submit(make_to_host(HOST), sample)
        if before is not None:
            before.result()
        return number

    def _draw(self) -> tuple[int, list[tf.Tensor]]:
        """Draws batches; returns how many, and a tensor per replica that depends on them.

        When such a tensor can be read, the batches are on the device.
        """
        deferred = self._model.train_function.take(self._iterator)
        if deferred is not None:
            return len(deferred[0]), self._sums(deferred)
        batch, number, most = next(self._iterator), 1, self._model.steps_per_execution
        while number < most and (following := next(self._iterator, None)) is not None:
            batch, number = following, number + 1  # the batch before is freed, as in a step
        # A device makes its batches in order, so the last one is enough.
        return number, _sample(batch, self._model.distribute_strategy)

    def _sums(self, deferred: list[Deferred]) -> list[tf.Tensor]:
        """Makes the batches of all replicas in one call, as the step does; returns their sums."""
        make, devices = deferred[0].make, [_device_of(each) for each in deferred]
        if make not in self._made:
            sum_of = tf.function(
                functools.partial(_sum_of_all, make),
                autograph=False,
                jit_compile=self._model.train_function.xla,
            )

            @tf.function(autograph=False)
            def sums_of(arguments):
                sums = []
                for device, own in zip(devices, arguments, strict=True):
                    with tf.device(device):
                        sums.append(sum_of(*own))
                return sums

            self._made[make] = sums_of
        return self._made[make]([(dict(each.inputs), dict(each.shared)) for each in deferred])


def _sum_of_all(make: Callable, inputs: dict, shared: dict) -> tf.Tensor:
    """Makes each batch, and sums its values, so that XLA cannot drop the work."""
    num_batches = next(iter(inputs.values())).shape[0]

    def add_batch(index, total):
        own = {name: each[index] for name, each in inputs.items()}
        leaves = tf.nest.flatten(make({**own, **shared}))
        sums = [tf.reduce_sum(tf.cast(each, tf.float32)) for each in leaves]
        return index + 1, total + tf.add_n(sums)

    start = tf.constant(0), tf.constant(0.0)
    return tf.while_loop(lambda index, _: index < num_batches, add_batch, start)[1]


def _first_batch(deferred: Deferred) -> tuple:
    with tf.device(_device_of(deferred)):
        return deferred.first()


def _device_of(deferred: Deferred) -> str:
    return next(iter(deferred.inputs.values())).device


def _distributed(strategy: tf.distribute.Strategy, parts: list[tuple]) -> tuple:
    """Returns the batches of all replicas as one distributed batch, as a step takes it."""
    if len(parts) == 1:
        return parts[0]

    def per_replica(*leaves):
        return strategy.experimental_distribute_values_from_function(
            lambda context: leaves[context.replica_id_in_sync_group]
        )

    return tf.nest.map_structure(per_replica, *parts)


def _sample(batch: tuple, strategy: tf.distribute.Strategy) -> list[tf.Tensor]:
    """Returns the first value of each tensor of a batch, on each replica."""
    return [
        tf.reshape(part, [-1])[:1]
        for leaf in tf.nest.flatten(batch)
        for part in strategy.experimental_local_results(leaf)
        if part is not None
    ]
