"""Slurm: reads this process's place from the environment that `srun` sets.

The claim is None outside of a step, and in a step of one task.

    srun --nodes=2 --ntasks-per-node=1 tfaccel train --config=... --workdir=...
    claim = slurm.claim(os.environ)
    claim.make().addresses      # ("n9:25817", "n10:25818")

TensorFlow's SlurmClusterResolver sorts hosts as text (n10 before n9) and fails without GPUs.
"""

import itertools
import re
from collections.abc import Mapping

from tfaccel.common.errors import UserError
from tfaccel.runtime.cluster.addresses import base_port
from tfaccel.runtime.cluster.place import Claim, Cluster

NAMES = (
    "SLURM_STEP_NUM_TASKS",
    "SLURM_PROCID",
    "SLURM_NODEID",
    "SLURM_LOCALID",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_STEP_NODELIST",
    "SLURM_DISTRIBUTION",
)


def claim(environment: Mapping[str, str]) -> Claim | None:
    """Reads the variables of a step. A step of one task makes no claim, because it may be a shell.

    Raises:
      UserError: a variable is missing, or is not a number.
    """
    if environment.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        return None
    num_tasks, rank = (_number(environment, name) for name in NAMES[:2])
    words = f"SLURM_STEP_NUM_TASKS={num_tasks}, SLURM_PROCID={rank}"
    return Claim(_source(environment), num_tasks, rank, words, lambda: _cluster(environment))


def why_alone(environment: Mapping[str, str]) -> str | None:
    """Returns why a process in a Slurm job is the only worker; None outside of Slurm."""
    if "SLURM_STEP_NUM_TASKS" in environment:
        return f"{_source(environment)} has one task"
    if environment.get("SLURM_NTASKS", "1") != "1":
        return (
            f"Slurm has {environment['SLURM_NTASKS']} tasks for this job, but srun did not start "
            "this process; to start all tasks, use `srun tfaccel ...`"
        )
    return None


def nodes(environment: Mapping[str, str]) -> list[str]:
    """Returns the names of the step's nodes in Slurm's order.

    Raises:
      UserError: the list of nodes is missing or cannot be read.
    """
    return expand(_text(environment, "SLURM_STEP_NODELIST"))


def expand(nodelist: str) -> list[str]:
    """Returns the names in a node list, such as n9, n10, n12, gpu-a for "n[9-10,12],gpu-a".

    Raises:
      UserError: the text is not a node list of Slurm's.
    """
    names = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodelist)
    if ",".join(names) != nodelist or not names:
        raise UserError(f"Slurm's node list {nodelist!r} cannot be read; expected e.g. n[9-10,12]")
    found = []
    for name in names:
        # The parts are alternately outside and inside of brackets.
        parts = re.split(r"\[([^\]]*)\]", name)
        choices = [_range(each) if place % 2 else [each] for place, each in enumerate(parts)]
        found += map("".join, itertools.product(*choices))
    return found


def _range(text: str) -> list[str]:
    """Returns the numbers of "08-10,12" as text of the same width: 08, 09, 10, 12."""
    numbers = []
    for each in text.split(","):
        span = re.fullmatch(r"(\d+)(?:-(\d+))?", each)
        if not span:
            raise UserError(f"Slurm's node list has [{text}]; expected numbers, e.g. [08-10,12]")
        first, last = span[1], span[2] or span[1]
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return numbers


def tasks_per_node(text: str) -> list[int]:
    """Returns the number of tasks of each node, such as 2, 2, 2, 1 for "2(x3),1".

    Raises:
      UserError: the text is not in Slurm's format.
    """
    counts = []
    for each in text.split(","):
        part = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", each)
        if not part:
            raise UserError(f"SLURM_STEP_TASKS_PER_NODE={text!r}; expected e.g. 2(x3),1")
        counts += [int(part[1])] * int(part[2] or 1)
    return counts


def _cluster(environment: Mapping[str, str]) -> Cluster:
    hosts = nodes(environment)
    counts = tasks_per_node(_text(environment, "SLURM_STEP_TASKS_PER_NODE"))
    num_tasks, rank, node_index, local_index = (_number(environment, name) for name in NAMES[:4])
    kind = re.split("[:,]", environment.get("SLURM_DISTRIBUTION", ""))[0]
    # Every task must notice this, including tasks that have the same number in another order.
    in_blocks = kind in ("", "block") or len(hosts) == 1 or max(counts) == 1
    places = [(node, local) for node, count in enumerate(counts) for local in range(count)]
    agrees = places[rank : rank + 1] == [(node_index, local_index)]
    if not in_blocks or not agrees or (len(hosts), num_tasks) != (len(counts), len(places)):
        shown = ", ".join(f"{each}={environment[each]}" for each in NAMES if each in environment)
        raise UserError(
            f"Slurm's tasks are not numbered node by node ({shown}); start srun with "
            "--distribution=block"
        )
    # Each worker has its own port, because two of Slurm's nodes may be one machine.
    first = base_port(*job(environment), num_workers=num_tasks)
    return Cluster(
        tuple(f"{hosts[node]}:{first + each}" for each, (node, _) in enumerate(places)),
        rank,
        local_index=local_index,
        num_local=counts[node_index],
        source=_source(environment),
    )


def job(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Returns what only the tasks of this step share: job, step and restart count.

    Raises:
      UserError: a variable is missing.
    """
    restarts = environment.get("SLURM_RESTART_COUNT", "0")
    return _text(environment, "SLURM_JOB_ID"), _text(environment, "SLURM_STEP_ID"), restarts


def _source(environment: Mapping[str, str]) -> str:
    return f"Slurm step {environment.get('SLURM_JOB_ID')}.{environment.get('SLURM_STEP_ID')}"


def _number(environment: Mapping[str, str], name: str) -> int:
    text = _text(environment, name)
    if not text.isdigit():
        raise UserError(f"{name}={text!r}; expected a number, which srun sets")
    return int(text)


def _text(environment: Mapping[str, str], name: str) -> str:
    if not environment.get(name):
        raise UserError(
            f"SLURM_STEP_NUM_TASKS={environment.get('SLURM_STEP_NUM_TASKS')} without {name}; srun "
            "sets both, so do not unset one"
        )
    return environment[name]
