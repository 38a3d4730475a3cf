"""Says in one sentence what failed in a user's Python file that reads or changes a config.

    in_file(error, "space.py")    # "space.py, line 2: config.train has no field 'rate'; ..."

ml_collections answers a wrong field with a KeyError or an AttributeError whose text has all fields
of the section with their values.
"""

import traceback

import ml_collections

from tfaccel.common import meant
from tfaccel.config.config import all_fields


def in_file(error: BaseException, file: str) -> str:
    """Returns the file, its line, and the error.

    Args:
      error: any error that was raised and caught.
      file: the user's file, as Python names it.
    """
    lines = [
        each.lineno for each in traceback.extract_tb(error.__traceback__) if each.filename == file
    ]
    line = f", line {lines[-1]}" if lines else ""
    return f"{file}{line}: {_no_field(error) or f'{type(error).__name__}: {error}'}"


def _no_field(error: BaseException) -> str | None:
    """Returns a sentence if a config has no such field or section; None of other errors."""
    if not isinstance(error, AttributeError | KeyError):
        return None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        own = frame.f_locals
        name = own.get("attribute", own.get("key"))
        config = own.get("self")
        if isinstance(config, ml_collections.ConfigDict) and isinstance(name, str):
            return None if name in config else _sentence(config, name)
    return None


def _sentence(config: ml_collections.ConfigDict, name: str) -> str | None:
    sections = {}
    for each in all_fields():
        section, _, field = each.partition(".")
        sections.setdefault(section, []).append(field)
    if set(sections) & set(config):
        return f"config has no section '{name}'{meant.field(name, all_fields())}"
    for section, fields in sections.items():
        if set(fields) & set(config) and set(config) <= {*fields, name}:
            hint = meant.field(name, all_fields(), fields, section=section)
            return f"config.{section} has no field '{name}'{hint}"
    return None  # another ConfigDict, of the user's own
