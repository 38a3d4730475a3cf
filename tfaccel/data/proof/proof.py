"""Judges whether a loader gives every example once in each epoch, in a new order, with new draws.

`record` takes the rows of each replica in every step of some dry epochs. `verdict` makes a page of
them, with a finding for each of the usual mistakes (equal shards, no shuffling, equal seeds).

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
from tfaccel.data.sampling import ClassSampling


@dataclasses.dataclass(frozen=True, repr=False)
class Verdict(Report):
    """All findings.

    Attributes:
      findings: one for each check, in the order of the page.
      title: the size of the epochs, in words.
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
        the draws, or None if nothing is drawn.
      num_steps: number of steps in an epoch. The last epoch may be shorter.
    """
    steps = iter(trace)
    epochs = iter(lambda: list(itertools.islice(steps, num_steps)), [])
    return [Epoch.of(each) for each in epochs]


def fingerprints(draws: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Returns a number for each row, a digest of all its random draws: [rows] int64.

    Args:
      draws: [rows, ...] by kind, from `draws.draw`. The result is None if there are none.
    """
    if not draws:
        return None
    rows = zip(*draws.values(), strict=True)
    texts = (b"".join(each.tobytes() for each in row) for row in rows)
    digests = (hashlib.blake2b(text, digest_size=8).digest() for text in texts)
    return np.array([int.from_bytes(each, signed=True) for each in digests], np.int64)


def verdict(
    epochs: Sequence[Epoch],
    *,
    num_examples: int,
    shuffle: bool,
    last_batch: str,
    sampling: ClassSampling | None = None,
) -> Verdict:
    """Judges consecutive epochs of one loader.

    Args:
      epochs: two or more epochs of all replicas, to see whether the order changes.
      num_examples: number of examples that an epoch should have.
      shuffle: whether each epoch should have a new order.
      last_batch: "pad", "drop" or "repeat", as in ImageConfig.
      sampling: how many images of each class an epoch should have; None for each image once.
    """
    expected = Expected.of(
        epochs, num_examples=num_examples, shuffle=shuffle, last_batch=last_batch
    )
    checks = [findings.coverage, findings.duplicates]
    if sampling is not None:
        expected = dataclasses.replace(expected, sampling=sampling)
        checks = [findings.classes]
    shards = findings.shards(epochs, expected)
    length = _unless([shards], findings.length, epochs, expected)
    return Verdict(
        findings=(
            findings.shapes(epochs, expected),
            shards,
            length,
            *(_unless([shards, length], each, epochs, expected) for each in checks),
            findings.order(epochs, expected),
            findings.draws(epochs, expected),
        ),
        title=(
            f"{num_examples:,} examples, {len(epochs)} epochs of {expected.num_steps:,} steps, "
            f"{expected.rows} rows on each of {expected.num_replicas} replicas"
        ),
    )


def _unless(causes: Sequence[Finding], check: Callable[..., Finding], *arguments) -> Finding:
    """Returns the finding of a check, or "not judged" if an earlier fault would cause its fault."""
    for cause in causes:
        if cause.ok is False:
            return Finding(check.__name__, None, f"not judged, because of {cause.name}")
    return check(*arguments)
