"""Measures the best variant so far, the champion, against one challenger after the other.

This module takes a function that starts a variant's process, and the order of the variants. It
gives a row for each variant.

    contest = Contest(start, repeats=5, time_left=lambda: 600, say=print)
    contest.run(levels, one_by_one)
    contest.champion.variant; contest.rows

A duel measures the champion and one challenger. Both processes are alive, and their stretches take
turns, so that both meet the same state of the machine. Only one of them trains at a time. The
champion's process stays alive for the next duel. If a challenger does not fit into memory beside
it, the two are measured one after the other. A variant that fails has a row that says why.
"""

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Generator

from tfaccel.diagnostics.compare.arm import ArmError, ArmProcess, OutOfTimeError
from tfaccel.diagnostics.compare.judge import (
    apart,
    is_faster,
    noise_of,
    quartiles,
    times,
    tolerance_of,
)
from tfaccel.diagnostics.compare.variants import CEILING, SLOW, Levels, Variant

# A rejected variant is tried again on a later champion if its speed is at least NEAR * the
# champion's. It has a second stretch only if its first is at least FAR * the champion's: on a CPU,
# half precision was 60 times as slow, and took the time of all other variants.
NEAR, FAR = 0.8, 0.5
# Starts a variant's process and trains its first steps. The int is added to the config's seed.
Start = Callable[[Variant, int], ArmProcess]
Plan = Callable[[Levels, Callable[[], Variant], bool], Generator[Variant, str, None]]
# The loader limits the step if the step waits for its batches for more than this share of the time.
STARVED = 0.5
NO_TIME = "the time was over"


@dataclasses.dataclass
class Row:
    """A variant and its result.

    Attributes:
      number: the number of the row, from 1.
      variant: the variant.
      status: "plain", "kept", "rejected", "failed", "ceiling" or "left out".
      why: the reason for the status, in a sentence.
      rates: images per second of each stretch. The first variant that ran has up to 2 * `repeats`
        stretches; a variant that is far behind the champion has one.
      first_step_s: seconds from the start of the process to the end of its first step.
      peak_mib: the peak memory of TensorFlow's tensors on each GPU; empty on the CPU.
      waited: the share of the timed seconds in which steps waited for their batches, from 0 to 1.
      losses: the loss of each step, in order.
      apart: the distance of the losses from the reference's.
      times: the speed, divided by that of the first variant that ran. It is the product of the
        ratios of duels, so the state of the machine at other times does not distort it. The best
        variant's is measured directly against the first one at the end.
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
        """The median of the rates; None if there are none."""
        return statistics.median(self.rates) if self.rates else None

    def take(self, arm: ArmProcess) -> None:
        """Copies the figures of the variant's process."""
        self.first_step_s, self.peak_mib, self.waited = arm.first_step_s, arm.peak_mib, arm.waited
        self.losses = tuple(arm.losses)

    def leave(self, status: str, why: str) -> None:
        """Marks the variant as not measured, and drops the rates of an incomplete measurement."""
        self.status, self.why, self.rates = status, why, []


class Contest:
    """A comparison in progress.

    Attributes:
      rows: the rows of all variants, in the order of measurement.
      champion: the row of the best variant so far; None if no variant has run.
      reference: the row of the first variant that ran; all losses are compared with its losses.
      tolerance: the largest distance from the reference at which losses agree.
      noise: the relative difference in speed between two processes of the reference; None if it is
        not known.
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
        """Takes the parts of the comparison; `run` starts the processes.

        Args:
          start: starts a variant's process and trains its first steps.
          repeats: the number of stretches for each variant.
          time_left: returns the seconds that are left for the comparison.
          say: receives a line about each event.
          begun: receives the seconds that the first variant took to start, and for a stretch.
        """
        self._start, self._repeats, self._time_left, self._say = start, repeats, time_left, say
        self._begun = begun
        self.rows, self.champion, self.reference = [], None, None
        self.tolerance, self.noise = tolerance_of(0.0), None
        self._arm = None  # the champion's process
        self._fit_together = True
        # The seconds of two duels: the first, between two processes of the reference, which takes
        # about as long as the final duel will; and the latest.
        self._first_duel_s, self._latest_duel_s = 0.0, 0.0

    def run(self, levels: Levels, plan: Plan) -> None:
        """Measures the plain variant, the planned variants, the best once more, and the ceiling.

        Args:
          levels: the levels of each factor.
          plan: gives the variants in order. It receives the levels, a function that returns the
            best variant so far, and whether the plain variant waits for its batches.
        """
        with contextlib.closing(self):
            self._timed(self._challenge, levels.plain)
            starved = self.champion is not None and self.champion.waited > STARVED
            best = lambda: self.champion.variant if self.champion else levels.plain  # noqa: E731
            candidates, outcome = plan(levels, best, starved), None
            while True:
                try:
                    variant = candidates.send(outcome)
                except StopIteration:
                    break
                # The time must also suffice for the ceiling and the final duel. But the first
                # challenger has priority over both: without it, nothing is compared.
                is_first = sum(bool(each.rates) for each in self.rows) < 2
                needs_s = self._latest_duel_s
                needs_s += 0 if is_first else self._latest_duel_s + self._first_duel_s
                outcome = self._timed(self._challenge, variant, needs_s=needs_s)
            if self.champion:
                self._confirm()
                ceiling = self.champion.variant._replace(arithmetic=CEILING)
                self._timed(self._measure_ceiling, ceiling, needs_s=self._latest_duel_s)

    def close(self) -> None:
        """Ends the champion's process if it is alive."""
        if self._arm:
            self._arm.close()
            self._arm = None

    def _timed(self, step: Callable, variant: Variant, *, needs_s: float = 0.0) -> str:
        """Measures a variant if `needs_s` seconds are left, reports it, and returns its outcome."""
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
                if row is not self.champion:  # the champion has been measured
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
        """Measures the row's variant, and makes it the champion if it is better."""
        if self.champion is None:
            return self._begin_with(row)
        arm, others, in_turn = self._duel(row)
        row.apart = apart(row.losses, self.reference.losses)
        faster = is_faster(row.rates, others, noise=self.noise or 0.0)
        row.times = times(row.rates, others) * self.champion.times
        turn = "" if in_turn else " (not in turn: the two did not fit into memory together)"
        if len(row.rates) < self._repeats:  # the champion's process was alive, so in turn
            turn = ", in its only stretch"
        ratio = f"{times(row.rates, others):.2f} times as fast as {self.champion.number}{turn}"
        distance = f"{_percent(row.apart)} apart, {_percent(self.tolerance)} allowed"
        if row.apart > self.tolerance:
            row.status, row.why = "rejected", f"losses differ: {distance}; {ratio}"
        elif not faster:
            row.status, row.why = "rejected", f"no faster: {ratio}{self._not_enough(row, others)}"
        else:
            row.status, row.why = "kept", f"{ratio}; losses agree: {distance}"
        if row.status == "kept":
            self._crown(row, arm, in_turn)
        else:
            arm.close()

    def _crown(self, row: Row, arm: ArmProcess, in_turn: bool) -> None:
        """Makes the row the champion; its process stays alive if it fits beside another one."""
        self.close()
        self.champion = row
        if in_turn:
            self._arm = arm
        else:
            arm.close()

    def _begin_with(self, row: Row) -> None:
        """Makes the first variant that runs the champion and the reference.

        A second process trains the same variant with another seed. It gives the noise and the
        tolerance.
        """
        began = time.monotonic()
        arm = self._start(row.variant, 0)
        started = time.monotonic()
        try:
            while len(row.rates) < self._repeats:
                row.rates.append(arm.stretch())
        except BaseException as error:
            if not (isinstance(error, OutOfTimeError) and row.rates):  # one stretch is enough
                arm.close()
                raise
        row.take(arm)
        self._begun(started - began, (time.monotonic() - started) / len(row.rates))
        row.status, row.apart, row.times = ("plain" if row.number == 1 else "kept"), 0.0, 1.0
        row.why = "the others are compared with it"
        if row.number > 1:
            row.why = f"the first variant that ran; {row.why}"
        if len(row.rates) < self._repeats:
            row.why += f"; {self._stretches_in(row.rates)} when the time was over"
        self._arm, self.champion, self.reference = arm, row, row
        again = Row(0, row.variant)
        try:
            other, rates, in_turn = self._duel(again, seed=1, in_full=True)
        except ArmError as error:
            self._say(f"{row.variant} was not measured with another seed: {error}")
            return
        other.close()
        self.noise = noise_of(rates, again.rates)
        self.tolerance = tolerance_of(apart(again.losses, row.losses))
        if in_turn:
            row.rates += rates

    def _stretches_in(self, rates: list[float]) -> str:
        return f"{len(rates)} of {self._repeats} stretches"

    def _confirm(self) -> None:
        """Measures the champion against the reference, which it has met only through other duels.

        The reference becomes the champion again if the gain is not confirmed.
        """
        if self.champion is self.reference:
            return
        if self._time_left() < self._first_duel_s:
            self._is_unconfirmed(NO_TIME)
            return
        first = Row(self.reference.number, self.reference.variant)
        try:
            arm, rates, in_turn = self._duel(first, in_full=True)
        except ArmError as error:
            self._is_unconfirmed(str(error))
            return
        best, ratio = self.champion, times(rates, first.rates)
        chained, best.times = best.times, ratio
        final = (
            f"at the end {best.number} was {ratio:.2f} times as fast as {first.number} "
            f"({statistics.median(rates):,.0f} and {statistics.median(first.rates):,.0f} "
            f"images/s); the product of the earlier gains is {chained:.2f}"
        )
        for each in self.rows[best.number :]:  # these had duels with the best
            each.times = each.times and each.times * ratio / chained
        if is_faster(rates, first.rates, noise=self.noise or 0.0):
            best.why += f"; {final}"
            arm.close()
        else:
            best.status, best.why = "rejected", f"{best.why}; but no gain: {final}"
            self._crown(self.reference, arm, in_turn)

    def _is_unconfirmed(self, why: str) -> None:
        self.champion.why += f"; not measured against {self.reference.number} at the end: {why}"

    def _measure_ceiling(self, row: Row) -> None:
        arm, others, _ = self._duel(row)
        arm.close()
        row.apart = apart(row.losses, self.reference.losses)
        row.status, row.times = "ceiling", times(row.rates, others) * self.champion.times
        row.why = (
            f"pure float16 (O3), {times(row.rates, others):.2f} times as fast as "
            f"{self.champion.number}, losses {_percent(row.apart)} apart; never chosen, because "
            "its weights and updates are float16 too"
        )

    def _duel(
        self, row: Row, *, seed: int = 0, in_full: bool = False
    ) -> tuple[ArmProcess, list[float], bool]:
        """Measures the row's variant in turn with the champion.

        Args:
          row: the row to fill in.
          seed: a number that is added to the config's seed.
          in_full: whether to measure all stretches even if the first is far behind the champion's.

        Returns:
          The row's process, which is alive; the champion's rates; whether the two took turns.
        """
        began = self._time_left()
        if self._arm is None and self._fit_together:
            with self._champion_may_fail():
                self._arm = self._start(self.champion.variant, 0)
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
            self._latest_duel_s = began - self._time_left()
            self._first_duel_s = self._first_duel_s or self._latest_duel_s
        in_turn = len(others) == len(row.rates)
        return arm, others if in_turn else list(self.champion.rates), in_turn

    def _part_of(self, row: Row, others: list[float]) -> OutOfTimeError | None:
        """Returns the error with the result of the stretches so far; None if there are none.

        The result is only reported, because a few stretches decide nothing.
        """
        number = min(len(row.rates), len(others or row.rates))
        if not number:
            return None
        rates = row.rates[:number]
        ratio = times(rates, others[:number] or self.champion.rates)
        return OutOfTimeError(
            f"{NO_TIME} after {self._stretches_in(rates)}, which were {ratio:.2f} times as fast "
            f"as those of {self.champion.number} ({statistics.median(rates):,.0f} images/s)"
        )

    def _beside_the_champion(self, variant: Variant, seed: int) -> ArmProcess:
        try:
            return self._start(variant, seed)
        except ArmError as error:
            if not (error.out_of_memory and self._arm):
                raise
        self._say(
            f"{variant} does not fit into memory beside {self.champion.variant}, the best so far; "
            "from here on, variants are measured one after the other"
        )
        self._stop_sharing()
        return self._start(variant, seed)

    @contextlib.contextmanager
    def _champion_may_fail(self):
        """Ends only the champion's process if it fails here, for example for lack of memory."""
        try:
            yield
        except OutOfTimeError:
            raise
        except ArmError as error:
            self._say(
                f"{self.champion.variant}, the best so far, failed beside another process: {error}"
            )
            self._stop_sharing()

    def _stop_sharing(self) -> None:
        """Ends the champion's process; after this, two processes are never alive together."""
        self.close()
        self._fit_together = False

    def _not_enough(self, row: Row, others: list[float]) -> str:
        """Returns why a higher median is not a gain; an empty string if the median is lower."""
        if times(row.rates, others) <= 1:
            return ""
        (least, _, most), (other_least, _, other_most) = quartiles(row.rates), quartiles(others)
        if least <= other_most:
            return (
                f", which is not beyond the spread (the middle half of its stretches is "
                f"{least:,.0f} to {most:,.0f} images/s, that of {self.champion.number} is "
                f"{other_least:,.0f} to {other_most:,.0f})"
            )
        return f", but two processes of the same variant differed by {_percent(self.noise)}"


def _percent(part: float) -> str:
    if not math.isfinite(part):
        return "infinitely"
    return f"{part:.1%}" if part < 10 else "more than 999%"
