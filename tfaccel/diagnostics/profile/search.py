"""Searches for the fastest setting; this module is only the strategy, and measures nothing itself.

It takes a start setting, the knobs to change, and a function that measures a setting. It gives
every trial with its outcome, and the best setting.

    found = search({"dali.threads": 2}, [Knob("dali.threads", (1, 2, 4))], measure, budget_s=600)
    found.best      # {"dali.threads": 4}

The search changes one knob after the other. If the values of a knob are numbers, it moves to the
next higher or lower number as long as that gains. If they are names, it tries each of them. A
setting that seems faster is measured again, in turn with the present best. It is kept only if its
slowest run beats the fastest run of the other. At the end, the start is measured again too. If the
machine became quicker during the search, the start gained as much.
"""

import contextlib
import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from tfaccel.common.errors import RunError

REPEATS = 3  # runs of a setting that is kept; an equally fast setting passes 1 time in 20 by chance
LEAST_GAIN = 0.02  # a smaller gain is not worth a line in a config
MAX_SWEEPS = 3
CLEARLY = 1.5  # a setting this many times as fast as the best's fastest run needs no repeats
HOPELESS = 0.5  # a value below this share of the best is not tried again with other knobs' values

Setting = Mapping[str, object]


class TrialError(RunError):
    """A setting cannot be measured; the message says why."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """One run of a setting.

    Attributes:
      rate: images per second.
      memory_mib: the peak memory in MiB; None if it is not known.
    """

    rate: float
    memory_mib: int | None = None


@dataclasses.dataclass(frozen=True)
class Knob:
    """A config field that the search may change.

    Attributes:
      name: the field, as SECTION.FIELD.
      values: the values to try: numbers in rising order, or names.
      loaders: the loaders that have this setting; None for all loaders.
    """

    name: str
    values: tuple
    loaders: frozenset[str] | None = None

    def applies(self, setting: Setting) -> bool:
        """Checks whether the setting's loader has this knob."""
        return self.loaders is None or setting.get("data.loader") in self.loaders


@dataclasses.dataclass(frozen=True)
class Trial:
    """A setting that was tried.

    Attributes:
      setting: the values of all knobs.
      changed: the field that differs from the best setting at that time; None for the start.
      samples: the runs of the setting.
      outcome: "start", "kept", "slower" (or equally fast), "noise", "memory", "failed" or "time".
      why: the reason, if the figures do not show it.
    """

    setting: Setting
    changed: str | None
    samples: tuple[Sample, ...]
    outcome: str
    why: str = ""

    @property
    def rate(self) -> float | None:
        """The median images per second of all runs; None if there are no runs."""
        return statistics.median(each.rate for each in self.samples) if self.samples else None

    @property
    def memory_mib(self) -> int | None:
        """The largest peak memory of all runs, in MiB; None if it is not known."""
        return max((each.memory_mib for each in self.samples if each.memory_mib), default=None)


@dataclasses.dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
      trials: all trials in order, the start first.
      best: the setting to use.
      remarks: why the search ended early, and what it did not confirm.
    """

    trials: tuple[Trial, ...]
    best: Setting
    remarks: tuple[str, ...] = ()

    @property
    def start(self) -> Setting:
        """The setting with which the search began."""
        return self.trials[0].setting

    @property
    def changes(self) -> dict[str, object]:
        """The values of the best setting that differ from the start, by field."""
        return {name: self.best[name] for name in self.best if self.best[name] != self.start[name]}

    def of(self, setting: Setting) -> Trial:
        """Returns the trial of a setting."""
        return next(each for each in self.trials if each.setting == setting)


class _TimeOver(Exception):  # noqa: N818  this is not an error
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
    """Tries settings, and returns the trials and the best setting.

    Args:
      start: the present setting, with the value of every knob.
      knobs: the knobs to change, the most promising first.
      measure: takes a setting and a time limit in seconds, and runs the setting once. It raises
        TrialError if the setting cannot run.
      budget_s: the time limit of the search in seconds. A run does not start if it would probably
        not end in time.
      memory_mib: the memory that a setting may take, in MiB; None for no limit.
      clock: returns the time in seconds, monotonic.
      tell: receives each trial when its outcome is known.

    Raises:
      TrialError: the start itself cannot be measured.
    """
    return _Search(start, measure, budget_s, memory_mib, clock, tell).run(knobs)


class _Search:
    """The samples of every setting so far, and which is the best."""

    def __init__(self, start, measure, budget_s, memory_mib, clock, tell):
        self._start, self._best = dict(start), dict(start)
        self._measure, self._clock, self._tell = measure, clock, tell
        self._budget_s, self._ends, self._memory_mib = budget_s, clock() + budget_s, memory_mib
        self._trials: list[Trial] = []
        self._samples: dict[tuple, list[Sample]] = {}
        self._longest_s = 0.0
        self._hopeless: set[tuple[str, object]] = set()

    def run(self, knobs: Sequence[Knob]) -> Found:
        remarks = []
        self._begin()
        try:
            for _ in range(MAX_SWEEPS):
                # A list, because any() would stop a generator at the first knob that gains.
                gains = [self._try(knob) for knob in knobs if knob.applies(self._best)]
                if not any(gains):
                    break
            self._confirm(remarks)
        except _TimeOver:
            remarks.append(
                "the time was over before every setting was tried; a run takes "
                f"{self._longest_s:.0f} s, so use --minutes={self._enough_minutes(knobs)} for one "
                "run of each setting, or more because faster settings need several runs"
            )
            if self._best != self._start:
                remarks.append("there was no time to compare the best with the start at the end")
        if self._too_large(self._of(self._best)):
            remarks.append("no setting that was tried stays below --memory-mib")
        return Found(tuple(self._trials), self._best, tuple(remarks))

    def _enough_minutes(self, knobs: Sequence[Knob]) -> int:
        """Returns the minutes for two runs of the start and one of each change.

        The result is at least 1.5 times the present time limit.
        """
        changes = sum(len(each.values) for each in knobs if each.applies(self._best))
        enough_s = max((2 + changes) * self._longest_s, 1.5 * self._budget_s)
        return max(1, math.ceil(enough_s / 60))

    def _begin(self) -> None:
        """Measures the start twice, so that its spread is known early."""
        self._sample(self._start)
        with contextlib.suppress(_TimeOver):  # the first knob will raise it again
            self._sample(self._start)
        self._decided(self._start, None, "start", self._too_large(self._of(self._start)))

    def _try(self, knob: Knob) -> bool:
        """Tries the values of a knob; returns True if one was kept."""
        here = self._best[knob.name]
        if not all(isinstance(each, int | float) for each in knob.values):
            gains = [self._consider(knob.name, each) for each in knob.values if each != here]
            return any(gains)
        values = sorted({*knob.values, here})
        above, below = values[values.index(here) + 1 :], values[: values.index(here)][::-1]
        return self._climb(knob.name, above) or self._climb(knob.name, below)

    def _climb(self, name: str, values: Sequence) -> bool:
        """Tries the values in order while each of them is kept; returns True if one was kept."""
        kept = itertools.takewhile(bool, (self._consider(name, each) for each in values))
        return len(list(kept)) > 0

    def _consider(self, name: str, value: object) -> bool:
        """Tries one change of the best setting; returns True if it was kept."""
        setting = self._best | {name: value}
        if _key(setting) in self._samples or (name, value) in self._hopeless:
            return False
        try:
            outcome, why = self._judged(setting)
        except TrialError as error:
            outcome, why = "failed", str(error)
        except _TimeOver:
            if self._samples.get(_key(setting)):
                self._decided(setting, name, "time", "seemed faster, but the time was over")
            raise
        self._decided(setting, name, outcome, why)
        rate = self._trials[-1].rate
        if outcome == "failed" or rate < HOPELESS * _median(self._of(self._best)):
            self._hopeless.add((name, value))
        if outcome == "kept":
            self._best = setting
        return outcome == "kept"

    def _judged(self, setting: Setting) -> tuple[str, str]:
        """Measures a setting that was not tried before; returns its outcome and the reason."""
        self._sample(setting)
        if why := self._too_large(self._of(setting)):
            return "memory", why
        if self._too_large(self._of(self._best)):
            return "kept", "stays below --memory-mib, unlike the setting before"
        if self._of(setting)[0].rate <= _median(self._of(self._best)) * (1 + LEAST_GAIN):
            return "slower", ""
        if self._of(setting)[0].rate > CLEARLY * max(each.rate for each in self._of(self._best)):
            return "kept", ""  # too much for chance; the end compares it with the start anyway
        for _ in range(REPEATS - 1):
            try:
                self._sample(self._best)  # in turn, so that both meet the same machine state
            except TrialError as error:
                return "noise", f"faster at first, but the best so far then failed: {error}"
            self._sample(setting)
            if not _beats(self._of(setting), self._of(self._best)):
                return "noise", "faster at first, but not beyond the spread of repeated runs"
            if why := self._too_large(self._of(setting)):
                return "memory", why
        return "kept", ""

    def _confirm(self, remarks: list[str]) -> None:
        """Measures the best against the start again; returns to the start if the gain is gone."""
        if self._best == self._start or self._too_large(self._of(self._start)):
            return
        try:
            self._sample(self._start)
            self._sample(self._best)
        except TrialError as error:
            remarks.append(f"the final comparison with the start failed: {error}")
            return
        if not _beats(self._of(self._best), self._of(self._start)):
            self._best = self._start
            remarks.append(
                "at the end the best was not faster than the start beyond the spread, so the "
                "present setting stays"
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
            if self._trials and self._clock() >= self._ends:  # the time limit ended the run
                raise _TimeOver from None
            raise
        self._longest_s = max(self._longest_s, self._clock() - began)
        for index, each in enumerate(self._trials):  # adds the run to the setting's trial
            if each.setting == setting:
                self._trials[index] = dataclasses.replace(each, samples=tuple(runs))

    def _decided(self, setting: Setting, changed: str | None, outcome: str, why: str) -> None:
        samples = tuple(self._of(setting))
        self._trials.append(Trial(setting, changed, samples, outcome, why))
        self._tell(self._trials[-1])

    def _of(self, setting: Setting) -> list[Sample]:
        return self._samples[_key(setting)]

    def _too_large(self, samples: Sequence[Sample]) -> str:
        """Returns a message if a run took too much memory; an empty string if none did."""
        most = max((each.memory_mib for each in samples if each.memory_mib), default=0)
        if self._memory_mib is None or most <= self._memory_mib:
            return ""
        return f"takes {most:,} MiB, but --memory-mib allows {self._memory_mib:,}"


def _key(setting: Setting) -> tuple:
    return tuple(sorted(setting.items()))


def _median(samples: Sequence[Sample]) -> float:
    return statistics.median(each.rate for each in samples)


def _beats(one: Sequence[Sample], other: Sequence[Sample]) -> bool:
    """Checks whether every run of one setting is faster than all of the other, and by enough."""
    apart = min(each.rate for each in one) > max(each.rate for each in other)
    return apart and _median(one) > _median(other) * (1 + LEAST_GAIN)
