"""Each replica's stream to what `model.fit` takes.

Takes the files, the strategy and the replicas' devices; gives a `Loader`, which Keras trains on as
on any data set: it knows its length, and every epoch of it is whole.

    loader = Loader(folder, images, strategy=strategy, runtime=runtime, cluster=cluster, ...)
    model.fit(loader, validation_data=test_loader)

Private Keras name relied on: `DataAdapter`, the base class of what `fit` accepts as it is.
"""

import itertools
import logging
from collections.abc import Mapping

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters.data_adapter import DataAdapter

from tfaccel.cluster import Cluster
from tfaccel.config import ImageConfig
from tfaccel.data import dali, shards
from tfaccel.data.image_folder import ImageFolder
from tfaccel.errors import UserError
from tfaccel.runtime import Runtime

log = logging.getLogger("tfaccel")


class Loader(DataAdapter, tf.distribute.DistributedDataset):
    """Batches of labelled images for every replica of this worker, one epoch after another.

    A batch is (image, label) or, with class weights, (image, label, weight): image [batch, height,
    width, channels] float16 or float32 in 0..1, label [batch] int32, weight [batch] float32. With
    several replicas each is a `tf.distribute` per-replica value. The last batch of an epoch is
    partial where the examples do not divide.

    The pipelines live as long as the loader: a second epoch or a second `fit` goes on with them.

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
          UserError: the global batch size does not divide by the replicas, or the last batch would
            be partial over several replicas.
        """
        self.class_names = folder.class_names
        self.num_examples = len(folder.files)
        self.global_batch_size = images.global_batch_size
        self._num_replicas = strategy.num_replicas_in_sync
        _check_even(images.global_batch_size, self.num_examples, self._num_replicas)
        dali.log_first_image(folder, images)

        self._folder, self._images, self._runtime = folder, images, runtime
        self._first_replica = cluster.worker_index * len(runtime.devices)
        self._strategy, self._shuffle = strategy, shuffle
        self._class_weight = None
        self._streams = None
        self._epoch, self._step = 0, 0  # of the batch that comes next
        self._first_batch = None  # kept while it is the only one of its epoch to have been drawn

    # What Keras asks for.

    def get_tf_dataset(self):
        """Returns itself: an epoch's batches are drawn from it."""
        return self

    @property
    def num_batches(self) -> int:
        """The steps of an epoch."""
        return shards.num_steps(
            self.num_examples, global_batch_size=self.global_batch_size, drop_last=False
        )

    @property
    def batch_size(self) -> int:
        """The global batch size, under the name Keras asks for."""
        return self.global_batch_size

    @property
    def has_partial_batch(self) -> bool:
        """Whether an epoch's last batch has fewer examples."""
        return self.partial_batch_size != 0

    @property
    def partial_batch_size(self) -> int:
        """The examples in the last batch, where it is partial; else 0."""
        return self.num_examples % self.global_batch_size

    @property
    def element_spec(self):
        """The `tf.TensorSpec` of a batch on one replica."""
        image = tf.TensorSpec((None, *self._images.image_size, self._images.channels), self._dtype)
        return image, tf.TensorSpec((None,), tf.int32)

    def __len__(self):
        """Returns the steps of an epoch."""
        return self.num_batches

    def __iter__(self):
        """Returns an iterator over one epoch. It takes the place of any earlier one."""
        return self._one_epoch()

    def weigh_classes(self, class_weight: Mapping[int, float] | None) -> None:
        """Adds to each example of the batches that follow the weight of its class; None ends it.

        Args:
          class_weight: class index to weight, as in `fit`; classes that are not in it weigh 1.
        """
        if class_weight is None:
            self._class_weight = None
            return
        labels = range(len(self.class_names))
        self._class_weight = tf.constant([float(class_weight.get(each, 1)) for each in labels])

    # How an epoch is drawn.

    @property
    def _dtype(self) -> str:
        """Of the images: float16 where the model computes in it; DALI has no bfloat16."""
        compute_dtype = keras.DTypePolicy(self._runtime.precision).compute_dtype
        return "float16" if compute_dtype == "float16" else "float32"

    def _one_epoch(self):
        if self._step > 1:
            # The rest of an abandoned epoch is not part of this one.
            log.debug("data: epoch %d was left at step %d", self._epoch, self._step)
            self._epoch, self._step, self._streams = self._epoch + 1, 0, None
        if self._step == 1:
            # Keras looks at one batch's shapes before `fit` and `evaluate`, and starts again.
            yield self._first_batch
        while True:
            batch = self._draw()
            self._first_batch = batch if self._step == 0 else None
            self._step += 1
            if self._step == self.num_batches:
                self._epoch, self._step, self._first_batch = self._epoch + 1, 0, None
                yield batch
                return
            yield batch

    def _draw(self):
        if self._streams is None:
            self._streams = [self._stream(index) for index in range(len(self._runtime.devices))]
        batches = [self._weighted(*next(stream)) for stream in self._streams]
        if len(batches) == 1:
            return batches[0]
        return tuple(self._per_replica(parts) for parts in zip(*batches, strict=True))

    def _weighted(self, image, label):
        if self._class_weight is None:
            return image, label
        return image, label, tf.gather(self._class_weight, label)

    def _per_replica(self, parts):
        return self._strategy.experimental_distribute_values_from_function(
            lambda context: parts[context.replica_id_in_sync_group - self._first_replica]
        )

    def _stream(self, local_index: int) -> dali.DaliStream:
        replica_index = self._first_replica + local_index
        start = self._epoch

        def index_batches():
            for epoch in itertools.count(start):
                order = shards.epoch_order(
                    self.num_examples, seed=self._runtime.seed, epoch=epoch, shuffle=self._shuffle
                )
                yield from shards.replica_batches(
                    order,
                    global_batch_size=self.global_batch_size,
                    num_replicas=self._num_replicas,
                    replica_index=replica_index,
                    drop_last=False,
                )

        # Another first epoch is another run of the pipeline: it does not repeat its random draws.
        words = [self._runtime.seed, replica_index, start]
        return dali.DaliStream(
            self._folder,
            self._images,
            placement=dali.Placement(
                device=self._runtime.devices[local_index],
                num_threads=self._runtime.dali_threads,
                seed=int(np.random.SeedSequence(words).generate_state(1)[0]),
            ),
            dtype=self._dtype,
            batch_size=self.global_batch_size // self._num_replicas,
            index_batches=index_batches,
        )


def _check_even(global_batch_size: int, num_examples: int, num_replicas: int) -> None:
    below = global_batch_size // num_replicas * num_replicas
    if below != global_batch_size:
        fix = f"{below} or {below + num_replicas}" if below else f"{num_replicas}"
        raise UserError(
            f"global_batch_size={global_batch_size} is not divisible by {num_replicas} replicas; "
            f"use {fix}"
        )
    if num_replicas > 1 and num_examples % global_batch_size:
        raise UserError(
            f"{num_examples} images make a partial last batch of {num_examples % global_batch_size}"
            f" at global_batch_size={global_batch_size}; with {num_replicas} replicas use a batch "
            "size that divides the number of images, or one replica"
        )
