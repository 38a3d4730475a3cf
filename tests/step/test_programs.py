"""Programs as people write them (tests/programs): N replicas train as stock Keras on one device.

The default suite runs a sample. `-m slow` runs every program on 1, 2 and 3 replicas, with XLA and
without.
"""

import pytest
import tensorflow as tf
from conftest import strategy_of
from programs.harness import PROGRAMS, by_stock_keras, difference, here

from tfaccel.common.errors import UserError
from tfaccel.training.callbacks.finite import NonFiniteError

# The programs that do not train as they should yet, and how they fail: on 2 and 3 replicas, with
# XLA and without, unless ON_ONE says otherwise. A program that is mended fails its test until its
# line is removed here.
FAILS: dict[str, str] = {
    "text classification, LSTM": "stock Keras's Adam squares the gradients of a repeated token one "
    "by one; several replicas add them up before (findings/keras_adam_repeated_ids.sh)",
}
RAISES = (
    AssertionError,
    AttributeError,
    NonFiniteError,
    UserError,
    ValueError,
    TypeError,
    tf.errors.InvalidArgumentError,
)
ON_ONE: set[str] = set()  # those that fail on one replica with XLA, and only there
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
                is_one_with_xla = num_replicas == 1 and xla
                is_sample = name in SAMPLE and (num_replicas, xla) == (2, False)
                marks = [] if is_sample else [pytest.mark.slow]
                if name in FAILS and (num_replicas > 1 if name not in ON_ONE else is_one_with_xla):
                    marks.append(pytest.mark.xfail(strict=True, reason=FAILS[name], raises=RAISES))
                yield pytest.param(name, num_replicas, xla, marks=marks)


@pytest.mark.parametrize(("name", "num_replicas", "xla"), cases())
def test_a_program_trains_on_replicas_as_with_stock_keras(name, num_replicas, xla):
    check(PROGRAMS[name], num_replicas, xla=xla)
