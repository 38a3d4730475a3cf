"""Loss scales of several optimizers: as the user asks, and in a step that runs as Python."""

import functools
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled
from keras import layers

from tfaccel.config import StepConfig

SLOW = pytest.mark.slow
ROWS, BATCHES, BAD = 8, 4, 1  # BAD: the index of the batch that overflows float16 in network a
SMALL = StepConfig(loss_scale_initial=2.0**8, loss_scale_growth_steps=2)
# Other sums round float16 otherwise, by up to 1e-3 of the weights, which start with 1.
RTOL = 2e-3
SCALED = keras.optimizers.LossScaleOptimizer


@pytest.fixture(autouse=True)
def policy(request):
    name = getattr(request, "param", "mixed_float16")
    keras.config.set_dtype_policy(name)
    yield name
    keras.config.set_dtype_policy("float32")


def sgd(rate=0.005):
    return keras.optimizers.SGD(rate, momentum=0.5)


class Pair(keras.Model):
    """Networks a and b, with an optimizer each. What b learns depends on a, as in a GAN."""

    def __init__(self, *, wrap_a=None, factor_b=1.0, by_step=False):
        super().__init__()
        self.nets = [keras.Sequential([keras.Input((4,)), self._dense()]) for _ in range(2)]
        self.wrap_a, self.factor_b, self.by_step = wrap_a, factor_b, by_step
        self.built = True

    def _dense(self):
        return layers.Dense(1, kernel_initializer="ones", use_bias=False)

    def compile(self, **kwargs):
        super().compile(**kwargs)
        self.a, self.b = sgd(), sgd(0.005 / self.factor_b)
        if self.wrap_a is not None:
            self.a = SCALED(self.a, **self.wrap_a)

    def train_step(self, data):
        x, y = data[:2]
        logs = {}
        for name, net in zip("ab", self.nets, strict=True):
            optimizer = getattr(self, name)
            with tf.GradientTape() as tape:
                answers = tf.cast(net(x[name], training=True), tf.float32)
                loss = tf.reduce_mean(tf.square(answers - y))
                if name == "b":
                    a = tf.clip_by_value(tf.cast(self.nets[0](x["b"]), tf.float32), -9, 9)
                    loss = self.factor_b * (loss + 0.1 * tf.reduce_mean(answers * a))
                scaled = optimizer.scale_loss(loss) if self.by_step else loss
            gradients = tape.gradient(scaled, net.trainable_variables)
            optimizer.apply_gradients(zip(gradients, net.trainable_variables, strict=True))
            logs[name] = loss
        return logs


def data(*, bad=None):
    rng = np.random.default_rng(0)
    x = {name: rng.uniform(1, 2, (BATCHES * ROWS, 4)).astype("float32") for name in "ab"}
    if bad is not None:
        x["a"][bad * ROWS] = 1e6  # one row, so one replica
    return x, rng.uniform(-1, 1, (BATCHES * ROWS, 1)).astype("float32")


def fit(model, *, bad=None):
    """The logs of each epoch, and the weights after it."""
    settings = {"batch_size": ROWS, "shuffle": False, "verbose": 0, "epochs": 2}
    history = model.fit(*data(bad=bad), **settings).history
    return history, [keras.ops.convert_to_numpy(each) for each in model.trainable_variables]


def pair(num_replicas, *, config=SMALL, eagerly=False, more=None, **model):
    make = functools.partial(Pair, **model)
    more = {} if more is None else more
    more = more | {"run_eagerly": eagerly, "xla": False}
    return compiled(make, num_replicas, optimizer=None, config=config, **more)


def stock(**model):
    model = Pair(**model)
    model.compile(optimizer=None, auto_scale_loss=False, jit_compile=False)
    return model


def assert_same(ours, theirs, *, but=()):
    assert set(theirs[0]) <= set(ours[0])
    for name in set(theirs[0]) - set(but):
        np.testing.assert_allclose(ours[0][name], theirs[0][name], rtol=RTOL, err_msg=name)
    for one, other in zip(ours[1], theirs[1], strict=True):
        np.testing.assert_allclose(one, other, rtol=RTOL, atol=RTOL)


class AsksItself(Pair):
    """Its own `compile` asks for it."""

    def compile(self, **kwargs):
        super().compile(**kwargs, auto_scale_loss=False)


class Drops(Pair):
    """Its own `compile` does not pass the argument on."""

    def compile(self, *, auto_scale_loss, optimizer=None):
        super().compile(optimizer=optimizer)


@pytest.mark.parametrize("make", [Pair, AsksItself, Drops])
def test_no_optimizer_has_a_loss_scale_that_the_user_does_not_want(make, caplog):
    more = {} if make is AsksItself else {"auto_scale_loss": False}
    with caplog.at_level(logging.INFO, "tfaccel"):
        model = compiled(make, 1, optimizer=sgd(), xla=False, **more)
    for each in (model.optimizer, model.a, model.b):
        assert type(each) is keras.optimizers.SGD
        assert each.loss_scale_factor is None
    assert "loss scale: none is added, because of auto_scale_loss=False" in caplog.text


def test_a_loss_scale_that_contradicts_the_users_argument_is_said(caplog):
    model = pair(1, config=StepConfig(loss_scale=128), more={"auto_scale_loss": False})
    assert model.a.loss_scale_factor is model.b.loss_scale_factor is None
    assert "loss_scale=128 is not used, because of auto_scale_loss=False" in caplog.text


OWN = {"initial_scale": 2.0**10, "dynamic_growth_steps": 3}


@pytest.mark.parametrize("num_replicas", [1, pytest.param(2, marks=SLOW)])
@pytest.mark.parametrize("auto", [True, False])
def test_a_loss_scale_of_the_users_stays(auto, num_replicas):
    model = pair(num_replicas, wrap_a=OWN, more={"auto_scale_loss": auto})
    history, _ = fit(model)
    assert history["loss_scale/a"] == [2.0**11, 2.0**12]  # steps 3 and 6 double it
    assert (model.a.initial_scale, model.a.dynamic_growth_steps) == (2.0**10, 3)
    if auto:
        assert history["loss_scale/b"] == [2.0**10, 2.0**12]  # every second step
    else:
        assert type(model.b) is keras.optimizers.SGD
        assert "loss_scale/b" not in history


@pytest.mark.parametrize("num_replicas", [1, pytest.param(2, marks=SLOW)])
@pytest.mark.parametrize("by_step", [pytest.param(True, marks=SLOW), False])
def test_gradients_without_a_loss_scale_are_not_scaled_by_another(num_replicas, by_step):
    # Times a's scale, the loss of b is above float16's range.
    own = {"initial_scale": 2.0**10}
    model = {"wrap_a": own, "factor_b": 100.0, "by_step": by_step}
    ours = fit(pair(num_replicas, **model, more={"auto_scale_loss": False}))
    assert ours[0]["skipped_steps/a"] == [0, 0]
    assert_same(ours, fit(stock(**model | {"by_step": True})))


# Steps that run as Python, and batches in parts.


@functools.cache
def in_a_graph(policy, num_replicas, parts, *, bad):
    """What the compiled step does, which other tests compare with stock Keras."""
    config = StepConfig(loss_scale_initial=2.0**8, accumulation_steps=parts)
    return fit(pair(num_replicas, config=config), bad=bad)


@pytest.mark.parametrize(
    ("num_replicas", "parts", "bad"),
    [
        (2, 1, BAD),
        *(
            pytest.param(*each, marks=SLOW)
            for each in [
                (2, 2, BAD),
                (1, 1, BAD),
                (1, 2, BAD),
                (3, 1, BAD),
                (3, 2, BAD),
                (2, 1, None),
            ]
        ),
    ],
)
def test_python_is_the_compiled_step(num_replicas, parts, bad):
    config = StepConfig(loss_scale_initial=2.0**8, accumulation_steps=parts)
    ours = fit(pair(num_replicas, config=config, eagerly=True), bad=bad)
    theirs = in_a_graph("mixed_float16", num_replicas, parts, bad=bad)
    one = in_a_graph("mixed_float16", 1, 1, bad=bad)
    assert ours[0]["skipped_steps/a"] == [0 if bad is None else 1] * 2
    assert ours[0]["skipped_steps/b"] == [0, 0]  # b is updated in the step that a skips
    for expected in (theirs, one, *([fit(stock())] if bad is None else [])):
        # The loss of a in the bad batch is infinite.
        assert_same(ours, expected, but=() if bad is None else ("a",))
    assert ours[0]["loss_scale/a"] == theirs[0]["loss_scale/a"]


@SLOW
@pytest.mark.parametrize("policy", ["mixed_bfloat16"], indirect=True)
@pytest.mark.parametrize(("num_replicas", "parts"), [(1, 1), (1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("eagerly", [False, True])
def test_bfloat16_has_no_loss_scale(policy, num_replicas, parts, eagerly):
    config = StepConfig(accumulation_steps=parts)
    model = pair(num_replicas, config=config, eagerly=eagerly)
    ours = fit(model)
    assert set(ours[0]) == {"a", "b"}
    assert type(model.a) is type(model.b) is keras.optimizers.SGD
    keras.config.set_dtype_policy("float32")
    theirs = fit(stock())
    # bfloat16 has 8 bits, and errors add up over 8 steps.
    for name, values in theirs[0].items():
        np.testing.assert_allclose(ours[0][name], values, rtol=0.05, err_msg=name)
    for one, other in zip(ours[1], theirs[1], strict=True):
        np.testing.assert_allclose(one, other, rtol=0.05, atol=0.05)
