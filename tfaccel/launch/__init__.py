"""`tfaccel launch`: starts the ranks of one job, on one or several machines, and watches them.

`launch` returns the exit code of the job. This room does not import TensorFlow.

    options, command = options.parse(["--nproc-per-node=2", "train", "--config=..."], os.environ)
    exit_code = launch(options, command)

A rank is one process of the job. A node is one machine, with one launcher.

    options.py       the flags
    scheduler.py     reads Slurm's or mpirun's variables in place of flags
    node.py          the launcher of one machine: starts, watches and ends its ranks
    coordinator.py   decides on node 0 for all nodes when an attempt begins and ends
    gang.py          finds the faulty rank, and decides whether to restart; only arithmetic
    rendezvous.py    the connection of the other nodes to node 0
    messages.py      the messages between nodes
    ranks.py         the processes, their groups and heartbeats
    guard.py         ends the ranks if the launcher is killed
    rank_environment.py, stop.py, output.py: ports and variables, signals, and output of ranks
    terminal.py      shows that output
    slurm.py, kubernetes.py, ray.py: engines that start the launchers
"""

import importlib
from collections.abc import Sequence

from tfaccel.launch.options import ENGINES, Options


def launch(options: Options, command: Sequence[str]) -> int:
    """Runs the command on the engine and returns the exit code.

    Args:
      options: the flags.
      command: `train` with its flags, or a Python file with its arguments.

    Raises:
      UserError: there is a mistake in the call.
      RunError: the job could not start, or a node was lost.
    """
    # Each engine has run(options, command) -> exit code, and is imported only if it is used.
    room = importlib.import_module(f"tfaccel.launch.{ENGINES[options.engine]}")
    return room.run(options, command)
