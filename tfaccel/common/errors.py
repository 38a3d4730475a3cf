"""Mistakes a user can mend, what ends a run in its course, and the search for a name they meant.

`UserError` reaches a Python caller as an ordinary `ValueError`, and `RunError` as a `RuntimeError`;
the `tfaccel` command prints either as one line and exits with status 2 or 1, and so does a script
that `tfaccel launch` starts: a launcher starts nothing again after a mistake in the call.
"""

import difflib
import sys
from collections.abc import Iterable

from tfaccel.common.redact import shown


class UserError(ValueError):
    """One sentence: what was received, what was expected, how to fix it."""

    ag_pass_through = True  # or AutoGraph makes another error of it in a traced function

    def __init__(self, *said):
        """Takes the sentence. Python prints it too, so that secrets must not get into it."""
        super().__init__(*map(_shown, said))


class RunError(RuntimeError):
    """One sentence: what ended a run that the call was right for, and what to do about it."""

    def __init__(self, *said):
        """Takes the sentence, as UserError does."""
        super().__init__(*map(_shown, said))


def _shown(said: object) -> object:
    return shown(said) if isinstance(said, str) else said


def tell(error: UserError | RunError) -> int:
    """Prints the sentence on standard error, and returns the exit code for it."""
    message = shown(" ".join(str(error).split()))
    print(f"tfaccel: error: {message}", file=sys.stderr)
    return 2 if isinstance(error, UserError) else 1


def exit_as_the_command() -> None:
    """Lets a script that one of these errors ends exit as `tfaccel` does; of others as before."""
    before = sys.excepthook

    def hook(kind, error, traceback):
        if not isinstance(error, UserError | RunError):
            return before(kind, error, traceback)
        sys.exit(tell(error))  # as an uncaught exception, the code would be 1

    sys.excepthook = hook


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Returns `"; did you mean 'x'?"` for the nearest valid name, else the list of valid names."""
    valid = sorted(valid)
    by_lowercase = {each.lower(): each for each in valid}
    near = [each for each in by_lowercase if name and each.startswith(name.lower())]
    near = near or difflib.get_close_matches(name.lower(), by_lowercase, n=1, cutoff=0.5)
    if near:
        return f"; did you mean '{by_lowercase[near[0]]}'?"
    return f"; expected one of: {', '.join(valid)}" if valid else ""
