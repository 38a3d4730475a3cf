"""What was measured and what it means: for 80 columns, a pipe, JSON and a notebook.

print(Profile(setup, ceilings))
"""

import dataclasses
import functools
import shlex

from tfaccel.common.tables import as_html, counted, html_table, in_figures, in_lines
from tfaccel.diagnostics.profile.verdict import Ceilings, Setup, Verdict, judge, milliseconds

NAMES = {"step": "step, its batch on the device", "loader": "loader alone", "real": "real run"}
HEADS = ("", "images/s", "quartiles", "a batch takes")


@dataclasses.dataclass(frozen=True)
class Profile:
    """The three rates of a run, and what bounds it.

    Attributes:
      setup: what was measured.
      ceilings: the rates.
      memory_mib: on the fullest GPU, by all processes; on the CPU this process's most; None where
        that is not known.
      trace: the folder of TensorFlow's own profile; None where there is none.
    """

    setup: Setup
    ceilings: Ceilings
    memory_mib: int | None = None
    trace: str | None = None

    @functools.cached_property
    def verdict(self) -> Verdict:
        """What bounds the run, and what to do."""
        return judge(self.ceilings, self.setup)

    @property
    def title(self) -> str:
        """What was measured, in a line."""
        setup = self.setup
        where = counted(setup.replicas, "GPU" if setup.on_gpu else "CPU replica")
        threads = f", {counted(setup.threads, 'thread')} each" if setup.threads else ""
        return (
            f"profile: {setup.model}, {setup.precision} {'with' if setup.xla else 'without'} XLA, "
            f"batches of {setup.global_batch_size:,} on {where}, loader {setup.loader}{threads}"
        )

    def __str__(self):
        """Returns all of it, at most 80 columns wide."""
        lines = [in_lines(self.title), "", _row(*HEADS)]
        lines += [_row(*each) for each in self._rows()]
        lines += ["", in_lines(self.verdict.sentence, first="verdict  ", rest=" " * 9)]
        lines += [in_lines(each, first="to do    ", rest=" " * 9) for each in self.verdict.advice]
        if self.memory_mib:
            lines.append(in_lines(self._memory(), first="memory   ", rest=" " * 9))
        if self.trace:
            lines.append(in_lines(self._trace(), first="trace    ", rest=" " * 9))
        return "\n".join(lines)

    def __repr__(self):
        """Returns the same: it is what a prompt should show."""
        return str(self)

    def as_dict(self) -> dict:
        """Returns what is ready for JSON."""
        return {
            "setup": dataclasses.asdict(self.setup),
            "images_per_second": dataclasses.asdict(self.ceilings),
            "verdict": dataclasses.asdict(self.verdict),
            "memory_mib": self.memory_mib,
            "trace": self.trace,
        }

    def _repr_html_(self) -> str:
        """Returns it for a notebook."""
        notes = [f"verdict: {self.verdict.sentence}", *self.verdict.advice]
        notes += [self._memory()] if self.memory_mib else []
        notes += [self._trace()] if self.trace else []
        listed = "".join(f"<li>{as_html(each)}</li>" for each in notes)
        return (
            f"<p>{as_html(self.title)}</p>"
            f"{html_table(HEADS, self._rows(), right=range(1, 4))}<ul>{listed}</ul>"
        )

    def _rows(self) -> list[tuple[str, str, str, str]]:
        rows = []
        for each, name in NAMES.items():
            rate = getattr(self.ceilings, each)
            took = milliseconds(rate, self.setup)
            quartiles = f"{rate.low:,.0f} to {rate.high:,.0f}"
            rows.append((name, f"{rate.median:,.0f}", quartiles, f"{in_figures(took)} ms"))
        return rows

    def _memory(self) -> str:
        where = "taken on the fullest GPU" if self.setup.on_gpu else "of this process at most"
        return f"{self.memory_mib:,} MiB {where}"

    def _trace(self) -> str:
        folder = shlex.quote(str(self.trace))
        return (
            f"uv run --with xprof tensorboard --logdir {folder} (its Profile tab is the package "
            "xprof, which tfaccel does not bring)"
        )


def _row(name: str, rate: str, quartiles: str, took: str) -> str:
    return f"{name:30} {rate:>11} {quartiles:>21} {took:>14}".rstrip()
