"""Programs as people write them (tests/programs): N replicas train as stock Keras on one device.

The default suite runs a sample. `-m slow` runs every program on 1, 2 and 3 replicas, with XLA and
without.
"""

import pytest
from conftest import strategy_of
from programs.harness import PROGRAMS, by_stock_keras, difference, here

SAMPLE = ("LoRA", "mean teacher", "hand-masked loss")


def check(program, num_replicas: int, *, xla: bool) -> None:
    """Raises AssertionError unless logs and variables are those of stock Keras."""
    wanted = by_stock_keras(program)
    figure, where = difference(here(program, strategy_of(num_replicas), xla=xla), wanted)
    assert figure <= program.rtol, where


def cases():
    """Yields (name, number of replicas, XLA), a sample of which is run by default."""
    for name in PROGRAMS:
        for num_replicas in (1, 2, 3):
            for xla in (False, True):
                is_sample = name in SAMPLE and (num_replicas, xla) == (2, False)
                marks = [] if is_sample else [pytest.mark.slow]
                yield pytest.param(name, num_replicas, xla, marks=marks)


@pytest.mark.parametrize(("name", "num_replicas", "xla"), cases())
def test_a_program_trains_on_replicas_as_with_stock_keras(name, num_replicas, xla):
    check(PROGRAMS[name], num_replicas, xla=xla)
