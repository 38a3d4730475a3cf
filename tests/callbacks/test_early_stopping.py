"""Early stopping where a metric is no number."""

import keras
import numpy as np
import pytest

from tfaccel.callbacks.early_stopping import EarlyStopping

NAN, INF = float("nan"), float("inf")


def stopped(values, *, mode="min", patience=2):
    """The epoch after which it stops, the weight at the end, and what it took for the best.

    After epoch number N the model's weight is N.
    """
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    stopping = EarlyStopping("loss", patience=patience, mode=mode, restore_best_weights=True)
    stopping.set_model(model)
    model.stop_training = False
    stopping.on_train_begin()
    for epoch, value in enumerate(values):
        model.set_weights([np.full((1, 1), epoch, np.float32)])
        stopping.on_epoch_end(epoch, {"loss": value})
        if model.stop_training:
            break
    stopping.on_train_end()
    return epoch, int(model.get_weights()[0][0, 0]), stopping.best


@pytest.mark.parametrize(
    ("values", "mode", "expected"),
    [
        ([NAN, 3.0, 2.0, 1.0], "min", (3, 3, 1.0)),  # Keras stops after two, and restores epoch 0
        ([NAN, 3.0, NAN, 4.0, 1.0], "min", (3, 1, 3.0)),
        ([-INF, 3.0, 2.0], "min", (2, 2, 2.0)),
        ([INF, 0.5, 0.6], "max", (2, 2, 0.6)),
        ([3.0, NAN, NAN], "min", (2, 0, 3.0)),
        ([NAN, NAN, NAN, NAN], "min", (1, 1, None)),  # nothing is restored
    ],
)
def test_what_is_not_finite_is_never_the_best(values, mode, expected):
    assert stopped(values, mode=mode) == expected


def test_a_missing_metric_is_keras_s_own_affair():
    stopping = EarlyStopping("val_loss", mode="min")
    stopping.set_model(keras.Sequential())
    stopping.on_train_begin()
    with pytest.warns(UserWarning, match="not available"):
        stopping.on_epoch_end(0, {"loss": 1.0})
