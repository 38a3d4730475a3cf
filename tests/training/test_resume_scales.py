"""A fit with a loss scale for each of its optimizers, that is cut and resumed, goes on alike."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import strategy_of
from cut_fit import Cut, CutError
from keras import layers

from tfaccel import UserError
from tfaccel.config import CheckpointConfig, StepConfig
from tfaccel.keras_internals.model_view import every_optimizer, state_of
from tfaccel.keras_internals.variables import components
from tfaccel.runtime.devices import Device

ROWS, BATCH, EPOCHS = 20, 4, 2  # 5 steps in an epoch
BAD = 7  # of the rows: the one that overflows float16 in network a


class Pair(keras.Model):
    """Networks a and b; the user has wrapped the optimizer of a."""

    def __init__(self, *, builds=False, rate=2.0**-6):
        super().__init__()
        self.builds, self.rate = builds, rate
        self.nets = {name: keras.Sequential([keras.Input((4,)), layers.Dense(1)]) for name in "ab"}
        self.built = True

    def compile(self, **kwargs):
        super().compile(**kwargs)
        a = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.Adam(0.01), initial_scale=2.0**6, dynamic_growth_steps=4
        )
        self.optimizers = {"a": a, "b": keras.optimizers.SGD(self.rate, momentum=0.9)}
        for name, each in self.optimizers.items() if self.builds else ():
            each.build(self.nets[name].trainable_variables)

    def train_step(self, data):
        x, y = data
        logs = {}
        for name, net in self.nets.items():
            with tf.GradientTape() as tape:
                answers = tf.cast(net(x[name], training=True), tf.float32)
                loss = tf.reduce_mean(tf.square(answers - y))
            gradients = tape.gradient(loss, net.trainable_variables)
            optimizer = self.optimizers[name]
            optimizer.apply_gradients(zip(gradients, net.trainable_variables, strict=True))
            logs[name] = tf.minimum(loss, 9.0)
        return logs


def fit(setup, num_replicas, folder, *, cut=None, eagerly=False, **model):
    """Trains from the newest checkpoint on; returns the model and the logs of all epochs."""
    run = setup(precision="mixed_float16", deterministic=True, xla=False)
    if num_replicas > 1:
        run.strategy = strategy_of(num_replicas)
        devices = tuple(Device(f"/cpu:{index}", None) for index in range(num_replicas))
        run.runtime = dataclasses.replace(run.runtime, devices=devices)
    keras.utils.set_random_seed(7)
    with run.scope():
        model = Pair(**model)
    step = StepConfig(loss_scale_initial=2.0**4, loss_scale_growth_steps=3)
    run.compile(model, optimizer=None, step=step, run_eagerly=eagerly)
    rng = np.random.default_rng(0)
    x = {name: rng.uniform(1, 2, (ROWS, 4)).astype("float32") for name in "ab"}
    x["a"][BAD] = 1e6
    y = rng.uniform(-1, 1, (ROWS, 1)).astype("float32")
    rows = [({name: x[name][row] for name in "ab"}, y[row]) for row in range(ROWS)]
    loader = run.examples(rows, global_batch_size=BATCH, shuffle=True)
    saves = run.checkpoints(folder, CheckpointConfig(every_steps=1))
    callbacks = [saves, Cut(cut or 10**6)]
    ended = model.fit(loader, epochs=EPOCHS, callbacks=callbacks, verbose=0)
    return model, ended.history


@pytest.mark.parametrize(
    ("num_replicas", "cuts"),
    [
        (1, [7]),
        *(pytest.param(each, [1, 5, 8], marks=pytest.mark.slow) for each in (1, 2)),
    ],
)
def test_each_loss_scale_goes_on(setup, tmp_path, num_replicas, cuts):
    wanted, history = fit(setup, num_replicas, tmp_path / "whole")
    a, b = (wanted.optimizers[name] for name in "ab")
    assert every_optimizer(wanted) == [a, b]
    # a has skipped a step of each epoch, and both have been doubled.
    assert history["skipped_steps/optimizers.a"] == [1, 1]
    assert (int(a.iterations), int(b.iterations)) == (8, 10)
    assert float(b.dynamic_scale) == 2.0 ** (4 + 10 // 3)
    assert int(b.step_counter) == 10 % 3
    assert float(a.dynamic_scale) != float(b.dynamic_scale)
    for cut in cuts:
        folder = tmp_path / f"cut{cut}"
        with pytest.raises(CutError):
            fit(setup, num_replicas, folder, cut=cut)
        assert_goes_on(fit(setup, num_replicas, folder), (wanted, history))


def assert_goes_on(resumed, whole):
    """The logs and the variables of every replica are those of the fit that was not cut."""
    assert resumed[1] == whole[1]
    for one, other in zip(state_of(resumed[0]), state_of(whole[0]), strict=True):
        for own, expected in zip(components(one), components(other), strict=True):
            np.testing.assert_array_equal(own.numpy(), expected.numpy(), err_msg=one.path)


@pytest.mark.parametrize("num_replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_python_resumes_if_the_optimizers_are_built(setup, tmp_path, num_replicas):
    settings = {"builds": True, "eagerly": True}
    whole = fit(setup, num_replicas, tmp_path / "whole", **settings)
    with pytest.raises(CutError):
        fit(setup, num_replicas, tmp_path / "cut", cut=4, **settings)
    with pytest.raises(
        UserError, match=r"with run_eagerly, .* before the first step: optimizers\.a, "
    ):
        fit(setup, num_replicas, tmp_path / "cut", eagerly=True)
    assert_goes_on(fit(setup, num_replicas, tmp_path / "cut", **settings), whole)


def test_another_rate_of_any_optimizer_is_another_run(setup, tmp_path):
    with pytest.raises(CutError):
        fit(setup, 1, tmp_path, cut=2)
    with pytest.raises(UserError, match=r"optimizers\.b\.\S*learning_rate 0\.015625 -> 0\.5"):
        fit(setup, 1, tmp_path, rate=0.5)
