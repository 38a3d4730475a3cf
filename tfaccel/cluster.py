"""Which process of the job this is, and the `tf.distribute` strategy that follows from it.

Takes TF_CONFIG and the devices that `runtime` chose; gives a `Cluster` and a strategy.

    cluster = from_environment(os.environ)
    strategy = make_strategy(("/gpu:0", "/gpu:1"))
"""

import dataclasses
import functools
import json
from collections.abc import Mapping

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


def from_environment(environment: Mapping[str, str]) -> Cluster:
    """Reads TF_CONFIG; a process without one is a job of its own.

    Raises:
      UserError: TF_CONFIG is not what TensorFlow defines, or names more than one worker.
    """
    text = environment.get("TF_CONFIG") or "{}"
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


@functools.cache
def make_strategy(devices: tuple[str, ...]) -> tf.distribute.Strategy:
    """Returns the process's one MirroredStrategy with a replica on each of these devices.

    A second one on the same devices would number its collectives from the start again, and
    TensorFlow would take them for the first one's ("Shape mismatch in the collective instance").
    """
    return tf.distribute.MirroredStrategy(list(devices))
