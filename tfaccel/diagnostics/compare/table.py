"""What was measured, and which variant is best.

comparison = Comparison(rows=..., winner=..., ...)
print(comparison); comparison.as_markdown(); comparison.flags
"""

import dataclasses
import math

from tfaccel.common.report import Code, Grid, Notes, Report
from tfaccel.common.tables import counted
from tfaccel.diagnostics.compare.contest import Row

HEADS = ("", "loader", "arithmetic", "XLA", "GPUs", "images/s", "spread", "times", "start", "MiB")
HEADS += ("apart",)
MEANINGS = Notes(
    [
        (
            "images/s",
            "the median stretch. Variants are measured at different times, so `times` compares "
            "them better",
        ),
        ("spread", "from the slowest stretch to the fastest, as a part of the median"),
        (
            "times",
            "how many times as fast as the first variant that ran. Each variant is measured in "
            "turn with the best one before it, and the gains are multiplied. In the end the best "
            "is measured in turn with the first, and later variants are reckoned from that",
        ),
        (
            "start",
            "seconds from a process's start to the end of its first step, with everything compiled "
            "anew; where several steps are one execution, to the end of those",
        ),
        ("MiB", "the most that TensorFlow's tensors took, on the fullest GPU"),
        (
            "apart",
            "the largest distance of the loss from the first one's, in five parts of its course",
        ),
    ]
)
RIGHT = (0, *range(3, len(HEADS)))  # loader and arithmetic begin at the left


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison(Report):
    """Every variant, and which is best.

    Attributes:
      title: what was trained, and where.
      rows: the variants, in the order in which they were measured.
      winner: the row of the best; None where nothing ran.
      flags: of `tfaccel train`, which make the config the best one.
      command: that of the experiment as it is, to which they are added.
      how: it was measured, in words.
      tolerance: how far losses may be apart.
      noise: by which part the same thing, measured twice, differed; None where it is not known.
      settings: steps, repeats and the rest.
      environment: versions and hardware.
      stretch_steps: of each stretch: those that were asked for, or fewer for want of time.
      to_ask_for: how many minutes would do, in words.
    """

    title: str
    rows: tuple[Row, ...]
    winner: Row | None
    flags: tuple[str, ...]
    command: str
    how: str
    tolerance: float
    noise: float | None
    settings: dict
    environment: dict
    stretch_steps: int | None = None
    to_ask_for: str = ""

    @property
    def exit_code(self) -> int:
        """0 if something ran; 1 if nothing did, or if there was no time for a second variant."""
        return 1 if self.winner is None or self._is_alone else 0

    @property
    def _left_out(self) -> list[Row]:
        return [
            each for each in self.rows if each.status == "left out" and each.why != "interrupted"
        ]

    @property
    def _is_alone(self) -> bool:
        """Whether all but one were left out: then there is nothing to compare."""
        measured = [each for each in self.rows if each.status in ("plain", "kept", "rejected")]
        return bool(self._left_out) and len(measured) <= 1

    @property
    def summary(self) -> str:
        """What came of it, in a sentence or two."""
        if not self._left_out:
            return self._outcome
        left = (
            f"there was no time for {len(self._left_out)} of {counted(len(self.rows), 'variant')}"
        )
        ask = f": {self.to_ask_for}" if self.to_ask_for else ""
        return f"{self._outcome}; {left}{ask}"

    @property
    def _outcome(self) -> str:
        if self.winner is None:
            return "nothing was measured" if self._left_out else "nothing ran; each row says why"
        if self._is_alone:
            return f"only {self.winner.variant} was measured, so nothing is compared"
        first = "the plain one" if self.rows[0].status == "plain" else "the first that ran"
        if self.winner.times == 1.0:
            return f"{first} is the best: {self.winner.variant}"
        times = f"{self.winner.times:.2f} times as fast as {first}"
        return f"the best is {self.winner.variant}: {times}"

    @property
    def has_best(self) -> bool:
        """Whether one was found to be the best of several."""
        return self.winner is not None and not self._is_alone

    @property
    def train_command(self) -> str:
        """The command that trains as the best does, a flag on each line."""
        return " \\\n    ".join([self.command, *self.flags])

    def cells(self, row: Row) -> list[str]:
        """Returns what stands in the columns of `HEADS`."""
        peak = f"{max(row.peak_mib):,}" if row.peak_mib else "-"
        variant = row.variant
        return [
            f"{'>' if row is self.winner else ''}{row.number}",
            variant.loader,
            variant.arithmetic,
            "on" if variant.xla else "-",
            str(variant.num_gpus) if variant.num_gpus else "-",
            _number(row.rate, ",.0f"),
            _number(spread(row), ".1%"),
            _number(row.times, ".2f" if (row.times or 0) < 99 else ".0f"),
            _number(row.first_step_s, ".1f" if (row.first_step_s or 0) < 999 else ".0f"),
            peak,
            ">99%" if row.apart and 0.9995 <= row.apart < math.inf else _number(row.apart, ".1%"),
        ]

    def parts(self):
        """Returns the figures, why each row is what it is, what they mean, and the best."""
        yield f"compare: {self.title}"
        yield self.figures
        yield self.reasons
        yield MEANINGS
        yield self.how
        yield self.summary
        if self.has_best:
            yield Code(self.train_command)

    @property
    def figures(self) -> Grid:
        """A row for each variant."""
        return Grid(HEADS, [self.cells(each) for each in self.rows], right=RIGHT, gap=1)

    @property
    def reasons(self) -> Notes:
        """Why each variant is what it is."""
        return Notes([(str(each.number), each.status, each.why) for each in self.rows])

    def as_dict(self) -> dict:
        """Returns what is ready for JSON; a distance that is infinite is null."""
        rows = []
        for each in self.rows:
            row = dataclasses.asdict(each) | {"variant": each.variant._asdict()}
            row |= {"apart": _finite(each.apart), "losses": [*map(_finite, each.losses)]}
            rows.append(row | {"images_per_second": each.rate})
        return {
            "about": self.title,
            "settings": self.settings,
            "stretch_steps": self.stretch_steps,
            "summary": self.summary,
            "tolerance": self.tolerance,
            "noise": self.noise,
            "rows": rows,
            "winner": self.winner.number if self.has_best else None,
            "flags": list(self.flags) if self.has_best else [],
            "environment": self.environment,
        }


def spread(row: Row) -> float | None:
    """Returns the distance from the slowest stretch to the fastest, as a part of the median.

    None where there are not two.
    """
    return (max(row.rates) - min(row.rates)) / row.rate if len(row.rates) > 1 else None


def _number(value: float | None, spec: str) -> str:
    if value is None:
        return "-"
    return format(value, spec) if math.isfinite(value) else "NaN"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
