"""The parts that the command lines of the benchmarks share.

parser.add_argument("--repeats", type=whole(1))
sys.exit(exit_code("bench", lambda: measure(options)))      # 0, 1, 2 or 130
"""

import argparse
import ast
import functools
import pathlib
import re
import sys
from collections.abc import Callable, Collection

from bench_arms.arm_process import ArmError
from tfaccel.process.signals import exiting_on_sigterm

NO_TORCH = "{} has no torch and torchvision; use --torch-python for an interpreter that has both"
NO_PACKAGE = "{} has no {}; install it, or use --torch-python for an interpreter that has it"


class UsageError(Exception):
    """A mistake in the call."""


def whole(at_least: int) -> Callable[[str], int]:
    """Returns a type for argparse: a whole number that is at least `at_least`."""

    def parsed(text: str) -> int:
        if not text.isdecimal() or int(text) < at_least:
            expected = f"expected a whole number of at least {at_least}"
            raise argparse.ArgumentTypeError(f"{text!r}; {expected}")
        return int(text)

    return parsed


@functools.cache
def listed_settings(program: str) -> set[str]:
    """Returns the names of the settings that an arm's program lists in its docstring.

    Args:
      program: the name of a file beside this one.
    """
    docstring = ast.get_docstring(ast.parse(pathlib.Path(__file__).with_name(program).read_text()))
    lines = re.findall(r"^    ((?:\w+, )*\w+)(?: |$)", docstring, re.M)
    return {name for line in lines for name in line.split(", ")}


def check_arm(name: str, settings: dict, *, program: str, others: Collection[str]) -> None:
    """Checks the settings that --arm gives.

    Args:
      name: the name of the arm.
      settings: the settings.
      program: the program that is the arm.
      others: settings that are not the program's.

    Raises:
      UsageError: neither the program nor `others` has a setting.
    """
    known = listed_settings(program) | {*others}
    if wrong := [each for each in settings if each not in known]:
        raise UsageError(
            f"--arm: {name} has the setting '{wrong[0]}', which is none of {program}; "
            f"use {', '.join(sorted(known))}"
        )


def exit_code(program: str, run: Callable[[], int]) -> int:
    """Calls `run` and returns its exit code; after an error, prints a line and returns its code."""
    try:
        with exiting_on_sigterm():
            return run()
    except (UsageError, ArmError) as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        return 130
