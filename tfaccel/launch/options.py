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

from absl import flags

from tfaccel.common.errors import UserError, did_you_mean
from tfaccel.common.local_path import local_path
from tfaccel.common.meant import unknown_flag
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


@dataclasses.dataclass(frozen=True)
class Options:
    """What the flags say; the command's own help has each in words.

    Attributes:
      engine: of ENGINES.
      num_nodes: launchers in the job, one for each machine.
      node_rank: which of them this is, from 0.
      num_ranks_per_node: processes that each starts.
      master_addr: host of the launcher of node 0, as the others reach it; None on one machine.
      master_port: on which it listens for them.
      port_chosen_by: the scheduler that chose it, in words; "" where a flag or its default did.
      max_restarts: how often all ranks may be started again, in all.
      start_timeout_s: until a rank's first step has ended, for nodes to come, and for what a
        script does of its own; infinite for no limit, as may be the three that follow.
      step_timeout_s: without progress in training.
      save_timeout_s: the same in a checkpoint or an export.
      evaluation_timeout_s: the same between two test batches.
      node_timeout_s: for which a launcher may be silent.
      grace_s: from SIGTERM to SIGKILL.
      log_dir: for each rank's output.
      prints: whether an engine's script is printed, and nothing submitted.
      name: of the job, for Slurm and Kubernetes.
      sbatch: Slurm's further options.
      image: Kubernetes' container image.
    """

    engine: str = "local"
    num_nodes: int = 1
    node_rank: int = 0
    num_ranks_per_node: int = 1
    master_addr: str | None = None
    master_port: int = MASTER_PORT
    port_chosen_by: str = ""
    max_restarts: int = 0
    start_timeout_s: float = 1800
    step_timeout_s: float = 300
    save_timeout_s: float = 600
    evaluation_timeout_s: float = 600
    node_timeout_s: float = 30
    grace_s: float = 30
    log_dir: pathlib.Path = pathlib.Path("launch")
    prints: bool = False
    name: str = "tfaccel"
    sbatch: str = ""
    image: str | None = None

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
    values = make_flags()
    try:
        command = tuple(values(["tfaccel launch", *arguments])[1:])
    except flags.UnrecognizedFlagError as error:
        raise unknown_flag("launch", error.flagname, values, all_fields()) from error
    except flags.Error as error:
        raise UserError(str(error)) from error
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


# Flags by the field that each is, for those whose value is taken as it is.
FIELDS = {
    "engine": "engine",
    "nnodes": "num_nodes",
    "node-rank": "node_rank",
    "nproc-per-node": "num_ranks_per_node",
    "master-addr": "master_addr",
    "master-port": "master_port",
    "max-restarts": "max_restarts",
    "start-timeout": "start_timeout_s",
    "step-timeout": "step_timeout_s",
    "save-timeout": "save_timeout_s",
    "evaluation-timeout": "evaluation_timeout_s",
    "node-timeout": "node_timeout_s",
    "grace": "grace_s",
    "print": "prints",
    "name": "name",
    "sbatch": "sbatch",
    "image": "image",
}
YES = ("true", "t", "1")  # of absl
# Seconds that may be 0, for no limit.
MAY_LAST = ("start_timeout_s", "step_timeout_s", "save_timeout_s", "evaluation_timeout_s")


def make_flags() -> flags.FlagValues:
    """Returns the flags of `tfaccel launch`, unparsed."""
    values = flags.FlagValues()
    values.set_gnu_getopt(False)  # what follows the command is the command's
    own = {"flag_values": values}
    flags.DEFINE_enum("engine", "local", list(ENGINES), "What starts the processes.", **own)
    lowest_of = {"nnodes": 1, "nproc-per-node": 1, "node-rank": 0, "max-restarts": 0}
    for name, lowest in lowest_of.items():
        default = getattr(Options, FIELDS[name])
        flags.DEFINE_integer(name, default, "", lower_bound=lowest, upper_bound=MOST_RANKS, **own)
    flags.DEFINE_integer("master-port", MASTER_PORT, "", lower_bound=1, upper_bound=65535, **own)
    for flag, field in FIELDS.items():
        if _is_seconds(field):
            lowest = 0.0 if field in MAY_LAST else 0.1
            lowest = SHORTEST_NODE_TIMEOUT_S if field == "node_timeout_s" else lowest
            flags.DEFINE_float(flag, getattr(Options, field), "s", lower_bound=lowest, **own)
    for name in ("master-addr", "log-dir", "name", "sbatch", "image"):
        flags.DEFINE_string(name, None, "", **own)
    flags.DEFINE_bool("print", False, "Print the engine's script alone.", **own)
    return values


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
    if command[0] == "train" and not workdir:
        raise UserError(
            "train without --workdir=DIR; give one that all ranks share, and that a restart goes "
            "on from"
        )
    is_dry = command[0] == "train" and _is_dry(command)
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
    passed_on = ("num_nodes", "num_ranks_per_node", *filter(_is_seconds, FIELDS.values()))
    values = {flag: getattr(options, field) for flag, field in FIELDS.items() if field in passed_on}
    return [
        f"--{flag}={0 if value == math.inf else format(value, '.15g')}"
        for flag, value in values.items()
        if value != getattr(Options, FIELDS[flag])
    ]


def _is_seconds(field: str) -> bool:
    return field.endswith("_s")


def digest_of(command: Sequence[str]) -> str:
    """Returns what tells two commands apart."""
    return hashlib.sha256("\0".join(command).encode()).hexdigest()[:16]
