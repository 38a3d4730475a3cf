"""The driver, seen from an arm: the arm sets up once, and then times a stretch on each request.

The two talk through files in a folder that the driver names. They do not use standard input and
output: the ranks of a launcher have no standard input, and libraries print to standard output.

    serve(begin)        # begin(settings) -> Arm

    settings.json       written by the driver before it starts the arm
    ready.json          written by the arm after its setup: `Arm.ready`
    go-0, go-1, ...     written by the driver; each asks for one stretch
    result-0.json, ...  written by the arm: the result of `Arm.stretch`
    end                 written by the driver; asks the arm to end

This module needs only Python's standard library, because the PyTorch arm may use another
installation.
"""

import dataclasses
import itertools
import json
import pathlib
import sys
import time
from collections.abc import Callable

POLL_S = 0.02


@dataclasses.dataclass(frozen=True)
class Arm:
    """An arm that is set up.

    Attributes:
      ready: the settings and first figures, for the record.
      stretch: a function that trains a stretch and returns its figures.
      speaks: True if this process answers the driver. Exactly one process of a job does.
    """

    ready: dict
    stretch: Callable[[], dict]
    speaks: bool = True


def serve(begin: Callable[[dict], Arm]) -> None:
    """Sets up the arm, and times stretches until the driver asks it to end."""
    folder = pathlib.Path(sys.argv[1])
    settings = json.loads((folder / "settings.json").read_text())
    arm = begin(settings)
    if arm.speaks:
        write(folder / "ready.json", arm.ready)
    for number in itertools.count():
        if not _told_to_go(folder, number):
            return
        result = arm.stretch()
        if arm.speaks:
            write(folder / f"result-{number}.json", result)


def write(path: pathlib.Path, value: dict) -> None:
    """Writes JSON, so that a reader sees either no file or the whole file."""
    beside = path.with_name(f"{path.name}.part")
    beside.write_text(json.dumps(value))
    beside.rename(path)


def _told_to_go(folder: pathlib.Path, number: int) -> bool:
    """Waits for the next request; returns True for a stretch, and False to end."""
    while not (folder / f"go-{number}").exists():
        if (folder / "end").exists() or not folder.exists():
            return False
        time.sleep(POLL_S)
    return True
