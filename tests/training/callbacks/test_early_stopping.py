"""Early stopping where a metric is no number."""

import keras
import numpy as np
import pytest
from conftest import compiled

from tfaccel.training.callbacks.early_stopping import never_best

NAN, INF = float("nan"), float("inf")


def stopped(values, *, mode="min", patience=2, **settings):
    """The epoch after which it stops, the weight at the end, and what it took for the best.

    After epoch number N the model's weight is N.
    """
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    settings |= {"patience": patience, "mode": mode}
    stopping = keras.callbacks.EarlyStopping("loss", restore_best_weights=True, **settings)
    stopping.set_model(model)
    model.stop_training = False
    stopping.on_train_begin()
    for epoch, value in enumerate(values):
        model.set_weights([np.full((1, 1), epoch, np.float32)])
        with never_best([stopping]):
            stopping.on_epoch_end(epoch, {"loss": value})
        if model.stop_training:
            break
    stopping.on_train_end()
    return epoch, int(model.get_weights()[0][0, 0]), stopping.best


@pytest.mark.parametrize(
    ("values", "mode", "expected"),
    [
        ([NAN, 3.0, 2.0, 1.0], "min", (3, 3, 1.0)),  # Keras alone restores epoch 0
        ([NAN, 3.0, NAN, 4.0, 1.0], "min", (3, 1, 3.0)),
        ([-INF, 3.0, 2.0], "min", (2, 2, 2.0)),
        ([INF, 0.5, 0.6], "max", (2, 2, 0.6)),
        ([3.0, NAN, NAN], "min", (2, 0, 3.0)),
        ([NAN, NAN, NAN, NAN], "min", (1, 0, None)),  # Keras restores the first epoch's weights
    ],
)
def test_what_is_not_finite_is_never_the_best(values, mode, expected):
    assert stopped(values, mode=mode) == expected


def test_an_epoch_before_the_first_that_counts_does_not_count_as_one_without_improvement():
    # Of Keras's own: epochs 0 and 1 are left out, 2 is the first and 4 the last of two without.
    assert stopped([NAN, NAN, 3.0, 4.0, 5.0, 1.0], start_from_epoch=2) == (4, 2, 3.0)
    assert stopped([9.0, 9.0, 3.0, 4.0, 5.0, 1.0], start_from_epoch=2) == (4, 2, 3.0)


class Given(keras.callbacks.Callback):
    """Gives each epoch its score, and sets the model's weight to the epoch's number."""

    def __init__(self, *scores):
        super().__init__()
        self.scores = scores

    def on_epoch_end(self, epoch, logs=None):
        logs["score"] = self.scores[epoch]
        self.model.layers[0].kernel.assign([[float(epoch)]])


@pytest.fixture(scope="module")
def model():
    def make():
        return keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])

    return compiled(make, 1, optimizer=keras.optimizers.SGD(1e-3), loss="mse", xla=False)


def fit(model, callback, *scores):
    x = np.ones((2, 1), "float32")
    history = model.fit(x, x, epochs=len(scores), verbose=0, callbacks=[Given(*scores), callback])
    assert "_is_improvement" not in vars(callback)
    return len(history.epoch), float(model.layers[0].kernel.numpy()[0, 0])


def test_keras_s_own_early_stopping_never_takes_nan_for_the_best(model, caplog):
    settings = {"patience": 2, "restore_best_weights": True, "mode": "min"}
    stopping = keras.callbacks.EarlyStopping("score", **settings)
    assert fit(model, stopping, NAN, 3.0, NAN, 2.0, 5.0) == (5, 3)
    assert caplog.text.count("EarlyStopping: score is nan, which never counts as the best") == 1
    stopping = keras.callbacks.EarlyStopping("score", start_from_epoch=1, **settings)
    assert fit(model, stopping, NAN, 3.0, NAN, NAN, 1.0) == (4, 1)


def test_keras_s_own_checkpoint_of_the_best_is_never_of_nan(model, tmp_path):
    path = tmp_path / "best.keras"
    fit(model, keras.callbacks.ModelCheckpoint(path, "score", mode="min", save_best_only=True), NAN)
    assert not path.exists()
    best = keras.callbacks.ModelCheckpoint(path, "score", mode="max", save_best_only=True)
    fit(model, best, INF, 1.0, 2.0, NAN, 1.5)
    assert best.best == 2
    assert float(keras.models.load_model(path).layers[0].kernel.numpy()[0, 0]) == 2


def test_keras_s_own_plateau_goes_on_after_nan(model):
    plateau = keras.callbacks.ReduceLROnPlateau("score", factor=0.1, patience=2, mode="min")
    model.optimizer.learning_rate = 1e-3
    fit(model, plateau, NAN, 3.0, 2.0, 1.0)
    assert float(model.optimizer.learning_rate) == pytest.approx(1e-3)
    assert plateau.best == 1
