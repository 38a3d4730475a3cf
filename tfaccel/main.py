"""The `tfaccel` command: flags to config and workdir, then `train.run`; nothing else.

Exit codes: 0 done or help, 1 the run failed, 2 a mistake in the call, 130 interrupted.
"""

import datetime
import itertools
import json
import os
import pathlib
import re
import sys

from absl import flags
from ml_collections import config_flags

from tfaccel import __version__
from tfaccel.errors import UserError, did_you_mean

HELP = f"""tfaccel {__version__}: train Keras models from image files and keep NVIDIA GPUs busy.

usage: tfaccel COMMAND [flags]

  train   train, measure and export what a config file says
            tfaccel train --config=configs/digits.py
            tfaccel train --config=configs/mnist.py --config.data.root=/data/mnist_png

  tfaccel COMMAND --help   a command's flags
  tfaccel --version        the version
"""

TRAIN_HELP = """usage: tfaccel train --config=FILE [--workdir=DIR] [--config.SECTION.FIELD=VALUE]

  --config=FILE    an experiment: a Python file with get_config(), as in configs/;
                   FILE:smoke runs its smallest size
  --workdir=DIR    a new folder for what the run leaves; runs/NAME-TIME by default

  any field of the experiment, with its default:
{fields}

  what each means: the docstrings in tfaccel/config.py

  tfaccel train --config=configs/digits.py --config.train.epochs=3
  tfaccel train --config=configs/mnist.py --config.runtime.gpu_ids=0 --config.runtime.precision=O2
"""


def cli() -> None:
    """Runs the command line's command and exits with its code."""
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(_mistake(str(error)))
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
    if {"--help", "-h", "--helpfull", "--helpshort"} & set(arguments):
        print(TRAIN_HELP.format(fields=_describe_fields()), end="")
        return 0
    config, name, workdir = _parse_train_flags(arguments)
    # TensorFlow reads this when it is imported: its start-up chatter would bury our few lines.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from tfaccel import train as train_room

    time = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    result = train_room.run(config, workdir=pathlib.Path(workdir or f"runs/{name}-{time}"))
    print(json.dumps(result))
    return 0


COMMANDS = {"train": train}


def _parse_train_flags(arguments: list[str]):
    """Returns the config with its overrides, the config file's name, and the workdir."""
    values = flags.FlagValues()
    argv = ["tfaccel train", *arguments]
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv, lock_config=True)
    flags.DEFINE_string("workdir", None, "A new folder.", flag_values=values)
    # What config_flags would answer with a traceback is looked at first.
    file = _config_file(arguments)
    _check_overrides(arguments)
    try:
        unparsed = values(argv)[1:]
    except flags.Error as error:
        raise UserError(str(error)) from error
    except Exception as error:  # whatever the user's file raises
        raise UserError(
            f"config file {file} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    if unparsed:
        raise UserError(f"'{unparsed[0]}' is no flag; expected --config.SECTION.FIELD=VALUE")
    return values.config, file.stem, values.workdir


def _config_file(arguments: list[str]) -> pathlib.Path:
    """Returns the file that --config names, without the argument after its colon."""
    given = [
        following if flag.endswith("config") else flag.partition("=")[2]
        for flag, following in itertools.pairwise([*arguments, ""])
        if re.fullmatch(r"--?config(=.*)?", flag)
    ]
    if not given or not given[-1]:
        raise UserError("no config; give one, e.g. `tfaccel train --config=configs/digits.py`")
    file = pathlib.Path(given[-1].partition(":")[0])
    if not file.is_file():
        there = [str(each) for each in file.parent.glob("*.py")]
        raise UserError(f"config file {file} does not exist{did_you_mean(str(file), there)}")
    return file


def _check_overrides(arguments: list[str]) -> None:
    """Raises UserError for a --config.SECTION.FIELD that no config has."""
    from tfaccel.config import default_config

    valid = default_config()
    names = [f"{section}.{name}" for section in valid for name in valid[section]]
    for argument in arguments:
        override = re.match(r"--?(?:no)?config\.([^=]*)", argument)
        if override and override[1] not in names:
            raise UserError(
                f"config has no field '{override[1]}'{did_you_mean(override[1], names)}"
            )


def _describe_fields() -> str:
    from tfaccel.config import default_config

    sections = default_config().items()
    return "\n".join(
        f"    --config.{section}.{name}={value}"
        for section, fields in sections
        for name, value in sorted(fields.items())
    )


def _mistake(message: str) -> int:
    print(f"tfaccel: error: {' '.join(message.split())}", file=sys.stderr)
    return 2
