"""Callbacks that write files or to trackers: of several workers only the chief keeps them.

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

# The modules of callbacks that MLflow and Weights & Biases bring.
OF_TRACKERS = ("mlflow.", "wandb.")
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
    writers = [] if cluster.is_chief else [each for each in callbacks if _writes(each)]
    if writers:
        names = ", ".join(type(each).__name__ for each in writers)
        log.info("callbacks: only the chief runs %s, and writes for all workers", names)
    return [each for each in callbacks if each not in writers]


def logs_epochs_alone(callback: keras.callbacks.Callback) -> bool:
    """Returns whether a tracker's own callback does nothing with the logs of a batch.

    MLflow's MlflowCallback and W&B's WandbMetricsLogger have a method for each batch, also if they
    are asked for epochs alone, as they are by default (mlflow 3.17, wandb 0.31; 2026-11-30).
    """
    kind = type(callback)
    if not kind.__module__.startswith(OF_TRACKERS):
        return False  # also a user's subclass, which may read the logs
    of_batches = {"MlflowCallback": "log_every_n_steps", "WandbMetricsLogger": "logging_batch_wise"}
    return kind.__name__ in of_batches and not getattr(callback, of_batches[kind.__name__])


def _writes(callback: keras.callbacks.Callback) -> bool:
    modules = (each.__module__ for each in type(callback).__mro__)
    of_tracker = any(each.startswith(OF_TRACKERS) for each in modules)
    return of_tracker or isinstance(callback, WRITERS)
