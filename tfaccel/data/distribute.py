"""Each replica's stream to what `model.fit` takes.

Takes the files, the strategy and the replicas' devices; gives a `Loader`, which Keras trains on as
on any data set: it knows its length, and every epoch of it is whole.

    loader = Loader(folder, images, strategy=strategy, runtime=runtime, cluster=cluster, ...)
    model.fit(loader, validation_data=test_loader)

Private Keras name relied on: `DataAdapter`, the base class of what `fit` accepts as it is.
"""

import contextlib
import functools
import logging
from collections.abc import Mapping

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters.data_adapter import DataAdapter

from tfaccel.cluster import Cluster
from tfaccel.config import ImageConfig
from tfaccel.data import dali, image_folder, shards
from tfaccel.data.image_folder import ImageFolder
from tfaccel.errors import UserError
from tfaccel.runtime import Runtime

log = logging.getLogger("tfaccel")


class Loader(DataAdapter, tf.distribute.DistributedDataset):
    """Batches of labelled images for every replica of this worker, one epoch after another.

    A batch is (image, label) or, with class weights, (image, label, weight): image [batch, height,
    width, channels] float16 or float32 in 0..1, label [batch] int32, weight [batch] float32. With
    several replicas each is a `tf.distribute` per-replica value. The last batch of an epoch is
    partial where the examples do not divide, and spread evenly: a replica may have one row fewer
    than another, or none.

    The pipelines live as long as the loader: a second epoch or a second `fit` goes on with them.
    Only an epoch that is left half way starts new ones. To take one batch and begin again, as Keras
    does before `fit`, costs nothing; but where one batch is the whole epoch, it is an epoch.

    Attributes:
      class_names: of the labels, in order.
      num_examples: in an epoch.
      num_batches: in an epoch.
      global_batch_size: examples per step over all replicas.
    """

    def __init__(
        self,
        folder: ImageFolder,
        images: ImageConfig,
        *,
        runtime: Runtime,
        cluster: Cluster,
        strategy: tf.distribute.Strategy,
        shuffle: bool,
    ):
        """Checks that the batches come out even. The pipelines are built at the first batch.

        Args:
          folder: the files.
          images: size, channels, batch size and augmentation.
          runtime: devices, threads, seed and precision.
          cluster: gives the replicas their global index.
          strategy: whose replicas take the batches.
          shuffle: whether every epoch has a new order.

        Raises:
          UserError: the global batch size does not divide by the replicas.
        """
        self.class_names = folder.class_names
        self.num_examples = len(folder.files)
        self.global_batch_size = images.global_batch_size
        self._num_replicas = strategy.num_replicas_in_sync
        _check_even(images.global_batch_size, self._num_replicas)
        image_folder.log_resize(folder, images.image_size)

        self._folder, self._images, self._runtime = folder, images, runtime
        self._first_replica = cluster.worker_index * len(runtime.devices)
        self._strategy, self._shuffle = strategy, shuffle
        self._class_weight = None
        self._drawing = None  # the _Epoch that may draw
        self._epoch, self._step = 0, 0  # of the batch that comes next
        self._first_batch = None  # kept while it is the only one of its epoch to have been drawn
        self._streams = None

    # What Keras asks for.

    def get_tf_dataset(self):
        """Returns itself: an epoch's batches are drawn from it."""
        return self

    @property
    def num_batches(self) -> int:
        """The steps of an epoch."""
        return shards.num_steps(self.num_examples, global_batch_size=self.global_batch_size)

    @property
    def element_spec(self):
        """The `tf.TensorSpec` of a batch on one replica."""
        image = tf.TensorSpec((None, *self._images.image_size, self._images.channels), self._dtype)
        return image, tf.TensorSpec((None,), tf.int32)

    def __len__(self):
        """Returns the steps of an epoch."""
        return self.num_batches

    def __iter__(self):
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
            labels = range(len(self.class_names))
            self._class_weight = tf.constant([float(class_weight.get(each, 1)) for each in labels])
        try:
            yield
        finally:
            self._class_weight = before

    # How an epoch is drawn.

    @property
    def _dtype(self) -> str:
        """Of the images: float16 where the model computes in it; DALI has no bfloat16."""
        compute_dtype = keras.DTypePolicy(self._runtime.precision).compute_dtype
        return "float16" if compute_dtype == "float16" else "float32"

    def _begin(self, epoch: "_Epoch") -> None:
        """Makes `epoch` the one that batches are drawn for."""
        self._drawing = epoch
        if self._step > 1:
            log.info("data: a new pipeline, because an epoch was left at step %d", self._step)
            self._restart(self._epoch + 1)

    def _next(self, epoch: "_Epoch"):
        if epoch is not self._drawing:
            raise UserError(
                "this iterator has failed, or a newer one draws from the same loader; begin anew "
                "with iter(loader), and give each of two readers a loader of its own"
            )
        if self._step == 1 and epoch.num_given == 0:
            # Keras looks at one batch's shapes before `fit` and `evaluate`, and starts again.
            return self._weighted(self._first_batch)
        try:
            batch = self._draw()
        except BaseException:
            # The pipeline is over or out of step: the next iterator begins this epoch anew.
            self._drawing = None
            self._restart(self._epoch)
            raise
        self._step += 1
        self._first_batch = batch if self._step == 1 else None
        if self._step == self.num_batches:
            self._epoch, self._step, self._first_batch = self._epoch + 1, 0, None
        return self._weighted(batch)

    def _restart(self, epoch: int) -> None:
        self._epoch, self._step, self._first_batch, self._streams = epoch, 0, None, None

    def _draw(self):
        if self._streams is None:
            self._streams = [self._stream(index) for index in range(len(self._runtime.devices))]
        batches = [next(stream) for stream in self._streams]
        rows_left = self.num_examples - self._step * self.global_batch_size
        if rows_left >= self._num_replicas:
            return batches
        # DALI makes no empty batch: a replica that has no rows left was given one, see _stream.
        for index, batch in enumerate(batches):
            own = shards.part(
                rows_left,
                num_replicas=self._num_replicas,
                replica_index=self._first_replica + index,
            )
            batches[index] = tuple(each[: own.stop - own.start] for each in batch)
        return batches

    def _weighted(self, batches):
        """Returns the replicas' batches as Keras takes them, with weights if there are any."""
        if self._class_weight is not None:
            batches = [
                (image, label, tf.gather(self._class_weight, label)) for image, label in batches
            ]
        if len(batches) == 1:
            return batches[0]
        return tuple(self._per_replica(parts) for parts in zip(*batches, strict=True))

    def _per_replica(self, parts):
        return self._strategy.experimental_distribute_values_from_function(
            lambda context: parts[context.replica_id_in_sync_group - self._first_replica]
        )

    def _stream(self, local_index: int) -> dali.DaliStream:
        replica_index = self._first_replica + local_index
        start, num_examples, shuffle = self._epoch, self.num_examples, self._shuffle
        seed, num_replicas = self._runtime.seed, self._num_replicas
        global_batch_size, num_steps = self.global_batch_size, self.num_batches

        @functools.lru_cache(maxsize=2)  # paths and labels may stand on two sides of an epoch's end
        def order(epoch: int):
            return shards.epoch_order(num_examples, seed=seed, epoch=epoch, shuffle=shuffle)

        def rows_of(number: int):  # holds no reference to this loader: see DaliStream
            epoch, step = divmod(number, num_steps)
            rows = shards.replica_batch(
                order(start + epoch),
                step=step,
                global_batch_size=global_batch_size,
                num_replicas=num_replicas,
                replica_index=replica_index,
            )
            return rows if len(rows) else order(start + epoch)[:1]

        # Another first epoch is another run of the pipeline: it does not repeat its random draws.
        words = [seed, replica_index, start]
        return dali.DaliStream(
            self._folder,
            self._images,
            placement=dali.Placement(
                device=self._runtime.devices[local_index],
                num_threads=self._runtime.dali_threads,
                seed=int(np.random.SeedSequence(words).generate_state(1)[0]),
            ),
            dtype=self._dtype,
            batch_size=min(global_batch_size // num_replicas, num_examples),
            rows_of=rows_of,
        )


class _Epoch:
    """One pass over a loader."""

    def __init__(self, loader: Loader):
        self._loader = loader
        self.num_given = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.num_given == len(self._loader):
            raise StopIteration
        if self.num_given == 0:
            self._loader._begin(self)
        batch = self._loader._next(self)
        self.num_given += 1
        return batch


def check_same_classes(train: Loader, test: Loader) -> None:
    """Raises UserError unless both number the same classes alike."""
    for one, other, which in ((train, test, "test"), (test, train, "training")):
        missing = sorted(set(one.class_names) - set(other.class_names))
        if missing:
            raise UserError(
                f"the {which} images have no class '{missing[0]}', which the others have; expected "
                "the same class folders in both"
            )


def _check_even(global_batch_size: int, num_replicas: int) -> None:
    below = global_batch_size // num_replicas * num_replicas
    if below != global_batch_size:
        fix = f"{below} or {below + num_replicas}" if below else f"{num_replicas}"
        raise UserError(
            f"global_batch_size={global_batch_size} is not divisible by {num_replicas} replicas; "
            f"use {fix}"
        )
