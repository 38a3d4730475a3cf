"""The order in which `fit` reads arrays and PyDatasets, and where a loader's epoch begins.

(What a `tf.data.Dataset` draws from epoch to epoch, tfaccel/keras_internals/epoch_draws.py says.)

Takes what a `fit` reads; gives each epoch an order of its own, by the seed and the epoch's number
alone: the same on any number of replicas, and in a run that begins at `initial_epoch`.

    order = EpochOrder(model, loader=None, steps_per_epoch=None)
    with order.of_next_input():
        model.fit(x, y, shuffle=True, callbacks=[order])

Keras draws the order of arrays by an operation that begins anew with each epoch: with a seed, which
`tfaccel.setup` always sets, every epoch of every `fit` has one order (Keras 3.15, TensorFlow 2.21).
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
from tfaccel.data.shards import epoch_order
from tfaccel.keras_internals import epoch_draws
from tfaccel.keras_internals.model_view import runs_eagerly
from tfaccel.keras_internals.one_replica import without_strategy
from tfaccel.keras_internals.patching import patched
from tfaccel.keras_internals.seeds import global_seed

log = logging.getLogger("tfaccel")

_NUM_BEGUN = weakref.WeakKeyDictionary()  # the epochs that each model has begun, in this process
_NEXT_INPUT = contextvars.ContextVar("the EpochOrder of the next input that Keras opens")


@contextlib.contextmanager
def _next_input_of(order) -> Iterator[None]:
    token = _NEXT_INPUT.set(order)
    try:
        yield
    finally:
        _NEXT_INPUT.reset(token)


class EpochOrder(keras.callbacks.Callback):
    """Numbers the epochs of one `fit`. It comes before all other callbacks.

    The number is Keras's own, from 0. A later `fit` of the same model goes on where the last one
    ended, unless its `initial_epoch` is higher.

    Attributes:
      trained: the model, of which Keras's `model` tells only once `fit` has begun.
      number: of the epoch that is read.
      seed: of `setup`, or of a later `keras.utils.set_random_seed`.
    """

    def __init__(self, model: keras.Model, *, loader: Loader | None, steps_per_epoch: int | None):
        """Takes the arguments of the `fit`; the loader is None for any other input."""
        super().__init__()
        self.trained, self._loader = model, loader
        self._offset, self.number = None, _NUM_BEGUN.get(model, 0)
        self.seed = global_seed()
        self._cut = _Cut(model, steps_per_epoch)

    def of_next_input(self) -> contextlib.AbstractContextManager:
        """Within the context, this is the order of the first input that Keras opens."""
        return _next_input_of(self)

    def on_epoch_begin(self, epoch, logs=None):
        """Numbers the epoch; a loader that stands before it goes there."""
        if self._loader is not None:
            if self._offset is None:
                self._offset = 0
                self._start_loader_at(epoch)
            return
        if self._offset is None:
            per_pass = self._cut.epochs_in(self._cut.num_batches)
            # A `fit` begins with a whole pass over the data, as Keras's does.
            passes = math.ceil(max(0, _NUM_BEGUN.get(self.trained, 0) - epoch) / per_pass)
            self._offset = passes * per_pass
        self.number = epoch + self._offset
        _NUM_BEGUN[self.trained] = self.number + 1

    def _start_loader_at(self, epoch: int) -> None:
        num_batches = self._loader.num_batches
        pass_, step = self._cut.place(epoch, num_batches)
        if self._loader.next_position < pass_ * num_batches + step:
            self._loader.start_at(epoch=pass_, step=step)
            log.info("data: the loader begins where epoch %d does, as `fit` does", epoch + 1)

    def applied(self, adapter: DataAdapter, x, steps_per_epoch: int | None) -> DataAdapter:
        """Returns what stands for Keras's adapter of the input x; or it, where it has an order."""
        self._cut = _Cut(self.trained, steps_per_epoch)
        if isinstance(adapter, ArrayDataAdapter) and adapter._shuffle:
            kind = _Arrays
        elif isinstance(adapter, PyDatasetAdapter) and (_shuffles(adapter) or _forks(adapter)):
            kind = _PyDataset
        elif isinstance(adapter, TFDatasetAdapter) and _draws(adapter, self.trained):
            kind = functools.partial(_Dataset, of_user=x)
        elif _is_read_anew(adapter, self.trained):
            kind = _AsItIs
        else:
            return adapter
        self._cut.num_batches = adapter.num_batches
        return kind(adapter, self)

    def place(self) -> tuple[int, int]:
        """Returns which pass over the data the epoch is of, and the batch that it begins with."""
        return self._cut.place(self.number, self._cut.num_batches)


class _Cut:
    """How `steps_per_epoch` cuts a pass over the data into epochs of Keras's."""

    def __init__(self, model: keras.Model, steps_per_epoch: int | None):
        at_a_time = model.steps_per_execution
        self._steps = steps_per_epoch and math.ceil(steps_per_epoch / at_a_time) * at_a_time
        self.num_batches = None  # not known, or without end

    def epochs_in(self, num_batches: int | None) -> int:
        """Returns how many epochs a pass is: Keras ends the last one with the data."""
        return math.ceil(num_batches / self._steps) if self._steps and num_batches else 1

    def place(self, epoch: int, num_batches: int | None) -> tuple[int, int]:
        """Returns the pass that an epoch is of, and which of its batches is the epoch's first."""
        pass_, part = divmod(epoch, self.epochs_in(num_batches))
        return pass_, part * (self._steps or 0)


def _shuffles(adapter: PyDatasetAdapter) -> bool:
    return bool(adapter.shuffle) and adapter.py_dataset.num_batches is not None


def _forks(adapter: PyDatasetAdapter) -> bool:
    return adapter.enqueuer is not None and adapter.py_dataset.use_multiprocessing


class _InOrder(DataAdapter):
    """Stands for one of Keras's adapters, and gives its input an order in each pass."""

    def __init__(self, adapter: DataAdapter, order: EpochOrder):
        self._adapter, self._order = adapter, order

    num_batches = property(lambda self: self._adapter.num_batches)
    batch_size = property(lambda self: self._adapter.batch_size)
    has_partial_batch = property(lambda self: self._adapter.has_partial_batch)
    partial_batch_size = property(lambda self: self._adapter.partial_batch_size)

    def get_tf_dataset(self) -> "_Passes":
        """Returns the batches of every replica, whose order each pass sets as it begins."""
        dataset = self._order.trained.distribute_strategy.experimental_distribute_dataset(
            self._dataset()
        )
        return self._passes(dataset.element_spec, dataset.__iter__)

    def _passes(self, element_spec, one_pass: Callable[[], Iterator]) -> "_Passes":
        stock_step = runs_eagerly(self._order.trained)
        return _Passes(element_spec, one_pass, self, stock_step=stock_step)

    def begin(self) -> int:
        """Sets the order of the pass, and returns how many of its batches were read before."""
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


class _Arrays(_InOrder):
    """Arrays, whose rows have a new order in each pass; with "batch", within each batch."""

    def __init__(self, adapter: ArrayDataAdapter, order: EpochOrder):
        super().__init__(adapter, order)
        self._of_batches, adapter._shuffle = adapter._shuffle == "batch", True
        # Keras's pipeline reads it as a pass begins. Of no strategy: the host alone has it.
        with without_strategy(), tf.device("/cpu:0"):
            self._rows = tf.Variable(np.arange(adapter._num_samples), dtype=tf.int64)
        self._pass = None

    def _dataset(self) -> tf.data.Dataset:
        with patched(tf.random, "shuffle", lambda _: self._rows.read_value()):
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
    """Returns each row's index once: [num_rows] int64, each batch with its own rows, shuffled."""
    drawn = np.random.default_rng([seed, epoch]).random(num_rows)
    return np.lexsort((drawn, np.arange(num_rows) // batch_size))


class _AsItIs(_InOrder):
    """An input whose order is its own: it is read no earlier than its first batch is needed."""

    def _dataset(self) -> tf.data.Dataset:
        return self._adapter.get_tf_dataset()

    def begin(self) -> int:
        """Sets no order: each pass begins with the first batch."""
        return 0


def _is_read_anew(adapter: DataAdapter, model: keras.Model) -> bool:
    """Returns whether each pass over Keras's input is an iterator of its own, for our steps."""
    if runs_eagerly(model):
        return False  # stock Keras's step asks for its own iterators
    if isinstance(adapter, TFDatasetAdapter):
        return isinstance(adapter.get_tf_dataset(), tf.data.Dataset)
    return isinstance(adapter, ArrayDataAdapter)


class _Read:
    """Stands for an EpochOrder where a model evaluates or predicts."""

    def __init__(self, model: keras.Model):
        self.trained = model

    def applied(self, adapter: DataAdapter, x, steps_per_epoch: int | None) -> DataAdapter:
        """Returns what stands for Keras's adapter of the input, or it."""
        return _AsItIs(adapter, self) if _is_read_anew(adapter, self.trained) else adapter


def one_iterator_a_pass(method: Callable, model: keras.Model) -> Callable:
    """Returns the model's `evaluate` or `predict`, which makes one iterator for each pass.

    Keras makes an iterator at the end of each pass, too, which nobody reads (Keras 3.15). It costs
    0.05 CPU s on one replica, 0.08 on two, for each epoch and validation (2 cores, 2026-11-27).
    """

    @functools.wraps(method)
    def wrapper(*args, **kwargs):
        of_fit = None  # Keras's iterator over what a `fit` validates with
        if kwargs.get("_use_cached_eval_dataset"):
            of_fit = getattr(model, "_eval_epoch_iterator", None)
        if of_fit is None:
            with _next_input_of(_Read(model)):
                return method(*args, **kwargs)
        if _is_read_anew(of_fit.data_adapter, model):
            of_fit.data_adapter = _AsItIs(of_fit.data_adapter, _Read(model))
            passes = of_fit.data_adapter._passes
            dataset = of_fit._distributed_dataset
            of_fit._distributed_dataset = passes(dataset.element_spec, dataset.__iter__)
        return method(*args, **kwargs)

    return wrapper


class _PyDataset(_InOrder):
    """A PyDataset, whose batches have a new order in each pass."""

    def __init__(self, adapter: PyDatasetAdapter, order: EpochOrder):
        super().__init__(adapter, order)
        self._shuffles = _shuffles(adapter)
        self._items = _Items(adapter.py_dataset, order.seed)
        adapter.py_dataset, adapter.shuffle = self._items, False
        if adapter.enqueuer is not None:
            adapter.enqueuer.py_dataset, adapter.enqueuer.shuffle = self._items, False

    def _dataset(self) -> tf.data.Dataset:
        return self._adapter.get_tf_dataset()

    def _set_order(self, pass_: int) -> None:
        self._items.epoch = pass_
        if self._shuffles:
            self._items.order = epoch_order(
                self._items.num_batches, seed=self._order.seed, epoch=pass_, shuffle=True
            )


class _Items:
    """A PyDataset as Keras's adapter reads it, in the order that was set.

    In a process that Keras forks for it, Python's and NumPy's random numbers are a function of the
    seed, the epoch and the item: each epoch forks this process anew, and all would draw the same.
    """

    def __init__(self, dataset: keras.utils.PyDataset, seed: int):
        self._dataset, self._seed = dataset, seed
        self.epoch, self.order = 0, ()

    num_batches = property(lambda self: self._dataset.num_batches)

    def __getitem__(self, index: int):
        # A data set may have become longer since the epoch began.
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
    """Returns whether a data set ends, draws at random, and is read by this process alone."""
    dataset, strategy = adapter.get_tf_dataset(), model.distribute_strategy
    if not isinstance(dataset, tf.data.Dataset) or not _is_dense(dataset):
        return False
    if int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
        return False  # one iterator draws on and on
    if len(strategy.extended.worker_devices) < strategy.num_replicas_in_sync:
        return False  # passes over the workers' shares may differ in length
    return epoch_draws.draws(dataset)


def _is_dense(dataset: tf.data.Dataset) -> bool:
    specs = tf.nest.flatten(dataset.element_spec)
    return all(isinstance(each, tf.TensorSpec) for each in specs)


class _Dataset(_InOrder):
    """A `tf.data.Dataset` whose operations draw on from pass to pass, and from `fit` to `fit`."""

    def __init__(self, adapter: TFDatasetAdapter, order: EpochOrder, *, of_user):
        super().__init__(adapter, order)
        dataset, strategy = adapter.get_tf_dataset(), order.trained.distribute_strategy
        # The data set has it, so that both are given up together. With Python in it, it must end
        # with `fit`; and with class weights, it is one that Keras made for this `fit`.
        keeps = dataset is of_user and not epoch_draws.calls_python(dataset)
        kept, stream = vars(of_user).get(_STREAM, (None, None))
        if not keeps or kept is not strategy:
            stream = epoch_draws.Stream(dataset, num_batches=self.num_batches, strategy=strategy)
        if keeps:
            vars(of_user)[_STREAM] = strategy, stream
        self._stream = stream

    def get_tf_dataset(self) -> "_Passes":
        """Returns the batches of every replica."""
        return self._passes(self._stream.element_spec, self._stream.one_pass)

    def _set_order(self, pass_: int) -> None:
        pass  # it goes on


_STREAM = "_tfaccel_stream"  # in a data set's __dict__


class _Passes(tf.distribute.DistributedDataset):
    """A distributed data set, each pass over which begins when its first batch is drawn.

    Keras asks for an iterator at the end of each epoch, too, and throws most of those away.
    """

    def __init__(
        self, element_spec, one_pass: Callable[[], Iterator], read: _InOrder, *, stock_step: bool
    ):
        self._element_spec, self._one_pass = element_spec, one_pass
        self._read, self._stock_step = read, stock_step

    @property
    def element_spec(self):
        """The spec of a batch, as Keras's own data set has it."""
        return self._element_spec

    def __iter__(self) -> Iterator:
        """Yields the batches of a pass, or what is left of it."""
        num_read = self._read.begin()
        batches = self._one_pass()
        for _ in range(num_read):
            next(batches)
        yield from batches
        if self._stock_step and (num_read or self._read.num_batches is None):
            # Stock Keras's step asks for more than there is, and knows this end alone.
            raise tf.errors.OutOfRangeError(None, None, "the pass is at its end")


def _get_data_adapter(*args, **kwargs) -> DataAdapter:
    """Returns Keras's adapter of an input; that of the `fit` which waits for one has its order."""
    adapter = _KERAS_OWN(*args, **kwargs)
    order = _NEXT_INPUT.get(None)
    if order is None:
        return adapter
    _NEXT_INPUT.set(None)  # the next one is that of its validation
    return order.applied(adapter, kwargs.get("x"), kwargs.get("steps_per_epoch"))


_KERAS_OWN = data_adapters.get_data_adapter
data_adapters.get_data_adapter = _get_data_adapter
