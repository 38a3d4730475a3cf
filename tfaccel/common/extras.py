"""Says which of the package's extras a library is in, and how to install it.

if not is_installed("optuna"):
    raise UserError(f"optuna is not installed; add the extra: {how_to_add('optuna')}")
"""

import importlib.util


def is_installed(library: str) -> bool:
    """Returns whether a library can be imported, without importing it."""
    return importlib.util.find_spec(library) is not None


def how_to_add(extra: str) -> str:
    """Returns the two ways to install an extra of this package, in words."""
    return f"uv run --extra {extra} tfaccel ..., or pip install 'tfaccel[{extra}]'"
