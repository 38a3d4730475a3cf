"""Keras's callbacks that write files, of which a job of several workers has one's alone.

Takes the user's callbacks and the cluster; gives those that this worker has.

    callbacks = of_this_worker(callbacks, cluster)

tf.keras let the others write into a temporary folder; Keras 3 has all write into the same files.
"""

import logging

import keras

from tfaccel.common.errors import UserError
from tfaccel.runtime.cluster import Cluster

log = logging.getLogger("tfaccel")

WRITERS = (keras.callbacks.CSVLogger, keras.callbacks.ModelCheckpoint, keras.callbacks.TensorBoard)


def of_this_worker(
    callbacks: list[keras.callbacks.Callback], cluster: Cluster
) -> list[keras.callbacks.Callback]:
    """Returns the callbacks less those whose files the chief writes.

    Args:
      callbacks: the user's, in a flat list.
      cluster: of how many workers, and which this is.

    Raises:
      UserError: one would have each worker resume by itself.
    """
    if cluster.num_workers == 1:
        return callbacks
    if any(isinstance(each, keras.callbacks.BackupAndRestore) for each in callbacks):
        raise UserError(
            f"BackupAndRestore on {cluster.num_workers} workers: each would go on from its own "
            "backup; use run.checkpoints(folder), which all go on from"
        )
    writers = [] if cluster.is_chief else [each for each in callbacks if isinstance(each, WRITERS)]
    if writers:
        names = ", ".join(type(each).__name__ for each in writers)
        log.info("callbacks: %s, by the chief alone, which writes for all workers", names)
    return [each for each in callbacks if each not in writers]
