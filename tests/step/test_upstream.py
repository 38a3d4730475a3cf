"""What stock Keras 3.15 gets wrong under a strategy, and the same here, on the CPU.

Every test runs twice: here it passes, and with stock Keras (`-m slow`) it must fail (`strict`):
should it pass one day, Keras has mended it, and what works around it can go.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled, strategy_of
from keras import layers

from tfaccel.config import StepConfig

FAILS = (pytest.mark.xfail(strict=True), pytest.mark.slow)
STOCK = pytest.param(("stock", 2), marks=FAILS, id="stock Keras")
OURS = pytest.param(("tfaccel", 2), id="2 replicas")
THREE = pytest.param(("tfaccel", 3), id="3 replicas", marks=pytest.mark.slow)
# On three replicas too, but for what does not depend on their number.
both = pytest.mark.parametrize("trainer", [STOCK, OURS])
both_or_three = pytest.mark.parametrize("trainer", [STOCK, OURS, THREE])


def compile_for(trainer, make, optimizer, *, xla=False, **compile_args):
    """A model compiled by stock Keras or by tfaccel, on the trainer's number of replicas."""
    who, num_replicas = trainer
    if who == "tfaccel":
        return compiled(make, num_replicas, optimizer=optimizer, xla=xla, **compile_args)
    with strategy_of(num_replicas).scope():
        model = make()
        model.compile(optimizer=optimizer(), jit_compile=xla, **compile_args)
    return model


def one_weight(dtype=None):
    """A model of one weight, 0 at first, whose gradient is the mean of its inputs."""
    layer = layers.Dense(1, use_bias=False, kernel_initializer="zeros", dtype=dtype)
    return keras.Sequential([keras.Input((1,)), layer])


def sum_of_outputs(_, outputs):
    return tf.cast(outputs[:, 0], tf.float32)


def fit_once(model, x, **settings):
    x = np.asarray(x, np.float32).reshape(-1, 1)
    model.fit(x, np.zeros(len(x)), shuffle=False, verbose=0, **settings)
    return model


def step_once(trainer, model, x):
    """Trains on all rows as one batch: by hand where it can be, for a third of a fit.

    By hand, stock Keras gives each replica the whole batch: what is wrong there is another thing.
    """
    if trainer[0] != "tfaccel":
        return fit_once(model, x, batch_size=len(x))
    x = np.asarray(x, np.float32).reshape(-1, 1)
    model.train_on_batch(x, np.zeros(len(x)))
    return model


def weight(model):
    return float(model.trainable_weights[0].numpy().ravel()[0])


def sgd(**settings):
    return lambda: keras.optimizers.SGD(1.0, **settings)


@both_or_three
def test_f1_overflow_on_any_one_replica_skips_the_step_on_all(trainer):
    num_replicas = trainer[1]
    optimizer = lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0))  # noqa: E731
    model = compile_for(
        trainer, lambda: one_weight("mixed_float16"), optimizer, loss=sum_of_outputs
    )
    # Stock Keras looks at replica 0 alone: there it would pass.
    replicas = range(1, num_replicas) if trainer[0] != "tfaccel" else range(num_replicas)
    for number, overflowing in enumerate(replicas):
        x = np.ones(num_replicas)
        x[overflowing] = 65504  # times the scale, of 32768 at first, no float16
        step_once(trainer, model, x)
        for component in model.trainable_weights[0]._value.values:
            assert component.numpy() == 0
        scales = model.optimizer.dynamic_scale._value.values
        assert [each.numpy() for each in scales] == [2.0 ** (14 - number)] * num_replicas


@pytest.mark.parametrize(
    "clip",
    [
        "global_clipnorm",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("clipnorm", "clipvalue")),
    ],
)
@both_or_three
def test_f3_the_sum_is_clipped_not_its_parts(trainer, clip):
    model = compile_for(trainer, one_weight, sgd(**{clip: 1.0}), loss=sum_of_outputs)
    # The mean of the gradients is above 1, and is clipped to 1; one of its parts is negative.
    x = {2: [30, -10], 3: [30, -10, 10]}[trainer[1]]
    assert weight(step_once(trainer, model, x)) == pytest.approx(-1, abs=1e-6)


@both_or_three
def test_f4_moving_statistics_are_the_same_on_every_replica(trainer):
    def make():
        return keras.Sequential([keras.Input((1,)), layers.BatchNormalization(momentum=0.5)])

    model = compile_for(trainer, make, sgd(), loss="mse")
    num_replicas = trainer[1]
    rows = np.arange(2 * num_replicas)
    step_once(trainer, model, rows)
    moving_mean, moving_variance = model.layers[0].non_trainable_weights
    for variable, wanted in ((moving_mean, rows.mean() / 2), (moving_variance, 0.5 + 0.25 / 2)):
        # Each replica has two rows, 1 apart: their variance is 1/4.
        for component in variable._value.values:
            np.testing.assert_allclose(component.numpy(), wanted, rtol=1e-6)


@both_or_three
def test_f6_gradients_accumulate_over_steps(trainer):
    accumulating = sgd(gradient_accumulation_steps=2)
    model = compile_for(trainer, one_weight, accumulating, loss=sum_of_outputs)
    num_replicas = trainer[1]
    first, second = np.full(num_replicas, 2.0), np.full(num_replicas, 4.0)
    step_once(trainer, model, first)
    assert weight(model) == 0
    step_once(trainer, model, second)
    assert weight(model) == pytest.approx(-3)


# The float32 of F11.
@pytest.mark.slow
@both_or_three
def test_f7_xla_compiles_the_step(trainer):
    model = compile_for(trainer, one_weight, sgd(), loss=sum_of_outputs, xla=True)
    x = np.ones(trainer[1])
    assert weight(step_once(trainer, model, x)) == pytest.approx(-1)


@pytest.mark.parametrize("xla", [pytest.param(False, marks=pytest.mark.slow), True])
@both_or_three
def test_f8_every_row_counts_the_same(trainer, xla):
    if trainer[0] == "stock" and xla:
        pytest.xfail("stock Keras has no XLA under a strategy: F7")
    model = compile_for(trainer, one_weight, sgd(), loss=sum_of_outputs, xla=xla)
    # Batches [2, 4] and [6]: gradients 3 and 6. With three replicas the last has no row in either.
    history = []
    log = keras.callbacks.LambdaCallback(on_epoch_end=lambda _, logs: history.append(logs["loss"]))
    fit_once(model, [2, 4, 6], batch_size=2, callbacks=[log])
    assert weight(model) == pytest.approx(-9, abs=1e-5)
    # The loss of the first two rows is 0, and of the third -3 * 6.
    assert history == pytest.approx([-18 / 3], abs=1e-5)


@both
def test_f8_metrics_and_additional_losses_count_every_row_once(trainer):
    def make():
        layer = layers.Dense(1, use_bias=False, kernel_initializer="ones", kernel_regularizer="l2")
        return keras.Sequential([keras.Input((1,)), layer])

    model = compile_for(trainer, make, sgd(), loss="mse", metrics=["mae"])
    x = np.array([[1.0], [2.0], [6.0]])
    # The first replica has two rows, the other one.
    loss, mae = model.evaluate(x, np.zeros(3), batch_size=3, verbose=0)
    assert loss == pytest.approx(41 / 3 + 0.01, rel=1e-6)
    assert mae == pytest.approx(3, rel=1e-6)
    step_once(trainer, model, x)
    assert weight(model) == pytest.approx(1 - 2 * 41 / 3 - 0.02, rel=1e-6)


@both
def test_f9_no_batch_is_drawn_but_for_training(trainer):
    drawn = []

    def row(index):
        drawn.append(int(index))
        return np.float32(index)

    def load(index):
        x = tf.ensure_shape(tf.numpy_function(row, [index], tf.float32), ())
        return x[tf.newaxis], x

    data = tf.data.Dataset.range(4).map(load).batch(2)
    model = compile_for(trainer, one_weight, sgd(), loss="mse")
    model.fit(data, epochs=1, verbose=0)
    assert sorted(drawn) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "steps_per_execution", [3, *(pytest.param(each, marks=pytest.mark.slow) for each in (2, 5))]
)
@both
def test_f10_several_steps_in_an_execution(trainer, steps_per_execution):
    class Unbuilt(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(1, use_bias=False, kernel_initializer="zeros")

        def call(self, x):
            return self.dense(x)

    model = compile_for(
        trainer, Unbuilt, sgd(), loss=sum_of_outputs, steps_per_execution=steps_per_execution
    )
    fit_once(model, np.arange(8), batch_size=2)
    assert weight(model) == pytest.approx(-sum([0.5, 2.5, 4.5, 6.5]))


@both_or_three
def test_f11_float16_with_xla_under_a_strategy(trainer):
    scaled = lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0))  # noqa: E731
    make = lambda: one_weight("mixed_float16")  # noqa: E731
    model = compile_for(trainer, make, scaled, loss=sum_of_outputs, xla=True)
    x = np.ones(trainer[1])
    assert weight(step_once(trainer, model, x)) == pytest.approx(-1)


@pytest.mark.slow  # on two it does by default
def test_f11_float16_with_xla_on_one_replica():
    model = compiled(lambda: one_weight("mixed_float16"), 1, optimizer=sgd(), loss=sum_of_outputs)
    assert weight(step_once(("tfaccel", 1), model, [1])) == pytest.approx(-1)


@pytest.mark.parametrize(
    ("num_replicas", "batch_size", "num_rows"),
    [
        (2, 3, 4),  # 2 and 1; 1 and none
        # 9 rows are 3, 3 and 3; 1 is 1, none and none; 7 are 3, 2 and 2.
        pytest.param(3, 9, 10, marks=pytest.mark.slow),
        pytest.param(3, 9, 16, marks=pytest.mark.slow),
    ],
)
def test_synchronized_batch_norm_is_that_of_one_device(num_replicas, batch_size, num_rows):
    check_synchronized_batch_norm(num_replicas, batch_size, num_rows)


def check_synchronized_batch_norm(num_replicas, batch_size, num_rows, **settings):
    def make():
        keras.utils.set_random_seed(0)
        # Through this one the gradient of the statistics goes.
        dense = layers.Dense(4, activation="tanh", use_bias=False)
        norm = layers.BatchNormalization(momentum=0.5)
        return keras.Sequential([keras.Input((1,)), dense, norm, layers.Dense(1)])

    several = compiled(
        make,
        num_replicas,
        optimizer=lambda: keras.optimizers.SGD(0.1),
        loss="mse",
        config=StepConfig(sync_batchnorm=True, **settings),
        xla=False,
    )
    one = make()
    one.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    rows = np.arange(num_rows, dtype=np.float32)[:, np.newaxis] ** 2
    for model in (several, one):
        for start in [*range(0, num_rows, batch_size)] * 2:
            batch = rows[start : start + batch_size]
            model.train_on_batch(batch, np.cos(batch))
    trained = [each.get_weights() for each in (several, one)]
    for several, one in zip(*trained, strict=True):
        np.testing.assert_allclose(several, one, rtol=1e-4, atol=1e-5)


def test_synchronized_batch_norm_of_parts_of_a_batch_is_that_of_the_whole():
    check_synchronized_batch_norm(2, 6, 17, accumulation_steps=2)
