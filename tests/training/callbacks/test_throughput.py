import math
import types

import pytest

from tfaccel.training.callbacks.throughput import Throughput, Timed, images_until


class Clock:
    """A clock that shows what it is told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def make_loader(*, num_examples, position=0):
    """What a loader of batches of 8 tells of itself."""
    return types.SimpleNamespace(
        global_batch_size=8,
        num_examples=num_examples,
        num_batches=math.ceil(num_examples / 8),
        position=position,
        next_position=position,
        waited_s=0.0,
    )


def epoch(throughput, loader, clock, seconds, *, executed=1):
    """One epoch whose executions, of `executed` steps each, end `seconds` apart."""
    logs = {}
    end = (loader.position // loader.num_batches + 1) * loader.num_batches
    throughput.on_epoch_begin(0)
    for execution, took in enumerate(seconds):
        clock.now += took
        loader.waited_s += took / 4
        loader.position = loader.next_position = min(loader.position + executed, end)
        throughput.on_train_batch_end(execution, logs)
    clock.now += 1000  # validation
    epoch_logs = {}
    throughput.on_epoch_end(0, epoch_logs)
    assert epoch_logs == logs
    return logs["images_per_second"]


def begin(loader, clock):
    throughput = Throughput(loader, clock=clock)
    throughput.on_train_begin()
    return throughput


def test_counts_steps_without_the_one_that_compiles_and_without_validation(clock):
    loader = make_loader(num_examples=32)
    throughput = begin(loader, clock)
    assert epoch(throughput, loader, clock, [60, 2, 2, 2]) == 4.0
    assert throughput.epoch == Timed(images=24, seconds=6.0, waited_s=1.5)
    assert epoch(throughput, loader, clock, [1, 1, 1, 1]) == 8.0
    # Over the whole of it: the first epoch, with its compilations, is left out.
    assert throughput.images_per_second == 8.0
    assert throughput.first_execution_s == 60


def test_a_partial_batch_counts_its_own_rows(clock):
    loader = make_loader(num_examples=20)
    throughput = begin(loader, clock)
    epoch(throughput, loader, clock, [60, 1, 1])
    assert throughput.images_per_second == (8 + 4) / 2
    assert epoch(throughput, loader, clock, [1, 1, 2]) == 20 / 4


def test_counts_all_steps_of_an_execution(clock):
    loader = make_loader(num_examples=40)
    throughput = begin(loader, clock)
    assert epoch(throughput, loader, clock, [60, 4, 2], executed=2) == (16 + 8) / 6
    # The last execution is shorter, and the first of its length: it may have compiled.
    assert throughput.steady == Timed(images=16, seconds=4.0, waited_s=1.0)
    epoch(throughput, loader, clock, [4, 4, 2], executed=2)
    assert throughput.steady == throughput.epoch


def test_says_nothing_where_nothing_was_timed(clock):
    loader = make_loader(num_examples=8)
    throughput = begin(loader, clock)
    assert epoch(throughput, loader, clock, [60]) == 0.0
    assert throughput.images_per_second == 0.0


def test_a_resume_in_the_middle_of_an_epoch_counts_what_is_left_of_it(clock):
    loader = make_loader(num_examples=36, position=5 + 2)
    throughput = begin(loader, clock)
    assert epoch(throughput, loader, clock, [60, 2, 2]) == (8 + 4) / 4
    assert loader.position == 10


def test_a_resume_at_an_epochs_end_leaves_the_rate_of_the_steps_before(clock):
    throughput = begin(make_loader(num_examples=32, position=4), clock)
    throughput.on_epoch_begin(0)
    logs = {"images_per_second": 123.0}
    throughput.on_epoch_end(0, logs)
    assert logs == {"images_per_second": 123.0}


@pytest.mark.parametrize(("position", "images"), [(0, 0), (1, 8), (3, 20), (4, 28), (6, 40)])
def test_images_are_counted_over_epochs(position, images):
    assert images_until(make_loader(num_examples=20), position) == images
