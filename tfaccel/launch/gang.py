"""Decides when a gang of ranks is over, which rank is faulty, and whether to restart.

This file is only arithmetic: it takes the states of all ranks, and returns a verdict or None.

    verdict = judge({0: RankState(...), 1: RankState(...)}, limits_of(options))
    verdict.rank, verdict.exit_code, verdict.reason     # 1, 137, "rank 1 was ended by SIGKILL"
    reason = why_not_again(verdict, restarts=1, options=options, furthest=[57, 57])

Every rank of a job takes the same steps. All others therefore wait for the rank with the least
progress, whatever they do meanwhile, and only the time limit of that rank's phase counts.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from tfaccel.common.tables import in_figures
from tfaccel.launch.options import Options
from tfaccel.process.child import how_it_ended

# The rank that ended first may have ended because it lost another, of which we learn a little
# later: a node reports each second, and TensorFlow's workers notice a death within 2 s (2
# processes, 2026-11).
SETTLE_S = 5.0
# Seconds until ranks have a signal: 1 s after their launcher, and 1 s more until node 0 knows.
PASSED_ON_S = 3.0
NEVER_AGAIN = {
    0: "it is done",
    2: "exit code 2 is a mistake in the call, which a restart would repeat",
    130: "it was interrupted",
}
LONGEST_BACKOFF_S = 60.0
IN_WORDS = {
    "start": "before its first step ended",
    "train": "in training",
    "evaluation": "in an evaluation",
    "save": "in saving",
    "export": "in the export",
    "own": "in the script's own code",
    "end": "after its end",
}


@dataclasses.dataclass(frozen=True)
class RankState:
    """The state of a rank.

    Attributes:
      beats: number of places that the rank has passed, the same for all ranks; see
        tfaccel/process/progress.py.
      phase: what the rank is doing.
      step: the newest step that it has begun.
      age_s: seconds since its last beat; for a rank that has ended, since its end.
      exit_code: 128 + n if signal n ended it; None while it runs.
      lost: the rank whose loss ended this one, -1 if unknown, None if none was lost.
      asked: whether it has heard a signal to stop.
      tail: the first error and the last lines of a rank that failed.
    """

    beats: int = 0
    phase: str = "start"
    step: int = 0
    age_s: float = 0.0
    exit_code: int | None = None
    lost: int | None = None
    asked: bool = False
    tail: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The end of the gang.

    Attributes:
      exit_code: the launcher's exit code, if there is no restart.
      reason: the reason in words.
      rank: the faulty rank; None if there is none.
      in_order: whether all ranks stopped because a signal asked them to.
      hung: ranks that run but make no progress; any of them may be the faulty one.
    """

    exit_code: int
    reason: str
    rank: int | None = None
    in_order: bool = False
    hung: tuple[int, ...] = ()


def limits_of(options: Options) -> dict[str, float]:
    """Returns the longest seconds without progress, by phase; infinite for no limit.

    The limit of "end" is also how long other ranks may take to stop after one has ended.
    """
    return {
        "start": options.start_timeout_s,
        "train": options.step_timeout_s,
        "evaluation": options.evaluation_timeout_s,
        "save": options.save_timeout_s,
        "export": options.save_timeout_s,
        "own": options.start_timeout_s,
        "end": options.grace_s,
    }


def judge(
    states: Mapping[int, RankState], limits: Mapping[str, float], *, stopping_s: float | None = None
) -> Verdict | None:
    """Returns the verdict that ends the gang, or None while it continues.

    Args:
      states: the states of all ranks.
      limits: the result of `limits_of`.
      stopping_s: seconds since this launcher was told to stop; None if it was not.
    """
    codes = [each.exit_code for each in states.values()]
    if all(code == 0 for code in codes):
        return Verdict(0, "all ranks are done")
    ended = {rank: each for rank, each in states.items() if each.exit_code}
    if ended:
        return _of_ended(states, ended, limits)
    return _of_slow(states, limits, stopping_s)


def _of_ended(
    states, ended: Mapping[int, RankState], limits: Mapping[str, float]
) -> Verdict | None:
    """Returns which rank failed by itself; None while that is unknown."""
    by_itself = [rank for rank, each in ended.items() if each.lost is None and not _in_order(each)]
    if by_itself:
        return _ended(states, max(by_itself, key=lambda rank: ended[rank].age_s))
    first = max(ended, key=lambda rank: ended[rank].age_s)
    in_order = [rank for rank, each in ended.items() if _in_order(each)]
    if in_order:
        # A signal made it save and stop. The others do the same, and need time for it.
        late = ended[first].age_s > limits["end"]
        return _stopped(states, in_order[0], late=late)
    if ended[first].age_s < SETTLE_S:
        return None
    accused = ended[first].lost
    if accused in states and states[accused].lost is None:
        hung = (accused,) if states[accused].exit_code is None else ()
        reason = _lost(states, first, accused)
        return Verdict(ended[first].exit_code, reason, accused, hung=hung)
    return _ended(states, first)


def _stopped(states, first: int, *, late: bool) -> Verdict | None:
    code = states[first].exit_code
    left = [str(rank) for rank, each in states.items() if each.exit_code is None]
    if not left:
        return Verdict(code, "stopped as asked, with its state saved", first, in_order=True)
    reason = f"rank {first} stopped as asked, but rank {', '.join(left)} did not stop in time"
    return Verdict(code, reason, first) if late else None


def _in_order(state: RankState) -> bool:
    """Returns whether a rank ended because a signal asked it to, with its state saved."""
    return state.phase == "end"


def _ended(states, rank: int) -> Verdict:
    code = states[rank].exit_code
    return Verdict(code, f"rank {rank} {how_it_ended(code)}", rank)


def _lost(states, first: int, accused: int) -> str:
    state = states[accused]
    how = "runs, but does not answer" if state.exit_code is None else how_it_ended(state.exit_code)
    return f"rank {accused} {how}: rank {first} ended because it lost it"


def _of_slow(states, limits: Mapping[str, float], stopping_s: float | None) -> Verdict | None:
    """Returns a verdict if all other ranks have waited too long for one."""
    running = {rank: each for rank, each in states.items() if each.exit_code is None}
    least = min(each.beats for each in running.values())
    last = {rank: each for rank, each in running.items() if each.beats == least}
    # If it waited for a rank that is done now, its time counts from that rank's end.
    since_s = min((each.age_s for each in states.values() if each.exit_code == 0), default=math.inf)
    overdue = {
        rank: each for rank, each in last.items() if min(each.age_s, since_s) > limits[each.phase]
    }
    # If several ranks are at the same place, one may be within a longer limit: a chief that saves.
    if overdue and len(overdue) == len(last):
        return _overdue(overdue, limits, num_ranks=len(states))
    # TensorFlow ignores SIGTERM for a program that saves nothing.
    deaf = not any(each.asked for each in running.values())
    if stopping_s is not None and stopping_s > PASSED_ON_S + limits["end"] and deaf:
        reason = f"no rank heard the signal to stop within {in_figures(limits['end'])} s (--grace)"
        return Verdict(143, reason)
    return None


def _overdue(
    overdue: Mapping[int, RankState], limits: Mapping[str, float], *, num_ranks: int
) -> Verdict:
    # Among ranks at the same place, those with the longest limit are the ones that others wait for.
    limit = max(limits[each.phase] for each in overdue.values())
    awaited = [rank for rank, each in overdue.items() if limits[each.phase] == limit]
    rank = max(awaited, key=lambda each: overdue[each].age_s)
    state = overdue[rank]
    who = f"rank {rank}"
    if 1 < len(awaited) == num_ranks:
        who = f"each of ranks {', '.join(map(str, awaited))}"
    reason = (
        f"{who} made no progress {IN_WORDS[state.phase]} for {state.age_s:.0f} s (limit "
        f"{in_figures(limit)} s), step {state.step}"
    )
    return Verdict(1, reason, rank, hung=tuple(awaited))


def why_not_again(
    verdict: Verdict,
    *,
    restarts: int,
    options: Options,
    furthest: Sequence[int],
    was_told_to_stop: bool = False,
) -> str | None:
    """Returns why the gang must not restart; None if it may.

    Args:
      verdict: the verdict that ended it.
      restarts: number of restarts so far.
      options: the options with `max_restarts`.
      furthest: the newest step that each attempt began; the last item is for this attempt.
      was_told_to_stop: whether a launcher received a signal.
    """
    if verdict.exit_code in NEVER_AGAIN:
        return NEVER_AGAIN[verdict.exit_code]
    if was_told_to_stop:
        return "it was told to stop"
    if restarts >= options.max_restarts:
        return f"all {options.max_restarts} restarts of --max-restarts are used up"
    if len(furthest) > 2 and max(furthest[-2:]) <= max(furthest[:-2]):
        return f"two restarts in a row got no further than step {max(furthest)}"
    return None


def backoff_s(restarts: int) -> float:
    """Returns the seconds to wait before the next start: 1, 2, 4, ..., at most 60."""
    return min(LONGEST_BACKOFF_S, 2.0**restarts)
