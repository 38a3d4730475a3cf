"""The loss scale and the skipped steps in the logs, and the end where it falls too low."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled
from keras import layers

from tfaccel.config import StepConfig
from tfaccel.training.callbacks.loss_scale import LossScale, LossScaleFloorError

OVERFLOW = 65504  # times any scale above 1, no float16


@pytest.fixture(autouse=True)
def float16():
    """Models are made in mixed_float16."""
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


def make():
    dense = layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    return keras.Sequential([keras.Input((1,)), dense])


def sum_of_outputs(_, outputs):
    return tf.cast(outputs[:, 0], tf.float32)


def compile_on(num_replicas, *, config=None, steps_per_execution=1, xla=False):
    return compiled(
        make,
        num_replicas,
        optimizer=keras.optimizers.SGD(0.0),
        loss=sum_of_outputs,
        config=config,
        xla=xla,
        steps_per_execution=steps_per_execution,
    )


def rows_with_overflow(*, num_steps, at):
    """Two rows for each step; the second of the steps `at` overflows."""
    x = np.ones((2 * num_steps, 1), "float32")
    x[[2 * step + 1 for step in at]] = OVERFLOW
    return x


class Seen(keras.callbacks.Callback):
    """Keeps what the logs of every execution and epoch say."""

    def __init__(self):
        super().__init__()
        self.executions, self.epochs = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.executions.append((float(logs["loss_scale"]), int(logs["skipped_steps"])))

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append((float(logs["loss_scale"]), int(logs["skipped_steps"])))


def fit(model, x, **settings):
    seen = Seen()
    settings = {"epochs": 2, "batch_size": 2, "shuffle": False, "verbose": 0, **settings}
    return seen, model.fit(x, x, callbacks=[seen], **settings).history


@pytest.mark.parametrize(
    ("num_replicas", "xla"),
    [(1, True), (2, False), pytest.param(2, True, marks=pytest.mark.slow)],
)
def test_logs_and_history_say_scale_and_skipped_steps(num_replicas, xla):
    model = compile_on(num_replicas, xla=xla)
    seen, history = fit(model, rows_with_overflow(num_steps=3, at=[1]))
    first = [(2.0**15, 0), (2.0**14, 1), (2.0**14, 1)]
    # Each epoch counts its own.
    assert seen.executions == [*first, (2.0**14, 0), (2.0**13, 1), (2.0**13, 1)]
    assert seen.epochs == [(2.0**14, 1), (2.0**13, 1)]
    assert history["loss_scale"] == [2.0**14, 2.0**13]
    assert history["skipped_steps"] == [1, 1]


@pytest.mark.parametrize("num_replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_all_steps_of_an_execution_count(num_replicas):
    model = compile_on(num_replicas, steps_per_execution=3)
    # Executions of steps 0 to 2 and 3 to 4; the last step of neither overflows.
    seen, history = fit(model, rows_with_overflow(num_steps=5, at=[0, 1, 3]), epochs=1)
    assert seen.executions == [(2.0**13, 2), (2.0**12, 3)]
    assert history["skipped_steps"] == [3]


def test_testing_says_nothing_of_it():
    model = compile_on(1)
    x = rows_with_overflow(num_steps=1, at=[])
    _, history = fit(model, x, validation_data=(x, x), epochs=1)
    assert set(history) == {"loss", "val_loss", "loss_scale", "skipped_steps"}
    assert model.evaluate(x, x, verbose=0, return_dict=True).keys() == {"loss"}


@pytest.mark.parametrize("num_replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_below_the_floor_training_ends(num_replicas):
    config = StepConfig(loss_scale_initial=64.0, loss_scale_floor=10.0)
    model = compile_on(num_replicas, config=config)
    with pytest.raises(LossScaleFloorError) as error:
        fit(model, rows_with_overflow(num_steps=6, at=range(6)))
    assert str(error.value) == (
        "the loss scale fell to 8, below its floor of 10, after 3 skipped steps in this epoch: "
        "gradients stay infinite or NaN; look for NaN in the data, lower the learning rate, or let "
        "the layers in which float16 overflows compute in float32 (tfaccel.with_float32_layers, or "
        "--config.model.float32_layers)"
    )


def test_at_the_floor_training_goes_on():
    callback = LossScale(floor=8.0)
    callback.on_epoch_begin(0)
    callback.on_train_batch_end(0, {"loss_scale": 8.0, "skipped_steps": 1})
    with pytest.raises(LossScaleFloorError, match=r"fell to 4, .* after 2 skipped steps"):
        callback.on_train_batch_end(1, {"loss_scale": 4.0, "skipped_steps": 1})


def test_without_a_loss_scale_there_is_nothing_to_say():
    callback, logs = LossScale(floor=8.0), {"loss": 1.0}
    callback.on_epoch_begin(0)
    callback.on_train_batch_end(0, logs)
    callback.on_epoch_end(0, logs)
    assert logs == {"loss": 1.0}
