"""A part ends with a barrier of XLA, also in the program that contains the part."""

import numpy as np
import pytest
import tensorflow as tf

from tfaccel.data.loaders.apart import apart


@pytest.mark.parametrize("parts", ["apart", "joined"])
def test_a_barrier_ends_a_part_within_a_larger_program(parts):
    decorator = apart if parts == "apart" else tf.function

    @decorator
    def first(x, factor: float):
        return tf.sin(x * factor)

    @decorator
    def second(x):
        return tf.reduce_sum(tf.cos(x), axis=1)

    whole = tf.function(lambda x: second(first(x, 2.0)), jit_compile=True, autograph=False)
    x = tf.constant(np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32))
    np.testing.assert_allclose(whole(x), np.cos(np.sin(2 * x)).sum(1), rtol=1e-5)
    program = whole.experimental_get_compiler_ir(x)(stage="hlo")
    # XLA joins nothing across a barrier on a GPU. (On a CPU it removes them first.)
    assert program.count("opt-barrier(") == (2 if parts == "apart" else 0)


def test_a_part_by_itself_is_one_program():
    @apart
    def part(x, shift: int = 1):
        """Adds."""
        return x + shift

    assert int(part(tf.constant(2), shift=3)) == 5
    assert part.__doc__ == "Adds."
