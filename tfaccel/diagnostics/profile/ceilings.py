"""The three rates of a compiled model and its loader, measured in this process.

    real = real_rate(model, loader, seconds=5.0)       # `fit`, as a run calls it
    step = step_rate(model, loader, seconds=5.0)       # one batch on the device
    rate = loader_rate(model, loader, seconds=5.0)      # nothing trains

The real one comes first: `fit` builds what a model does not have before it is trained. Rows are
counted as the steps compute them: a partial last batch as a whole one, in all three.
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

ENDLESS = 10**9  # epochs; a Stopwatch ends them
HOST = "/cpu:0"


def beside(real: Rate, model: keras.Model, loader: Loader, *, seconds: float) -> Ceilings:
    """Returns the real rate with the two that bound it. Trains the model.

    Args:
      real: of the same model and loader, in this process.
      model: compiled by `run.compile`.
      loader: that it trains on.
      seconds: of each steady stretch.
    """
    step = step_rate(model, loader, seconds=seconds)
    alone = loader_rate(model, loader, seconds=seconds)
    return Ceilings(step=step, loader=alone, real=real)


def real_rate(
    model: keras.Model,
    loader: Loader,
    *,
    seconds: float,
    callbacks: Sequence[keras.callbacks.Callback] = (),
) -> Rate:
    """Returns the rate of `fit` itself, less what lies between epochs."""
    watch = Stopwatch(seconds=seconds)
    model.fit(loader, epochs=ENDLESS, callbacks=[*callbacks, _Laps(loader, watch)], verbose=0)
    return watch.rate(loader.global_batch_size)


class _Laps(keras.callbacks.Callback):
    """Gives each execution's time to a Stopwatch, and ends `fit` when that has enough."""

    def __init__(self, loader: Loader, watch: Stopwatch):
        super().__init__()
        self._loader, self._watch = loader, watch

    def on_epoch_begin(self, epoch, logs=None):
        self._last = time.perf_counter(), self._loader.next_position, self._loader.waited_s

    def on_train_batch_end(self, batch, logs=None):
        # The step's own check for what is not finite has waited for the device by now.
        now = time.perf_counter(), self._loader.position, self._loader.waited_s
        seconds, steps, waited_s = (new - old for new, old in zip(now, self._last, strict=True))
        self._last = now
        self._watch.add(Lap(steps, seconds, waited_s))
        if self._watch.is_done:
            self.model.stop_training = True


def step_rate(model: keras.Model, loader: Loader, *, seconds: float) -> Rate:
    """Returns the rate of the step on one batch that stays where it is. After `real_rate`."""
    again, steps = _resident(model, loader)
    watch = Stopwatch(seconds=seconds)
    while not watch.is_done:
        began = time.perf_counter()
        model.train_function(again)
        model.train_function.nonfinite  # noqa: B018  waits for the device, as `fit` does
        watch.add(Lap(steps, time.perf_counter() - began))
    return watch.rate(loader.global_batch_size)


def _resident(model: keras.Model, loader: Loader) -> tuple[Resident | ResidentLaunch, int]:
    """Returns what gives the same batches again, and how many steps of an execution."""
    iterator, steps = iter(loader), model.steps_per_execution
    deferred = model.train_function.take(iterator)
    if deferred is None:
        return Resident(next(iterator), pads=loader.pads), steps
    length = len(deferred[0])
    if deferred[0].is_made:
        resident = ResidentLaunch(deferred, pads=loader.pads)
    else:
        parts = [_first(each) for each in deferred]
        batch = _distributed(model.distribute_strategy, parts)
        resident = Resident(batch, pads=loader.pads, parts=parts, most=length)
    return resident, length * math.ceil(steps / length)  # in whole launches: an epoch has an end


def loader_rate(model: keras.Model, loader: Loader, *, seconds: float) -> Rate:
    """Returns the rate of batches that nothing trains on. After `real_rate`.

    Args:
      model: whose step they are drawn for, so many at a time and together, as it would.
      loader: whose batches are drawn.
      seconds: of the steady stretch.
    """
    watch = Stopwatch(seconds=seconds)
    with _Drawing(model, loader) as draw:
        while not watch.is_done:
            began = time.perf_counter()
            num_batches = draw()
            watch.add(Lap(num_batches, time.perf_counter() - began))
    return watch.rate(loader.global_batch_size)


class _Drawing:
    """Draws a launch's batches, over the ends of epochs; waits until those before are there.

    Not for its own: a run waits for its step there, but the loader's threads go on meanwhile.
    """

    def __init__(self, model: keras.Model, loader: Loader):
        self._model, self._loader = model, loader
        self._iterator, self._made, self._before = iter(loader), {}, None

    def __enter__(self):
        # Two threads: one that waits for batches lets the next ones' copy be queued.
        self._reader = concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix="drawn")
        return self

    def __exit__(self, *_):
        self._reader.shutdown()

    def __call__(self) -> int:
        """Returns how many batches it drew."""
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
        """Returns how many, and a number of each replica, which is there once they are."""
        deferred = self._model.train_function.take(self._iterator)
        if deferred is not None:
            return len(deferred[0]), self._sums(deferred)
        batch, number, most = next(self._iterator), 1, self._model.steps_per_execution
        while number < most and (following := next(self._iterator, None)) is not None:
            batch, number = following, number + 1  # the one before goes, as a step lets it
        return number, _sample(batch, self._model.distribute_strategy)  # streams are in order

    def _sums(self, deferred: list[Deferred]) -> list[tf.Tensor]:
        """Makes the replicas' batches at once, as the step would; returns a sum of each one's."""
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
    """Makes each batch; the sum is what XLA cannot leave out."""
    num_batches = next(iter(inputs.values())).shape[0]

    def go_on(index, total):
        own = {name: each[index] for name, each in inputs.items()}
        leaves = tf.nest.flatten(make({**own, **shared}))
        sums = [tf.reduce_sum(tf.cast(each, tf.float32)) for each in leaves]
        return index + 1, total + tf.add_n(sums)

    start = tf.constant(0), tf.constant(0.0)
    return tf.while_loop(lambda index, _: index < num_batches, go_on, start)[1]


def _first(deferred: Deferred) -> tuple:
    with tf.device(_device_of(deferred)):
        return deferred.first()


def _device_of(deferred: Deferred) -> str:
    return next(iter(deferred.inputs.values())).device


def _distributed(strategy: tf.distribute.Strategy, parts: list[tuple]) -> tuple:
    """Returns the replicas' batches as the step takes them."""
    if len(parts) == 1:
        return parts[0]

    def per_replica(*leaves):
        return strategy.experimental_distribute_values_from_function(
            lambda context: leaves[context.replica_id_in_sync_group]
        )

    return tf.nest.map_structure(per_replica, *parts)


def _sample(batch: tuple, strategy: tf.distribute.Strategy) -> list[tf.Tensor]:
    """Returns a number of each replica's part of a batch, of each of its tensors."""
    return [
        tf.reshape(part, [-1])[:1]
        for leaf in tf.nest.flatten(batch)
        for part in strategy.experimental_local_results(leaf)
        if part is not None
    ]
