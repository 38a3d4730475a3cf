"""Gives each epoch of `fit` its own order of arrays and PyDatasets, and its place in a loader.

Takes the input of `fit`. The order depends only on the seed and the epoch's number. So it is the
same for any number of replicas, and in a run that begins at `initial_epoch`.

    order = EpochOrder(model, loader=None, steps_per_epoch=None)
    with next_input_in(order):
        model.fit(x, y, shuffle=True, callbacks=[order])

Keras draws the order of arrays with an operation that starts again in each epoch. If a seed is set,
and `tfaccel.setup` always sets one, every epoch of every `fit` has the same order (Keras 3.15,
TensorFlow 2.21). For the random numbers of a `tf.data.Dataset`, see epoch_draws.py.
"""

import contextlib
import contextvars
import functools
import logging
import math
import multiprocessing
import random
import weakref
from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

from tfaccel.data.distribute import Loader
from tfaccel.data.gathered import Allowance, Gathered
from tfaccel.data.placement import untuned
from tfaccel.data.shards import epoch_order
from tfaccel.keras_internals import epoch_draws, launches
from tfaccel.keras_internals.model_view import has_eager_steps_of_keras
from tfaccel.keras_internals.moved import ordered_by
from tfaccel.keras_internals.one_replica import without_strategy
from tfaccel.keras_internals.rank_order import in_rank_order
from tfaccel.keras_internals.seeds import global_seed

log = logging.getLogger("tfaccel")

_NUM_BEGUN = weakref.WeakKeyDictionary()  # how many epochs each model has begun in this process
_NEXT_INPUT = contextvars.ContextVar("the EpochOrder of the next input that Keras opens")


@contextlib.contextmanager
def next_input_in(order) -> Iterator[None]:
    """Gives this order to the first input that Keras opens within the context."""
    token = _NEXT_INPUT.set(order)
    try:
        yield
    finally:
        _NEXT_INPUT.reset(token)


class EpochOrder(keras.callbacks.Callback):
    """Numbers the epochs of one `fit`. It precedes all other callbacks.

    The number is Keras's own, from 0. A later `fit` of the same model continues the numbers of the
    last one, unless its `initial_epoch` is higher.

    Attributes:
      trained: the model. Keras sets `model` only when `fit` has begun.
      number: of the current epoch.
      seed: from `setup`, or from a later `keras.utils.set_random_seed`.
      allowance: how far the epoch's batches may be read ahead of its steps.
    """

    def __init__(self, model: keras.Model, *, loader: Loader | None, steps_per_epoch: int | None):
        """Takes the arguments of `fit`; the loader is None if the input is not a loader."""
        super().__init__()
        self.trained, self._loader = model, loader
        self._offset, self.number = None, _NUM_BEGUN.get(model, 0)
        self.seed = global_seed()
        self._cut, self.allowance = _Cut(model, steps_per_epoch), Allowance()

    def on_epoch_begin(self, epoch, logs=None):
        """Numbers the epoch. If a loader is before this epoch, moves it there."""
        if self._loader is not None:
            if self._offset is None:
                self._offset = 0
                self._start_loader_at(epoch)
            return
        self.allowance.left = self._cut.batches_of_epoch()
        if self._offset is None:
            per_pass = self._cut.epochs_in(self._cut.num_batches)
            # Like Keras, a `fit` begins with a complete pass over the data.
            passes = math.ceil(max(0, _NUM_BEGUN.get(self.trained, 0) - epoch) / per_pass)
            self._offset = passes * per_pass
        self.number = epoch + self._offset
        _NUM_BEGUN[self.trained] = self.number + 1

    def _start_loader_at(self, epoch: int) -> None:
        num_batches = self._loader.num_batches
        pass_, step = self._cut.place(epoch, num_batches)
        if self._loader.next_position < pass_ * num_batches + step:
            self._loader.start_at(epoch=pass_, step=step)
            log.info("data: the loader begins at epoch %d, like `fit`", epoch + 1)

    def applied(self, adapter: DataAdapter, x, steps_per_epoch: int | None) -> DataAdapter:
        """Returns an adapter of the input x in this order; Keras's own if it needs no order."""
        self._cut = _Cut(self.trained, steps_per_epoch)
        if isinstance(adapter, ArrayDataAdapter) and adapter._shuffle:
            kind = _Arrays
        elif isinstance(adapter, PyDatasetAdapter) and (_shuffles(adapter) or _forks(adapter)):
            kind = _PyDataset
        elif isinstance(adapter, TFDatasetAdapter) and _draws(adapter, self.trained):
            kind = functools.partial(_Dataset, of_user=x)
        elif _has_iterator_per_pass(adapter, self.trained) or _is_gathered(adapter, self.trained):
            kind = _Unordered
        else:
            return adapter
        self._cut.num_batches = adapter.num_batches
        return kind(adapter, self)

    def place(self) -> tuple[int, int]:
        """Returns the pass over the data, and the index of the epoch's first batch in that pass."""
        return self._cut.place(self.number, self._cut.num_batches)


class _Cut:
    """Divides a pass over the data into Keras's epochs of `steps_per_epoch` steps."""

    def __init__(self, model: keras.Model, steps_per_epoch: int | None):
        self._at_a_time = model.steps_per_execution
        self._steps = steps_per_epoch and self._whole_executions(steps_per_epoch)
        self.num_batches = None  # unknown or infinite

    def batches_of_epoch(self) -> float:
        """Returns the most batches that Keras reads in an epoch; infinity if only the end tells."""
        most = keras.config.max_steps_per_epoch()  # of debugging runs
        known = [each for each in (self._steps, self.num_batches, most) if each is not None]
        return self._whole_executions(min(known)) if known else math.inf

    def _whole_executions(self, steps: int) -> int:
        return math.ceil(steps / self._at_a_time) * self._at_a_time

    def epochs_in(self, num_batches: int | None) -> int:
        """Returns how many epochs a pass has. Keras ends the last one with the data."""
        return math.ceil(num_batches / self._steps) if self._steps and num_batches else 1

    def place(self, epoch: int, num_batches: int | None) -> tuple[int, int]:
        """Returns the pass of an epoch, and the index of the epoch's first batch in that pass."""
        pass_, part = divmod(epoch, self.epochs_in(num_batches))
        return pass_, part * (self._steps or 0)


def _shuffles(adapter: PyDatasetAdapter) -> bool:
    return bool(adapter.shuffle) and adapter.py_dataset.num_batches is not None


def _forks(adapter: PyDatasetAdapter) -> bool:
    return adapter.enqueuer is not None and adapter.py_dataset.use_multiprocessing


class _InOrder(DataAdapter):
    """Replaces one of Keras's adapters, and sets the order of its input before each pass."""

    def __init__(self, adapter: DataAdapter, order: EpochOrder):
        self._adapter, self._order = adapter, order

    num_batches = property(lambda self: self._adapter.num_batches)
    batch_size = property(lambda self: self._adapter.batch_size)
    has_partial_batch = property(lambda self: self._adapter.has_partial_batch)
    partial_batch_size = property(lambda self: self._adapter.partial_batch_size)

    def get_tf_dataset(self) -> "_Passes":
        """Returns the batches of every replica. Each pass sets its order when it begins."""
        strategy = self._order.trained.distribute_strategy
        dataset = in_rank_order(self._dataset(), strategy)
        gather = self._gathering(dataset.element_spec)
        distribute = strategy.experimental_distribute_dataset
        dataset = distribute(dataset, launches.on_host(gather))
        return self._passes(dataset.element_spec, _without_reader(dataset.__iter__), gather)

    def _dataset(self) -> tf.data.Dataset:
        return self._adapter.get_tf_dataset()

    def _gathering(self, element_spec) -> Callable[..., Gathered] | None:
        """Returns what gathers batches for launches of several steps; None if nothing does."""
        return launches.gathering(self._order.trained, element_spec, self._order.allowance)

    def _passes(
        self, element_spec, one_pass: Callable, gather: Callable[..., Gathered] | None = None
    ) -> "_Passes":
        stock_step = has_eager_steps_of_keras(self._order.trained)
        return _Passes(element_spec, one_pass, self, stock_step=stock_step, gather=gather)

    def begin(self) -> int:
        """Sets the order of the pass, and returns how many of its batches to skip."""
        pass_, step = self._order.place()
        self._set_order(pass_)
        return step

    def on_epoch_begin(self):
        """Sets the order before threads begin to read."""
        self.begin()
        self._adapter.on_epoch_begin()

    def on_epoch_end(self):
        """Tells the input."""
        self._adapter.on_epoch_end()


def _without_reader(one_pass: Callable[[], Iterator]) -> Callable:
    """Returns a pass that does not ask whether the last one was read ahead."""
    return lambda _: one_pass()


class _Arrays(_InOrder):
    """Arrays that are shuffled in each pass; with `shuffle="batch"`, only within each batch."""

    def __init__(self, adapter: ArrayDataAdapter, order: EpochOrder):
        super().__init__(adapter, order)
        self._of_batches, adapter._shuffle = adapter._shuffle == "batch", True
        # Keras's pipeline reads it when a pass begins. Without a strategy, only the host has it.
        with without_strategy(), tf.device("/cpu:0"):
            self._rows = tf.Variable(np.arange(adapter._num_samples), dtype=tf.int64)
        self._pass = None

    def _dataset(self) -> tf.data.Dataset:
        with ordered_by(lambda _: self._rows.read_value(), self._adapter):
            return self._adapter.get_tf_dataset()

    def _set_order(self, pass_: int) -> None:
        if pass_ == self._pass:
            return
        self._pass, num_rows = pass_, self._adapter._num_samples
        if self._of_batches:
            rows = _batches_shuffled(
                num_rows, self._adapter.batch_size, seed=self._order.seed, epoch=pass_
            )
        else:
            rows = epoch_order(num_rows, seed=self._order.seed, epoch=pass_, shuffle=True)
        self._rows.assign(rows)


def _batches_shuffled(num_rows: int, batch_size: int, *, seed: int, epoch: int) -> np.ndarray:
    """Returns [num_rows] int64, the indices of all examples, shuffled within each batch."""
    drawn = np.random.default_rng([seed, epoch]).random(num_rows)
    return np.lexsort((drawn, np.arange(num_rows) // batch_size))


class _Unordered(_InOrder):
    """An input that keeps its order. A pass makes its iterator when it needs its first batch."""

    def begin(self) -> int:
        """Returns 0: no batch is skipped."""
        return 0


def _has_iterator_per_pass(adapter: DataAdapter, model: keras.Model) -> bool:
    """Returns whether each pass over Keras's input has a new iterator, with tfaccel's steps."""
    if has_eager_steps_of_keras(model):
        return False  # stock Keras's step makes its own iterators
    if isinstance(adapter, TFDatasetAdapter):
        return isinstance(adapter.get_tf_dataset(), tf.data.Dataset)
    return isinstance(adapter, ArrayDataAdapter)


def _is_gathered(adapter: DataAdapter, model: keras.Model) -> bool:
    """Returns whether batches of Keras's input may be gathered for launches of several steps."""
    is_dataset = isinstance(adapter, TFDatasetAdapter)
    if is_dataset and not isinstance(adapter.get_tf_dataset(), tf.data.Dataset):
        launches.go_one_by_one(model, "the data set is distributed already")
        return False
    return launches.may_gather(model)


class _NoOrder:
    """Takes the place of an EpochOrder when a model evaluates or predicts."""

    def __init__(self, model: keras.Model):
        self.trained, self.allowance = model, None

    def applied(self, adapter: DataAdapter, x, steps_per_epoch: int | None) -> DataAdapter:
        """Returns an adapter with one iterator per pass, if Keras's adapter needs that."""
        needed = _has_iterator_per_pass(adapter, self.trained)
        return _Unordered(adapter, self) if needed else adapter


def one_iterator_a_pass(method: Callable, model: keras.Model) -> Callable:
    """Returns the model's `evaluate` or `predict` with only one iterator for each pass.

    Keras 3.15 makes another iterator at the end of each pass, which is never read. For each epoch
    and validation it costs 0.05 CPU s on one replica and 0.08 on two (2 cores, 2026-11-27).
    """

    @functools.wraps(method)
    def wrapper(*args, **kwargs):
        of_fit = None  # Keras's iterator over the validation data of a `fit`
        if kwargs.get("_use_cached_eval_dataset"):
            of_fit = getattr(model, "_eval_epoch_iterator", None)
        if of_fit is None:
            with next_input_in(_NoOrder(model)):
                return method(*args, **kwargs)
        if _has_iterator_per_pass(of_fit.data_adapter, model):
            of_fit.data_adapter = _Unordered(of_fit.data_adapter, _NoOrder(model))
            passes = of_fit.data_adapter._passes
            dataset = of_fit._distributed_dataset
            one_pass = _without_reader(dataset.__iter__)
            of_fit._distributed_dataset = passes(dataset.element_spec, one_pass)
        return method(*args, **kwargs)

    return wrapper


class _PyDataset(_InOrder):
    """A PyDataset. If Keras would shuffle its batches, they are shuffled in each pass."""

    def __init__(self, adapter: PyDatasetAdapter, order: EpochOrder):
        super().__init__(adapter, order)
        self._shuffles = _shuffles(adapter)
        self._items = _Items(adapter.py_dataset, order.seed)
        adapter.py_dataset, adapter.shuffle = self._items, False
        if adapter.enqueuer is not None:
            adapter.enqueuer.py_dataset, adapter.enqueuer.shuffle = self._items, False

    def _set_order(self, pass_: int) -> None:
        self._items.epoch = pass_
        if self._shuffles:
            self._items.order = epoch_order(
                self._items.num_batches, seed=self._order.seed, epoch=pass_, shuffle=True
            )


class _Items:
    """A PyDataset for Keras's adapter, in the order that was set.

    If Keras forks processes that read it, each item seeds Python's and NumPy's random numbers by
    the seed, the epoch and the item's index. Otherwise all processes would draw the same numbers in
    every epoch, because each epoch forks them from this process.
    """

    def __init__(self, dataset: keras.utils.PyDataset, seed: int):
        self._dataset, self._seed = dataset, seed
        self.epoch, self.order = 0, ()

    num_batches = property(lambda self: self._dataset.num_batches)

    def __getitem__(self, index: int):
        # The data set may have grown since the epoch began.
        index = int(self.order[index]) if index < len(self.order) else index
        if multiprocessing.parent_process() is not None:
            words = np.random.SeedSequence([self._seed, self.epoch, index]).generate_state(8)
            random.seed(words.tobytes())
            np.random.seed(words)
        return self._dataset[index]

    def on_epoch_begin(self):
        self._dataset.on_epoch_begin()

    def on_epoch_end(self):
        self._dataset.on_epoch_end()


def _draws(adapter: TFDatasetAdapter, model: keras.Model) -> bool:
    """Returns whether a data set is finite, draws at random, and is read only by this process."""
    dataset, strategy = adapter.get_tf_dataset(), model.distribute_strategy
    if not isinstance(dataset, tf.data.Dataset) or not _is_dense(dataset):
        return False
    if int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
        return False  # its only iterator draws new numbers for ever
    if len(strategy.extended.worker_devices) < strategy.num_replicas_in_sync:
        return False  # the workers' passes may differ in length
    return epoch_draws.draws(dataset)


def _is_dense(dataset: tf.data.Dataset) -> bool:
    specs = tf.nest.flatten(dataset.element_spec)
    return all(isinstance(each, tf.TensorSpec) for each in specs)


class _Dataset(_InOrder):
    """A `tf.data.Dataset` whose operations draw new numbers in every pass of every `fit`."""

    def __init__(self, adapter: TFDatasetAdapter, order: EpochOrder, *, of_user):
        super().__init__(adapter, order)
        dataset, strategy = adapter.get_tf_dataset(), order.trained.distribute_strategy
        # The user's data set keeps the stream, so that both are freed together. A stream that calls
        # Python must end with `fit`. With class weights, Keras makes a data set for each `fit`.
        keeps = dataset is of_user and not epoch_draws.calls_python(dataset)
        self._gather = self._gathering(dataset.element_spec)
        options = launches.on_host(self._gather)
        wanted = strategy, options is not None  # batches on the host are for gathering
        kept, stream = vars(of_user).get(_STREAM, (None, None))
        if not keeps or kept != wanted:
            stream = epoch_draws.Stream(
                dataset, num_batches=self.num_batches, strategy=strategy, options=options
            )
        if keeps:
            vars(of_user)[_STREAM] = wanted, stream
        self._stream = stream

    def get_tf_dataset(self) -> "_Passes":
        """Returns the batches of every replica."""
        return self._passes(self._stream.element_spec, self._stream.one_pass, self._gather)

    def _set_order(self, pass_: int) -> None:
        pass  # the stream continues


_STREAM = "_tfaccel_stream"  # in a data set's __dict__


class _Passes(tf.distribute.DistributedDataset):
    """A distributed data set. A pass begins only when its first batch is read.

    Keras also makes an iterator at the end of each epoch, and discards most of those.
    """

    def __init__(
        self,
        element_spec,
        one_pass: Callable[[Callable[[], bool]], Iterator],
        read: _InOrder,
        *,
        stock_step: bool,
        gather: Callable[..., Gathered] | None,
    ):
        self._element_spec, self._one_pass, self._read = element_spec, one_pass, read
        self._stock_step, self._gather = stock_step, gather

    @property
    def element_spec(self):
        """The spec of a batch of Keras's own data set."""
        return self._element_spec

    def __iter__(self) -> Iterator:
        """Returns an iterator over the batches of a pass, without those to skip."""
        if self._gather is None:
            return self._one_by_one()
        return self._gather(lambda has_unread: self._begun(has_unread)[0])

    def _begun(self, has_unread: Callable[[], bool]) -> tuple[Iterator, int]:
        num_to_skip = self._read.begin()
        batches = iter(self._one_pass(has_unread))
        for _ in range(num_to_skip):
            next(batches)
        return batches, num_to_skip

    def _one_by_one(self) -> Iterator:
        batches, num_skipped = self._begun(lambda: False)
        yield from batches
        if self._stock_step and (num_skipped or self._read.num_batches is None):
            # Stock Keras's step reads past the end, and accepts only this error as the end.
            raise tf.errors.OutOfRangeError(None, None, "the pass is at its end")


def _get_data_adapter(*args, **kwargs) -> DataAdapter:
    """Returns Keras's adapter of an input, with the order of the `fit` that waits for an input."""
    adapter = _KERAS_OWN(*args, **kwargs)
    if isinstance(adapter, ArrayDataAdapter):
        # Keras's data set of arrays has nothing to tune, and its end may wait for the tuner. In 7
        # of 10 runs of a ResNet-50, an epoch's end waited 8 to 17 s (2 CPU cores, 2026-11-29).
        of_arrays = adapter.get_tf_dataset
        adapter.get_tf_dataset = lambda: untuned(of_arrays())
    order = _NEXT_INPUT.get(None)
    if order is None:
        return adapter
    _NEXT_INPUT.set(None)  # the next input is the validation's
    return order.applied(adapter, kwargs.get("x"), kwargs.get("steps_per_epoch"))


_KERAS_OWN = data_adapters.get_data_adapter
data_adapters.get_data_adapter = _get_data_adapter
