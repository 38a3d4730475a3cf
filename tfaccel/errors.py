"""Mistakes a user can mend, what ends a run in its course, and the search for a name they meant.

`UserError` reaches a Python caller as an ordinary `ValueError`, and `RunError` as a `RuntimeError`;
the `tfaccel` command prints either as one line and exits with status 2 or 1.
"""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """One sentence: what was received, what was expected, how to fix it."""

    ag_pass_through = True  # or AutoGraph makes another error of it in a traced function


class RunError(RuntimeError):
    """One sentence: what ended a run that the call was right for, and what to do about it."""


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Returns `"; did you mean 'x'?"` for the nearest valid name, else the list of valid names."""
    valid = sorted(valid)
    by_lowercase = {each.lower(): each for each in valid}
    near = [each for each in by_lowercase if name and each.startswith(name.lower())]
    near = near or difflib.get_close_matches(name.lower(), by_lowercase, n=1, cutoff=0.5)
    if near:
        return f"; did you mean '{by_lowercase[near[0]]}'?"
    return f"; expected one of: {', '.join(valid)}" if valid else ""
