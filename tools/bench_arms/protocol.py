"""What an arm does for the driver: it sets up once, then times a stretch whenever it is told.

Takes the folder that the driver names; they speak by files in it, because a launcher's ranks have
no standard input of their own, and libraries print what they like on standard output.

    serve(begin)        # begin(settings) -> Arm

    settings.json       from the driver, before it starts the arm
    ready.json          from the arm, when it is set up: `Arm.ready`
    go-0, go-1, ...     from the driver
    result-0.json, ...  from the arm: what `Arm.stretch` gives, a time for each
    end                 from the driver

Needs Python alone: the arm of PyTorch may be of another installation.
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
    """What is measured.

    Attributes:
      ready: how it was set up, for the record.
      stretch: trains for a while and returns what came of it.
      speaks: whether this process tells the driver; of several of one job, one does.
    """

    ready: dict
    stretch: Callable[[], dict]
    speaks: bool = True


def serve(begin: Callable[[dict], Arm]) -> None:
    """Sets up, and times stretches until the driver says that it was the last."""
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
    """Writes JSON that is whole as soon as it is there."""
    beside = path.with_name(f"{path.name}.part")
    beside.write_text(json.dumps(value))
    beside.rename(path)


def _told_to_go(folder: pathlib.Path, number: int) -> bool:
    """Waits, and returns whether it was for the next stretch: else there is no more to do."""
    while not (folder / f"go-{number}").exists():
        if (folder / "end").exists() or not folder.exists():
            return False
        time.sleep(POLL_S)
    return True
