"""The `tfaccel` command. It parses the flags of a command, checks them, and runs the command.

Exit codes: 0 done or help shown, 1 the run failed, 2 a mistake in the call, 130 interrupted, 143
ended by SIGTERM. A training run that a signal made save and stop exits with its config's
checkpoint.exit_code, which is 143 by default.
"""

import os
import pathlib
import sys
import traceback
from typing import NoReturn

from tfaccel.cli import pages
from tfaccel.cli.command import overview
from tfaccel.cli.diagnose_commands import (
    audit,
    autobatch,
    compare,
    doctor,
    lint,
    profile,
    selftest,
    underflow,
)
from tfaccel.cli.evaluate_command import evaluate
from tfaccel.cli.search_command import search
from tfaccel.cli.train_commands import export, launch, plot, predict, train
from tfaccel.common import meant
from tfaccel.common.disk_errors import OF_DISKS, cure
from tfaccel.common.errors import RunError, UserError, tell
from tfaccel.common.redact import shown
from tfaccel.common.tables import show
from tfaccel.common.version import __version__


def cli() -> None:
    """Runs the command of the command line and exits with its code."""
    try:
        _run()
    except SystemExit as ended:
        if isinstance(ended.code, int) and "tfaccel.step.aside" in sys.modules:
            sys.modules["tfaccel.step.aside"].leave_at_once(ended.code)
        raise


def _run() -> NoReturn:
    try:
        sys.exit(main(sys.argv[1:]))
    except (UserError, RunError) as error:
        sys.exit(tell(error))
    except OSError as error:
        if error.errno not in OF_DISKS:
            _end_with_traceback()
        where = error.filename or os.getcwd()
        sentence = f"{where} cannot be used ({error.strerror}): {cure(error, pathlib.Path(where))}"
        sys.exit(tell(RunError(sentence)))
    except KeyboardInterrupt:
        print("tfaccel: interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception:  # a bug in tfaccel or in a library
        _end_with_traceback()


def _end_with_traceback() -> NoReturn:
    """Prints the current exception's traceback, as Python would but without secrets, and exits."""
    print(shown(traceback.format_exc()), end="", file=sys.stderr)
    sys.exit(1)


def main(arguments: list[str]) -> int:
    """Runs one command and returns the exit code.

    Raises:
      UserError: there is a mistake in the call, or the command found one.
    """
    command, *rest = arguments or ["--help"]
    if command == "help" and rest:
        show(pages.page(rest[0]), end="")
        return 0
    if command in ("--help", "-h", "help"):
        show(overview(COMMANDS) + pages.topics(), end="")
        return 0
    if command == "--version":
        print(__version__)
        return 0
    if command not in COMMANDS:
        raise UserError(f"there is no command '{command}'{meant.command(command, COMMANDS)}")
    if command not in ("doctor", "launch"):  # they start processes with another environment
        # TensorFlow reads this when it is imported, and then prints less at its start.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    return COMMANDS[command](rest)


COMMANDS = {
    each.name: each
    for each in (
        train,
        launch,
        audit,
        lint,
        profile,
        search,
        evaluate,
        export,
        predict,
        plot,
        compare,
        autobatch,
        underflow,
        selftest,
        doctor,
    )
}
