"""Reads examples from a user's own Python code, one at a time, as arrays of fixed shapes.

The source is an object with `__len__` and `__getitem__(index)`, or an endless callable of an index.
Values are stacked and otherwise passed on unchanged: nothing is resized, normalised or augmented,
and uint8 images stay uint8.

    data = open_examples(Mine(), global_batch_size=64, num_replicas=2, seed=0, shuffle=True, ...)
    x, y = next(data.stream(placement, data.feed(replica_index=0)))

For launches of several steps, the batches of a launch are read one after another, stacked and
copied to the device together.
"""

import collections
import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfaccel.common.checks import check_choice, check_int
from tfaccel.common.errors import UserError
from tfaccel.config import LAST_BATCHES, AugmentConfig
from tfaccel.data.deferred import Deferred, span
from tfaccel.data.endings import ender
from tfaccel.data.feed import Feed
from tfaccel.data.gathered import Taken, fitting, taken
from tfaccel.data.placement import Placement
from tfaccel.data.shards import Plan, Rows, check_even, part
from tfaccel.process.to_device import stack_to
from tfaccel.runtime.devices import Device

log = logging.getLogger("tfaccel")

PREFETCH_BATCHES = 2  # batches that are made ahead of the step; DALI's default


@dataclasses.dataclass(frozen=True)
class EndlessPlan:
    """How the indices 0, 1, 2, ... of an endless source are cut into steps and replicas' rows.

    Attributes:
      global_batch_size: examples per step over all replicas; a multiple of `num_replicas`.
      num_replicas: number of replicas over all workers.
      num_steps: number of steps in what is called an epoch.
      num_examples: None; `shards.Plan` has a number here.
      last_batch: "drop", because no batch is ever padded.
    """

    global_batch_size: int
    num_replicas: int
    num_steps: int
    num_examples: None = None
    last_batch: str = "drop"

    def __post_init__(self):
        """Checks that all replicas get equal batches, and that an epoch has a step."""
        check_even(self.global_batch_size, num_replicas=self.num_replicas)
        check_int("steps_per_epoch", self.num_steps, at_least=1)

    @property
    def rows_per_replica(self) -> int:
        """The number of rows in every batch."""
        return self.global_batch_size // self.num_replicas

    def rows(self, *, epoch: int, step: int, replica_index: int) -> Rows:
        """Returns one replica's rows of one step: see `Plan.rows`."""
        own = part(
            self.global_batch_size, num_replicas=self.num_replicas, replica_index=replica_index
        )
        positions = np.arange(own.start, own.stop)
        first = (epoch * self.num_steps + step) * self.global_batch_size
        real = self.real(epoch=epoch, step=step, replica_index=replica_index)
        return Rows(first + positions, positions, real)

    def real(self, *, epoch: int, step: int, replica_index: int) -> np.ndarray:
        """Returns which of one replica's rows of one step are not padding: all, [rows] bool."""
        return np.ones(self.rows_per_replica, bool)


@dataclasses.dataclass(frozen=True)
class Examples:
    """A source, and the structure of its first example. It is as thread-safe as the source.

    Attributes:
      read: returns the example at an index.
      num_examples: number of examples; None for an endless source.
      names: the structure of the first example, with a name in place of each array.
      specs: the (shape, dtype) of each array, by name.
    """

    read: Callable[[int], Any]
    num_examples: int | None
    names: tuple
    specs: dict[str, tuple[tuple[int, ...], np.dtype]]

    def arrays(self, index: int) -> dict[str, np.ndarray]:
        """Returns an example's arrays by name.

        Raises:
          UserError: the source fails, or the arrays differ from the first example's.
        """
        _, arrays = _arrays(self.read, index, endless=self.num_examples is None)
        if arrays.keys() != self.specs.keys():
            raise UserError(
                f"example {index} has {_listed(arrays)}, expected {_listed(self.specs)} as in "
                "example 0; give all examples the same structure"
            )
        for name, array in arrays.items():
            if (array.shape, array.dtype) != self.specs[name]:
                raise UserError(
                    f"example {index}: {name} is {_described(array.shape, array.dtype)}, expected "
                    f"{_described(*self.specs[name])} as in example 0; give all examples the same "
                    "shape and dtype"
                )
        return arrays


@dataclasses.dataclass(frozen=True)
class ExamplesData:
    """A source and its plan, in the form that a Loader reads.

    Attributes:
      examples: the source.
      plan: how epochs are cut into steps and rows.
      class_names: empty, because no classes are known.
      skips_bad: False, because an example that fails ends the run.
      deferred_are_made: True, because the batches of a launch wait for each other.
    """

    examples: Examples
    plan: Plan | EndlessPlan
    class_names: tuple[str, ...] = ()
    skips_bad: bool = False
    deferred_are_made: bool = True

    @property
    def spec(self) -> tuple:
        """The `tf.TensorSpec`s of one replica's batch, in the structure of the first example."""
        specs, rows = self.examples.specs, self.plan.rows_per_replica

        def of_batch(name):
            shape, dtype = specs[name]
            return tf.TensorSpec((rows, *shape), dtype)

        return tf.nest.map_structure(of_batch, self.examples.names)

    def facts(self) -> dict[str, object]:
        """Returns the facts that must be the same on all workers, by name: see `agreement`."""
        examples = self.examples
        return {
            "number of examples": examples.num_examples,
            "shapes": examples.specs,
            "plan": self.plan,
        }

    def feed(self, replica_index: int, *, first: int = 0, lost: frozenset = frozenset()) -> Feed:
        """Returns the feed of a replica from batch `first` on, counted from epoch 0."""
        return Feed(self.plan, AugmentConfig(), (1, 1), replica_index, first, lost)  # draws nothing

    def stream(self, placement: Placement, feed: Feed) -> "ExamplesStream":
        """Returns an endless stream of one replica's batches."""
        return ExamplesStream(self.examples, feed=feed, placement=placement)

    def at_a_time(self, devices: Sequence[Device], most: int) -> tuple[int, str]:
        """Returns how many batches one launch takes, and why not more: see `gathered.fitting`."""
        specs = tf.nest.flatten(self.spec)
        return fitting(most, sum(each.shape.num_elements() * each.dtype.size for each in specs))

    def deferred(self, placement: Placement, feed: Feed, number: int) -> "LaunchesStream":
        """Returns a stream of one replica's batches, for launches of several steps.

        Args:
          placement: where and how the stream runs.
          feed: which examples each batch has.
          number: batches in a launch, from `at_a_time`; an epoch's last launch may have fewer.
        """
        return LaunchesStream(self.examples, feed=feed, placement=placement, most=number)


class ExamplesStream(Iterator):
    """An endless iterator over one replica's batches.

    A batch has the structure of an example, and is always a tuple: (x,) if an example is x alone.
    Each array is stacked to a tensor [rows, ...] on the replica's device. (TensorFlow keeps int32
    tensors of a GPU in host memory.)

    It does not use tf.data. TensorFlow would never free the Python function and with it the source,
    and would turn the user's exceptions into text.

    Raises:
      UserError: `next` raises it if the source fails or an example differs from the first.
    """

    def __init__(
        self,
        examples: Examples,
        *,
        feed: Feed,
        placement: Placement,
        make: Callable | None = None,
    ):
        """Starts to read the first batches.

        Args:
          examples: the source.
          feed: which examples each batch has.
          placement: the device of the batches, and the number of threads that read.
          make: makes what `next` gives; None for a batch.
        """
        readers = ThreadPoolExecutor(placement.num_threads, "tfaccel-examples")
        batches = ThreadPoolExecutor(1, "tfaccel-batches")
        # None of these refers to the stream, so the stream can be freed and its queue with it.
        self._make = functools.partial(make or _batch, examples, feed, placement, readers)
        self._submit = batches.submit
        for each in (batches, readers):
            shutdown = functools.partial(each.shutdown, wait=False, cancel_futures=True)
            weakref.finalize(self, ender(), shutdown)
        self._number = 0
        self._ahead = collections.deque()
        for _ in range(PREFETCH_BATCHES):
            self._read_ahead()

    def __next__(self):
        """Returns the next batch."""
        batch = self._ahead.popleft()
        self._read_ahead()
        return batch.result()

    def _read_ahead(self) -> None:
        self._ahead.append(self._submit(self._make, self._number))
        self._number += 1


class LaunchesStream(ExamplesStream):
    """An endless iterator over `Deferred` batches of one replica.

    Raises:
      UserError: as of an `ExamplesStream`; `next` first gives the batches before the fault.
    """

    def __init__(self, examples: Examples, *, feed: Feed, placement: Placement, most: int):
        """Starts to read the batches of the first launches.

        Args:
          examples, feed, placement: as of an `ExamplesStream`.
          most: number of batches in a launch; an epoch's last launch may have fewer.
        """
        # A copy may wait for the device, and reading must not wait for the copy.
        copying = ThreadPoolExecutor(PREFETCH_BATCHES, "tfaccel-copies")
        shutdown = functools.partial(copying.shutdown, wait=False, cancel_futures=True)
        weakref.finalize(self, ender(), shutdown)
        make = functools.partial(_launch, most=most, copy=copying.submit)
        super().__init__(examples, feed=feed, placement=placement, make=make)
        self._fault = None

    def __next__(self):
        """Returns the batches of the next launch."""
        if self._fault is not None:
            raise self._fault
        make, copied, self._fault = super().__next__()
        if copied is None:
            raise self._fault
        return Deferred(make.named(copied.result()), {}, make, is_made=True)


def open_examples(
    source,
    *,
    global_batch_size: int,
    num_replicas: int,
    seed: int,
    shuffle: bool,
    last_batch: str,
    steps_per_epoch: int | None,
) -> ExamplesData:
    """Reads the first example and plans the epochs.

    An example is a tuple (x,), (x, y) or (x, y, sample_weight), or x alone. Each part is an array
    or a number, or a nested tuple or dict of these. Lists become arrays. float64, the dtype of
    Python's numbers, becomes float32, as in Keras; every other dtype stays. All examples have the
    structure, shapes and dtypes of the first.

    Args:
      source: an object with `__len__` and `__getitem__(index)`, or a callable, `source(index)`,
        which gives examples without end. The callable's index counts the examples of all replicas
        from the start of the run. So step s with `global_batch_size` B reads s * B to
        s * B + B - 1, for any number of replicas and after a resume. Several threads call the
        source at once, ahead of need. The same index must always give the same example.
      global_batch_size: examples per step over all replicas.
      num_replicas: number of replicas over all workers.
      seed: seed of the order.
      shuffle: whether every epoch has a new order.
      last_batch: "pad", "drop" or "repeat", as in ImageConfig.
      steps_per_epoch: number of steps in an epoch of a callable; None for an object with a length.

    Raises:
      UserError: the source is neither, its first example cannot be used, or a setting does not
        suit it.
    """
    check_choice("last_batch", last_batch, LAST_BATCHES)
    _check_source(source)
    read, num_examples = source, None
    if _is_indexable(source):
        read, num_examples = source.__getitem__, len(source)
        if num_examples == 0:
            raise UserError(f"{type(source).__name__} has no examples; expected one or more")
    names, arrays = _arrays(read, 0, endless=num_examples is None)
    if len(names) > 3:
        raise UserError(
            f"example 0 has {len(names)} parts; expected x, (x, y) or (x, y, sample_weight): put "
            "values that belong together into a nested tuple or dict"
        )
    specs = {name: (array.shape, array.dtype) for name, array in arrays.items()}
    log.info("examples: %s", ", ".join(f"{name} {_described(*specs[name])}" for name in specs))
    examples = Examples(read, num_examples, names, specs)
    if num_examples is None:
        if steps_per_epoch is None:
            raise UserError("a callable has no end; give steps_per_epoch, e.g. 1000")
        if shuffle:
            raise UserError(
                "shuffle=True needs a source with a length, but a callable has no end; remove "
                "shuffle, and let the callable choose at random"
            )
        return ExamplesData(examples, EndlessPlan(global_batch_size, num_replicas, steps_per_epoch))
    if steps_per_epoch is not None:
        raise UserError(
            f"steps_per_epoch={steps_per_epoch} is only for a callable; the {num_examples} "
            "examples give the length of an epoch, so remove it"
        )
    plan = Plan(
        num_examples=num_examples,
        global_batch_size=global_batch_size,
        num_replicas=num_replicas,
        seed=seed,
        shuffle=shuffle,
        last_batch=last_batch,
    )
    return ExamplesData(examples, plan)


def _check_source(source) -> None:
    expected = "expected an object with __len__ and __getitem__(index), or a callable of an index"
    if isinstance(source, type):
        raise UserError(f"{source.__name__} is a class; give an object of it: {source.__name__}()")
    if isinstance(source, keras.utils.PyDataset):
        raise UserError(
            f"{type(source).__name__} is a keras PyDataset, which gives batches; {expected} that "
            "gives one example"
        )
    if isinstance(source, tuple | Mapping):
        raise UserError(f"a {type(source).__name__} of arrays is not a source; {expected}")
    if not (_is_indexable(source) or callable(source)):
        raise UserError(f"{type(source).__name__} cannot be indexed or called; {expected}")


def _is_indexable(source) -> bool:
    return hasattr(source, "__len__") and hasattr(source, "__getitem__")


def _arrays(read: Callable, index: int, *, endless: bool) -> tuple[tuple, dict[str, np.ndarray]]:
    """Reads an example, and returns its structure of names and its arrays by name."""
    try:
        example = read(index)
        example = example if isinstance(example, tuple) else (example,)
        arrays = {}
        _map(lambda name, value: arrays.update({name: _array(value)}), example)
    except Exception as error:
        end = endless and isinstance(error, IndexError | StopIteration)
        fix = "; a callable must not end, so give an object with __len__ and __getitem__" * end
        raise UserError(
            f"reading example {index} failed: {type(error).__name__}: {error}{fix}"
        ) from error
    for name, array in arrays.items():
        if array.dtype.kind not in "biuf":
            raise UserError(
                f"example {index}: {name} has dtype {array.dtype}; expected numbers, or an array "
                "of numbers"
            )
    return _map(lambda name, _: name, example), arrays


def _map(function: Callable[[str, Any], Any], example, name: str = ""):
    """Returns an example's structure with `function(name, value)` in place of each value."""
    if isinstance(example, tuple):
        return tuple(_map(function, each, f"{name}[{i}]") for i, each in enumerate(example))
    if isinstance(example, dict):
        return {key: _map(function, each, f"{name}[{key!r}]") for key, each in example.items()}
    return function(name, example)


def _array(value) -> np.ndarray:
    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _batch(
    examples: Examples, feed: Feed, placement: Placement, readers: ThreadPoolExecutor, number: int
):
    """Returns a batch on the replica's device."""
    batch = _read(examples, feed, placement, readers, number)
    with tf.device(placement.device.name):
        tensors = {name: tf.convert_to_tensor(array) for name, array in batch.items()}
    return tf.nest.map_structure(tensors.__getitem__, examples.names)


def _launch(
    examples: Examples,
    feed: Feed,
    placement: Placement,
    readers: ThreadPoolExecutor,
    number: int,
    *,
    most: int,
    copy: Callable[..., Future],
) -> tuple[Taken | None, Future | None, Exception | None]:
    """Reads the batches of a launch, and begins to copy them to the replica's device.

    Returns:
      What makes a batch, and its stacked tensors, of all batches before a fault; and the fault.
    """
    batches, fault = [], None
    try:
        for each in span(feed, number, most=most):
            batches.append(_read(examples, feed, placement, readers, each))
    except UserError as error:
        fault = error
    if not batches:
        return None, None, fault
    with tf.device("/cpu:0"):
        batches = [
            tf.nest.map_structure(
                lambda name, own=own: tf.convert_to_tensor(own[name]), examples.names
            )
            for own in batches
        ]
    leaves = [tf.nest.flatten(each) for each in batches]
    return taken(batches[0]), copy(stack_to, placement.device.name, leaves), fault


def _read(
    examples: Examples, feed: Feed, placement: Placement, readers: ThreadPoolExecutor, number: int
) -> dict[str, np.ndarray]:
    """Returns a batch's arrays by name; all threads of `readers` read it together."""
    ids = feed.rows(number).ids
    batch = {
        name: np.empty((len(ids), *shape), dtype) for name, (shape, dtype) in examples.specs.items()
    }

    def fill(rows):
        for row in rows:
            for name, array in examples.arrays(int(ids[row])).items():
                batch[name][row] = array

    # Each thread gets a range of rows. A task for each row would cost more than some examples.
    for _ in readers.map(fill, np.array_split(np.arange(len(ids)), placement.num_threads)):
        pass  # raises the error of the first rows that failed
    return batch


def _listed(names) -> str:
    return ", ".join(names) or "nothing"


def _described(shape: tuple[int, ...], dtype: np.dtype) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"
