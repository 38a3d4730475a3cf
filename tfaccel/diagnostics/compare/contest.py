"""The best so far against one challenger after the other, both alive and timed in turn.

Takes what starts a variant's process, and the order; gives a row for each variant.

    contest = Contest(start, repeats=5, time_left=lambda: 600, say=print)
    contest.run(levels, one_by_one)
    contest.champion.variant; contest.rows

Two processes are alive at most, and one of them trains: in turns, so that both meet the same state
of the machine. A variant that fails is a row with its sentence. The best so far stays alive; where
a challenger does not fit beside it, both are measured one after the other instead.
"""

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterable

from tfaccel.diagnostics.compare.arm import Arm, ArmError, OutOfTimeError
from tfaccel.diagnostics.compare.judge import (
    apart,
    is_faster,
    noise_of,
    quartiles,
    times,
    tolerance_of,
)
from tfaccel.diagnostics.compare.variants import CEILING, SLOW, Levels, Variant

# As fast as the best so far, at least, for a variant to be tried again on a better one; and to have
# a second stretch: on a CPU half precision was 60 times as slow, and took the time of all others.
NEAR, FAR = 0.8, 0.5
# Starts a variant's process, with the config's seed or so many more, and trains its first steps.
Start = Callable[[Variant, int], Arm]
Plan = Callable[[Levels, Callable[[], Variant], bool], Iterable[Variant]]
# Part of the time from which on a step that waits for its batches is bound by them.
STARVED = 0.5
NO_TIME = "the time was over"


@dataclasses.dataclass
class Row:
    """A variant and what came of it.

    Attributes:
      number: of the row, from 1.
      variant: what was measured.
      status: "plain", "kept", "rejected", "failed", "ceiling" or "left out".
      why: in a sentence.
      rates: images per second of each stretch; of the best so far more than of others, of what is
        far behind it one.
      first_step_s: seconds from its process's start to its first step's end.
      peak_mib: of each GPU, what TensorFlow's tensors took at most; empty on the CPU.
      waited: part of the timed seconds in which steps waited for their batches.
      losses: of each step, in order.
      apart: the losses' distance from the reference's.
      times: as fast as the first that ran: by what each was measured in turn with, so that what the
        machine does at another time has no part in it; the best by the first itself, in the end.
    """

    number: int
    variant: Variant
    status: str = "failed"
    why: str = ""
    rates: list[float] = dataclasses.field(default_factory=list)
    first_step_s: float | None = None
    peak_mib: tuple[int, ...] = ()
    waited: float | None = None
    losses: tuple[float, ...] = ()
    apart: float | None = None
    times: float | None = None

    @property
    def rate(self) -> float | None:
        """The median of the rates; None where there is none."""
        return statistics.median(self.rates) if self.rates else None

    def take(self, arm: Arm) -> None:
        """Takes what its process knows of itself."""
        self.first_step_s, self.peak_mib, self.waited = arm.first_step_s, arm.peak_mib, arm.waited
        self.losses = tuple(arm.losses)

    def leave(self, status: str, why: str) -> None:
        """Takes that it was not measured; of some stretches alone there is no rate."""
        self.status, self.why, self.rates = status, why, []


class Contest:
    """A comparison in its course.

    Attributes:
      rows: of all variants, in the order in which they were measured.
      champion: the row of the best so far; None where nothing has run.
      reference: the row whose losses are the measure.
      tolerance: how far losses may be from it.
      noise: by which part the same thing, measured twice, differed; None where it is not known.
      other_seed: the losses of the reference with another seed.
    """

    def __init__(
        self,
        start: Start,
        *,
        repeats: int,
        time_left: Callable[[], float],
        say: Callable[[str], None],
        begun: Callable[[float, float], None] = lambda start_s, stretch_s: None,
    ):
        """Starts nothing yet.

        Args:
          start: starts a variant's process and trains its first steps.
          repeats: stretches of each variant.
          time_left: seconds until nothing more is to be started.
          say: is told what happens.
          begun: is told how long the first that ran took to start, and for a stretch.
        """
        self._start, self._repeats, self._time_left, self._say = start, repeats, time_left, say
        self._begun = begun
        self.rows, self.champion, self.reference = [], None, None
        self.tolerance, self.noise, self.other_seed = tolerance_of(0.0), None, ()
        self._arm = None  # the champion's
        self._fit_together = True
        # What duels took: the plain one's with itself, as the proof's will, and the latest.
        self._slow_s, self._latest_s = 0.0, 0.0

    def run(self, levels: Levels, plan: Plan) -> None:
        """Measures the plain one, all of the plan, the best against the plain one, and the ceiling.

        Args:
          levels: what there is to choose from.
          plan: which variants, in which order; it is told whether the plain one waits for batches.
        """
        with contextlib.closing(self):
            self._timed(self._challenge, levels.plain)
            starved = self.champion is not None and self.champion.waited > STARVED
            candidates, outcome = iter(plan(levels, lambda: self._base(levels), starved)), None
            while True:
                try:
                    sends = hasattr(candidates, "send")
                    variant = candidates.send(outcome) if sends else next(candidates)
                except StopIteration:
                    break
                # What is left must do for this one, for the ceiling, and for the proof. But the
                # first beside the plain one goes before these: without it, nothing is compared.
                is_first = sum(bool(each.rates) for each in self.rows) < 2
                needs_s = self._latest_s + (0 if is_first else self._latest_s + self._slow_s)
                outcome = self._timed(self._challenge, variant, needs_s=needs_s)
            if self.champion:
                self._prove()
                ceiling = self.champion.variant._replace(arithmetic=CEILING)
                self._timed(self._measure_ceiling, ceiling, needs_s=self._latest_s)

    def close(self) -> None:
        """Ends what is alive."""
        self._rest()

    def _base(self, levels: Levels) -> Variant:
        """Returns what the next variant differs from."""
        return self.champion.variant if self.champion else levels.plain

    def _timed(self, step: Callable, variant: Variant, *, needs_s: float = 0.0) -> str | None:
        """Measures a variant, if that much time is left, and says what came of it."""
        row = Row(len(self.rows) + 1, variant)
        self.rows.append(row)
        if self._time_left() < needs_s:
            row.status, row.why = "left out", NO_TIME
        else:
            try:
                step(row)
            except OutOfTimeError as error:
                row.first_step_s = row.first_step_s or error.start_s
                row.leave("left out", str(error))
            except (KeyboardInterrupt, SystemExit):
                if row is not self.champion:  # which has been measured
                    row.leave("left out", "interrupted")
                raise
            except ArmError as error:
                row.leave("failed", str(error))
        rate = f", {row.rate:,.0f} images/s" if row.rates else ""
        self._say(f"{row.number} {row.status}: {row.variant}{rate}")
        if row.status != "rejected" or row.apart > self.tolerance:
            return row.status
        return SLOW if row.times >= NEAR * self.champion.times else row.status

    def _challenge(self, row: Row) -> None:
        """Fills the row in, and makes it the champion if it is better."""
        if self.champion is None:
            return self._begin_with(row)
        arm, others, in_turn = self._duel(row)
        row.apart = apart(row.losses, self.reference.losses)
        faster = is_faster(row.rates, others, noise=self.noise or 0.0)
        row.times = times(row.rates, others) * self.champion.times
        turn = "" if in_turn else " (not in turn: both did not fit in memory)"
        if len(row.rates) < self._repeats:  # then they were in turn
            turn = ", in the one stretch that it was given"
        ratio = f"{times(row.rates, others):.2f} times as fast as {self.champion.number}{turn}"
        if row.apart > self.tolerance:
            row.status, row.why = "rejected", f"its losses part: {self._distance(row)}; {ratio}"
        elif not faster:
            row.status, row.why = "rejected", f"no faster: {ratio}{self._not_enough(row, others)}"
        else:
            row.status, row.why = "kept", f"{ratio}; losses agree: {self._distance(row)}"
        if row.status != "kept":
            return arm.close()
        self._rest()
        self.champion = row
        if in_turn:
            self._arm = arm
        else:
            arm.close()
        return None

    def _begin_with(self, row: Row) -> None:
        """Makes the first that runs the champion, the measure of losses, and, twice, of noise."""
        began = time.monotonic()
        arm = self._start(row.variant, 0)
        started = time.monotonic()
        try:
            self._stretch_alone(arm, row)
        except BaseException:
            arm.close()
            raise
        row.take(arm)
        self._begun(started - began, (time.monotonic() - started) / len(row.rates))
        row.status, row.apart, row.times = ("plain" if row.number == 1 else "kept"), 0.0, 1.0
        row.why = "what the others are compared with"
        if row.number > 1:
            row.why = f"the first that ran; {row.why}"
        if len(row.rates) < self._repeats:
            row.why += f"; {self._so_many(row.rates)}, when the time was over"
        self._arm, self.champion, self.reference = arm, row, row
        again = Row(0, row.variant)
        try:
            other, rates, in_turn = self._duel(again, seed=1, in_full=True)
        except ArmError as error:
            self._say(f"with another seed it was not measured: {error}")
            return
        other.close()
        self.noise = noise_of(rates, again.rates)
        self.other_seed = again.losses
        self.tolerance = tolerance_of(apart(again.losses, row.losses))
        if in_turn:
            row.rates += rates

    def _stretch_alone(self, arm: Arm, row: Row) -> None:
        """Measures the row's stretches, as far as the time goes: one says something."""
        for _ in range(self._repeats):
            try:
                row.rates.append(arm.stretch())
            except OutOfTimeError:
                if not row.rates:
                    raise
                return

    def _so_many(self, rates: list[float]) -> str:
        return f"{len(rates)} of {self._repeats} stretches"

    def _prove(self) -> None:
        """Measures the champion in turn with the first again: keeping was a chain of such duels."""
        if self.champion is self.reference:
            return
        if self._time_left() < self._slow_s:
            self._is_unproven("the time was over")
            return
        first = Row(self.reference.number, self.reference.variant)
        try:
            arm, rates, in_turn = self._duel(first, in_full=True)
        except ArmError as error:
            self._is_unproven(str(error))
            return
        best, ratio = self.champion, times(rates, first.rates)
        chained, best.times = best.times, ratio
        proof = (
            f"in the end {best.number} was {ratio:.2f} times as fast as {first.number} "
            f"({statistics.median(rates):,.0f} and {statistics.median(first.rates):,.0f} "
            f"images/s); the gains' product is {chained:.2f}"
        )
        for each in self.rows[best.number :]:  # all were measured in turn with the best
            each.times = each.times and each.times * ratio / chained
        if is_faster(rates, first.rates, noise=self.noise or 0.0):
            best.why += f"; {proof}"
            return arm.close()
        best.status, best.why = "rejected", f"{best.why}; but no gain: {proof}"
        self._rest()
        self.champion = self.reference
        if in_turn:
            self._arm = arm
        else:
            arm.close()
        return None

    def _is_unproven(self, why: str) -> None:
        first, best = self.reference.number, self.champion
        best.why += f"; not measured beside {first} again in the end: {why}"

    def _measure_ceiling(self, row: Row) -> None:
        arm, others, _ = self._duel(row)
        arm.close()
        row.apart = apart(row.losses, self.reference.losses)
        row.status, row.times = "ceiling", times(row.rates, others) * self.champion.times
        row.why = (
            f"pure float16 (O3), {times(row.rates, others):.2f} times as fast as "
            f"{self.champion.number}, losses {_percent(row.apart)} apart; never chosen: its "
            "weights and updates are float16 too"
        )

    def _duel(
        self, row: Row, *, seed: int = 0, in_full: bool = False
    ) -> tuple[Arm, list[float], bool]:
        """Fills the row in, in turn with the champion.

        Args:
          row: of the variant.
          seed: as of `Start`.
          in_full: whether it has all stretches, even where it is far behind after the first.

        Returns:
          The row's arm, alive; the champion's rates; whether they took turns.
        """
        began = self._time_left()
        self._revive()
        arm = self._beside_the_champion(row.variant, seed)
        others = []
        try:
            for number in range(self._repeats):
                for is_own in (number % 2 == 1, number % 2 == 0):  # A B, B A, A B, ...
                    if is_own:
                        row.rates.append(arm.stretch())
                    elif self._arm:
                        with self._champion_may_fail():
                            others.append(self._arm.stretch())
                may_end = number == 0 and others and not in_full
                if may_end and row.rates[0] < FAR * others[0]:
                    break
        except OutOfTimeError as error:
            arm.close()
            row.first_step_s = arm.first_step_s
            raise self._part_of(row, others) or error from error
        except BaseException:
            arm.close()
            raise
        row.take(arm)
        if math.isfinite(began):
            self._latest_s = began - self._time_left()
            self._slow_s = self._slow_s or self._latest_s
        in_turn = len(others) == len(row.rates)
        return arm, others if in_turn else list(self.champion.rates), in_turn

    def _part_of(self, row: Row, others: list[float]) -> OutOfTimeError | None:
        """Returns what the stretches said that there was time for; None where there was none.

        It is said and no more: a few stretches decide nothing.
        """
        number = min(len(row.rates), len(others or row.rates))
        if not number:
            return None
        rates = row.rates[:number]
        ratio = times(rates, others[:number] or self.champion.rates)
        return OutOfTimeError(
            f"the time was over after {self._so_many(rates)}, in which it was {ratio:.2f} times "
            f"as fast as {self.champion.number} ({statistics.median(rates):,.0f} images/s)"
        )

    def _beside_the_champion(self, variant: Variant, seed: int) -> Arm:
        try:
            return self._start(variant, seed)
        except ArmError as error:
            if not (error.out_of_memory and self._arm):
                raise
        self._say(f"{variant}: does not fit beside the best so far, whose process ends")
        self._part()
        return self._start(variant, seed)

    @contextlib.contextmanager
    def _champion_may_fail(self):
        """Within the context, a champion that fails, as for memory, ends alone."""
        try:
            yield
        except OutOfTimeError:
            raise
        except ArmError as error:
            self._say(f"the best so far, {self.champion.variant}, failed beside another: {error}")
            self._part()

    def _part(self) -> None:
        self._rest()
        self._fit_together = False

    def _revive(self) -> None:
        if self._arm is None and self._fit_together:
            with self._champion_may_fail():
                self._arm = self._start(self.champion.variant, 0)

    def _rest(self) -> None:
        if self._arm:
            self._arm.close()
            self._arm = None

    def _distance(self, row: Row) -> str:
        return f"{_percent(row.apart)} apart, {_percent(self.tolerance)} allowed"

    def _not_enough(self, row: Row, others: list[float]) -> str:
        """Returns what is lacking of a gain; nothing where it is slower anyway."""
        if times(row.rates, others) <= 1:
            return ""
        (least, _, most), (other_least, _, other_most) = quartiles(row.rates), quartiles(others)
        if least <= other_most:
            return (
                f", which is not beyond the spread (half of its stretches {least:,.0f} to "
                f"{most:,.0f} images/s, against {other_least:,.0f} to {other_most:,.0f})"
            )
        return f", and the same thing twice differed by {_percent(self.noise)}"


def _percent(part: float) -> str:
    if not math.isfinite(part):
        return "infinitely"
    return f"{part:.1%}" if part < 10 else "more than 999%"
