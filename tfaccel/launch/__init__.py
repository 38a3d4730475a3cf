"""`tfaccel launch`: many processes of one job, on one machine or several, watched and restarted.

Takes the command line; gives the exit code of the job. Imports no TensorFlow.

    options, command = options.parse(["--nproc-per-node=2", "train", "--config=..."], os.environ)
    exit_code = launch(options, command)

    options.py       the flags
    scheduler.py     what Slurm or mpirun says instead of them
    node.py          one machine's launcher, on every engine: starts ranks, follows, ends them
    coordinator.py   what node 0 decides for all: when an attempt begins and when it is over
    gang.py          whose fault an end is, and whether to start again; arithmetic
    rendezvous.py    how the other nodes reach node 0
    messages.py      what they say to each other
    ranks.py         processes, their groups and heartbeats
    guard.py         ends them where the launcher is gone
    rank_environment.py, stop.py, output.py: their ports, signals, and what they print
    terminal.py      where that is shown
    slurm.py, kubernetes.py, ray.py: what starts the launchers, on an engine
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
      UserError: a mistake in the call.
      RunError: the job could not begin, or a node was lost.
    """
    # Each engine has run(options, command) -> exit code, and is imported when it is used.
    room = importlib.import_module(f"tfaccel.launch.{ENGINES[options.engine]}")
    return room.run(options, command)
