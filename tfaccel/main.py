"""The `tfaccel` command: flags to config and workdir, then `train.run`; nothing else.

Exit codes: 0 done or help, 1 the run failed, 2 a mistake in the call, 130 interrupted, and of a
training run that a signal made save and stop what its config says: 143.
"""

import dataclasses
import datetime
import inspect
import itertools
import json
import os
import pathlib
import re
import sys
import tempfile
import textwrap

from absl import flags
from ml_collections import config_flags

from tfaccel import __version__
from tfaccel.cluster import Cluster, find
from tfaccel.cluster.ray import undo_legacy_keras
from tfaccel.config import Config, RuntimeConfig, default_config, parse
from tfaccel.errors import RunError, UserError, did_you_mean
from tfaccel.redact import without_userinfo
from tfaccel.workdir import RESUMES, check_usable, finished

HELP = f"""tfaccel {__version__}: train Keras models from image files and keep NVIDIA GPUs busy.

usage: tfaccel COMMAND [flags]

  train   train, measure and export what a config file says
            tfaccel train --config=configs/digits.py
            tfaccel train --config=configs/mnist.py --config.data.root=/data/mnist_png
            tfaccel train --config=configs/digits.py --workdir=runs/a   # again: goes on from there
            tfaccel train --config=configs/digits.py --dry-run   # two steps, and who does what

  launch   run many processes of one job, on one machine or several, and watch them
            tfaccel launch --nproc-per-node=2 train --config=configs/digits.py --workdir=runs/a

  audit   look through an experiment's images, and prove what its loader gives each replica
            tfaccel audit --config=configs/digits.py
            tfaccel audit --config=configs/digits.py --contact-sheet=digits.png

  plot   draw loss, metrics and throughput of one or more runs
            tfaccel plot runs/a runs/b --output=curves.html

  autobatch   find the largest batch that fits in the GPUs' memory
            tfaccel autobatch --config=configs/mnist.py --config.data.root=/data/mnist_png

  selftest   check that this machine's replicas train as one device does
            tfaccel selftest
            tfaccel selftest --precision=mixed_float16 --xla=on --output=selftest.json

  tfaccel COMMAND --help   a command's flags
  tfaccel --version        the version
"""

TRAIN_HELP = """usage: tfaccel train --config=FILE [--workdir=DIR] [--dry-run]
                     [--config.SECTION.FIELD=VALUE]

  --config=FILE      an experiment: a Python file with get_config(), as in configs/;
                     FILE:smoke runs its smallest size
  --workdir=DIR      a folder for what the run leaves; runs/NAME-TIME by default. Where it holds a
                     run that was stopped, the same command goes on from its newest checkpoint.
                     Several workers need one that they share
  --resume=auto      or "required" (an error if there is no checkpoint) or "never" (if there is a
                     run)
  --accept_changes   go on from a checkpoint although the config or the data have changed since
  --dry-run          train two steps and print, in every process, which worker it is, its GPUs and
                     replicas, and its share of a batch; write nothing
  --workers=HOST:PORT,...
                     the addresses of all workers, the chief's first. Without it TF_CONFIG says, or
                     Slurm or Open MPI, which started this process, or it is one of its own
  --worker-index=N   which of them this process is, from 0, unless Slurm or Open MPI says

  SIGTERM, SIGUSR1 and Ctrl-C let it save and stop, with exit code checkpoint.exit_code; a second
  one ends it at once.

  tfaccel train --config=configs/digits.py --config.train.epochs=3
  tfaccel train --config=configs/mnist.py --config.runtime.gpu_ids=0 --config.runtime.precision=O2

Every field of an experiment, as {source}:
"""


AUDIT_HELP = """usage: tfaccel audit --config=FILE [--report=FILE] [--contact-sheet=FILE.png]
                     [--config.SECTION.FIELD=VALUE]

  Decodes every image once, in parallel, and lists those that cannot be trained on: missing,
  unreadable, empty, cut short, no image, animated and more. A second audit looks at changed files
  alone. Then runs two dry epochs through the real loader on this machine's replicas: whether each
  image comes once, in a new order, and whether replicas draw different random numbers. Trains
  nothing. Exit code 1 if there is a bad file (unless bad_files=skip leaves it out) or the loader is
  at fault.

  --config=FILE              an experiment, as for `tfaccel train`
  --report=FILE              a new text file for the list: severity, kind, path, cause; in the cache
                             folder by default
  --contact-sheet=FILE.png   a new picture of augmented training images with their labels

  tfaccel audit --config=configs/cifar10.py --config.data.root=/data/cifar10 --report=bad.txt
"""

SELFTEST_HELP = """usage: tfaccel selftest [flags]

  Trains small models on this machine's replicas and, by plain Keras, on one device, and compares:
  loss, weights, clipping, accumulation, batch norm, a partial batch, overflow on each replica, save
  and load, XLA. Prints a row for each; exit code 1 if any failed. Minutes, most of it compilation.
"""

PLOT_HELP = """usage: tfaccel plot WORKDIR... [--output=FILE]

  Draws loss, metrics and images per second of one or more runs over their epochs, finished or not.
  Each run has a colour; test images are the full line, training the dashed one.

  --output=FILE   a new .png, or .html: one page with the picture and a table, that needs no other
                  file; plot.png by default

  tfaccel plot runs/digits-20261121-094702
  tfaccel plot runs/a runs/b --output=curves.html
"""

AUTOBATCH_HELP = """usage: tfaccel autobatch --config=FILE [--config.SECTION.FIELD=VALUE]

  Finds the largest global batch, a multiple of 8, that fits in the GPUs' memory: trains a few steps
  on one size after another, each in a process of its own, DALI's memory and 5% to spare counted.
  Prints it, and the flag to use, as JSON. A try takes about as long as a run to its first steps.

  tfaccel autobatch --config=configs/imagenet_resnet50.py --config.data.root=/data/imagenet
"""

LAUNCH_HELP = """usage: tfaccel launch [flags] train --config=FILE --workdir=DIR [flags of train]
       tfaccel launch [flags] SCRIPT.py [arguments]

  Starts the ranks of one job, each a process that trains on its share of every batch, and watches
  them. Where one fails, never starts or makes no progress, all are ended, with the reason and the
  last lines of the one at fault; with --max-restarts they start again from the last checkpoint. On
  several machines, start it once on each, with the same flags but --node-rank; inside a step of
  Slurm with one task for each node, nodes and addresses are known.

  --nproc-per-node=1   ranks on each machine
  --nnodes=1           machines
  --node-rank=0        which of them this is
  --master-addr=HOST   of node 0, as the others reach it
  --master-port={port}  on which it listens for them
  --max-restarts=0     how often all may start again, in all. Never after a mistake in the call
                       (exit code 2), nor once two restarts came no further
  --start-timeout=1800 seconds until the first step has ended, compilation included, and for all
                       machines to come
  --step-timeout=300, --evaluation-timeout=600, --save-timeout=600
                       seconds without progress in training, in an evaluation, and in a checkpoint
                       or export; what one execution of several steps takes is without progress
  --node-timeout=30    seconds for which a machine's launcher may be silent
  --grace=30           seconds from SIGTERM to SIGKILL
  --log-dir=DIR        for each rank's output, DIR/attempt-0/rank-0.log; WORKDIR/launch by default
  --engine=local       or slurm, ray or k8s: what starts the launchers
  --print              print the engine's script and submit nothing

  SIGTERM, SIGUSR1 and Ctrl-C are passed on: the ranks save and stop, and the exit code is theirs,
  143. A second one ends them at once. Exit codes else: 0 done, 2 a mistake in the call, 128 + n
  where signal n ended a rank, 1 where a rank or a machine fell silent.

  A script is watched by its calls of tfaccel: one that never calls `tfaccel.setup` and `fit` counts
  as one that never starts.

  WARNING: TensorFlow's ports between ranks have no password, and on each machine they listen on all
  interfaces, of one machine's ranks too. Whoever reaches one can read and write files as you. Run
  several ranks on a private network alone, or close the ports, {first} to {last}, to all but
  the job's machines, here 10.0.0.0/24:
    nft add table inet tfaccel
    nft add chain inet tfaccel in '{{ type filter hook input priority 0; }}'
    nft add rule inet tfaccel in iif lo accept
    nft add rule inet tfaccel in ip saddr 10.0.0.0/24 accept
    nft add rule inet tfaccel in tcp dport {first}-{last} drop
  Ranks of one machine need no network at all: `unshare --net --map-root-user sh -c
  'ip link set lo up; exec tfaccel launch ...'`. Who may join as a node is settled by a secret in
  TFACCEL_LAUNCH_TOKEN, the same on all machines.
"""

HELP_FLAGS = {"--help", "-h", "--helpfull", "--helpshort"}


def cli() -> None:
    """Runs the command line's command and exits with its code."""
    try:
        sys.exit(main(sys.argv[1:]))
    except (UserError, RunError) as error:
        message = without_userinfo(" ".join(str(error).split()))
        print(f"tfaccel: error: {message}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)
    except KeyboardInterrupt:
        print("tfaccel: interrupted", file=sys.stderr)
        sys.exit(130)


def main(arguments: list[str]) -> int:
    """Runs one command and returns the exit code.

    Raises:
      UserError: a mistake in the call, or one that the run found.
    """
    command, *rest = arguments or ["--help"]
    if command in ("--help", "-h", "help"):
        print(HELP, end="")
        return 0
    if command == "--version":
        print(__version__)
        return 0
    if command not in COMMANDS:
        raise UserError(f"there is no command '{command}'{did_you_mean(command, COMMANDS)}")
    return COMMANDS[command](rest)


def train(arguments: list[str]) -> int:
    """Trains what the flags say and prints the result as one JSON line."""
    if HELP_FLAGS & set(arguments):
        print(_train_help([each for each in arguments if each.startswith("--config=")]), end="")
        return 0
    values, name = _parse_config_flags("train", arguments, paths=("workdir",), trains=True)
    config, workdir = parse(values.config), values.workdir
    if values.resume == "required" and not workdir:
        raise UserError("--resume=required without --workdir; say which run to go on with")
    undo_legacy_keras(os.environ)
    dry, index = values["dry-run"].value, values["worker-index"].value
    cluster = find(os.environ, workers=values.workers, worker_index=index)
    if not workdir and cluster.num_workers > 1:
        raise UserError(
            f"no --workdir with {cluster.num_workers} workers ({cluster.source}); give all the "
            "same, which they share"
        )
    time = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    workdir = check_usable(pathlib.Path(workdir or f"runs/{name}-{time}"), resume=values.resume)
    if dry:
        return _train_dry(config, workdir, cluster)
    if result := finished(workdir, dataclasses.asdict(config)):
        print(f"tfaccel: {workdir} holds the end of this run; nothing to do", file=sys.stderr)
        print(json.dumps(result))
        return 0
    # TensorFlow reads this when it is imported, and then says less at its start.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from tfaccel import train as train_room

    result = train_room.run(
        config,
        workdir=workdir,
        cluster=cluster,
        resume=values.resume,
        accept_changes=values.accept_changes,
    )
    print(json.dumps(result))
    return 0


def _train_dry(config: Config, workdir: pathlib.Path, cluster: Cluster) -> int:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from tfaccel.dry_run import dry_run

    # In one piece: other workers may write to the same terminal.
    print(dry_run(config, workdir=workdir, cluster=cluster), end="", flush=True)
    return 0


def audit(arguments: list[str]) -> int:
    """Audits the data that the flags name and returns 1 if something is wrong."""
    if HELP_FLAGS & set(arguments):
        print(AUDIT_HELP, end="")
        return 0
    values, _ = _parse_config_flags("audit", arguments, paths=("report", "contact-sheet"))
    config = parse(values.config)
    report, sheet = (_new_file(name, values[name].value) for name in ("report", "contact-sheet"))
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from tfaccel.audit.run import run

    return 0 if run(config, report=report, sheet=sheet) else 1


def _new_file(name: str, given: str | None) -> pathlib.Path | None:
    """Returns the absolute path of a file that can be written, or None for none.

    Raises:
      UserError: it exists, or its folder does not or cannot be written to.
    """
    path = pathlib.Path(given).expanduser().absolute() if given else None
    if path and path.exists():
        raise UserError(f"{name} {path} exists; give a new file")
    if path:
        try:
            tempfile.TemporaryFile(dir=path.parent).close()
        except OSError as error:
            raise UserError(
                f"{name} {path} cannot be written ({error.strerror}); give another folder"
            ) from error
    return path


def selftest(arguments: list[str]) -> int:
    """Checks the replicas, prints a row for each check, and returns 1 if any failed."""
    values = flags.FlagValues()
    flags.DEFINE_string(
        "gpu_ids",
        None,
        "GPUs to test, e.g. 0,1; empty for two CPU devices; all by default.",
        flag_values=values,
    )
    flags.DEFINE_list(
        "precision",
        ["float32", "mixed_float16", "mixed_bfloat16"],
        "Keras dtype policies.",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "xla",
        "both",
        ["both", "on", "off"],
        "Steps with XLA, without, or both.",
        flag_values=values,
    )
    flags.DEFINE_string("output", None, "A new JSON file for the figures.", flag_values=values)
    if set(arguments) & HELP_FLAGS:
        described = values.get_help(include_special_flags=False).splitlines()
        print("\n".join([SELFTEST_HELP, *described[2:]]))  # without the module's name
        return 0
    try:
        unparsed = values(["tfaccel selftest", *arguments])[1:]
    except flags.Error as error:
        raise UserError(str(error)) from error
    if unparsed:
        raise UserError(f"'{unparsed[0]}' is no flag of selftest; see `tfaccel selftest --help`")
    config = RuntimeConfig(gpu_ids=values.gpu_ids)
    if not values.precision:
        raise UserError("--precision names none; give at least one, e.g. --precision=float32")
    precisions = tuple(RuntimeConfig(precision=each).precision for each in values.precision)
    output = _new_file("output", values.output)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from tfaccel import selftest as selftest_room

    xla = {"both": (False, True), "on": (True,), "off": (False,)}[values.xla]
    return selftest_room.report(config, precisions=precisions, xla=xla, output=output)


def plot(arguments: list[str]) -> int:
    """Draws the runs whose workdirs are given, and prints the picture's path."""
    if HELP_FLAGS & set(arguments):
        print(PLOT_HELP, end="")
        return 0
    values = flags.FlagValues()
    values.set_gnu_getopt(True)  # flags may follow the workdirs
    flags.DEFINE_string("output", "plot.png", "A new PNG or HTML file.", flag_values=values)
    try:
        workdirs = values(["tfaccel plot", *arguments])[1:]
    except flags.Error as error:
        raise UserError(str(error)) from error
    if not workdirs:
        raise UserError("no workdir; name one or more, e.g. `tfaccel plot runs/a runs/b`")
    output = pathlib.Path(values.output).expanduser()
    from tfaccel import plot as plot_room

    plot_room.plot([pathlib.Path(each).expanduser() for each in workdirs], output)
    print(output)
    return 0


def autobatch(arguments: list[str]) -> int:
    """Finds the largest batch that fits and prints it, with its flag, as one JSON line."""
    if HELP_FLAGS & set(arguments):
        print(AUTOBATCH_HELP, end="")
        return 0
    values, _ = _parse_config_flags("autobatch", arguments, paths=())
    config = parse(values.config)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from tfaccel.auto_batch import auto_batch

    batch = auto_batch(config)
    flag = f"--config.data.global_batch_size={batch}"
    if config.data.batch_per_replica is not None:
        flag += " --config.data.batch_per_replica=None"
    print(json.dumps({"global_batch_size": batch, "flag": flag}))
    return 0


def launch(arguments: list[str]) -> int:
    """Runs a command in many processes and returns the job's exit code."""
    from tfaccel import launch as launch_room
    from tfaccel.cluster import addresses
    from tfaccel.launch import options as options_lib

    # What follows the command is the command's own affair.
    own = list(itertools.takewhile(lambda each: each.startswith("-"), arguments))
    if HELP_FLAGS & set(own):
        print(
            LAUNCH_HELP.format(
                port=options_lib.MASTER_PORT,
                first=addresses.FIRST_PORT,
                last=addresses.LAST_PORT,
            ),
            end="",
        )
        return 0
    return launch_room.launch(*options_lib.parse(arguments, os.environ))


COMMANDS = {
    "train": train,
    "launch": launch,
    "plot": plot,
    "audit": audit,
    "autobatch": autobatch,
    "selftest": selftest,
}


def _parse_config_flags(
    command: str, arguments: list[str], *, paths: tuple[str, ...], trains: bool = False
):
    """Returns the flags, `config` with its overrides among them, and the config file's name.

    Args:
      command: whose flags these are.
      arguments: the command line after it.
      paths: the command's own flags, each of a path.
      trains: whether the command has the flags of training: resuming and workers.
    """
    values = flags.FlagValues()
    argv = [f"tfaccel {command}", *arguments]
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv, lock_config=True)
    for path in paths:
        flags.DEFINE_string(path, None, "A new one.", flag_values=values)
    if trains:
        flags.DEFINE_enum("resume", "auto", RESUMES, "Where to begin.", flag_values=values)
        flags.DEFINE_bool("accept_changes", False, "Of a resumed run.", flag_values=values)
        flags.DEFINE_bool("dry-run", False, "Two steps alone.", flag_values=values)
        flags.DEFINE_list("workers", None, "host:port of each.", flag_values=values)
        flags.DEFINE_integer("worker-index", None, "This one's.", flag_values=values)
    # What config_flags would answer with a traceback is looked at first.
    file = _config_file(arguments)
    _check_overrides(arguments)
    try:
        unparsed = values(argv)[1:]
    except (AttributeError, KeyError) as error:
        raise UserError(
            f"config file {file} lacks a field that the command line changes ({error}); let it "
            "start from tfaccel.config.default_config()"
        ) from error
    except flags.IllegalFlagValueError as error:
        # Where the file itself fails, absl's message is its whole traceback.
        raise UserError(f"{file}: {str(error).strip().splitlines()[-1]}") from error
    except flags.Error as error:
        raise UserError(str(error)) from error
    except Exception as error:  # whatever else the user's file raises
        raise UserError(f"{file}: {type(error).__name__}: {error}") from error
    if unparsed:
        raise UserError(f"'{unparsed[0]}' is no flag; expected --config.SECTION.FIELD=VALUE")
    return values, file.stem


def _config_file(arguments: list[str]) -> pathlib.Path:
    """Returns the file that --config names, without the argument after its colon."""
    given = [
        flag.partition("=")[2] if "=" in flag else following
        for flag, following in itertools.pairwise([*arguments, ""])
        if re.fullmatch(r"--?config(=.*)?", flag)
    ]
    if not given or not given[-1]:
        meant = next((each for each in arguments if ".py" in each), "configs/digits.py")
        raise UserError(f"no config; give one, e.g. `tfaccel train --config={meant}`")
    file = pathlib.Path(given[-1].partition(":")[0])
    if not file.is_file():
        there = [str(each) for each in file.parent.glob("*.py")]
        raise UserError(f"config file {file} does not exist{did_you_mean(str(file), there)}")
    return file


def _check_overrides(arguments: list[str]) -> None:
    """Raises UserError for a --config.SECTION.FIELD that no config has."""
    valid = default_config()
    names = [f"{section}.{name}" for section in valid for name in valid[section]]
    for argument in arguments:
        override = re.match(r"--?(?:no)?config\.([^=]*)", argument)
        name = override[1] if override else None
        if name and name not in names:
            raise UserError(f"config has no field '{name}'{did_you_mean(name, names)}")


def _train_help(config_flag: list[str]) -> str:
    """Returns the help, with the values of the config file that is given, if one is."""
    values = default_config()
    if config_flag:
        values = _parse_config_flags("train", config_flag, paths=())[0].config
    source = config_flag[0].partition("=")[2] + " says" if config_flag else "it is by default"
    lines = [TRAIN_HELP.format(source=source)]
    for section in dataclasses.fields(Config):
        meanings = _meanings(section.default_factory)
        for field in dataclasses.fields(section.default_factory):
            value = values[section.name][field.name]
            shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
            lines.append(f"  --config.{section.name}.{field.name}={shown}")
            lines.append(textwrap.indent(textwrap.fill(meanings[field.name], 80), " " * 8))
    return "\n".join(lines) + "\n"


def _meanings(kind: type) -> dict[str, str]:
    """Returns what the class's docstring, and those it inherits from, say of each field."""
    meanings = {}
    for each in reversed(kind.__mro__[:-1]):
        attributes = inspect.getdoc(each).partition("Attributes:")[2]
        meanings |= dict(re.findall(r"^  (\w+): (.+?)(?=^  \w|\Z)", attributes, re.M | re.S))
    return {name: " ".join(meaning.split()) for name, meaning in meanings.items()}
