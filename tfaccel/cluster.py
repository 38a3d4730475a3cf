"""Which process of the job this is, and the `tf.distribute` strategy that follows from it.

Takes TF_CONFIG and the devices that `runtime` chose; gives a `Cluster` and a strategy.

    cluster = from_environment(os.environ)
    strategy = make_strategy(runtime.devices)
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfaccel.errors import UserError


@dataclasses.dataclass(frozen=True)
class Cluster:
    """This worker's place in the job.

    Attributes:
      num_workers: processes in the job.
      worker_index: which of them this is, from 0.
    """

    num_workers: int = 1
    worker_index: int = 0

    @property
    def is_chief(self) -> bool:
        """Whether this worker writes what the job writes once. Every worker runs every step."""
        return self.worker_index == 0


def from_environment(environment: Mapping[str, str]) -> Cluster:
    """Reads TF_CONFIG; a process without one is a job of its own.

    Raises:
      UserError: TF_CONFIG is not what TensorFlow defines, or names more than one worker.
    """
    text = environment.get("TF_CONFIG", "{}")
    try:
        tf_config = json.loads(text)
        workers = [
            *tf_config.get("cluster", {}).get("chief", ()),
            *tf_config.get("cluster", {}).get("worker", ()),
        ]
    except (json.JSONDecodeError, AttributeError, TypeError) as error:
        raise UserError(
            f"TF_CONFIG={text!r} cannot be read ({error}); expected "
            '{"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}'
        ) from error
    if len(workers) > 1:
        raise UserError(
            f"TF_CONFIG names {len(workers)} workers; this version trains in one process: unset "
            "TF_CONFIG"
        )
    return Cluster()


def make_strategy(devices: Sequence[str]) -> tf.distribute.Strategy:
    """Returns a MirroredStrategy with one replica on each device."""
    return tf.distribute.MirroredStrategy(list(devices))
