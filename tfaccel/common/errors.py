"""Errors that a user can fix, and the search for the name that a user meant.

For a Python caller, `UserError` is a `ValueError` and `RunError` is a `RuntimeError`. The `tfaccel`
command prints either as one line and exits with status 2 or 1. So does a script that `tfaccel
launch` starts. The launcher does not restart ranks after status 2, which means a mistake in the
call.
"""

import difflib
import sys
from collections.abc import Iterable

from tfaccel.common.redact import shown


class UserError(ValueError):
    """One sentence about a mistake in the call: what was received, what was expected, the fix."""

    ag_pass_through = True  # AutoGraph keeps this class in a traced function

    def __init__(self, *said):
        """Takes the sentence, and removes secrets from it, because Python may print it."""
        super().__init__(*map(_shown, said))


class RunError(RuntimeError):
    """One sentence about what ended a run although the call was right, and how to fix it."""

    def __init__(self, *said):
        """Takes the sentence, and removes secrets from it."""
        super().__init__(*map(_shown, said))


def _shown(said: object) -> object:
    return shown(said) if isinstance(said, str) else said


def tell(error: UserError | RunError) -> int:
    """Prints the sentence on standard error, and returns the exit code."""
    message = shown(" ".join(str(error).split()))
    print(f"tfaccel: error: {message}", file=sys.stderr)
    return 2 if isinstance(error, UserError) else 1


def exit_as_the_command() -> None:
    """Makes a script that ends with a UserError or RunError exit as `tfaccel` does."""
    before = sys.excepthook

    def hook(kind, error, traceback):
        if not isinstance(error, UserError | RunError):
            return before(kind, error, traceback)
        sys.exit(tell(error))  # as an uncaught exception, the code would be 1

    sys.excepthook = hook


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """Returns the valid name that was probably meant; None if no name is near."""
    by_lowercase = {each.lower(): each for each in sorted(valid)}
    near = [each for each in by_lowercase if name and each.startswith(name.lower())]
    near = near or difflib.get_close_matches(name.lower(), by_lowercase, n=1, cutoff=0.5)
    return by_lowercase[near[0]] if near else None


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Returns `"; did you mean 'x'?"` for the nearest valid name, or the list of valid names."""
    valid = sorted(valid)
    if (near := nearest(name, valid)) is not None:
        return f"; did you mean '{near}'?"
    return f"; expected one of: {', '.join(valid)}" if valid else ""
