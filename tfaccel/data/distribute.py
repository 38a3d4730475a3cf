"""Each replica's stream to what `model.fit` takes.

Takes data that makes a stream for each replica, and the strategy; gives a `Loader`, which Keras
trains on as on any data set: it knows its length, and every epoch of it is whole.

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
from tfaccel.runtime.agreement import check_same
from tfaccel.runtime.devices import Device
from tfaccel.runtime.private_names import DataAdapter

log = logging.getLogger("tfaccel")

# Examples that may become unreadable in a run that leaves bad files out: more are another fault.
MAX_LOST, MAX_LOST_SHARE = 10, 0.1

MOST_MASKS = 64  # that are kept on the devices: of whole batches, and of an epoch's last


class Loader(DataAdapter, tf.distribute.DistributedDataset):
    """Batches for every replica of this worker, one epoch after another.

    A batch is (x, y, weight) where its data pads, (x, y) otherwise; with several replicas each is a
    `tf.distribute` per-replica value. All batches have the same shape. `weight`, [rows] float32, is
    0 for padding and 1, or its class's weight, for a row that counts.

    The streams live as long as the loader: a second epoch or a second `fit` goes on with them. Only
    an epoch that is left half way, and `start_at`, start new ones.

    Attributes:
      data: what is read: an ImageData, ExamplesData or PipelineData.
      class_names: of the labels, in order; empty where there are none.
      pixel_range: (least, largest) value of a pixel as the model gets it; None where the data are
        not images that a tfaccel loader normalises.
      num_examples: in an epoch; None for endless data.
      num_batches: steps in an epoch.
      global_batch_size: examples per step over all replicas.
      pads: whether some batches may have padding.
      waited_s: seconds that readers have waited for their batches, in this process.
      kept: what `keep_next` asked for, (x, y) or (x, y, weight) in NumPy; None until it is there.
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
        """Builds no pipeline yet: that is done at the first batch.

        Args:
          data: what is read.
          devices: of this worker's replicas.
          seed: of a user's own pipeline, in which we draw nothing.
          num_threads: CPU threads of each replica's stream.
          first_replica: this worker's first replica, counted over all workers.
          strategy: whose replicas take the batches.
        """
        self.data = data
        self.class_names = data.class_names
        self.pixel_range = getattr(data, "pixel_range", None)
        self.warned_of = set()  # models whose own scaling does not suit that range
        self.num_examples = data.plan.num_examples
        self.global_batch_size = data.plan.global_batch_size
        has_rest = data.plan.last_batch == "pad" and self.num_examples % self.global_batch_size > 0
        # Of bad files that are left out in the middle of a run, the rows become padding too.
        self.pads = has_rest or data.skips_bad
        self._devices, self._seed, self._num_threads = tuple(devices), seed, num_threads
        self._first_replica, self._strategy = first_replica, strategy
        self._class_weight, self._is_agreed, self._padding_is_known = None, False, False
        self._drawing = None  # the ticket of the _Epoch that may draw
        self._position = 0  # of the batch that comes next, counted from the start of epoch 0
        self._is_epochs_end = False  # whether an epoch without a step comes next
        self._lost = frozenset()
        self._streams = None
        self._deferred, self._number = None, None  # streams of them, and how many at a time
        self._at_a_time = {}  # that number, by how many at most; 1 where they come one by one
        self._masks = {}  # on a device, by its number and the mask: nearly always the same few
        self._recording = None  # the masks of drawn batches, while `recorded_real` asks for them
        self.waited_s = 0.0
        self.kept, self._num_to_keep = None, 0

    @property
    def strategy(self) -> tf.distribute.Strategy:
        """The strategy that distributes the batches to its replicas."""
        return self._strategy

    # What Keras asks for.

    def get_tf_dataset(self):
        """Returns itself: an epoch's batches are drawn from it.

        Raises:
          UserError: there may be padding, which stock Keras's step would count.
        """
        if self.pads and not self._padding_is_known:
            raise UserError(
                "this model's step counts padding as examples; compile it by run.compile(model, "
                "...), or give the loader last_batch='drop'"
            )
        return self

    @contextlib.contextmanager
    def padding_left_out(self):
        """Within the context, what reads this loader by Keras's methods knows padding."""
        before, self._padding_is_known = self._padding_is_known, True
        try:
            yield
        finally:
            self._padding_is_known = before

    @property
    def num_batches(self) -> int:
        """The steps of an epoch."""
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
        """Returns the steps of an epoch."""
        return self.num_batches

    def __repr__(self):
        """Returns in a few lines what it gives: examples, classes, batches, and by what."""
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
        """Returns what the data say of themselves, or else the shapes of a replica's batch."""
        if hasattr(self.data, "described"):
            return self.data.described()
        specs = tf.nest.flatten(self.data.spec)
        shapes = ", ".join(f"{tuple(each.shape)} {each.dtype.name}" for each in specs)
        return [f"a replica's batch: {shapes}"]

    def __iter__(self) -> Iterator:
        """Returns an iterator over one epoch. From its first batch on it replaces any earlier."""
        return _Epoch(self)

    @contextlib.contextmanager
    def class_weights(self, class_weight: Mapping[int, float] | None):
        """Within the context, batches carry each example's weight: that of its class.

        Args:
          class_weight: class index to weight, as in `fit`; classes that are not in it weigh 1.
            None for no weights.
        """
        before = self._class_weight  # of the `fit` that this test on the same loader is part of
        self._class_weight = None
        if class_weight is not None:
            if not self.class_names:
                raise UserError(
                    "class_weight for data of which no classes are known; leave it out, or let "
                    "an example's third part be its weight: (x, y, weight)"
                )
            labels = range(len(self.class_names))
            if not isinstance(class_weight, Mapping) or not set(class_weight) <= set(labels):
                raise UserError(
                    f"class_weight={class_weight!r}; expected a dict from class numbers, 0 to "
                    f"{len(labels) - 1} in the order of loader.class_names, to weights"
                )
            self._class_weight = tf.constant([float(class_weight.get(each, 1)) for each in labels])
        try:
            yield
        finally:
            self._class_weight = before

    # Where it stands.

    def start_at(self, *, epoch: int, step: int = 0) -> None:
        """Makes the next iterator begin at a step of an epoch, as an uninterrupted run would.

        The examples, their order and the augmentation are those that the same (seed, epoch, step)
        has in any run, on any number of replicas with the same global batch size. (A user's own
        DALI pipeline draws by itself: of that, the examples alone.)

        Args:
          epoch: from 0.
          step: of the epoch, from 0; the number of its steps for its end, where the next iterator
            gives no batch.

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
        """The batches given so far, counted from the start of epoch 0."""
        return self._position

    @property
    def begins_late(self) -> bool:
        """Whether the next iterator begins after its epoch's first step, as after `start_at`."""
        return self._is_epochs_end or self.next_position % self.num_batches > 0

    @property
    def next_position(self) -> int:
        """The batch that the next iterator begins with, counted from the start of epoch 0."""
        step = self._position % self.num_batches
        left_half_way = step > 0 and self._drawing is not None
        return self._position - step + self.num_batches if left_half_way else self._position

    @contextlib.contextmanager
    def recorded_real(self):
        """Within the context, notes which rows of each batch that is drawn are not padding.

        Yields:
          A list, to which each batch adds, for each replica of all workers, [rows] bool.
        """
        self._recording = []
        try:
            yield self._recording
        finally:
            self._recording = None

    def keep_next(self, num_rows: int) -> None:
        """Makes `kept` a copy of the first rows, of this worker, of the batch that comes next."""
        self._num_to_keep = num_rows

    def check_workers(self) -> None:
        """Raises UserError unless all workers read the same; asked once, of all of them at a time.

        Call it where every worker does: before `fit`, `evaluate` and `predict`.
        """
        several = self._strategy.num_replicas_in_sync > len(self._devices)
        if several and not self._is_agreed:
            check_same(self.data.facts(), self._strategy, of="their data")
            self._is_agreed = True

    # How an epoch is drawn.

    def _begin(self, ticket: object) -> int:
        """Makes a ticket the one that draws, and returns how many batches its epoch has."""
        if self.next_position != self._position:
            step = self._position % self.num_batches
            if self._skip_to(self.next_position):
                log.info("data: the rest of an epoch that was left at step %d is dropped", step)
            else:
                log.info("data: a new pipeline, because an epoch was left at step %d", step)
                self._restart(self.next_position)
        self._drawing = ticket
        if self._is_epochs_end:
            self._is_epochs_end = False
            return 0
        return self.num_batches - self._position % self.num_batches

    def _next(self, ticket: object):
        if ticket is not self._drawing:
            raise UserError(
                "this iterator has failed, or a newer one draws from the same loader; begin anew "
                "with iter(loader), and give each of two readers a loader of its own"
            )
        with self._reading():
            batches = self._unless_lost(self._draw)
            if self.pads or self._class_weight is not None:
                batches = [self._weighted(index, batch) for index, batch in enumerate(batches)]
            batch = self._distributed(batches)
        self._given(1)
        if self._num_to_keep:
            self.kept, self._num_to_keep = _first_rows(batches, self._num_to_keep), 0
        return batch

    def _take(self, ticket: object, most: int, *, may_wait: bool) -> list[Deferred] | None:
        is_alone = self._strategy.num_replicas_in_sync == len(self._devices)
        too_soon = not may_wait and getattr(self.data, "come_made", False)
        if ticket is not self._drawing or not is_alone or too_soon:
            return None
        if most not in self._at_a_time:
            self._at_a_time[most] = self._choose_number(most)
        number = self._at_a_time[most]
        if number == 1:
            return None
        with self._reading():
            deferred = self._unless_lost(lambda: self._draw_deferred(number))
            deferred = [self._weighing(index, each) for index, each in enumerate(deferred)]
        self._given(len(deferred[0]))
        if self._num_to_keep:
            batches = [each.first() for each in deferred]
            self.kept, self._num_to_keep = _first_rows(batches, self._num_to_keep), 0
        return deferred

    def _draw_deferred(self, number: int) -> list[Deferred]:
        """Returns each local replica's next ones, so many at a time."""
        if self._deferred is None or self._number != number:
            self._deferred = [
                self.data.deferred(self._placement(index), self._feed(index), number)
                for index in range(len(self._devices))
            ]
            self._number, self._streams = number, None
        return [next(each) for each in self._deferred]

    def _choose_number(self, most: int) -> int:
        """Returns how many batches are taken together, of so many at most; says why no more."""
        number, why = 1, "they are of examples or a pipeline of one's own"
        if hasattr(self.data, "at_a_time"):
            number, why = self.data.at_a_time(self._devices, most)
        if number < most:
            how = "one by one" if number == 1 else f"{number} at a time"
            log.info("data: batches come %s, because %s", how, why)
        return number

    @contextlib.contextmanager
    def _reading(self):
        """Within the context, time counts as waiting, and a failure leaves this epoch undone."""
        began = time.perf_counter()
        try:
            yield
        except BaseException:
            # The pipeline is over or out of step: the next iterator begins this epoch anew.
            self._drawing = None
            self._restart(self._position // self.num_batches * self.num_batches)
            raise
        self.waited_s += time.perf_counter() - began

    def _given(self, num_batches: int) -> None:
        """Counts batches that were given."""
        if self._recording is not None:
            replicas = range(self._strategy.num_replicas_in_sync)
            for position in range(self._position, self._position + num_batches):
                self._recording += [self._real(position, each) for each in replicas]
        self._position += num_batches

    def _restart(self, position: int) -> None:
        self._position, self._streams, self._deferred = position, None, None

    def _skip_to(self, position: int) -> bool:
        """Goes on with streams that can only be reached by drawing what comes before."""
        streams = self._streams or []
        if not streams or not all(hasattr(each, "skip_to") for each in streams):
            return False
        skipped = [each.skip_to(position) for each in streams]  # all, or they part
        if not all(skipped):
            return False
        self._position = position
        return True

    def _draw(self) -> list:
        """Returns each local replica's batch."""
        if self._streams is None:
            self._deferred = None  # it stands elsewhere
            self._streams = [self._stream(index) for index in range(len(self._devices))]
        return [next(stream) for stream in self._streams]

    def _unless_lost(self, draw: Callable):
        """Returns what `draw` returns, without examples that can no longer be read, if allowed."""
        while True:
            try:
                return draw()
            except UnreadableError as error:
                if not self.data.skips_bad:
                    raise
                # They were there when all were looked through. Without them, from here on.
                log.warning("data: %s; left out from here on", error)
                self._lost |= set(error.ids)
                self._streams = self._deferred = None
                most = min(max(MAX_LOST, MAX_LOST_SHARE * self.num_examples), self.num_examples - 1)
                if len(self._lost) > most:
                    raise UserError(
                        f"{len(self._lost)} of {self.num_examples} examples could be read at the "
                        "start and cannot now; is the disk or the folder gone?"
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
        if self._lost:  # some of which it may be that it would read
            return self.data.feed(replica_index, first=position, lost=self._lost).rows(0).real
        epoch, step = divmod(position, self.num_batches)
        return self.data.plan.real(epoch=epoch, step=step, replica_index=replica_index)

    def _weighted(self, local_index: int, batch: tuple) -> tuple:
        with tf.device(self._devices[local_index].name):
            real = self._mask(local_index) if self.pads else None
            return weighted(batch, real, self._class_weight)

    def _weighing(self, local_index: int, deferred: Deferred) -> Deferred:
        """Returns the same, whose batches are (x, y, weight) where they have weights."""
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

    def _mask(self, local_index: int) -> tf.Tensor:
        """Returns which rows of the present batch are not padding: [rows] float32, 1 or 0."""
        real = self._real(self._position, self._first_replica + local_index)
        return self._on_device(local_index, real)

    def _on_device(self, local_index: int, mask: np.ndarray) -> tf.Tensor:
        """Returns a mask as float32: to bring one there is to wait for what the GPU is doing."""
        key = local_index, mask.shape, mask.tobytes()
        if key not in self._masks:
            if len(self._masks) >= MOST_MASKS:  # where files are lost, there may be many
                self._masks.clear()
            self._masks[key] = tf.constant(mask, tf.float32)
        return self._masks[key]

    def _distributed(self, batches: list):
        """Returns the replicas' batches as Keras takes them."""
        if len(batches) == 1:
            return batches[0]
        return tf.nest.map_structure(lambda *parts: self._per_replica(parts), *batches)

    def _per_replica(self, parts):
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
    """One pass over a loader, from where it stands to the epoch's end.

    Attributes:
      pads: whether rows of weight 0 are padding: tfaccel's step asks.
    """

    def __init__(self, loader: Loader):
        self._loader = loader
        # By which the loader knows it: if it held this, neither would end before Python looks for
        # such circles, which is seldom, and the memory of its pipelines would be held until then.
        self._ticket = object()
        self._left = None  # not begun
        self.pads = loader.pads

    def __iter__(self):
        return self

    def __next__(self):
        if self._num_left() == 0:
            raise StopIteration
        batch = self._loader._next(self._ticket)
        self._left -= 1
        return batch

    def take(self, most: int, *, may_wait: bool = True) -> list[Deferred] | None:
        """Returns each replica's next batches, at most so many, for steps in one launch.

        None at the epoch's end, and where batches come one by one.

        Args:
          most: how many.
          may_wait: whether batches that a loader makes may wait until all of them are made.
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
    """Returns NumPy copies of some rows of the replicas' batches, in their order."""
    copies = [tf.nest.map_structure(lambda each: each[:num_rows].numpy(), b) for b in batches]
    return tf.nest.map_structure(lambda *parts: np.concatenate(parts)[:num_rows], *copies)


def check_same_classes(ours: Sequence[str], theirs: Sequence[str]) -> None:
    """Raises UserError unless test images number the same classes as training images, alike.

    Args:
      ours: the class names of the training images; empty where there are none.
      theirs: those of the test images.
    """
    if not ours or not theirs or ours == theirs:
        return
    numbered = all(each.isdigit() for each in (*ours, *theirs))
    if numbered and theirs == ours[: len(theirs)]:
        return  # a small test set need not have the last classes
    for one, other, which in ((ours, theirs, "test"), (theirs, ours, "training")):
        missing = sorted(set(one) - set(other))
        if missing:
            cure = "; for test images without some classes, give class_names=train.class_names"
            raise UserError(
                f"the {which} images have no class '{missing[0]}', which the others have; expected "
                f"the same classes in both{cure if which == 'test' else ''}"
            )
    raise UserError(
        f"the training images number their classes {', '.join(ours[:3])}, ..., the test images "
        f"{', '.join(theirs[:3])}, ...; give both the same order, by class_names=train.class_names"
    )
