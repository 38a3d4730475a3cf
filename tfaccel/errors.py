"""The one exception for mistakes a user can mend, and the search for the name they meant.

`UserError` reaches a Python caller as an ordinary `ValueError`; the `tfaccel` command prints it as
one line and exits with status 2.
"""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """One sentence: what was received, what was expected, how to fix it."""

    ag_pass_through = True  # or AutoGraph makes another error of it in a traced function


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Returns `"; did you mean 'x'?"` for the nearest valid name, else the list of valid names."""
    valid = sorted(valid)
    by_lowercase = {each.lower(): each for each in valid}
    near = difflib.get_close_matches(name.lower(), by_lowercase, n=1, cutoff=0.5)
    if near:
        return f"; did you mean '{by_lowercase[near[0]]}'?"
    return f"; expected one of: {', '.join(valid)}" if valid else ""
