"""Orders the rows of each batch so that the replicas get them in the order of their ranks.

    dataset = in_rank_order(dataset, strategy)
    distributed = strategy.experimental_distribute_dataset(dataset)

TensorFlow 2.21 cuts a batch of n rows into pieces of ceil(n / replicas) rows. With W workers,
worker w gets the pieces w, w + W, w + 2 W and so on, one for each of its replicas. The rank of its
replica l is w L + l, where L is the number of its replicas. So with several workers of several
replicas, the rows that replicas gather would be in another order than in the batch: 0, 1, 4, 5, 2,
3, 6, 7 for 8 rows, two workers and two replicas on each.
"""

import numpy as np
import tensorflow as tf


def in_rank_order(dataset: tf.data.Dataset, strategy: tf.distribute.Strategy) -> tf.data.Dataset:
    """Returns the dataset with the rows of each batch in another order, if it must be another one.

    Args:
      dataset: batches of all replicas: nests of tensors whose first axis is the rows. Batches with
        sparse tensors, or of an unknown rank, keep their order.
      strategy: the strategy that distributes the dataset.
    """
    num_local = len(strategy.extended.worker_devices)
    num_workers = strategy.num_replicas_in_sync // num_local
    leaves = tf.nest.flatten(dataset.element_spec)
    if 1 in (num_local, num_workers) or not all(map(_has_rows, leaves)):
        return dataset

    def ordered(*batch):
        leaves = tf.nest.flatten(batch)
        num_rows = leaves[0].nrows() if _is_ragged(leaves[0]) else tf.shape(leaves[0])[0]
        rows = places(num_rows, num_workers=num_workers, num_local=num_local)
        moved = [_moved(each, rows) for each in leaves]
        batch = tf.nest.pack_sequence_as(batch, moved)
        return batch if isinstance(dataset.element_spec, tuple) else batch[0]

    return dataset.map(ordered, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def places(num_rows, *, num_workers: int, num_local: int) -> tf.Tensor:
    """Returns the row of the batch for each place that TensorFlow cuts up, [num_rows] int32.

    Args:
      num_rows: the number of rows, an int or a scalar tensor.
      num_workers: the number of workers.
      num_local: the number of replicas of each worker.
    """
    num_rows = tf.cast(num_rows, tf.int32)
    num_pieces = num_workers * num_local
    size = tf.maximum(1, -(-num_rows // num_pieces))
    sizes = tf.clip_by_value(num_rows - tf.range(num_pieces) * size, 0, size)
    # Piece p is for worker p % W and its replica p // W.
    piece_of_rank = np.arange(num_pieces).reshape(num_local, num_workers).T.ravel()
    starts = tf.cumsum(tf.gather(sizes, piece_of_rank), exclusive=True)  # by rank
    rank_of_piece = np.argsort(piece_of_rank)
    place = tf.range(num_rows)
    piece = place // size
    return tf.gather(tf.gather(starts, rank_of_piece), piece) + place - piece * size


def _has_rows(spec) -> bool:
    return isinstance(spec, tf.TensorSpec | tf.RaggedTensorSpec) and (spec.shape.rank or 0) > 0


def _is_ragged(value) -> bool:
    return isinstance(value, tf.RaggedTensor)


def _moved(value, rows: tf.Tensor):
    moved = tf.gather(value, rows)
    if not _is_ragged(value):
        moved.set_shape(value.shape)
    return moved
