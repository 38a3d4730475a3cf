"""Keras's callbacks that write files: in a job of several workers only the chief keeps them.

Takes the user's callbacks and the cluster; gives the callbacks that this worker keeps.

    callbacks = of_this_worker(callbacks, cluster)

In tf.keras the other workers wrote into a temporary folder. In Keras 3 all workers write into the
same files.
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
    """Returns the user's callbacks without those that only the chief keeps.

    Raises:
      UserError: there is a BackupAndRestore, with which each worker would resume on its own.
    """
    if cluster.num_workers == 1:
        return callbacks
    if any(isinstance(each, keras.callbacks.BackupAndRestore) for each in callbacks):
        raise UserError(
            f"BackupAndRestore on {cluster.num_workers} workers: each worker would resume from its "
            "own backup; use run.checkpoints(folder), from which all workers resume together"
        )
    writers = [] if cluster.is_chief else [each for each in callbacks if isinstance(each, WRITERS)]
    if writers:
        names = ", ".join(type(each).__name__ for each in writers)
        log.info("callbacks: only the chief runs %s, and writes for all workers", names)
    return [each for each in callbacks if each not in writers]
