"""How long stretches can be: arithmetic."""

import pytest

from tfaccel.diagnostics.compare.pace import Pace, Settings, fitted, minutes_for, seconds_for

ASKED = Settings(steps=50, lead_in=5, warm_up=10, repeats=5, variants=4)
SLOW = Pace(start_s=10.0, step_s=1.0, epoch_steps=10_000)


def test_seconds_are_starts_warming_up_and_stretches_in_turn():
    # 4 starts of 10 s, 4 x 10 s of warming up, and 5 stretches of 55 s: 1 + 3 x 2 times.
    assert seconds_for(ASKED, SLOW) == 4 * 20 + 7 * 5 * 55
    assert minutes_for(ASKED, SLOW) == 34
    short_epochs = Pace(10.0, 1.0, epoch_steps=100)  # whose end comes before what is timed
    assert seconds_for(ASKED, short_epochs) == 4 * 110 + 7 * 5 * 55


@pytest.mark.parametrize(
    ("left_s", "pace", "steps", "lead_in", "warm_up"),
    [
        (None, SLOW, 50, 5, 10),  # of other variants than the first
        (3000.0, SLOW, 50, 5, 10),
        (600.0, SLOW, 13, 2, 3),  # 52 s, and 35 stretches of 15 s
        (120.0, SLOW, 3, 1, 3),  # too little for the shortest
        (1.0, Pace(1.0, 0.1, epoch_steps=10_000), 10, 2, 3),  # which takes a second at least
        (1.0, Pace(1.0, 0.001, epoch_steps=10_000), 50, 5, 3),
    ],
)
def test_stretches_are_as_long_as_there_is_time(left_s, pace, steps, lead_in, warm_up):
    found = fitted(ASKED._replace(left_s=left_s), pace)
    assert (found.steps, found.lead_in, found.warm_up) == (steps, lead_in, warm_up)
