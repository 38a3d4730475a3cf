import pytest

from tfaccel.callbacks.throughput import Throughput


class Clock:
    """A clock that shows what it is told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def epoch(throughput, clock, seconds, *, index, executed=1):
    """One epoch whose executions, of `executed` steps each, end `seconds` apart."""
    logs = {}
    throughput.on_epoch_begin(index)
    for execution, took in enumerate(seconds, start=1):
        clock.now += took
        throughput.on_train_batch_end(execution * executed - 1, logs)
    clock.now += 1000  # validation
    epoch_logs = {}
    throughput.on_epoch_end(index, epoch_logs)
    assert epoch_logs == logs
    return logs["images_per_second"]


def test_counts_steps_without_the_one_that_compiles_and_without_validation(clock):
    throughput = Throughput(global_batch_size=8, num_examples=32, clock=clock)
    assert epoch(throughput, clock, [60, 2, 2, 2], index=0) == 4.0
    assert epoch(throughput, clock, [1, 1, 1, 1], index=1) == 8.0
    # Over the whole of it: the first epoch, with its compilations, is left out.
    assert throughput.images_per_second == 8.0


def test_a_partial_batch_counts_its_own_rows(clock):
    throughput = Throughput(global_batch_size=8, num_examples=20, clock=clock)
    epoch(throughput, clock, [60, 1, 1], index=0)
    assert throughput.images_per_second == (8 + 4) / 2
    assert epoch(throughput, clock, [1, 1, 2], index=1) == 20 / 4


def test_counts_all_steps_of_an_execution(clock):
    throughput = Throughput(global_batch_size=8, num_examples=40, clock=clock)
    assert epoch(throughput, clock, [60, 4, 2], index=0, executed=2) == (16 + 8) / 6


def test_says_nothing_where_nothing_was_timed(clock):
    throughput = Throughput(global_batch_size=8, num_examples=8, clock=clock)
    assert epoch(throughput, clock, [60], index=0) == 0.0
    assert throughput.images_per_second == 0.0
