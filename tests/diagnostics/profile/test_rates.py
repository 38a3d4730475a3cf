"""Rates: what is dropped, how a stretch is looked at, and when it is enough."""

import pytest

from tfaccel.diagnostics.profile.rates import Lap, Stopwatch, cut


def watched(laps, *, seconds=1.0):
    watch = Stopwatch(seconds=seconds)
    for each in laps:
        watch.add(each)
    return watch


def test_compilation_and_what_was_prefetched_are_dropped():
    slow_start = [Lap(1, 30.0), Lap(1, 0.0), *[Lap(1, 0.0)] * 2, *[Lap(1, 0.1)] * 20]
    watch = watched(slow_start)
    assert watch.is_done
    rate = watch.rate(images_per_step=64)
    assert rate.median == pytest.approx(640)
    assert (rate.low, rate.high) == (pytest.approx(640), pytest.approx(640))


def test_it_goes_on_until_there_is_enough_time_and_enough_laps():
    assert not watched([Lap(1, 0.1)] * 14).is_done  # 2 and 0.3 s are dropped
    assert watched([Lap(1, 0.1)] * 16).is_done
    assert not watched([Lap(1, 5.0)] * 5).is_done
    assert watched([Lap(1, 5.0)] * 8).is_done


def test_bursts_of_a_queue_do_not_make_the_median():
    # Three batches at once, then a wait: 4 batches of 8 in 0.4 s.
    bursts = [Lap(1, 0.0), Lap(1, 0.0), Lap(1, 0.0), Lap(1, 0.4, waited_s=0.4)] * 40
    rate = watched(bursts, seconds=10.0).rate(images_per_step=8)
    assert rate.median == pytest.approx(80, rel=0.1)
    assert rate.waited_s == pytest.approx(0.1, rel=0.05)


def test_parts_are_of_equal_time():
    parts = cut([Lap(1, 1.0)] * 10 + [Lap(1, 10.0)])
    assert sum(each.seconds for each in parts[0]) == 2
    assert sum(map(len, parts)) == 11
