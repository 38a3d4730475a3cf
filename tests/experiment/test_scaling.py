"""The all-reduce is timed within bounds, and its time means a bandwidth and a speed."""

import json

import pytest
import tensorflow as tf
from conftest import in_workers, strategy_of

from tfaccel.experiment.scaling import (
    BUDGET_S,
    MOST_ROUNDS,
    MOST_SUMS,
    Scaling,
    planned,
    time_all_reduce,
)


class Clock:
    """A clock that stands still until it is told to go on."""

    now = 0.0

    def __call__(self):
        return self.now


class Sums:
    """Stands for a GradientSum whose sums take as many seconds as they are given, in turn."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds, self.rounds = clock, list(seconds), []

    def run(self, num_times):
        self.rounds.append(num_times)
        self.clock.now += num_times * self.seconds.pop(0)


def test_four_replicas_computed_by_hand():
    # 100 MB in 10 ms are 10 GB/s. Each link carries 2 * 3 / 4 of the bytes: 15 GB/s.
    scaling = Scaling(num_replicas=4, num_bytes=100_000_000, all_reduce_s=0.010, step_s=0.050)
    assert scaling.bus_bandwidth == pytest.approx(15e9)
    assert scaling.pass_s == pytest.approx(0.040)
    assert scaling.share == pytest.approx(0.8)
    assert str(scaling).splitlines() == [
        "  all-reduce 100 MB of gradients over 4 replicas in 10 ms; bus bandwidth 15 GB/s",
        "  step       50 ms without loading; minus the all-reduce: 40 ms",
        "  scaling    expected: 0.80 of 4 times one replica (the all-reduce is not hidden behind "
        "the pass)",
    ]


def test_two_replicas_have_the_bandwidth_of_the_bytes():
    scaling = Scaling(num_replicas=2, num_bytes=3_000_000, all_reduce_s=0.5, step_s=2.0)
    assert scaling.bus_bandwidth == pytest.approx(6e6)
    assert scaling.share == pytest.approx(0.75)


@pytest.mark.parametrize("step_s", [0.02, 0.019])
def test_a_step_that_is_no_longer_than_its_all_reduce_says_nothing_of_the_scaling(step_s):
    scaling = Scaling(num_replicas=2, num_bytes=1000, all_reduce_s=0.02, step_s=step_s)
    assert scaling.pass_s == 0
    assert str(scaling).endswith(
        "  scaling    expected: unknown, because an all-reduce alone took as long as a step\n"
    )


@pytest.mark.parametrize(
    ("all_reduce_s", "rounds"),
    [
        (1e-5, (MOST_ROUNDS, MOST_SUMS)),
        (0.001, (MOST_ROUNDS, 20)),
        (0.004, (MOST_ROUNDS, 5)),
        (0.08, (3, 1)),
        (0.2, (1, 1)),
        (60.0, (1, 1)),
    ],
)
def test_the_rounds_have_a_bounded_number_and_time(all_reduce_s, rounds):
    assert planned(all_reduce_s) == rounds
    assert all_reduce_s * rounds[0] * rounds[1] <= max(all_reduce_s, BUDGET_S)


def test_the_time_is_the_median_of_the_rounds_after_the_warm_up():
    clock = Clock()
    sums = Sums(clock, [5.0, 0.09, 0.2, 0.9, 0.3])  # the first compiles, the second is the warm one
    assert time_all_reduce(sums, strategy_of(2), clock=clock) == pytest.approx(0.3)
    assert sums.rounds == [1, 1, 1, 1, 1]


def test_a_round_of_quick_sums_counts_each_of_them():
    clock = Clock()
    sums = Sums(clock, [5.0, 0.002] + [0.003] * MOST_ROUNDS)
    assert time_all_reduce(sums, strategy_of(2), clock=clock) == pytest.approx(0.003)
    assert sums.rounds == [1, 1] + [10] * MOST_ROUNDS


def test_a_collective_that_fails_ends_the_measure():
    class Broken:
        def run(self, num_times):
            raise tf.errors.UnavailableError(None, None, "peer is gone")

    with pytest.raises(tf.errors.UnavailableError, match="peer is gone"):
        time_all_reduce(Broken(), strategy_of(2))


# The second worker's clock is 50 times as quick, so it would do fewer rounds and fewer steps.
PROGRAM = """
import time
import keras
import numpy as np
import tfaccel
from tfaccel.experiment.scaling import time_all_reduce
from tfaccel.experiment.step_times import MOST_EPOCHS, StepTimes
from tfaccel.step.gradient_sum import GradientSum

run = tfaccel.setup(gpu_ids=())
clock = lambda: time.perf_counter() * (1 + 49 * run.cluster.worker_index)
with run.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
run.compile(model, "sgd", "mse")
examples = [(np.zeros(8, np.float32), np.zeros(1, np.float32))] * 24
loader = run.examples(examples, global_batch_size=4)
times = StepTimes(loader, run.strategy, clock=clock)
fit = {"steps_per_epoch": 1, "epochs": MOST_EPOCHS, "callbacks": [times], "verbose": 0}
model.fit(loader, **fit)

rounds, alone = [], GradientSum(model, gradients_as=None)
sum_ = alone.run
alone.run = lambda number: rounds.append(number) or sum_(number)
seconds = time_all_reduce(alone, run.strategy, clock=clock)
(sums,) = sum_(1)
print(json.dumps([seconds, rounds, times.num_steps, sums[0].numpy().tolist()]))
"""


@pytest.mark.slow
def test_two_workers_with_other_clocks_do_the_same_number_of_everything():
    one, other = map(json.loads, in_workers(PROGRAM, 2))
    assert one == other
    seconds, rounds, num_steps, sums = one
    assert seconds > 0
    assert len(rounds) >= 3
    assert num_steps == list(range(1, len(num_steps) + 1))
    assert sums == [2.0] * 9
