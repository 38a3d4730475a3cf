"""metrics.jsonl: each record as a line of JSON, within epochs and after them.

Takes records; gives a line for each. Its field "record" tells its kind: "steps" or "epoch".

    {"record": "steps", "step": 50, "epoch": 1, "seconds": 31.5, "loss": 6.91, ...}

JSON has no NaN and no infinity, so both are written as null.
"""

import json
import logging
import math
import pathlib

from tfaccel.common.own_files import replace
from tfaccel.common.regular_file import read_regular
from tfaccel.training.logs import Record, Writer
from tfaccel.training.logs.appended import Appended

log = logging.getLogger("tfaccel")


class JsonLines(Writer):
    """Appends a line for each record."""

    def __init__(self, path: pathlib.Path):
        """Takes the path of the file, which is made at the first record."""
        self.name = path.name
        self._path, self._keep, self._file = path, False, None

    def resume_at(self, *, step: int, epoch: int) -> None:
        """Removes the lines of later steps and epochs, and damaged lines."""
        self.close()
        self._keep = True
        if not self._path.exists():
            return
        records = read(self._path)
        kept = [each for each in records if _stays(each, step=step, epoch=epoch)]
        replace(self._path, b"".join(map(_line, kept)))

    def steps(self, record: Record) -> None:
        """Appends a line."""
        self._append({"record": "steps"} | record)

    def epoch(self, record: Record) -> None:
        """Appends a line."""
        self._append({"record": "epoch"} | record)

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _append(self, record: dict) -> None:
        if self._file is None:
            self._file, self._keep = Appended(self._path, keep=self._keep), True
        self._file.append(_line(record))


def read(path: pathlib.Path) -> list[dict]:
    """Returns the records of a file, with NaN for null. It skips damaged lines, and logs them.

    Raises:
      OSError: the file cannot be read.
    """
    records = []
    lines = read_regular(path).split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        record = _record(line)
        if record is not None:
            records.append(record)
        elif number < len(lines):
            log.warning("logs: %s: line %d is damaged and is skipped", path, number)
        else:  # a killed process may leave such a line
            log.info("logs: %s: the last line is incomplete and is skipped", path)
    return records


def _record(line: bytes) -> dict | None:
    """Returns the record of a line; None if the line is damaged."""
    try:
        numbers = json.loads(line)
        kind = numbers.pop("record")
        numbers = {name: math.nan if each is None else each for name, each in numbers.items()}
        valid = kind in ("steps", "epoch") and {"step", "epoch"} <= set(numbers)
        valid = valid and all(isinstance(each, int | float) for each in numbers.values())
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return None
    return {"record": kind} | numbers if valid else None


def _line(record: dict) -> bytes:
    finite = {
        name: None if isinstance(each, float) and not math.isfinite(each) else each
        for name, each in record.items()
    }
    return json.dumps(finite).encode() + b"\n"


def _stays(record: dict, *, step: int, epoch: int) -> bool:
    """Returns whether a resume after `step`, with `epoch` complete epochs, keeps a record."""
    if record["record"] == "epoch":
        return record["epoch"] <= epoch
    return record["step"] <= step
