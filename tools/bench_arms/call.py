"""The parts that the command lines of the benchmarks share.

parser.add_argument("--repeats", type=whole(1))
sys.exit(exit_code("bench", lambda: measure(options)))      # 0, 1, 2 or 130
"""

import argparse
import sys
from collections.abc import Callable

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
