"""What the calls of tools/bench.py and tools/bench_cifar.py have in common, but for their flags.

add("--repeats", type=whole(1))                             # of an argparse.ArgumentParser
sys.exit(exit_code("bench", lambda: measure(options)))      # 0, 1, 2 or 130
"""

import argparse
import sys
from collections.abc import Callable

from bench_arms.arm_process import ArmError
from tfaccel.process.signals import exiting_on_sigterm

NO_TORCH = "{} has no torch and torchvision; say --torch-python"


class UsageError(Exception):
    """A mistake in the call."""


def whole(at_least: int) -> Callable[[str], int]:
    """Returns what argparse takes for the type of a whole number of at least this much."""

    def parsed(text: str) -> int:
        if not text.isdecimal() or int(text) < at_least:
            expected = f"expected a whole number of at least {at_least}"
            raise argparse.ArgumentTypeError(f"{text!r}; {expected}")
        return int(text)

    return parsed


def exit_code(program: str, run: Callable[[], int]) -> int:
    """Returns what `run` does, or the code for what ended it, which is said in a line."""
    try:
        with exiting_on_sigterm():
            return run()
    except (UsageError, ArmError) as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        return 130
