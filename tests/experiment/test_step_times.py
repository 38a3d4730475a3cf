"""Warm steps are timed, a few of them, and without the time that they wait for data."""

import types

import pytest
from conftest import strategy_of

from tfaccel.experiment.step_times import BUDGET_S, MOST_EPOCHS, StepTimes, most_epochs


def fit(executions):
    """Calls a StepTimes as `fit` does: (steps, seconds, of these waited for data) each.

    Returns the StepTimes, and the number of executions until it ended `fit`.
    """
    loader, now = types.SimpleNamespace(waited_s=0.0, position=0), [100.0]
    times = StepTimes(loader, strategy_of(2), clock=lambda: now[0])
    times.set_model(types.SimpleNamespace(stop_training=False))
    times.on_train_begin()
    for epoch, (steps, seconds, waited_s) in enumerate(executions):
        times.on_epoch_begin(epoch)
        times.on_train_batch_begin(0)
        now[0] += seconds
        loader.waited_s += waited_s
        loader.position += steps
        times.on_train_batch_end(0)
        times.on_epoch_end(epoch)
        now[0] += 7.0  # between two epochs
        if times.model.stop_training:
            break
    return times, epoch + 1


def test_the_first_execution_compiles_and_waiting_does_not_count():
    times, number = fit([(10, 30.0, 0), (10, 0.09, 0.01), (10, 0.25, 0.05), (10, 0.5, 0.2)])
    assert times.step_s == pytest.approx(0.02)
    assert number == 4
    assert times.num_steps == [10, 20, 30, 40]
    assert times.seconds[:2] == pytest.approx([30.0, 37.09])


def test_an_execution_of_another_length_compiles_too():
    times, _ = fit([(10, 30.0, 0), (3, 30.0, 0), (10, 0.5, 0)])
    assert times.step_s == pytest.approx(0.05)


@pytest.mark.parametrize("execution_s", [0.001, 0.1, 60.0])
def test_the_number_of_executions_and_their_time_are_bounded(execution_s):
    _, number = fit([(1, 30.0, 0)] + [(1, execution_s, 0)] * (MOST_EPOCHS - 1))
    assert 2 <= number <= MOST_EPOCHS
    assert (number - 1) * execution_s <= max(execution_s, BUDGET_S + 1e-9)


@pytest.mark.parametrize(
    ("num_batches", "steps_per_execution", "expected"),
    [
        (23, 1, MOST_EPOCHS),
        (1, 1, MOST_EPOCHS),
        (30, 10, MOST_EPOCHS),  # whole executions, in each epoch of the data
        (23, 10, 2),  # the third would have 3 steps
        (15, 10, MOST_EPOCHS),  # 10, 5, and 10 that are warm
        (3, 10, MOST_EPOCHS),  # 3, and 3
    ],
)
def test_no_partial_execution_is_compiled_if_two_whole_ones_come_before(
    num_batches, steps_per_execution, expected
):
    assert most_epochs(num_batches, steps_per_execution) == expected
