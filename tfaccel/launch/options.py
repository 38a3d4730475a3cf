"""What `tfaccel launch` was asked for: its flags, checked, and what a scheduler's step says.

Takes the command line and the environment; gives `Options` and the command that each rank runs.

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

# What starts the launchers, and the room that does; see launch/__init__.py.
ENGINES = {"local": "node", "slurm": "slurm", "ray": "ray", "k8s": "kubernetes"}
MASTER_PORT = 29400
MOST_RANKS = 4096
SHORTEST_NODE_TIMEOUT_S = 2.0  # a launcher reports each second


def _flag(name: str, default: object, help_: str, **more) -> Any:
    """Returns a field that is a flag."""
    flag = Flag(name, default, help_, **more)
    return dataclasses.field(default=default, metadata={"flag": flag})


@dataclasses.dataclass(frozen=True)
class Options:
    """What the flags say. A field that is a flag says what it is by the flag's help.

    Seconds are infinite for no limit.
    """

    num_ranks_per_node: int = _flag(
        "nproc-per-node", 1, "ranks on each machine", at_least=1, at_most=MOST_RANKS
    )
    num_nodes: int = _flag(
        "nnodes", 1, "machines: start it once on each", at_least=1, at_most=MOST_RANKS
    )
    node_rank: int = _flag(
        "node-rank", 0, "which of the machines this is, from 0", at_least=0, at_most=MOST_RANKS
    )
    master_addr: str | None = _flag(
        "master-addr", None, "host of node 0, as the others reach it", shown="HOST"
    )
    master_port: int = _flag(
        "master-port",
        MASTER_PORT,
        "port on which node 0 listens for the others",
        at_least=1,
        at_most=65535,
    )
    max_restarts: int = _flag(
        "max-restarts",
        0,
        "how often all may start again from the last checkpoint",
        more="That is in all. Never after a mistake in the call (exit code 2), nor once two "
        "restarts came no further",
        at_least=0,
        at_most=MOST_RANKS,
    )
    start_timeout_s: float = _flag(
        "start-timeout",
        1800.0,
        "seconds until the first step has ended",
        more="Compilation counts. It is the time for all machines to come, and for what a script "
        "does after fit or evaluate, too. 0, here and for the next three, is no limit",
        at_least=0.0,
    )
    step_timeout_s: float = _flag(
        "step-timeout",
        300.0,
        "seconds without progress in training",
        more="What one execution of several steps takes is without progress",
        at_least=0.0,
    )
    evaluation_timeout_s: float = _flag(
        "evaluation-timeout",
        600.0,
        "seconds without progress in an evaluation, between two test batches",
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
        "seconds from SIGTERM to SIGKILL, and for all that a script does once `fit` has saved and "
        "stopped at a signal",
        at_least=0.1,
        is_rare=True,
    )
    log_dir: pathlib.Path = pathlib.Path("launch")
    """For each rank's output; LOG_DIR is its flag."""
    engine: str = _flag(
        "engine",
        "local",
        "what starts the processes: local, slurm, ray or k8s",
        more="slurm writes a batch script and submits it; ray runs on "
        "the Ray cluster that is there (the extra `ray`); k8s, with --print alone, prints a "
        "manifest of a JobSet",
        choices=tuple(ENGINES),
    )
    prints: bool = _flag(
        "print",
        False,
        "print the script of Slurm, or the manifest, and submit nothing",
        is_rare=True,
    )
    name: str = _flag("name", "tfaccel", "name of the job, for slurm and k8s", is_rare=True)
    sbatch: str = _flag(
        "sbatch",
        "",
        "options of slurm, e.g. '--partition=gpu --gpus-per-node=4 --time=8:00:00'",
        shown="OPTIONS",
        is_rare=True,
    )
    image: str | None = _flag(
        "image", None, "for k8s: a container image with tfaccel in it", shown="IMAGE", is_rare=True
    )
    port_chosen_by: str = ""
    """The scheduler that chose the port, in words; "" where a flag or its default did."""

    @property
    def node_0(self) -> str:
        """Where node 0's launcher listens, as host:port."""
        return f"{in_url(self.master_addr)}:{self.master_port}"

    @property
    def num_ranks(self) -> int:
        """Processes in the job."""
        return self.num_nodes * self.num_ranks_per_node


def parse(
    arguments: Sequence[str], environment: Mapping[str, str]
) -> tuple[Options, tuple[str, ...]]:
    """Returns the options, and the command after them as it was given.

    Args:
      arguments: after `tfaccel launch`.
      environment: of this process: a step of Slurm or Open MPI says which node this is.

    Raises:
      UserError: a flag is unknown or not what it may be, or there is no command.
    """
    values = define(FLAGS)
    values.set_gnu_getopt(False)  # what follows the command is the command's
    command = tuple(parsed("launch", values, arguments, fields=all_fields()))
    argv_of(command)  # or a UserError
    given = {field: values[flag].value for flag, field in FIELDS.items() if values[flag].present}
    if given.get("engine", "local") == "local":
        given = scheduler.nodes(environment, given)
    if given.get("master_addr"):
        given["master_addr"] = given["master_addr"].strip("[]")  # as IPv6 stands before a port
    given |= {field: math.inf for field in MAY_LAST if given.get(field) == 0}
    options = Options(**given)
    _check(options, environment)
    # Last: it may be a temporary folder, which is made.
    log_dir = _log_dir(values["log-dir"].value, command, options.engine)
    return dataclasses.replace(options, log_dir=log_dir), command


LOG_DIR = Flag(
    "log-dir",
    None,
    "folder for each rank's output; WORKDIR/launch by default",
    more="It is in DIR/attempt-0/rank-0.log and so on",
    shown="DIR",
)
_OF_FIELDS = {
    field.name: field.metadata["flag"] for field in dataclasses.fields(Options) if field.metadata
}
FLAGS = (*_OF_FIELDS.values(), LOG_DIR)
# Fields by the flag that each is, for those whose value is taken as it is.
FIELDS = {flag.name: field for field, flag in _OF_FIELDS.items()}
YES = ("true", "t", "1")  # of absl
# Seconds that may be 0, for no limit.
MAY_LAST = ("start_timeout_s", "step_timeout_s", "save_timeout_s", "evaluation_timeout_s")


def argv_of(command: Sequence[str]) -> list[str]:
    """Returns the program that a rank runs, by this Python.

    Args:
      command: `train` with its flags, or a Python file with its arguments.

    Raises:
      UserError: it is neither.
    """
    if not command:
        raise UserError("no command to launch; e.g. `tfaccel launch --nproc-per-node=2 train ...`")
    if command[0] == "train":
        return [sys.executable, "-m", "tfaccel", *command]
    if not command[0].endswith(".py"):
        raise UserError(
            f"cannot launch '{command[0]}'{did_you_mean(command[0], ['train'])}; give `train` with "
            "its flags, or a Python file with its arguments"
        )
    if not pathlib.Path(command[0]).is_file():
        raise UserError(f"script {command[0]} does not exist; give the path of a Python file")
    return [sys.executable, *command]


def workdir_of(command: Sequence[str]) -> str:
    """Returns the last `--workdir` of the command, or an empty text; spelt as absl takes it."""
    found = ""
    for each, following in itertools.zip_longest(command, command[1:], fillvalue=""):
        name, sign, value = each.partition("=")
        if name in ("--workdir", "-workdir"):
            found = value if sign else following
    return found


def _is_dry(command: Sequence[str]) -> bool:
    flags_given = [
        each.lstrip("-").replace("_", "-").lower() for each in command if each[:1] == "-"
    ]
    return any(each in ("dry-run", *(f"dry-run={yes}" for yes in YES)) for each in flags_given)


def _log_dir(given: str | None, command: Sequence[str], engine: str) -> pathlib.Path:
    """Returns the folder for the ranks' output: in the workdir, if the command names one.

    A dry run leaves nothing there: its folder is a temporary one, or for another engine, whose
    launchers run elsewhere, one in the current folder.
    """
    workdir = workdir_of(command)
    is_dry = command[0] == "train" and _is_dry(command)
    if command[0] == "train" and not workdir and not is_dry:
        raise UserError(
            "train without --workdir=DIR; give one that all ranks share, and that a restart goes "
            "on from"
        )
    if given:
        folder = given
    elif is_dry and engine == "local":
        folder = tempfile.mkdtemp(prefix="tfaccel-launch-")
    elif workdir and not is_dry:
        folder = f"{workdir}/launch"
    else:
        folder = f"launch-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    return local_path(folder).absolute()


def _check(options: Options, environment: Mapping[str, str]) -> None:
    if environment.get("TF_CONFIG") and options.engine == "local":
        raise UserError(
            "TF_CONFIG is set, which says already who this process is; take it out of the "
            "environment, or start the command without `tfaccel launch`"
        )
    if options.node_rank >= options.num_nodes:
        raise UserError(
            f"--node-rank={options.node_rank} of --nnodes={options.num_nodes}; expected 0 to "
            f"{options.num_nodes - 1}"
        )
    if options.engine == "local" and options.num_nodes > 1 and not options.master_addr:
        raise UserError(
            f"--nnodes={options.num_nodes} without --master-addr; give the host of node 0, as the "
            "others reach it"
        )
    if options.prints and options.engine not in ("slurm", "k8s"):
        raise UserError(
            f"--print with --engine={options.engine}, which has no script; it is for slurm and k8s"
        )


def warn_of_secrets(command: Sequence[str]) -> None:
    """Says that a script which runs a command holds the secrets that the command was given."""
    if list(command) != list(redacted_command(command)):
        log.warning(
            "launch: the command holds a password or a token, and so does what is printed; keep "
            "that from others, or give the secret by a variable of the environment"
        )


def flags_of(options: Options) -> list[str]:
    """Returns the flags that an engine gives to the launcher of each node, beside its place."""
    passed_on = ("num_nodes", "num_ranks_per_node", *filter(_is_seconds, _OF_FIELDS))
    values = {_OF_FIELDS[field].name: (field, getattr(options, field)) for field in passed_on}
    return [
        f"--{flag}={0 if value == math.inf else format(value, '.15g')}"
        for flag, (field, value) in values.items()
        if value != getattr(Options, field)
    ]


def _is_seconds(field: str) -> bool:
    return field.endswith("_s")


def digest_of(command: Sequence[str]) -> str:
    """Returns what tells two commands apart."""
    return hashlib.sha256("\0".join(command).encode()).hexdigest()[:16]
