"""The files through which a variant's process and the comparison talk, in a temporary folder.

    first.json, pace.json   written by the process after its first steps
    ready.json              written by the process after its warm-up
    go-0, go-1, ...         written by the comparison; each asks for one stretch
    result-0.json, ...      written by the process: the figures of that stretch

This module does not import TensorFlow.
"""

import json
import pathlib

POLL_S = 0.01  # seconds between two checks for the next request: see child.py


def write(path: pathlib.Path, value: dict) -> None:
    """Writes JSON, so that a reader sees either no file or the whole file."""
    beside = path.with_name(f"{path.name}.part")
    beside.write_text(json.dumps(value))
    beside.rename(path)


def read(path: pathlib.Path) -> dict | None:
    """Returns the contents of a JSON file; None if it does not exist yet."""
    return json.loads(path.read_text()) if path.exists() else None
