"""Whether a variant is faster beyond the spread, and whether its losses agree."""

import math

import pytest

from tfaccel.diagnostics.compare.judge import (
    FLOOR,
    apart,
    is_faster,
    means,
    noise_of,
    quartiles,
    tolerance_of,
)

FALLING = [2.3 * 0.97**step for step in range(100)]


@pytest.mark.parametrize(
    ("rates", "others", "noise", "expected"),
    [
        ([110, 112, 111], [100, 102, 101], 0.0, True),
        ([101, 112, 100], [100, 102, 101], 0.0, False),  # half of them are within the spread
        ([110, 111, 112, 113, 90], [100, 101, 102, 103, 130], 0.0, True),  # one of each disturbed
        ([103, 104, 105], [100, 102, 101], 0.05, False),  # another process may be as much faster
        ([90, 91, 92], [100, 102, 101], 0.0, False),
        ([100, 100, 100], [100, 100, 100], 0.0, False),
    ],
)
def test_faster_beyond_the_spread(rates, others, noise, expected):
    assert is_faster(rates, others, noise=noise) is expected


def test_noise_is_what_the_same_thing_twice_differs_by():
    assert noise_of([100, 101, 102], [103, 104, 105]) == pytest.approx(3 / 101)
    assert noise_of([103, 104, 105], [100, 101, 102]) == pytest.approx(3 / 104)


def test_quartiles_also_of_one():
    assert quartiles([3.0]) == (3.0, 3.0, 3.0)
    assert quartiles([1, 2, 3, 4, 5]) == (2, 3, 4)


def test_means_of_parts_that_follow_each_other():
    assert means([1, 3, 5, 5, 6, 8], 3) == [2, 5, 7]
    assert means([1, 3], 3) == [1, 3]
    assert means([], 3) == []


def test_equal_curves_are_not_apart():
    assert apart(FALLING, FALLING) == 0


def test_distance_is_a_part_of_the_loss_where_it_is_largest():
    middle = [*FALLING[:20], *(1.1 * each for each in FALLING[20:40]), *FALLING[40:]]
    assert apart(middle, FALLING) == pytest.approx(0.1)


def test_small_losses_count_as_a_quarter_of_the_largest():
    flat = [1.0] * 20 + [0.01] * 80
    assert apart([*flat[:20], *[0.03] * 80], flat) == pytest.approx(0.02 / 0.25)


def test_single_steps_may_jump_but_not_many_in_a_row():
    jumping = [each + (0.05 if step % 2 else -0.05) for step, each in enumerate(FALLING)]
    assert apart(jumping, FALLING) < FLOOR


def test_a_curve_that_stalls_is_apart():
    stalling = FALLING[:30] + [FALLING[30]] * 70
    assert apart(stalling, FALLING) > 0.2


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_infinitely_apart(bad):
    assert apart([*FALLING[:50], bad], FALLING) == math.inf


def test_curves_of_different_lengths_are_compared_as_far_as_both_go():
    assert apart(FALLING[:37], FALLING) == 0
    assert apart(FALLING, FALLING[:3]) == 0
    assert apart([], FALLING) == math.inf


def test_tolerance_is_twice_what_another_seed_does_but_no_less_than_the_floor():
    assert tolerance_of(0.043) == pytest.approx(0.086)
    assert tolerance_of(0.0001) == FLOOR
    assert tolerance_of(math.inf) == FLOOR  # a recipe that diverges says nothing
