"""The flags of `tfaccel launch`, checked, together with the variables of a scheduler.

`parse` takes the command line and the environment, and returns `Options` and each rank's command.

    options, command = parse(["--nproc-per-node=2", "train", "--config=..."], os.environ)
    argv_of(command)        # [python, "-m", "tfaccel", "train", ...]
"""

import dataclasses
import datetime
import hashlib
import itertools
import logging
import math
import pathlib
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from tfaccel.common.errors import UserError, did_you_mean
from tfaccel.common.flags import Flag, define, parsed
from tfaccel.common.local_path import local_path
from tfaccel.common.redact import redacted_command
from tfaccel.config import all_fields
from tfaccel.launch import scheduler
from tfaccel.runtime.cluster.addresses import in_url

log = logging.getLogger("tfaccel")

# The engines that start the launchers, and the module of each; see launch/__init__.py.
ENGINES = {"local": "node", "slurm": "slurm", "ray": "ray", "k8s": "kubernetes"}
MASTER_PORT = 29400
MOST_RANKS = 4096
SHORTEST_NODE_TIMEOUT_S = 2.0  # launchers report every second


def _flag(name: str, default: object, help_: str, **more) -> Any:
    """Returns a dataclass field with a flag."""
    flag = Flag(name, default, help_, **more)
    return dataclasses.field(default=default, metadata={"flag": flag})


@dataclasses.dataclass(frozen=True)
class Options:
    """The values of the flags. The help of each flag describes its field.

    Seconds are infinite for no limit.
    """

    num_ranks_per_node: int = _flag(
        "nproc-per-node", 1, "ranks on each machine", at_least=1, at_most=MOST_RANKS
    )
    num_nodes: int = _flag(
        "nnodes", 1, "machines; start the command once on each", at_least=1, at_most=MOST_RANKS
    )
    node_rank: int = _flag(
        "node-rank", 0, "index of this machine, from 0", at_least=0, at_most=MOST_RANKS
    )
    master_addr: str | None = _flag(
        "master-addr", None, "host of node 0, as other machines reach it", shown="HOST"
    )
    master_port: int = _flag(
        "master-port",
        MASTER_PORT,
        "port on which node 0 listens for other machines",
        at_least=1,
        at_most=65535,
    )
    max_restarts: int = _flag(
        "max-restarts",
        0,
        "how often all ranks may restart from the last checkpoint",
        more="This is the total. There is no restart after a mistake in the call (exit code 2), "
        "or if two restarts got no further",
        at_least=0,
        at_most=MOST_RANKS,
    )
    start_timeout_s: float = _flag(
        "start-timeout",
        1800.0,
        "seconds until the first step has ended",
        more="Compilation is included. It is also the limit for all machines to join, and for a "
        "script's code after fit or evaluate. Here and in the next three flags, 0 means no limit",
        at_least=0.0,
    )
    step_timeout_s: float = _flag(
        "step-timeout",
        300.0,
        "seconds without progress in training",
        more="Within one execution of several steps there is no progress",
        at_least=0.0,
    )
    evaluation_timeout_s: float = _flag(
        "evaluation-timeout",
        600.0,
        "seconds between two test batches in an evaluation",
        at_least=0.0,
        is_rare=True,
    )
    save_timeout_s: float = _flag(
        "save-timeout",
        600.0,
        "seconds without progress in a checkpoint or an export",
        at_least=0.0,
        is_rare=True,
    )
    node_timeout_s: float = _flag(
        "node-timeout",
        30.0,
        "seconds for which a machine's launcher may be silent",
        at_least=SHORTEST_NODE_TIMEOUT_S,
        is_rare=True,
    )
    grace_s: float = _flag(
        "grace",
        30.0,
        "seconds from SIGTERM to SIGKILL; also for a script's code after `fit` has saved and "
        "stopped because of a signal",
        at_least=0.1,
        is_rare=True,
    )
    log_dir: pathlib.Path = pathlib.Path("launch")
    """Folder for each rank's output; LOG_DIR is its flag."""
    engine: str = _flag(
        "engine",
        "local",
        "what starts the processes: local, slurm, ray or k8s",
        more="slurm writes a batch script and submits it. ray runs on an existing Ray cluster "
        "(needs the extra `ray`). k8s prints the manifest of a JobSet, and needs --print",
        choices=tuple(ENGINES),
    )
    prints: bool = _flag(
        "print",
        False,
        "print the Slurm script or the manifest, and submit nothing",
        is_rare=True,
    )
    name: str = _flag("name", "tfaccel", "name of the job, for slurm and k8s", is_rare=True)
    sbatch: str = _flag(
        "sbatch",
        "",
        "options of sbatch, e.g. '--partition=gpu --gpus-per-node=4 --time=8:00:00'",
        shown="OPTIONS",
        is_rare=True,
    )
    image: str | None = _flag(
        "image", None, "for k8s: a container image with tfaccel", shown="IMAGE", is_rare=True
    )
    port_chosen_by: str = ""
    """The scheduler that chose the port; "" if a flag or its default did."""

    @property
    def node_0(self) -> str:
        """The address of node 0's launcher, as host:port."""
        return f"{in_url(self.master_addr)}:{self.master_port}"

    @property
    def num_ranks(self) -> int:
        """Number of processes in the job."""
        return self.num_nodes * self.num_ranks_per_node


def parse(
    arguments: Sequence[str], environment: Mapping[str, str]
) -> tuple[Options, tuple[str, ...]]:
    """Returns the options, and the command after them, unchanged.

    Args:
      arguments: the command line after `tfaccel launch`.
      environment: the environment of this process; Slurm or Open MPI tell the node in it.

    Raises:
      UserError: a flag is unknown or has a wrong value, or there is no command.
    """
    values = define(FLAGS)
    values.set_gnu_getopt(False)  # flags after the command belong to it
    command = tuple(parsed("launch", values, arguments, fields=all_fields()))
    argv_of(command)  # or a UserError
    given = {field: values[flag].value for flag, field in FIELDS.items() if values[flag].present}
    if given.get("engine", "local") == "local":
        given = scheduler.nodes(environment, given)
    if given.get("master_addr"):
        given["master_addr"] = given["master_addr"].strip("[]")  # IPv6 may be in brackets
    given |= {field: math.inf for field in MAY_LAST if given.get(field) == 0}
    options = Options(**given)
    _check(options, environment)
    # This comes last, because it may make a temporary folder.
    log_dir = _log_dir(values["log-dir"].value, command, options.engine)
    return dataclasses.replace(options, log_dir=log_dir), command


LOG_DIR = Flag(
    "log-dir",
    None,
    "folder for each rank's output; WORKDIR/launch by default",
    more="The files are DIR/attempt-0/rank-0.log and so on",
    shown="DIR",
)
_OF_FIELDS = {
    field.name: field.metadata["flag"] for field in dataclasses.fields(Options) if field.metadata
}
FLAGS = (*_OF_FIELDS.values(), LOG_DIR)
# The field of each flag whose value is used unchanged.
FIELDS = {flag.name: field for field, flag in _OF_FIELDS.items()}
COMMANDS = ("train", "selftest")  # those that each rank can run
YES = ("true", "t", "1")  # absl's true values
# Seconds for which 0 means no limit.
MAY_LAST = ("start_timeout_s", "step_timeout_s", "save_timeout_s", "evaluation_timeout_s")


def argv_of(command: Sequence[str]) -> list[str]:
    """Returns the program that a rank runs with this Python.

    Args:
      command: `train` or `selftest` with its flags, or a Python file with its arguments.

    Raises:
      UserError: the command is neither.
    """
    if not command:
        raise UserError("no command to launch; e.g. `tfaccel launch --nproc-per-node=2 train ...`")
    if command[0] in COMMANDS:
        return [sys.executable, "-m", "tfaccel", *command]
    if not command[0].endswith(".py"):
        raise UserError(
            f"cannot launch '{command[0]}'{did_you_mean(command[0], COMMANDS)}; give `train` or "
            "`selftest` with its flags, or a Python file with its arguments"
        )
    if not pathlib.Path(command[0]).is_file():
        raise UserError(f"script {command[0]} does not exist; give the path of a Python file")
    return [sys.executable, *command]


def workdir_of(command: Sequence[str]) -> str:
    """Returns the last `--workdir` of the command, or ""; spelled in any way that absl accepts."""
    found = ""
    for each, following in itertools.zip_longest(command, command[1:], fillvalue=""):
        name, sign, value = each.partition("=")
        if name in ("--workdir", "-workdir"):
            found = value if sign else following
    return found


def _leaves_nothing(command: Sequence[str]) -> bool:
    """Returns whether the command is a dry run or a self-test, whose logs nobody keeps."""
    if command[0] == "selftest":
        return True
    if command[0] != "train":
        return False
    flags_given = [
        each.lstrip("-").replace("_", "-").lower() for each in command if each[:1] == "-"
    ]
    return any(each in ("dry-run", *(f"dry-run={yes}" for yes in YES)) for each in flags_given)


def _log_dir(given: str | None, command: Sequence[str], engine: str) -> pathlib.Path:
    """Returns the folder for the ranks' output: in the workdir, if the command has one.

    A dry run and a self-test write nothing there. They use a temporary folder or, with another
    engine, whose launchers run elsewhere, a folder in the current one.
    """
    workdir = workdir_of(command)
    leaves_nothing = _leaves_nothing(command)
    if command[0] == "train" and not workdir and not leaves_nothing:
        raise UserError(
            "train without --workdir=DIR; give a workdir that all ranks share, from which a "
            "restart continues"
        )
    if given:
        folder = given
    elif leaves_nothing and engine == "local":
        folder = tempfile.mkdtemp(prefix="tfaccel-launch-")
    elif workdir and not leaves_nothing:
        folder = f"{workdir}/launch"
    else:
        folder = f"launch-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    return local_path(folder).absolute()


def _check(options: Options, environment: Mapping[str, str]) -> None:
    if environment.get("TF_CONFIG") and options.engine == "local":
        raise UserError(
            "TF_CONFIG is set, which already gives this process a place in a cluster; unset "
            "TF_CONFIG, or run the command without `tfaccel launch`"
        )
    if options.node_rank >= options.num_nodes:
        raise UserError(
            f"--node-rank={options.node_rank} of --nnodes={options.num_nodes}; expected 0 to "
            f"{options.num_nodes - 1}"
        )
    if options.engine == "local" and options.num_nodes > 1 and not options.master_addr:
        raise UserError(
            f"--nnodes={options.num_nodes} without --master-addr; give the host of node 0, as the "
            "other machines reach it"
        )
    if options.prints and options.engine not in ("slurm", "k8s"):
        raise UserError(
            f"--print with --engine={options.engine}, which has no script; use it with slurm or k8s"
        )


def warn_of_secrets(command: Sequence[str]) -> None:
    """Warns if a printed script contains secrets that are in its command."""
    if list(command) != list(redacted_command(command)):
        log.warning(
            "launch: the command, and the text printed, contain a password or a token; do not show "
            "it to others, or pass the secret in an environment variable"
        )


def flags_of(options: Options) -> list[str]:
    """Returns the flags, without its place, that an engine gives to the launcher of each node."""
    passed_on = (
        "num_nodes",
        "num_ranks_per_node",
        *(each for each in _OF_FIELDS if each.endswith("_s")),
    )
    values = {_OF_FIELDS[field].name: (field, getattr(options, field)) for field in passed_on}
    return [
        f"--{flag}={0 if value == math.inf else format(value, '.15g')}"
        for flag, (field, value) in values.items()
        if value != getattr(Options, field)
    ]


def digest_of(command: Sequence[str]) -> str:
    """Returns a text that is the same only for equal commands."""
    return hashlib.sha256("\0".join(command).encode()).hexdigest()[:16]
