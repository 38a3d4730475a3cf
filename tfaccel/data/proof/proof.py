"""Whether a loader gives every example once an epoch, in a new order, with its own random draws.

Takes what each replica was given in every step of some dry epochs; gives a verdict of one page,
in which each of the usual mistakes (equal shards, no shuffle, equal seeds) has its own finding.

    epochs = record(trace, num_steps)
    print(verdict(epochs, num_examples=50000, shuffle=True, last_batch="pad"))
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from tfaccel.common.report import Notes, Report
from tfaccel.data.proof import findings
from tfaccel.data.proof.epochs import Epoch
from tfaccel.data.proof.findings import Expected, Finding


@dataclasses.dataclass(frozen=True, repr=False)
class Verdict(Report):
    """All findings.

    Attributes:
      findings: one for each name, in the order of reading.
      title: what was looked at.
    """

    findings: tuple[Finding, ...]
    title: str

    @property
    def ok(self) -> bool:
        """Whether there is no fault."""
        return all(each.ok is not False for each in self.findings)

    def parts(self):
        """Returns one page."""
        said = {True: "ok", False: "FAULT", None: "-"}
        yield f"the loader is {'sound' if self.ok else 'at fault'}: {self.title}"
        yield Notes([(said[each.ok], each.name, each.text) for each in self.findings])


def record(trace: Iterable[Sequence[tuple]], num_steps: int) -> list[Epoch]:
    """Returns the epochs of a trace.

    Args:
      trace: for each step, for each replica: ids [rows], real [rows], and fingerprints [rows] of
        the draws, or None where nothing is drawn.
      num_steps: of an epoch. Should the trace end in the middle of one, that is a shorter epoch.
    """
    steps = iter(trace)
    epochs = iter(lambda: list(itertools.islice(steps, num_steps)), [])
    return [Epoch.of(each) for each in epochs]


def fingerprints(draws: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Returns a number for each row that stands for all its random draws: [rows] int64.

    Args:
      draws: [rows, ...] by kind, as `tfaccel.data.draws.draw` gives them. None for none at all.
    """
    if not draws:
        return None
    rows = zip(*draws.values(), strict=True)
    texts = (b"".join(each.tobytes() for each in row) for row in rows)
    digests = (hashlib.blake2b(text, digest_size=8).digest() for text in texts)
    return np.array([int.from_bytes(each, signed=True) for each in digests], np.int64)


def verdict(
    epochs: Sequence[Epoch], *, num_examples: int, shuffle: bool, last_batch: str
) -> Verdict:
    """Judges epochs that one loader gave, one after the other.

    Args:
      epochs: of all replicas; two or more, to see whether anything changes.
      num_examples: that an epoch should have.
      shuffle: whether each epoch should have a new order.
      last_batch: "pad", "drop" or "repeat", as ImageConfig says.
    """
    expected = Expected.of(
        epochs, num_examples=num_examples, shuffle=shuffle, last_batch=last_batch
    )
    shards = findings.shards(epochs, expected)
    length = _unless([shards], findings.length, epochs, expected)
    return Verdict(
        findings=(
            findings.shapes(epochs, expected),
            shards,
            length,
            _unless([shards, length], findings.coverage, epochs, expected),
            _unless([shards, length], findings.duplicates, epochs, expected),
            findings.order(epochs, expected),
            findings.draws(epochs, expected),
        ),
        title=(
            f"{num_examples:,} examples, {len(epochs)} epochs of {expected.num_steps:,} steps, "
            f"{expected.rows} rows on each of {expected.num_replicas} replicas"
        ),
    )


def _unless(causes: Sequence[Finding], check: Callable[..., Finding], *arguments) -> Finding:
    """Returns what a check finds, unless there is a fault from which its own would follow."""
    for cause in causes:
        if cause.ok is False:
            return Finding(check.__name__, None, f"not judged, because of {cause.name}")
    return check(*arguments)
