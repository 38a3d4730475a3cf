"""The result of a comparison: what was measured, and which variant is best.

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
            "the median of the stretches. Variants are measured at different times, so `times` "
            "compares them better",
        ),
        ("spread", "the range from the slowest stretch to the fastest, relative to the median"),
        (
            "times",
            "how many times as fast as the first variant that ran. Each variant is measured in "
            "turn with the best one before it, and the ratios are multiplied. At the end the best "
            "is measured in turn with the first. The best and all later variants are scaled to "
            "that result",
        ),
        (
            "start",
            "seconds from the start of the process to the end of its first execution (one step, or "
            "several), including compilation; the compile cache is off",
        ),
        ("MiB", "the peak memory of TensorFlow's tensors, on the fullest GPU"),
        (
            "apart",
            "the largest relative distance of the loss from the first variant's. Each training is "
            "cut into five parts, and the means of the parts are compared",
        ),
    ]
)
RIGHT = (0, *range(3, len(HEADS)))  # loader and arithmetic are aligned left


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison(Report):
    """Every variant with its figures, and which one is best.

    Attributes:
      title: the experiment and the machine, in words.
      rows: the variants, in the order of measurement.
      winner: the row of the best variant; None if nothing ran.
      flags: the flags of `tfaccel train` that turn the experiment's config into the best variant's.
      command: the command that trains the experiment; the flags are added to it.
      how: a description of the method.
      tolerance: the largest distance between losses that agree, for example 0.01 for 1%.
      noise: the relative difference in speed between two processes of the first variant that ran;
        None if it is not known.
      settings: the requested steps, repeats, minutes and grid.
      environment: versions and hardware.
      stretch_steps: the number of steps in a stretch; less than requested if the time was short.
      to_ask_for: advice on a longer time limit, in words.
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
        """0 if something ran; 1 if nothing ran, or if there was no time for a second variant."""
        return 1 if self.winner is None or self._is_alone else 0

    @property
    def _left_out(self) -> list[Row]:
        return [
            each for each in self.rows if each.status == "left out" and each.why != "interrupted"
        ]

    @property
    def _is_alone(self) -> bool:
        """True if there was only time for one variant, so that nothing is compared."""
        measured = [each for each in self.rows if each.status in ("plain", "kept", "rejected")]
        return bool(self._left_out) and len(measured) <= 1

    @property
    def summary(self) -> str:
        """The result in a sentence or two."""
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
            return "nothing was measured" if self._left_out else "nothing ran: see the rows for why"
        if self._is_alone:
            return f"only {self.winner.variant} was measured, so nothing is compared"
        is_plain = self.rows[0].status == "plain"
        first = "the plain variant" if is_plain else "the first variant that ran"
        if self.winner.times == 1.0:
            return f"{first} is the best: {self.winner.variant}"
        times = f"{self.winner.times:.2f} times as fast as {first}"
        return f"the best is {self.winner.variant}: {times}"

    @property
    def has_best(self) -> bool:
        """True if at least two variants were measured, so that one is the best."""
        return self.winner is not None and not self._is_alone

    @property
    def train_command(self) -> str:
        """The command that trains the best variant, with one flag on each line."""
        return " \\\n    ".join([self.command, *self.flags])

    def cells(self, row: Row) -> list[str]:
        """Returns the row's cells, in the order of `HEADS`."""
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
        """Returns the figures, the reasons, the explanations and the command of the best."""
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
        """The table of figures, with a row for each variant."""
        return Grid(HEADS, [self.cells(each) for each in self.rows], right=RIGHT, gap=1)

    @property
    def reasons(self) -> Notes:
        """The status of each variant, and the reason for it."""
        return Notes([(str(each.number), each.status, each.why) for each in self.rows])

    def as_dict(self) -> dict:
        """Returns a dict that JSON can hold; infinite and NaN losses and distances are None."""
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
    """Returns the range from the slowest stretch to the fastest, relative to the median.

    The result is None if there are fewer than two stretches.
    """
    return (max(row.rates) - min(row.rates)) / row.rate if len(row.rates) > 1 else None


def _number(value: float | None, spec: str) -> str:
    if value is None:
        return "-"
    return format(value, spec) if math.isfinite(value) else "NaN"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
