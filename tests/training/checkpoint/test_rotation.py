"""Which checkpoints stay, by table."""

import math

import pytest

from tfaccel.training.checkpoint.folder import Name
from tfaccel.training.checkpoint.rotation import best_first, to_keep


@pytest.mark.parametrize(
    ("scores", "keep_last", "keep_best", "largest", "kept"),
    [
        ({1: 0.5, 2: 0.6, 3: 0.4}, 1, 0, True, {3}),
        ({1: 0.5, 2: 0.6, 3: 0.4}, 2, 1, True, {2, 3}),
        ({1: 0.5, 2: 0.6, 3: 0.4}, 1, 1, True, {2, 3}),
        ({1: 0.5, 2: 0.6, 3: 0.4}, 1, 2, False, {1, 3}),
        ({1: 0.5, 2: 0.5, 3: 0.4}, 1, 1, True, {2, 3}),  # of equal ones the newest
        ({1: 0.0, 2: 1.0, 3: 2.0}, 1, 1, False, {1, 3}),  # 0 is a score
        ({1: math.nan, 2: 0.1, 3: None}, 1, 1, True, {2, 3}),
        ({1: math.nan, 2: math.inf, 3: -math.inf, 4: None}, 1, 3, True, {4}),
        ({1: 0.5}, 5, 5, True, {1}),
        ({9: 0.5, 10: None, 100: None}, 2, 0, True, {10, 100}),  # as numbers, not as text
    ],
)
def test_the_last_and_the_best_stay(scores, keep_last, keep_best, largest, kept):
    received = to_keep(
        {Name(step, tested=True): score for step, score in scores.items()},
        keep_last=keep_last,
        keep_best=keep_best,
        largest_is_best=largest,
    )
    assert {each.step for each in received} == kept


def test_a_state_before_validation_goes_when_the_one_after_it_is_there():
    scores = {Name(1, False): None, Name(1, True): 0.5, Name(2, False): None}
    kept = to_keep(scores, keep_last=2, keep_best=0, largest_is_best=True)
    assert kept == {Name(1, True), Name(2, False)}


@pytest.mark.parametrize(
    ("scores", "largest", "best"),
    [
        ({1: 0.5, 2: 0.6, 3: 0.4}, True, [2, 1, 3]),
        ({1: 0.5, 2: 0.6, 3: 0.4}, False, [3, 1, 2]),
        ({1: 0.5, 2: 0.4, 3: 0.5, 10: 0.5}, True, [10, 3, 1, 2]),  # of equal ones the newest
        ({1: 0.5, 2: 0.4, 3: 0.5}, False, [2, 3, 1]),
        ({1: math.nan, 2: None, 3: 0.0, 4: math.inf, 5: -math.inf}, True, [3]),
        ({1: None, 2: math.nan}, True, []),
        ({}, False, []),
    ],
)
def test_the_best_comes_first_and_what_has_no_finite_score_not_at_all(scores, largest, best):
    received = best_first(
        {Name(step, tested=True): score for step, score in scores.items()}, largest_is_best=largest
    )
    assert [each.step for each in received] == best
