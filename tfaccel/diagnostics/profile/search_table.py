"""The trials of a search and what to use: for 80 columns, a pipe, JSON and a notebook.

print(SearchTable(found))
"""

import dataclasses

from tfaccel.common.tables import as_html, html_table, in_lines
from tfaccel.diagnostics.profile.search import Found, Trial

WORDS = {
    "start": "the present setting",
    "kept": "kept",
    "slower": "no faster",
    "noise": "no faster",
    "memory": "too large",
    "failed": "failed",
    "time": "left",
}
COLUMNS = ("setting", "images/s", "of start", "runs", "MiB", "")


@dataclasses.dataclass(frozen=True)
class SearchTable:
    """What a search came to.

    Attributes:
      found: its trials and the best.
      remarks: what was not tried, and why.
      written: the config file that has the best; None for none.
    """

    found: Found
    remarks: tuple[str, ...] = ()
    written: str | None = None

    @property
    def flags(self) -> list[str]:
        """Flags of `tfaccel train` for the best setting; none where it is the present one."""
        return [f"--config.{name}={value}" for name, value in self.found.changes.items()]

    @property
    def summary(self) -> str:
        """The best, in a sentence."""
        found = self.found
        start, best = found.of(found.start), found.of(found.best)
        if not found.changes:
            return f"best: the present setting, {start.rate:,.0f} images/s; nothing tried beats it"
        return (
            f"best: {' '.join(self.flags)}: {best.rate:,.0f} images/s, "
            f"{best.rate / start.rate:.2f} times the start's {start.rate:,.0f}"
        )

    def __str__(self):
        """Returns all of it, at most 80 columns wide."""
        lines = [_row(*COLUMNS)]
        for each in self.found.trials:
            lines.append(_row(*self._cells(each)))
            if each.why:
                lines.append(in_lines(each.why, first="    ", rest="    "))
        lines += ["", in_lines(self.summary)]
        lines += [in_lines(each, first="  ", rest="    ") for each in self._remarks()]
        return "\n".join(lines)

    def __repr__(self):
        """Returns the same: it is what a prompt should show."""
        return str(self)

    def as_dict(self) -> dict:
        """Returns what is ready for JSON."""
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

    def _repr_html_(self) -> str:
        """Returns it for a notebook."""
        rows = [(*self._cells(each), each.why) for each in self.found.trials]
        listed = "".join(f"<li>{as_html(each)}</li>" for each in self._remarks())
        return (
            f"{html_table((*COLUMNS, 'why'), rows, right=range(1, 5))}"
            f"<p>{as_html(self.summary)}</p><ul>{listed}</ul>"
        )

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


def _row(name, rate, of_start, runs, memory, outcome) -> str:
    line = f"{name:25} {rate:>10} {of_start:>8} {runs:>4} {memory:>8}  {outcome}"
    return line.rstrip()
