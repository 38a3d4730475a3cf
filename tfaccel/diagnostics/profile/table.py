"""The result of a profile: the rates, and what limits the run.

print(Profile(setup, ceilings))
"""

import dataclasses
import functools
import shlex

from tfaccel.common.report import Grid, Notes, Report
from tfaccel.common.tables import counted, in_figures
from tfaccel.diagnostics.profile.verdict import Ceilings, Setup, Verdict, judge, milliseconds

NAMES = {"step": "step, its batch on the device", "loader": "loader alone", "real": "real run"}
HEADS = ("", "images/s", "quartiles", "a batch takes")


@dataclasses.dataclass(frozen=True, repr=False)
class Profile(Report):
    """The three rates of a run, and what limits it.

    Attributes:
      setup: the facts about the run.
      ceilings: the rates.
      memory_mib: the memory in use on the fullest GPU, by all processes; on the CPU, the peak of
        this process. It is None if it is not known.
      trace: the folder of TensorFlow's own profile; None if there is no profile.
    """

    setup: Setup
    ceilings: Ceilings
    memory_mib: int | None = None
    trace: str | None = None

    @functools.cached_property
    def verdict(self) -> Verdict:
        """What limits the run, and what to do."""
        return judge(self.ceilings, self.setup)

    @property
    def title(self) -> str:
        """The run in one line."""
        setup = self.setup
        where = counted(setup.replicas, "GPU" if setup.on_gpu else "CPU replica")
        threads = f", {counted(setup.threads, 'thread')} each" if setup.threads else ""
        return (
            f"profile: {setup.model}, {setup.precision} {'with' if setup.xla else 'without'} XLA, "
            f"batches of {setup.global_batch_size:,} on {where}, loader {setup.loader}{threads}"
        )

    def parts(self):
        """Returns the title, the rates, the verdict and the advice."""
        yield self.title
        yield Grid(HEADS, self._rows(), right=range(1, 4))
        notes = [("verdict", self.verdict.sentence)]
        notes += [("to do", each) for each in self.verdict.advice]
        notes += [("memory", self._memory())] if self.memory_mib else []
        notes += [("trace", self._trace())] if self.trace else []
        yield Notes(notes)

    def as_dict(self) -> dict:
        """Returns a dict that JSON can hold."""
        return {
            "setup": dataclasses.asdict(self.setup),
            "images_per_second": dataclasses.asdict(self.ceilings),
            "verdict": dataclasses.asdict(self.verdict),
            "memory_mib": self.memory_mib,
            "trace": self.trace,
        }

    def _rows(self) -> list[tuple[str, str, str, str]]:
        rows = []
        for each, name in NAMES.items():
            rate = getattr(self.ceilings, each)
            took = milliseconds(rate, self.setup)
            quartiles = f"{rate.low:,.0f} to {rate.high:,.0f}"
            rows.append((name, f"{rate.median:,.0f}", quartiles, f"{in_figures(took)} ms"))
        return rows

    def _memory(self) -> str:
        where = "in use on the fullest GPU" if self.setup.on_gpu else "at the peak of the process"
        return f"{self.memory_mib:,} MiB {where}"

    def _trace(self) -> str:
        folder = shlex.quote(str(self.trace))
        return (
            f"uv run --with xprof tensorboard --logdir {folder} (the Profile tab needs the package "
            "xprof, which tfaccel does not install)"
        )
