"""The best of some settings, found by trying them: strategy alone, without measuring anything.

Takes where to start, what may be changed, and a function that measures a setting; gives every trial
with what came of it, and the best.

    found = search({"dali.threads": 2}, [Knob("dali.threads", (1, 2, 4))], measure, budget_s=600)
    found.best      # {"dali.threads": 4}

One knob after the other, from the present setting: numbers are climbed, neighbour by neighbour, in
the direction that gains; names are all tried. A setting that seems faster is measured again, in
turn with the one it would replace, and is kept only if its slowest run beats the other's fastest.
Once all is done, so is the start again: what both gained from a machine that became quicker is no
gain.
"""

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from tfaccel.common.errors import RunError

REPEATS = 3  # runs of a setting that is kept; equal ones pass by chance 1 time in 20
LEAST_GAIN = 0.02  # below which no change is worth a line in a config
MAX_SWEEPS = 3
CLEARLY = 1.5  # times the fastest run of the best: what is faster than that needs no repeats
HOPELESS = 0.5  # of the best: what is slower than that is not tried again beside other values

Setting = Mapping[str, object]


class TrialError(RunError):
    """A setting cannot be measured: the sentence says why."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """One run of a setting.

    Attributes:
      rate: images per second.
      memory_mib: that it took at most; None where that is not known.
    """

    rate: float
    memory_mib: int | None = None


@dataclasses.dataclass(frozen=True)
class Knob:
    """One thing to change.

    Attributes:
      name: of the config's field, with its section.
      values: to try: numbers in rising order, which are climbed, or names.
      loaders: of which it is a setting; None for all.
    """

    name: str
    values: tuple
    loaders: frozenset[str] | None = None

    def applies(self, setting: Setting) -> bool:
        """Whether it is a setting of the loader that this one has."""
        return self.loaders is None or setting.get("data.loader") in self.loaders


@dataclasses.dataclass(frozen=True)
class Trial:
    """A setting that was tried.

    Attributes:
      setting: all of it.
      changed: the field that differs from the best one before; None for the start.
      samples: what was measured.
      outcome: "start", "kept", "slower" (or no faster), "noise", "memory", "failed" or "time".
      why: in words, where figures do not say it.
    """

    setting: Setting
    changed: str | None
    samples: tuple[Sample, ...]
    outcome: str
    why: str = ""

    @property
    def rate(self) -> float | None:
        """Images per second, the median of its runs; None where there is none."""
        return statistics.median(each.rate for each in self.samples) if self.samples else None

    @property
    def memory_mib(self) -> int | None:
        """The most that a run took; None where that is not known."""
        return max((each.memory_mib for each in self.samples if each.memory_mib), default=None)


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search came to.

    Attributes:
      trials: in their order, the start first.
      best: the setting to use.
      remarks: why it ended, and what was not kept in the end.
    """

    trials: tuple[Trial, ...]
    best: Setting
    remarks: tuple[str, ...] = ()

    @property
    def start(self) -> Setting:
        """The setting that it began with."""
        return self.trials[0].setting

    @property
    def changes(self) -> dict[str, object]:
        """What differs from the start, by the field's name."""
        return {name: self.best[name] for name in self.best if self.best[name] != self.start[name]}

    def of(self, setting: Setting) -> Trial:
        """Returns a setting's trial."""
        return next(each for each in self.trials if each.setting == setting)


class _TimeOver(Exception):  # noqa: N818  no error: an end
    pass


def search(
    start: Setting,
    knobs: Sequence[Knob],
    measure: Callable[[Setting, float], Sample],
    *,
    budget_s: float,
    memory_mib: int | None = None,
    clock: Callable[[], float] = time.monotonic,
    tell: Callable[[Trial], None] = lambda trial: None,
) -> Found:
    """Returns the trials and the best setting.

    Args:
      start: the present setting, every knob's value in it.
      knobs: what to change, the most promising first.
      measure: runs a setting once, within so many seconds; raises TrialError where it cannot.
      budget_s: for all of it. No run is begun that would probably not end in time.
      memory_mib: above which a setting is none to use; None for no limit.
      clock: seconds, monotonic.
      tell: is given each trial, as it is decided.

    Raises:
      TrialError: the start itself cannot be measured.
    """
    return _Search(start, measure, budget_s, memory_mib, clock, tell).run(knobs)


class _Search:
    """The samples of every setting so far, and which is the best."""

    def __init__(self, start, measure, budget_s, memory_mib, clock, tell):
        self._start, self._best = dict(start), dict(start)
        self._measure, self._clock, self._tell = measure, clock, tell
        self._ends, self._memory_mib = clock() + budget_s, memory_mib
        self._budget_s = budget_s
        self._trials: list[Trial] = []
        self._samples: dict[tuple, list[Sample]] = {}
        self._longest_s = 0.0
        self._hopeless: set[tuple[str, object]] = set()

    def run(self, knobs: Sequence[Knob]) -> Found:
        remarks = []
        self._begin()
        try:
            for _ in range(MAX_SWEEPS):
                # A list: every knob has its turn, also after one that gained.
                gains = [self._try(knob) for knob in knobs if knob.applies(self._best)]
                if not any(gains):
                    break
            self._confirm(remarks)
        except _TimeOver:
            remarks.append(
                f"the time was over before all was tried: a run takes {self._longest_s:.0f} s; "
                f"--minutes={self._enough_minutes(knobs)} would do for one of each setting, and "
                "more for what is faster"
            )
            if self._best != self._start:
                remarks.append("nor was the best measured beside the start in the end")
        if self._too_large(self._of(self._best)):
            remarks.append("no setting that was tried takes so little memory")
        return Found(tuple(self._trials), self._best, tuple(remarks))

    def _enough_minutes(self, knobs: Sequence[Knob]) -> int:
        """Returns the minutes for the start, twice, and each change; more than there were."""
        changes = sum(len(each.values) for each in knobs if each.applies(self._best))
        enough_s = max((2 + changes) * self._longest_s, 1.5 * self._budget_s)
        return max(1, math.ceil(enough_s / 60))

    def _begin(self) -> None:
        """Measures the start, twice, so that its spread is known from the first."""
        self._sample(self._start)
        with contextlib.suppress(_TimeOver):  # which the first knob finds, too
            self._sample(self._start)
        why = self._too_large(self._of(self._start))
        self._decided(self._start, None, "start", why)

    def _try(self, knob: Knob) -> bool:
        """Tries one knob's values; returns whether one was kept."""
        here = self._best[knob.name]
        if not all(isinstance(each, int | float) for each in knob.values):
            others = [each for each in knob.values if each != here]
            gains = [self._consider(knob.name, each) for each in others]
            return any(gains)
        values = sorted({*knob.values, here})
        above, below = values[values.index(here) + 1 :], values[: values.index(here)][::-1]
        return self._climb(knob.name, above) or self._climb(knob.name, below)

    def _climb(self, name: str, values: Sequence) -> bool:
        kept = 0
        for each in values:
            if not self._consider(name, each):
                break
            kept += 1
        return kept > 0

    def _consider(self, name: str, value: object) -> bool:
        """Tries one change of the best setting; returns whether it is the best now."""
        setting = self._best | {name: value}
        if _key(setting) in self._samples or (name, value) in self._hopeless:
            return False
        try:
            outcome, why = self._judged(setting)
        except TrialError as error:
            outcome, why = "failed", str(error)
        except _TimeOver:
            if self._samples.get(_key(setting)):
                self._decided(setting, name, "time", "it seemed faster, but the time was over")
            raise
        self._decided(setting, name, outcome, why)
        rate = self._trials[-1].rate
        if outcome == "failed" or rate < HOPELESS * _median(self._of(self._best)):
            self._hopeless.add((name, value))
        if outcome == "kept":
            self._best = setting
        return outcome == "kept"

    def _judged(self, setting: Setting) -> tuple[str, str]:
        """Returns what comes of a setting that was not tried before, and why."""
        self._sample(setting)
        if why := self._too_large(self._of(setting)):
            return "memory", why
        if self._too_large(self._of(self._best)):
            return "kept", "it takes less memory than the budget, which the one before does not"
        if self._of(setting)[0].rate <= _median(self._of(self._best)) * (1 + LEAST_GAIN):
            return "slower", ""
        if self._of(setting)[0].rate > CLEARLY * max(each.rate for each in self._of(self._best)):
            return "kept", ""  # chance is no such factor; the end compares it with the start
        for _ in range(REPEATS - 1):
            try:
                self._sample(self._best)  # in turn: both have the same moods of the machine
            except TrialError as error:
                return "noise", f"faster at first, but the best so far failed beside it: {error}"
            self._sample(setting)
            if not _beats(self._of(setting), self._of(self._best)):
                return "noise", "faster at first, but not beyond the spread of repeated runs"
            if why := self._too_large(self._of(setting)):
                return "memory", why
        return "kept", ""

    def _confirm(self, remarks: list[str]) -> None:
        """Measures the start again, if it was replaced, and goes back to it if that was chance."""
        if self._best == self._start or self._too_large(self._of(self._start)):
            return
        try:
            self._sample(self._start)
            self._sample(self._best)
        except TrialError as error:
            remarks.append(f"the end's comparison with the start failed: {error}")
            return
        if not _beats(self._of(self._best), self._of(self._start)):
            self._best = self._start
            remarks.append(
                "measured again at the end, the best was not faster than the start beyond the "
                "spread: the present setting stays"
            )

    def _sample(self, setting: Setting) -> None:
        left_s = self._ends - self._clock()
        if self._samples and left_s < self._longest_s:
            raise _TimeOver
        began = self._clock()
        runs = self._samples.setdefault(_key(setting), [])
        try:
            runs.append(self._measure(setting, left_s))
        except TrialError:
            if self._trials and self._clock() >= self._ends:  # it was ended for that
                raise _TimeOver from None
            raise
        self._longest_s = max(self._longest_s, self._clock() - began)
        for index, each in enumerate(self._trials):  # those that were decided have it too
            if each.setting == setting:
                self._trials[index] = dataclasses.replace(each, samples=tuple(runs))

    def _decided(self, setting: Setting, changed: str | None, outcome: str, why: str) -> None:
        samples = tuple(self._of(setting))
        self._trials.append(Trial(setting, changed, samples, outcome, why))
        self._tell(self._trials[-1])

    def _of(self, setting: Setting) -> list[Sample]:
        return self._samples[_key(setting)]

    def _too_large(self, samples: Sequence[Sample]) -> str:
        """Returns by how much one is above the budget, in words; nothing where none is."""
        most = max((each.memory_mib for each in samples if each.memory_mib), default=0)
        if self._memory_mib is None or most <= self._memory_mib:
            return ""
        return f"takes {most:,} MiB of the {self._memory_mib:,} that --memory-mib allows"


def _key(setting: Setting) -> tuple:
    return tuple(sorted(setting.items()))


def _median(samples: Sequence[Sample]) -> float:
    return statistics.median(each.rate for each in samples)


def _beats(one: Sequence[Sample], other: Sequence[Sample]) -> bool:
    """Whether every run of one is faster than all of the other, and by enough to matter."""
    apart = min(each.rate for each in one) > max(each.rate for each in other)
    return apart and _median(one) > _median(other) * (1 + LEAST_GAIN)
