"""TF_CONFIG: reads this process's place from TensorFlow's own variable.

The claim is None if TF_CONFIG names no workers.

    claim = tf_config.claim(os.environ)
    claim.make().addresses      # ("10.0.0.1:2222", "10.0.0.2:2222")

https://www.tensorflow.org/guide/distributed_training#setting_up_the_tf_config_environment_variable
"""

import json
from collections.abc import Mapping, Sequence

from tfaccel.common.errors import UserError
from tfaccel.runtime.cluster.addresses import check_addresses, is_address, neighbours
from tfaccel.runtime.cluster.place import Claim, Cluster

JOBS = ("chief", "worker")  # TensorFlow counts replicas in this order
EXPECTED = (
    'expected {"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}'
)


def claim(environment: Mapping[str, str]) -> Claim | None:
    """Reads TF_CONFIG. If it has one worker, this process is the only worker.

    Raises:
      UserError: TF_CONFIG is invalid, or has other jobs than chief and worker.
    """
    jobs, task = _read(environment.get("TF_CONFIG") or "{}")
    tasks = [(job, index) for job in JOBS for index in range(len(jobs.get(job, ())))]
    if not tasks:
        return None
    if len(tasks) == 1:
        alone = Cluster(source="TF_CONFIG has one worker")
        return Claim("TF_CONFIG", 1, 0, "it has one worker", lambda: alone)
    addresses = tuple(jobs[job][index] for job, index in tasks)
    check_addresses(addresses, of="TF_CONFIG")
    worker_index = _worker_index(task, tasks)
    cluster = Cluster(
        addresses,
        worker_index,
        tasks[0][0] == "chief",
        *neighbours(addresses, worker_index),
        source="TF_CONFIG",
    )
    words = f"it has {len(tasks)} workers and task={task}"
    return Claim("TF_CONFIG", len(tasks), worker_index, words, lambda: cluster)


def _read(text: str) -> tuple[dict, object]:
    """Returns the checked jobs, and the unchecked task."""
    try:
        tf_config = json.loads(text)
        jobs = dict(tf_config.get("cluster", {}))
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise UserError(f"TF_CONFIG={text!r:.200} cannot be read ({error}); {EXPECTED}") from error
    for job, addresses in jobs.items():
        if job not in JOBS:
            raise UserError(
                f"TF_CONFIG has the job {job!r}, but tfaccel trains only on a chief and workers; "
                f"remove {job!r} from the cluster, and do not start tfaccel there"
            )
        if not isinstance(addresses, list) or not all(map(is_address, addresses)):
            raise UserError(f"TF_CONFIG has {job}={addresses!r}; {EXPECTED}")
    if len(jobs.get("chief", ())) > 1:
        raise UserError(
            f"TF_CONFIG has chief={jobs['chief']}; keep one chief, and make the others workers"
        )
    return jobs, tf_config.get("task")


def _worker_index(task, tasks: Sequence[tuple[str, int]]) -> int:
    """Returns the position of TF_CONFIG's `task` among the `tasks` (job, index)."""
    names = [f"{job} {index}" for job, index in tasks]
    name = f"{task.get('type')} {task.get('index')}" if isinstance(task, dict) else None
    if name not in names:
        raise UserError(
            f"TF_CONFIG has task={task!r}, which is not in its cluster; expected the type and "
            f"index of one of: {', '.join(names)}"
        )
    return names.index(name)
