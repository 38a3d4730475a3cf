"""Whose fault an end is, and whether to start again: tables."""

import dataclasses
import math

import pytest

from tfaccel.launch.gang import RankState, Verdict, backoff_s, judge, limits_of, why_not_again
from tfaccel.launch.options import Options

OPTIONS = Options(
    start_timeout_s=100,
    step_timeout_s=10,
    save_timeout_s=30,
    evaluation_timeout_s=20,
    grace_s=5,
    max_restarts=3,
)


def judged(*states, **stopping):
    return judge(dict(enumerate(states)), limits_of(OPTIONS), **stopping)


def training(beats, age_s, phase="train", **more):
    return RankState(beats=beats, phase=phase, step=beats, age_s=age_s, **more)


def ended(code, age_s=0.0, phase="train", **more):
    return RankState(beats=9, phase=phase, step=9, exit_code=code, age_s=age_s, **more)


DONE = RankState(exit_code=0)
LONG_DONE = RankState(exit_code=0, age_s=1000)


@pytest.mark.parametrize(
    ("states", "at_fault"),
    [
        # Within its limit; the others wait for it, however long.
        ([training(5, 9), training(6, 500)], None),
        # It sleeps between two steps, the other waits in the step after.
        ([training(6, 11), training(5, 11)], 1),
        ([training(6, 500), training(5, 11)], 1),
        # The chief saves: within its own limit, and then beyond.
        ([training(5, 29, "save"), training(6, 29)], None),
        ([training(5, 31, "save"), training(6, 31)], 0),
        # All wait for the chief, which stands at the same place with another limit.
        ([training(6, 29, "save"), training(6, 29)], None),
        ([training(6, 31, "save"), training(6, 31)], 0),
        # Evaluation and export have limits of their own.
        ([training(6, 15, "evaluation"), training(6, 15, "evaluation")], None),
        ([training(6, 21, "evaluation"), training(7, 1)], 0),
        ([training(6, 25, "export"), LONG_DONE], None),
        ([training(6, 31, "export"), LONG_DONE], 0),
        # What a script does between two calls, e.g. draws curves, has the start's.
        ([training(6, 99, "own"), training(7, 500)], None),
        ([training(6, 101, "own"), training(7, 500)], 0),
        # It waited for the one that is done now, and goes on.
        ([training(6, 500), DONE], None),
        # The first step compiles; one that never starts has no beat at all.
        ([training(3, 99, "start"), training(3, 99, "start")], None),
        ([training(1, 99, "start"), RankState(age_s=101)], 1),
    ],
)
def test_p7_the_rank_that_is_least_far_is_at_fault_beyond_its_own_limit(states, at_fault):
    verdict = judged(*states)
    assert (verdict.rank if verdict else None) == at_fault
    assert verdict is None or verdict.exit_code == 1


def test_p3_all_that_are_at_fault_are_to_show_their_stacks():
    assert judged(training(6, 11), training(5, 12)).hung == (1,)
    # Any of them may be the one that the others wait for.
    assert judged(training(5, 11), training(5, 12)).hung == (0, 1)
    assert judged(ended(1, 6, lost=1), training(9, 66)).hung == (1,)
    assert judged(ended(1), training(9, 66)).hung == ()


def test_a_rank_that_is_overdue_is_named_with_phase_and_limit():
    assert judged(training(6, 11), training(5, 12)).reason == (
        "rank 1 made no progress in training for 12 s (limit 10 s), step 5"
    )
    assert judged(training(5, 11), training(5, 12)).reason == (
        "each of ranks 0, 1 made no progress in training for 12 s (limit 10 s), step 5"
    )


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([DONE, DONE], (0, None)),
        ([DONE, training(5, 1)], None),
        ([ended(3), training(5, 1)], (3, 0)),
        ([training(5, 1), ended(137)], (137, 1)),
        # Both in one look: the first.
        ([ended(1, 0.1), ended(137, 0.9)], (137, 1)),
        # One that ended because another was lost waits for news of that one...
        ([ended(1, 1, lost=1), training(9, 1)], None),
        ([ended(1, 4, lost=1), ended(137, 0.1)], (137, 1)),
        # ... which is at fault if there are none: frozen, or ended too early.
        ([ended(1, 6, lost=1), training(9, 66)], (1, 1)),
        ([ended(1, 6, lost=1), DONE], (1, 1)),
        # Nobody knows whose fault it was: the first's, then.
        ([ended(1, 6, lost=-1), ended(1, 7, lost=-1)], (1, 1)),
        # Saved and stopped, as a signal asked: the others have the grace for it.
        ([ended(143, 1, "end"), training(9, 1)], None),
        ([ended(143, 6, "end"), training(9, 1)], (143, 0)),
        ([ended(143, 1, "end"), ended(143, 2, "end")], (143, 0)),
    ],
)
def test_p6_who_ended_by_itself_is_at_fault(states, expected):
    verdict = judged(*states)
    assert (verdict and (verdict.exit_code, verdict.rank)) == expected


def test_ranks_that_stop_as_asked_are_no_error():
    verdict = judged(ended(143, 1, "end"), ended(143, 2, "end"))
    assert (verdict.reason, verdict.in_order) == ("stopped as asked, with its state saved", True)
    verdict = judged(ended(143, 6, "end"), training(9, 1))
    assert not verdict.in_order
    assert verdict.reason == "rank 0 stopped as asked, but rank 1 did not stop in time"


def test_a_rank_that_another_lost_is_named_with_who_lost_it():
    assert judged(ended(1, 6, lost=1), training(9, 66)).reason == (
        "rank 1 runs, but does not answer: rank 0 ended because it lost it"
    )


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (3, "ended with exit code 3"),
        (137, "was ended by SIGKILL, exit code 137 (perhaps the machine was out of memory)"),
        (134, "was ended by SIGABRT, exit code 134"),
        (255, "ended with exit code 255"),
    ],
)
def test_an_exit_code_in_words(code, words):
    assert judged(ended(code), training(9, 0)).reason == f"rank 0 {words}"


def test_a_phase_may_be_without_limit():
    options = dataclasses.replace(OPTIONS, step_timeout_s=math.inf)
    stuck = {0: training(5, 1e9), 1: training(6, 1e9)}
    assert judge(stuck, limits_of(options)) is None
    assert judge({**stuck, 0: training(5, 31, "save")}, limits_of(options)).rank == 0


def test_ranks_that_hear_no_signal_have_the_grace():
    deaf, heard = training(5, 1), training(5, 1, asked=True)
    assert judged(deaf, deaf, stopping_s=7) is None
    assert judged(deaf, deaf, stopping_s=9).exit_code == 143
    assert judged(deaf, heard, stopping_s=9) is None  # they save, all of them


@pytest.mark.parametrize(
    ("code", "restarts", "furthest", "why_not"),
    [
        (1, 0, [57], None),
        (137, 2, [57, 60, 90], None),
        (143, 0, [57], None),  # somebody ended a rank, not the launcher
        (0, 0, [57], "it is done"),
        (2, 0, [57], "exit code 2 is a mistake in the call, which a restart would repeat"),
        (130, 0, [57], "it was interrupted"),
        (1, 3, [57, 60, 80, 90], "all 3 restarts of --max-restarts are used up"),
        # One restart that comes no further may be bad luck, two are not.
        (1, 1, [57, 57], None),
        (1, 2, [57, 57, 56], "two restarts in a row got no further than step 57"),
        (1, 2, [57, 56, 58], None),
        (1, 2, [0, 0, 0], "two restarts in a row got no further than step 0"),
    ],
)
def test_why_a_gang_may_not_start_again(code, restarts, furthest, why_not):
    verdict = Verdict(code, "something")
    received = why_not_again(verdict, restarts=restarts, options=OPTIONS, furthest=furthest)
    assert received == why_not


def test_a_gang_that_was_told_to_stop_does_not_start_again():
    why_not = why_not_again(
        Verdict(143, "something"),
        restarts=0,
        options=OPTIONS,
        furthest=[5],
        was_told_to_stop=True,
    )
    assert why_not == "it was told to stop"


def test_the_pause_before_a_restart_doubles_up_to_a_minute():
    assert [backoff_s(restarts) for restarts in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
