"""The result of a scan: faults, their number by kind, and the list as a text file.

report.bad_ids, report.summary("train")
report.write("bad_files.txt")
"""

import collections
import dataclasses
import os
import pathlib
from collections.abc import Iterable

import numpy as np

from tfaccel.common.own_files import replace
from tfaccel.common.redact import shown
from tfaccel.data.scan.examine import BAD, NOTE

NUM_NAMED = 5  # bad examples that are named outside the list


@dataclasses.dataclass(frozen=True, order=True)
class Fault:
    """Something wrong with one image.

    Attributes:
      severity: "bad" (not every loader can train on it) or "note".
      kind: one of examine.KINDS.
      name: path of the image, or its place in a shard.
      cause: the cause, in words.
      id: index of the example in the source.
    """

    severity: str
    kind: str
    name: str
    cause: str
    id: int


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of a scan.

    Attributes:
      faults: sorted by severity, kind and name; an image may have several.
      num_examples: number of examples in the source.
      num_reused: number of images that an earlier scan had checked; a pair has two images.
      list_path: path of the text file that lists the faults.
    """

    faults: tuple[Fault, ...]
    num_examples: int
    num_reused: int
    list_path: pathlib.Path

    @property
    def bad_ids(self) -> np.ndarray:
        """The ids of the examples that cannot be trained on: [n] int64, in order."""
        bad = {each.id for each in self.faults if each.severity == BAD}
        return np.array(sorted(bad), np.int64)

    def counts(self, severity: str) -> str:
        """Returns the number of faults of each kind: "2 empty, 1 truncated"."""
        kinds = collections.Counter(each.kind for each in self.faults if each.severity == severity)
        return ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))

    def summary(self, name: str) -> str:
        """Returns a summary of one line.

        Args:
          name: name of the source, for example "train".
        """
        bad, notes = (self.counts(each) or "none" for each in (BAD, NOTE))
        said = f"{name}: {self.num_examples:,} examples; bad: {bad}; notes: {notes}"
        return f"{said}; listed in {self.list_path}" if self.faults else said

    def worst(self) -> str:
        """Returns a line for each of the first bad examples, with its cause; "" if none is bad."""
        bad = [each for each in self.faults if each.severity == BAD]
        lines = [f"  bad: {shown(each.name)}: {each.cause}" for each in bad[:NUM_NAMED]]
        if len(bad) > NUM_NAMED:
            lines.append(f"  and {len(bad) - NUM_NAMED:,} more")
        return "\n".join(lines)

    def write(self, path: str | os.PathLike) -> None:
        """Writes the list of faults: see `write_list`."""
        write_list(path, self.faults)


def write_list(path: str | os.PathLike, faults: Iterable[Fault]) -> None:
    """Writes a line for each fault: severity, kind, path and cause, separated by tabs."""
    lines = []
    for each in faults:
        words = (each.severity, each.kind, each.name, each.cause)
        lines.append("\t".join(shown(word.replace("\\", "\\\\"), keep="") for word in words))
    replace(pathlib.Path(path), "".join(f"{line}\n" for line in lines).encode())
