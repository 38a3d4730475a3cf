"""Passes each replica's batches to `model.fit`.

A `Loader` takes data that makes one stream for each replica, and the strategy. Keras trains on it
as on any data set: it knows its length, and each iterator over it gives one epoch.

    loader = Loader(data, strategy=strategy, devices=runtime.devices, first_replica=0, ...)
    model.fit(loader, validation_data=test_loader)
"""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfaccel.common.errors import UserError
from tfaccel.common.redact import shown
from tfaccel.common.tables import counted
from tfaccel.data.deferred import Deferred
from tfaccel.data.placement import Placement
from tfaccel.data.source import UnreadableError
from tfaccel.data.weights import Weighing, weighted
from tfaccel.runtime.agreement import check_same, of_workers
from tfaccel.runtime.devices import Device
from tfaccel.runtime.private_names import DataAdapter

log = logging.getLogger("tfaccel")

# How many examples may become unreadable during a run that skips bad files: this number or this
# share, whichever is larger. If more do, the disk or the folder has failed.
MAX_LOST, MAX_LOST_SHARE = 10, 0.1

MOST_MASKS = 64  # masks of padding rows that are kept on the devices


class Loader(DataAdapter, tf.distribute.DistributedDataset):
    """Batches for every replica of this worker, one epoch after another.

    A batch is (x, y, weight) if there may be padding rows, else (x, y). With several replicas, each
    part is a `tf.distribute` per-replica value. All batches have the same shape. `weight`,
    [rows] float32, is 0 for a padding row, else 1 or the weight of the row's class.

    The streams live as long as the loader: a second epoch or a second `fit` continues with them.
    Only `start_at` and an epoch that is abandoned before its end start new streams.

    Attributes:
      data: an ImageData, ExamplesData or PipelineData.
      class_names: names of the labels, in order; empty if the data has none.
      pixel_range: (least, largest) value of a pixel in the model's input; None if no tfaccel loader
        normalises the data.
      num_examples: number of examples in an epoch; None for endless data.
      num_batches: number of steps in an epoch.
      global_batch_size: examples per step over all replicas.
      pads: whether batches may have padding rows.
      waited_s: seconds that this process has waited for batches.
      kept: the rows that `keep_next` has copied, (x, y) or (x, y, weight) in NumPy; None before.
    """

    def __init__(
        self,
        data,
        *,
        devices: Sequence[Device],
        seed: int,
        num_threads: int,
        first_replica: int,
        strategy: tf.distribute.Strategy,
    ):
        """Builds no pipeline: the first batch does.

        Args:
          data: an ImageData, ExamplesData or PipelineData.
          devices: devices of this worker's replicas.
          seed: seed for the random operators of a user's own pipeline; ours have none.
          num_threads: CPU threads of each replica's stream.
          first_replica: index of this worker's first replica, counted over all workers.
          strategy: the strategy that distributes the batches.
        """
        self.data = data
        self.class_names = data.class_names
        self.pixel_range = getattr(data, "pixel_range", None)
        self.warned_of = set()  # models whose own input scaling does not suit `pixel_range`
        self.num_examples = data.plan.num_examples
        self.global_batch_size = data.plan.global_batch_size
        has_rest = data.plan.last_batch == "pad" and self.num_examples % self.global_batch_size > 0
        # With skips_bad, a file that becomes unreadable during the run leaves padding rows, too.
        self.pads = has_rest or data.skips_bad
        self._devices, self._seed, self._num_threads = tuple(devices), seed, num_threads
        self._first_replica, self._strategy = first_replica, strategy
        self._class_weight, self._is_agreed, self._padding_is_known = None, False, False
        self._drawing = None  # the ticket of the _Epoch that may draw
        self._position = 0  # number of the next batch, counted from the start of epoch 0
        self._is_epochs_end = False  # whether the next epoch has no steps
        self._lost = frozenset()
        self._streams = None
        self._deferred, self._number = None, None  # streams of `Deferred`, and their batches each
        self._at_a_time = {}  # batches of a launch, by the most that are asked for
        self._masks = {}  # on a device, by its index and the mask; nearly always the same few
        self._recording = None  # the masks of drawn batches, while `recorded_real` collects them
        self.waited_s = 0.0
        self.kept, self._num_to_keep = None, 0

    @property
    def strategy(self) -> tf.distribute.Strategy:
        """The strategy that distributes the batches to its replicas."""
        return self._strategy

    def __array__(self, dtype=None, copy=None):
        """Raises UserError, for a model whose own `fit` makes arrays of what it is given."""
        raise UserError(
            "a loader where arrays or a data set are expected: a model with its own fit, as those "
            "of KerasHub, does not take it; call Keras's fit, evaluate or predict, such as "
            "keras.Model.fit(model, loader), on examples that are preprocessed already"
        )

    # The methods that Keras calls.

    def get_tf_dataset(self):
        """Returns the loader itself, because Keras may draw an epoch's batches from it.

        Raises:
          UserError: there may be padding rows, and the caller's step would count them.
        """
        if self.pads and not self._padding_is_known:
            raise UserError(
                "this model's step counts padding rows as examples; compile the model with "
                "run.compile(model, ...), or give the loader last_batch='drop'"
            )
        return self

    @contextlib.contextmanager
    def padding_left_out(self):
        """Within the context, the caller's step leaves out padding rows."""
        before, self._padding_is_known = self._padding_is_known, True
        try:
            yield
        finally:
            self._padding_is_known = before

    @property
    def num_batches(self) -> int:
        """The number of steps in an epoch."""
        return self.data.plan.num_steps

    @property
    def element_spec(self):
        """The `tf.TensorSpec` of a batch on one replica."""
        if not self.pads:
            return self.data.spec
        x, y, own = keras.utils.unpack_x_y_sample_weight(self.data.spec)
        if own is None:
            return x, y, tf.TensorSpec((self.data.plan.rows_per_replica,), tf.float32)
        return x, y, tf.nest.map_structure(lambda each: tf.TensorSpec(each.shape, "float32"), own)

    def __len__(self):
        """Returns the number of steps in an epoch."""
        return self.num_batches

    def __repr__(self):
        """Returns a summary of a few lines: examples, classes, batches and loader."""
        plan = self.data.plan
        count = "endless" if self.num_examples is None else f"{self.num_examples:,}"
        replicas = counted(plan.num_replicas, "replica")
        lines = [
            f"<tfaccel loader: {count} examples",
            *([_classes(self.class_names)] if self.class_names else []),
            f"{counted(plan.num_steps, 'step')} of {self.global_batch_size} an epoch, "
            f"{plan.rows_per_replica} rows on each of {replicas}; last batch: {plan.last_batch}",
            *self._described(),
        ]
        return shown("\n  ".join(lines) + ">")

    def _described(self) -> list[str]:
        """Returns the data's description of itself, or else the shapes of a replica's batch."""
        if hasattr(self.data, "described"):
            return self.data.described()
        specs = tf.nest.flatten(self.data.spec)
        shapes = ", ".join(f"{tuple(each.shape)} {each.dtype.name}" for each in specs)
        return [f"a replica's batch: {shapes}"]

    def __iter__(self) -> Iterator:
        """Returns an iterator over one epoch, which at its first batch replaces any earlier one."""
        return _Epoch(self)

    @contextlib.contextmanager
    def class_weights(self, class_weight: Mapping[int, float] | None):
        """Within the context, the weight of each row is the weight of its class.

        Args:
          class_weight: class index to weight, as in `fit`; classes that are missing weigh 1. None
            for no weights.
        """
        before = self._class_weight  # weights of a `fit` that validates on this loader
        self._class_weight = None
        if class_weight is not None:
            if len(tf.nest.flatten(self.data.spec[1])[0].shape) != 1:
                raise UserError(
                    "class_weight is for images of one class each, but these have several classes "
                    "or numbers; remove class_weight"
                )
            if not self.class_names:
                raise UserError(
                    "class_weight needs data with known classes; remove class_weight, or let each "
                    "example have its weight as third part: (x, y, weight)"
                )
            labels = range(len(self.class_names))
            if not isinstance(class_weight, Mapping) or not set(class_weight) <= set(labels):
                raise UserError(
                    f"class_weight={class_weight!r}; expected a dict of class indices, 0 to "
                    f"{len(labels) - 1} in the order of loader.class_names, and weights"
                )
            self._class_weight = tf.constant([float(class_weight.get(each, 1)) for each in labels])
            if sampling := getattr(self.data.plan, "sampling", None):
                log.warning(
                    "data: class_weight with sampling=%s: rare classes count more by both; use one "
                    "of them unless the weights are meant for sampled data",
                    sampling,
                )
        try:
            yield
        finally:
            self._class_weight = before

    # The loader's position.

    def start_at(self, *, epoch: int, step: int = 0) -> None:
        """Makes the next iterator begin at the given step, as an uninterrupted run would.

        The examples, their order and the augmentation depend on (seed, epoch, step) alone, for any
        number of replicas with the same global batch size. A user's own DALI pipeline draws its own
        random numbers, so only its examples are the same.

        Args:
          epoch: the epoch, from 0.
          step: the step within the epoch, from 0. The number of steps stands for the epoch's end:
            the next iterator then gives no batch.

        Raises:
          UserError: the epoch has no such step.
        """
        whole = isinstance(epoch, int) and isinstance(step, int)
        if not whole or not 0 <= step <= self.num_batches or epoch < 0:
            raise UserError(
                f"start_at(epoch={epoch!r}, step={step!r}); expected an epoch of at least 0 and a "
                f"step of at most {self.num_batches}"
            )
        self._drawing = None
        self._restart(epoch * self.num_batches + step)
        self._is_epochs_end = step == self.num_batches

    @property
    def position(self) -> int:
        """The number of batches given so far, counted from the start of epoch 0."""
        return self._position

    @property
    def lost(self) -> frozenset[int]:
        """The indices of examples that could no longer be read, and were skipped."""
        return self._lost

    @property
    def begins_late(self) -> bool:
        """Whether the next iterator begins after its epoch's first step, for example to resume."""
        return self._is_epochs_end or self.next_position % self.num_batches > 0

    @property
    def next_position(self) -> int:
        """The number of the batch that the next iterator begins with, counted from epoch 0."""
        step = self._position % self.num_batches
        left_half_way = step > 0 and self._drawing is not None
        return self._position - step + self.num_batches if left_half_way else self._position

    @contextlib.contextmanager
    def recorded_real(self):
        """Within the context, records which rows of each drawn batch are not padding.

        Yields:
          A list, to which each batch appends a [rows] bool for each replica of all workers.
        """
        self._recording = []
        try:
            yield self._recording
        finally:
            self._recording = None

    def keep_next(self, num_rows: int) -> None:
        """Copies the first rows of this worker's next batch to `kept`."""
        self._num_to_keep = num_rows

    def check_workers(self) -> None:
        """Raises UserError unless all workers read the same data; all workers check together, once.

        Every worker calls it before `fit`, `evaluate` and `predict`.
        """
        several = self._strategy.num_replicas_in_sync > len(self._devices)
        if several and not self._is_agreed:
            check_same(self.data.facts(), self._strategy, of="their data")
            self._is_agreed = True

    # How the batches of an epoch are drawn.

    def _begin(self, ticket: object) -> int:
        """Lets the holder of a ticket draw, and returns the number of batches in its epoch."""
        if self.next_position != self._position:
            step = self._position % self.num_batches
            if self._skip_to(self.next_position):
                log.info("data: the last epoch stopped at step %d; its rest is dropped", step)
            else:
                log.info("data: the last epoch stopped at step %d; a new pipeline is built", step)
                self._restart(self.next_position)
        self._drawing = ticket
        if self._is_epochs_end:
            self._is_epochs_end = False
            return 0
        return self.num_batches - self._position % self.num_batches

    def _next(self, ticket: object):
        if ticket is not self._drawing:
            raise UserError(
                "this iterator has failed, or a newer iterator draws from the same loader; start "
                "again with iter(loader), and give each of two readers its own loader"
            )
        with self._reading():
            batches = self._skipping_lost(self._draw)
            if self.pads or self._class_weight is not None:
                batches = [self._weighted(index, batch) for index, batch in enumerate(batches)]
            batch = batches[0]
            if len(batches) > 1:
                batch = tf.nest.map_structure(self._per_replica, *batches)
        self._advance(1)
        if self._num_to_keep:
            self.kept, self._num_to_keep = _first_rows(batches, self._num_to_keep), 0
        return batch

    def _take(self, ticket: object, most: int, *, may_wait: bool) -> list[Deferred] | None:
        if ticket is not self._drawing or (self.deferred_are_made and not may_wait):
            return None
        if most not in self._at_a_time:
            self._at_a_time[most] = self._choose_number(most)
        number = self._at_a_time[most]
        if number == 1:
            return None
        with self._reading():
            deferred = self._skipping_lost(lambda: self._draw_deferred(number))
            deferred = [self._weighing(index, each) for index, each in enumerate(deferred)]
        self._advance(len(deferred[0]))
        if self._num_to_keep:
            batches = [each.first() for each in deferred]
            self.kept, self._num_to_keep = _first_rows(batches, self._num_to_keep), 0
        return deferred

    def _draw_deferred(self, number: int) -> list[Deferred]:
        """Returns each local replica's next `number` batches."""
        if self._deferred is None or self._number != number:
            self._deferred = [
                self.data.deferred(self._placement(index), self._feed(index), number)
                for index in range(len(self._devices))
            ]
            self._number, self._streams = number, None
        deferred = [next(each) for each in self._deferred]
        shortest = min(map(len, deferred))  # the others fail only after the examples before
        return [each if len(each) == shortest else each.cut(shortest) for each in deferred]

    @property
    def deferred_are_made(self) -> bool:
        """Whether the batches of a launch are finished, and wait for each other."""
        return getattr(self.data, "deferred_are_made", False)

    def _choose_number(self, most: int) -> int:
        """Returns how many batches one launch takes, at most `most`, and logs why it is fewer.

        All workers take the same number, because XLA may sum once for a whole launch. So every
        worker must call it.
        """
        number, why = 1, "your own pipeline gives them one by one"
        if hasattr(self.data, "at_a_time"):
            number, why = self.data.at_a_time(self._devices, most)
        fewest = int(of_workers(np.array([number]), self._strategy).min())
        if fewest < number:
            number, why = fewest, "another worker can take no more"
        if number < most:
            how = "one batch" if number == 1 else f"{number} batches"
            log.info("data: a launch takes %s, because %s", how, why)
        return number

    @contextlib.contextmanager
    def _reading(self):
        """Within the context, time counts as waiting; a failure restarts the epoch."""
        began = time.perf_counter()
        try:
            yield
        except BaseException:
            # The pipeline has ended or lost batches: the next iterator begins this epoch again.
            self._drawing = None
            self._restart(self._position // self.num_batches * self.num_batches)
            raise
        self.waited_s += time.perf_counter() - began

    def _advance(self, num_batches: int) -> None:
        """Moves the position past the given batches, and records their masks if asked to."""
        if self._recording is not None:
            replicas = range(self._strategy.num_replicas_in_sync)
            for position in range(self._position, self._position + num_batches):
                self._recording += [self._real(position, each) for each in replicas]
        self._position += num_batches

    def _restart(self, position: int) -> None:
        self._position, self._streams, self._deferred = position, None, None

    def _skip_to(self, position: int) -> bool:
        """Moves streams ahead that must draw the batches in between; returns whether they did."""
        streams = self._streams or []
        if not streams or not all(hasattr(each, "skip_to") for each in streams):
            return False
        skipped = [each.skip_to(position) for each in streams]  # all, so that they stay together
        if not all(skipped):
            return False
        self._position = position
        return True

    def _draw(self) -> list:
        """Returns each local replica's batch."""
        if self._streams is None:
            self._deferred = None  # its position is behind from here on
            self._streams = [self._stream(index) for index in range(len(self._devices))]
        return [next(stream) for stream in self._streams]

    def _skipping_lost(self, draw: Callable):
        """Returns `draw()`. With skips_bad, examples that cannot be read are dropped first."""
        while True:
            try:
                return draw()
            except UnreadableError as error:
                if not self.data.skips_bad:
                    raise
                # They could be read when the data was opened.
                log.warning("data: %s; skipped from this batch on", error)
                self._lost |= set(error.ids)
                self._streams = self._deferred = None
                most = min(max(MAX_LOST, MAX_LOST_SHARE * self.num_examples), self.num_examples - 1)
                if len(self._lost) > most:
                    raise UserError(
                        f"{len(self._lost)} of {self.num_examples} examples can no longer be read; "
                        "check whether the disk or the folder is still there"
                    ) from error

    def _stream(self, local_index: int):
        return self.data.stream(self._placement(local_index), self._feed(local_index))

    def _feed(self, local_index: int):
        replica_index = self._first_replica + local_index
        return self.data.feed(replica_index, first=self._position, lost=self._lost)

    def _placement(self, local_index: int) -> Placement:
        words = [self._seed, self._first_replica + local_index]
        return Placement(
            device=self._devices[local_index],
            num_threads=self._num_threads,
            seed=int(np.random.SeedSequence(words).generate_state(1)[0]),
        )

    def _real(self, position: int, replica_index: int) -> np.ndarray:
        if self._lost:  # the plan does not know them
            return self.data.feed(replica_index, first=position, lost=self._lost).rows(0).real
        epoch, step = divmod(position, self.num_batches)
        return self.data.plan.real(epoch=epoch, step=step, replica_index=replica_index)

    def _weighted(self, local_index: int, batch: tuple) -> tuple:
        with tf.device(self._devices[local_index].name):
            real = None
            if self.pads:
                rows = self._real(self._position, self._first_replica + local_index)
                real = self._on_device(local_index, rows)
            return weighted(batch, real, self._class_weight)

    def _weighing(self, local_index: int, deferred: Deferred) -> Deferred:
        """Returns a `Deferred` that adds weights to its batches, if they have weights."""
        inputs, shared = dict(deferred.inputs), dict(deferred.shared)
        with tf.device(self._devices[local_index].name):
            if self.pads:
                positions = range(self._position, self._position + len(deferred))
                replica_index = self._first_replica + local_index
                real = np.stack([self._real(each, replica_index) for each in positions])
                inputs["real"] = self._on_device(local_index, real)
            if self._class_weight is not None:
                shared["class_weight"] = tf.identity(self._class_weight)
        make = Weighing(deferred.make)
        return dataclasses.replace(deferred, inputs=inputs, shared=shared, make=make)

    def _on_device(self, local_index: int, mask: np.ndarray) -> tf.Tensor:
        """Returns a mask as float32; a cached one, as a copy would wait for the GPU's queue."""
        key = local_index, mask.shape, mask.tobytes()
        if key not in self._masks:
            if len(self._masks) >= MOST_MASKS:  # lost files can make many masks
                self._masks.clear()
            self._masks[key] = tf.constant(mask, tf.float32)
        return self._masks[key]

    def _per_replica(self, *parts):
        if parts[0] is None:
            return None
        return self._strategy.experimental_distribute_values_from_function(
            lambda context: parts[context.replica_id_in_sync_group - self._first_replica]
        )


def _classes(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > 5 else ""
    noun = "class" if len(names) == 1 else "classes"
    return f"{len(names):,} {noun}: {', '.join(names[:5])}{more}"


class _Epoch:
    """An iterator from the loader's position to the end of the epoch.

    Attributes:
      pads: whether rows of weight 0 are padding; tfaccel's step reads it.
      are_made: whether the batches of a launch are finished, and wait for each other.
      ends_alike: True, because the epoch has the same number of batches on every worker.
    """

    ends_alike = True

    def __init__(self, loader: Loader):
        self._loader = loader
        # The loader holds the ticket and not this iterator. A reference in both directions would
        # keep the memory of the pipelines until the garbage collector finds the cycle, which it
        # seldom looks for.
        self._ticket = object()
        self._left = None  # None before the first batch
        self.pads, self.are_made = loader.pads, loader.deferred_are_made

    def __iter__(self):
        return self

    def __next__(self):
        if self._num_left() == 0:
            raise StopIteration
        batch = self._loader._next(self._ticket)
        self._left -= 1
        return batch

    def take(self, most: int, *, may_wait: bool = True) -> list[Deferred] | None:
        """Returns each replica's next batches for one launch of several steps.

        None at the epoch's end, and where batches are drawn one by one.

        Args:
          most: the largest number of batches.
          may_wait: whether finished batches may wait until all batches of the launch are finished.
        """
        if self._num_left() == 0:
            return None
        deferred = self._loader._take(self._ticket, most, may_wait=may_wait)
        if deferred is not None:
            self._left -= len(deferred[0])
        return deferred

    def _num_left(self) -> int:
        if self._left is None:
            self._left = self._loader._begin(self._ticket)
        return self._left


def _first_rows(batches: list[tuple], num_rows: int) -> tuple:
    """Returns NumPy copies of the first rows of the replicas' batches, in replica order."""
    copies = [tf.nest.map_structure(lambda each: each[:num_rows].numpy(), b) for b in batches]
    return tf.nest.map_structure(lambda *parts: np.concatenate(parts)[:num_rows], *copies)


def check_same_classes(ours: Sequence[str], theirs: Sequence[str]) -> None:
    """Raises UserError unless training and test images give the same numbers to the same classes.

    Args:
      ours: class names of the training images; empty if there are none.
      theirs: class names of the test images; empty if there are none.
    """
    if not ours or not theirs or ours == theirs:
        return
    numbered = all(each.isdigit() for each in (*ours, *theirs))
    if numbered and theirs == ours[: len(theirs)]:
        return  # a small test set may lack the last classes
    for one, other, which in ((ours, theirs, "test"), (theirs, ours, "training")):
        missing = sorted(set(one) - set(other))
        if missing:
            fix = ""
            if which == "test":
                fix = "; if the test images lack some classes, give class_names=train.class_names"
            raise UserError(
                f"the {which} images have no class '{missing[0]}', but the other images have it; "
                f"expected the same classes in both{fix}"
            )
    raise UserError(
        f"the training images have the classes {', '.join(ours[:3])}, ..., the test images "
        f"{', '.join(theirs[:3])}, ...; give both the same order with class_names=train.class_names"
    )
