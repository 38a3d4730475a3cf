"""The trials of a search, and the setting to use.

print(SearchTable(found))
"""

import dataclasses

from tfaccel.common.report import Grid, Notes, Report
from tfaccel.diagnostics.profile.search import Found, Trial

WORDS = {
    "start": "the present setting",
    "kept": "kept",
    "slower": "no faster",
    "noise": "no faster",
    "memory": "too large",
    "failed": "failed",
    "time": "no time",
}
COLUMNS = ("setting", "images/s", "of start", "runs", "MiB", "")


@dataclasses.dataclass(frozen=True, repr=False)
class SearchTable(Report):
    """The result of a search as a report.

    Attributes:
      found: the trials and the best setting.
      remarks: which settings were not tried, and why.
      written: the config file with the best setting; None if none was written.
    """

    found: Found
    remarks: tuple[str, ...] = ()
    written: str | None = None

    @property
    def flags(self) -> list[str]:
        """The flags of `tfaccel train` for the best setting; empty if it is the present one."""
        return [f"--config.{name}={value}" for name, value in self.found.changes.items()]

    @property
    def summary(self) -> str:
        """The best setting, in a sentence."""
        found = self.found
        start, best = found.of(found.start), found.of(found.best)
        if not found.changes:
            return f"best: the present setting, {start.rate:,.0f} images/s; no other is faster"
        return (
            f"best: {' '.join(self.flags)}: {best.rate:,.0f} images/s, "
            f"{best.rate / start.rate:.2f} times the {start.rate:,.0f} of the start"
        )

    def parts(self):
        """Returns the trials, the reasons for their outcomes, the best setting and the remarks."""
        trials = self.found.trials
        yield Grid(COLUMNS, [self._cells(each) for each in trials], right=range(1, 5))
        yield Notes([(self._cells(each)[0], each.why) for each in trials if each.why])
        yield self.summary
        yield Notes([(each,) for each in self._remarks()])

    def as_dict(self) -> dict:
        """Returns a dict that JSON can hold."""
        trials = [
            {
                "setting": dict(each.setting),
                "changed": each.changed,
                "images_per_second": each.rate,
                "runs": [run.rate for run in each.samples],
                "memory_mib": each.memory_mib,
                "outcome": each.outcome,
                "why": each.why,
            }
            for each in self.found.trials
        ]
        return {
            "trials": trials,
            "best": dict(self.found.best),
            "flags": self.flags,
            "remarks": self._remarks(),
            "written": self.written,
        }

    def _remarks(self) -> list[str]:
        written = [f"written: {self.written}"] if self.written else []
        return [*self.remarks, *self.found.remarks, *written]

    def _cells(self, trial: Trial) -> tuple[str, ...]:
        rate, start = trial.rate, self.found.trials[0].rate
        if trial.changed is None:
            name = "start"
        else:
            name = f"{trial.changed}={trial.setting[trial.changed]}"
        return (
            name,
            "-" if rate is None else f"{rate:,.0f}",
            "-" if rate is None else f"{rate / start:.2f}",
            str(len(trial.samples)),
            "-" if trial.memory_mib is None else f"{trial.memory_mib:,}",
            WORDS[trial.outcome],
        )
