"""Updates with states of fewer bytes, against a slow reference of each optimizer in float64.

The reference rounds its states as they are stored: by the same random bits, or by a search of the
whole code book.
"""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from test_blockwise import slowly

from tfaccel.keras_internals.optimizer_states import KNOWN, State, pack
from tfaccel.step.states.blockwise import BLOCK, code_book
from tfaccel.step.states.codecs import CODECS
from tfaccel.step.states.rounding import random_bits

NUMBERS = {"m": 0, "v": 1, "v_hat": 2}  # of the states of the first weight
SEED, SIZE, STEPS, RATE, EPSILON = 11, 600, 4, 0.01, 1e-7


class Reference:
    """An optimizer in float64, whose states are rounded by `store(name, values)`."""

    def __init__(self, weight, store):
        self.weight, self.store, self.states = weight.astype(np.float64), store, {}

    def keep(self, name, values):
        self.states[name] = self.store(name, values)

    def state(self, name):
        return self.states.get(name, np.zeros(SIZE))

    def moments(self, gradient, beta_1=0.9, beta_2=0.999):
        m = beta_1 * self.state("m") + (1 - beta_1) * gradient
        v = beta_2 * self.state("v") + (1 - beta_2) * gradient**2
        self.keep("m", m)
        self.keep("v", v)
        return m, v


def adam(own, gradient, t):
    m, v = own.moments(gradient)
    m, v = m / (1 - 0.9**t), v / (1 - 0.999**t)
    # Keras adds epsilon before the correction of v, so here it is divided by the same root.
    own.weight -= RATE * m / (np.sqrt(v) + EPSILON / np.sqrt(1 - 0.999**t))


def adam_w(own, gradient, t):
    own.weight -= 0.1 * RATE * own.weight
    adam(own, gradient, t)


def amsgrad(own, gradient, t):
    m, v = own.moments(gradient)
    v = np.maximum(own.state("v_hat"), v)
    own.keep("v_hat", v)
    own.weight -= RATE * np.sqrt(1 - 0.999**t) / (1 - 0.9**t) * m / (np.sqrt(v) + EPSILON)


def nadam(own, gradient, t):
    u = lambda step: 0.9 * (1 - 0.5 * 0.96**step)  # noqa: E731
    product = np.prod([u(step) for step in range(1, t + 1)])
    m, v = own.moments(gradient)
    m = u(t + 1) * m / (1 - product * u(t + 1)) + (1 - u(t)) * gradient / (1 - product)
    own.weight -= RATE * m / (np.sqrt(v / (1 - 0.999**t)) + EPSILON)


def lamb(own, gradient, t):
    m, v = own.moments(gradient)
    update = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + EPSILON)
    norms = np.linalg.norm(own.weight) / np.linalg.norm(update)
    own.weight -= RATE * norms * update


def rms_prop(own, gradient, t):
    v = 0.9 * own.state("v") + 0.1 * gradient**2
    m = 0.8 * own.state("m") + RATE * gradient / np.sqrt(v + EPSILON)
    own.keep("v", v)
    own.keep("m", m)
    own.weight -= m


def lion(own, gradient, t):
    m = own.state("m")
    own.weight -= RATE * np.sign(0.9 * m + 0.1 * gradient)
    own.keep("m", 0.99 * m + 0.01 * gradient)


def sgd(own, gradient, t):
    m = 0.9 * own.state("m") - RATE * gradient
    own.weight += 0.9 * m - RATE * gradient  # nesterov
    own.keep("m", m)


OPTIMIZERS = {
    "Adam": (adam, lambda: keras.optimizers.Adam(RATE), "mv"),
    "AdamW": (adam_w, lambda: keras.optimizers.AdamW(RATE, weight_decay=0.1), "mv"),
    "amsgrad": (
        amsgrad,
        lambda: keras.optimizers.Adam(RATE, amsgrad=True),
        NUMBERS,
    ),
    "Nadam": (nadam, lambda: keras.optimizers.Nadam(RATE), "mv"),
    "Lamb": (lamb, lambda: keras.optimizers.Lamb(RATE), "mv"),
    "RMSprop": (rms_prop, lambda: keras.optimizers.RMSprop(RATE, momentum=0.8), "mv"),
    "Lion": (lion, lambda: keras.optimizers.Lion(RATE), "m"),
    "SGD": (sgd, lambda: keras.optimizers.SGD(RATE, momentum=0.9, nesterov=True), "m"),
}


def test_each_known_optimizer_has_a_reference():
    assert set(KNOWN) == OPTIMIZERS.keys() - {"amsgrad"}


def rounded(values, *, key):
    """Values in bfloat16, by the bits of this key."""
    bits = random_bits(SIZE, key=key).numpy() >> 16
    upper = (values.astype(np.float32).view(np.uint32) + bits) & np.uint32(0xFFFF0000)
    return upper.view(np.float32).astype(np.float64)


def in_blocks(values, *, is_signed):
    """Values in 8 bits."""
    codes, largest = slowly(values, is_signed=is_signed)
    return code_book(is_signed=is_signed)[codes] * np.repeat(largest, BLOCK)[:SIZE]


def gradients():
    """Of a loss that falls: their sizes differ by weight and become smaller with each step."""
    draw = np.random.default_rng(1)
    sizes = 10 ** draw.uniform(-3, 0, SIZE)
    return [(draw.normal(size=SIZE) * sizes * 0.7**t).astype("float32") for t in range(STEPS)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "8bit"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_is_that_of_the_reference(name, dtype):
    reference_step, make, kinds = OPTIMIZERS[name]
    optimizer, step = make(), 0
    start = np.random.default_rng(0).normal(size=SIZE).astype("float32")
    weight = keras.Variable(start.reshape(30, 20), name="kernel")
    pack(
        optimizer,
        CODECS.get(dtype),
        fits=lambda _: True,
        bits=lambda num, key: random_bits(num, key=(SEED, *key)),
    )

    def store(kept, values):
        if dtype == "bfloat16":
            return rounded(values, key=(SEED, step, NUMBERS[kept]))
        return in_blocks(values, is_signed=kept == "m") if dtype == "8bit" else values

    reference = Reference(start, store)
    for step, gradient in enumerate(gradients()):
        optimizer.apply([tf.constant(gradient.reshape(30, 20))], [weight])
        reference_step(reference, gradient.astype(np.float64), step + 1)
    off = np.abs(weight.numpy().ravel() - reference.weight)
    moved = np.abs(reference.weight - start).mean()
    # A value between two numbers may be rounded to the other one, as float32 and float64 differ.
    # So of 600 weights a few may differ by more than float32's errors.
    assert np.median(off) < 1e-5 * moved
    assert np.mean(off > 1e-3 * moved) < 0.01
    assert off.max() < 3 * moved
    states = [
        each for each in optimizer.variables if "momentum" in each.path or "velocity" in each.path
    ]
    assert {str(each.dtype) for each in states} <= {
        "float32": {"float32"}, "bfloat16": {"bfloat16"}, "8bit": {"uint8", "float32"}
    }[dtype]  # fmt: skip
    assert len(states) == len(kinds) * (2 if dtype == "8bit" else 1)


def test_a_state_that_is_not_assigned_is_not_rounded_again():
    """Only an assignment stores: a state that is read alone keeps its bits."""
    optimizer, weight = keras.optimizers.SGD(RATE, momentum=0.9), keras.Variable(np.ones((30, 20)))
    pack(optimizer, CODECS["bfloat16"], fits=lambda _: True, bits=lambda num, key: 1 / 0)
    optimizer.build([weight])
    state = optimizer.momentums[0]
    assert isinstance(state, State)
    with state.open():
        assert tf.reduce_sum(tf.convert_to_tensor(state)) == 0
    with pytest.raises(ZeroDivisionError), state.open():
        state.assign(tf.ones((30, 20)))


def packed_optimizer():
    """One that is packed, and whose `fits` refers to it, as that of a model does."""
    optimizer = keras.optimizers.Adam()
    fits = lambda _: optimizer is not None  # noqa: E731
    pack(optimizer, CODECS["8bit"], fits=fits, bits=lambda num, key: None)
    optimizer.build([keras.Variable(np.ones((30, 20)))])
    return optimizer


def test_an_optimizer_that_is_no_longer_used_is_freed():
    found = weakref.ref(packed_optimizer())
    gc.collect()
    assert found() is None
