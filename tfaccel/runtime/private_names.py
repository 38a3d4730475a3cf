"""Private names of TensorFlow, Keras and Python that the rooms below keras_internals need.

The canaries in tests/keras_internals/test_canaries.py say what each name must do.
"""

import sys
from collections.abc import Mapping, Sequence
from types import FrameType

import tensorflow as tf
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from tensorflow.compiler.tf2xla.python.xla import optimization_barrier
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.eager import context
from tensorflow.python.framework import config

__all__ = [
    "DataAdapter",  # the base class of what `fit` accepts as it is
    "abort_collectives",
    "ask_worker",
    "configure_coordination",
    "devices_are_known",
    "frame_of",
    "optimization_barrier",  # of XLA: what it returns is written to memory
    "stop_determinism",
]


def devices_are_known() -> bool:
    """Returns whether TensorFlow was asked for its devices, and so has read its flags."""
    return context.context()._physical_devices is not None


def stop_determinism() -> bool:
    """Lets TensorFlow choose any kernels again, and returns whether it chose deterministic ones."""
    was_on = config.is_op_determinism_enabled()
    if was_on:
        config.disable_op_determinism()
    return was_on


def configure_coordination(
    leader: str, jobs: Mapping[str, Sequence[str]], *, heartbeat_timeout_s: int
) -> None:
    """Sets how long TensorFlow's coordination service waits for a silent worker; 10 s by default.

    Args:
      leader: the chief, e.g. "/job:worker/replica:0/task:0".
      jobs: the addresses of the workers of each job.
      heartbeat_timeout_s: the longest silence.
    """
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=leader,
        heartbeat_timeout_in_ms=1000 * heartbeat_timeout_s,
        coordinated_jobs=[
            coordination_config_pb2.CoordinatedJob(name=job, num_tasks=len(addresses))
            for job, addresses in jobs.items()
        ],
    )


def ask_worker(task: str, *, timeout_s: float) -> None:
    """Waits until a worker answers.

    Args:
      task: the worker, e.g. "/job:worker/replica:0/task:1".
      timeout_s: the longest wait.

    Raises:
      tf.errors.OpError: It does not answer in time, or cannot be reached.
    """
    context.context().check_collective_ops_peer_health(task, timeout_in_ms=int(1000 * timeout_s))


def abort_collectives(reason: str) -> None:
    """Ends every collective of this process with an UnavailableError that gives the reason."""
    context.context().abort_collective_ops(tf.errors.UNAVAILABLE, reason)


def frame_of(thread: int) -> FrameType | None:
    """Returns the innermost frame of a thread of this process; None if it has ended.

    Args:
      thread: from `threading.get_ident`.
    """
    return sys._current_frames().get(thread)
