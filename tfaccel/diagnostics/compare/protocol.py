"""The files by which a variant's process and the comparison speak, in a folder of their own.

    first.json, pace.json   from the process, when its first steps are done
    ready.json              from the process, when it is warm
    go-0, go-1, ...         from the comparison, for a stretch each
    result-0.json, ...      from the process: what came of it

Nothing of TensorFlow is imported here.
"""

import json
import pathlib

POLL_S = 0.01  # between two looks of a process that waits: see child.py


def write(path: pathlib.Path, value: dict) -> None:
    """Writes JSON that is whole as soon as it is there."""
    beside = path.with_name(f"{path.name}.part")
    beside.write_text(json.dumps(value))
    beside.rename(path)


def read(path: pathlib.Path) -> dict | None:
    """Returns what a file says; None if it is not there yet."""
    return json.loads(path.read_text()) if path.exists() else None
