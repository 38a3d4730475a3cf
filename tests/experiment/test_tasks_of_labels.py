"""Several classes an image, and numbers: loss, metrics and replicas, against plain NumPy."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled

from tfaccel import UserError
from tfaccel.config import AugmentConfig, ModelConfig, StepConfig, TrainConfig
from tfaccel.experiment import tasks
from tfaccel.experiment.metrics import metrics_of_numbers, metrics_of_several
from tfaccel.step import mixing
from tfaccel.training.checkpoint.rotation import largest_is_best

ROWS, REAL, COLUMNS = 24, 21, 3


def rows_of(kind):
    """Inputs and labels of three columns; and weights, of which the last three are 0."""
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, 6)).astype(np.float32)
    y = random.normal(size=(ROWS, COLUMNS)).astype(np.float32)
    y = y if kind == "regression" else (y > 0.3).astype(np.float32)
    return x, y, np.repeat([1.0, 0.0], [REAL, ROWS - REAL]).astype(np.float32)


def trained(kind, num_replicas, *, xla):
    """The model after two epochs, and the logs of the second."""
    keras.utils.set_random_seed(0)

    def make():
        image = keras.Input((6,))
        return keras.Model(image, keras.layers.Dense(COLUMNS)(image))

    numbers = kind == "regression"
    model = compiled(
        make,
        num_replicas,
        optimizer=keras.optimizers.SGD(0.1),
        xla=xla,
        config=StepConfig(zero_weight_is_padding=True),
        loss=keras.losses.MeanSquaredError()
        if numbers
        else keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=metrics_of_numbers() if numbers else metrics_of_several(COLUMNS),
    )
    x, y, weight = rows_of(kind)
    settings = {"batch_size": 12, "epochs": 2, "shuffle": False, "verbose": 0}
    fitted = model.fit(x, y, sample_weight=weight, validation_data=(x, y, weight), **settings)
    return model, {name: values[-1] for name, values in fitted.history.items()}


def average_precision(labels, scores):
    """The area under the steps of precision and recall."""
    found = labels[np.argsort(-scores)]
    precision = np.cumsum(found) / np.arange(1, len(found) + 1)
    return (precision * found).sum() / found.sum()


def area(labels, scores):
    """The share of pairs of a positive and a negative row in the right order."""
    return (scores[labels > 0][:, None] > scores[labels == 0]).mean()


def f1(labels, found):
    return 2 * (labels * found).sum() / (labels.sum() + found.sum())


@pytest.mark.parametrize(
    ("kind", "xla"),
    [
        ("multilabel", False),
        pytest.param("regression", False, marks=pytest.mark.slow),
        pytest.param("multilabel", True, marks=pytest.mark.slow),
        pytest.param("regression", True, marks=pytest.mark.slow),
    ],
)
def test_two_replicas_measure_what_one_does(kind, xla):
    one, two = (trained(kind, each, xla=xla)[1] for each in (1, 2))
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert two[name] == pytest.approx(value, abs=2e-5), name


@pytest.mark.parametrize("kind", ["multilabel", "regression"])
def test_the_metrics_are_those_of_numpy(kind):
    model, logs = trained(kind, 1, xla=False)
    x, y, _ = (each[:REAL] for each in rows_of(kind))
    outputs = model.predict(x, verbose=0)
    if kind == "regression":
        wanted = {
            "loss": np.square(outputs - y).mean(),
            "mean_absolute_error": np.abs(outputs - y).mean(),
            "r2_score": (
                1 - np.square(outputs - y).sum(0) / np.square(y - y.mean(0)).sum(0)
            ).mean(),
        }
    else:
        found = (outputs > 0).astype(int)
        pairs = list(zip(y.T, outputs.T, found.T, strict=True))
        wanted = {
            "loss": (np.log1p(np.exp(outputs)) - y * outputs).mean(),
            "binary_accuracy": (found == y).mean(),
            "f1_score": np.mean([f1(label, each) for label, _, each in pairs]),
            "auc": np.mean([area(label, scores) for label, scores, _ in pairs]),
            "mean_average_precision": np.mean([average_precision(*each[:2]) for each in pairs]),
        }
    assert logs.keys() == {*wanted, *(f"val_{name}" for name in wanted)}
    for name, value in wanted.items():
        # Keras has 200 thresholds, and it interpolates the curve of precision and recall.
        tolerance = {"auc": 0.01, "mean_average_precision": 0.05}.get(name, 1e-4)
        assert logs[f"val_{name}"] == pytest.approx(value, abs=tolerance), name


def task(kind, *, outputs=None, step=None, **train):
    source = types.SimpleNamespace(task=kind, labels=np.zeros((5, COLUMNS), np.float32))
    data = types.SimpleNamespace(source=source)
    settings = ModelConfig(num_outputs=outputs), StepConfig(**step or {}), TrainConfig(**train)
    return tasks.task_of(data, *settings)


def test_the_loss_follows_the_task_or_the_config():
    for settings, wanted in (
        ({"kind": "multilabel"}, keras.losses.BinaryCrossentropy),
        ({"kind": "multilabel", "loss": "focal"}, keras.losses.BinaryFocalCrossentropy),
        ({"kind": "regression"}, keras.losses.MeanSquaredError),
        ({"kind": "regression", "loss": "absolute_error"}, keras.losses.MeanAbsoluteError),
        ({"kind": "regression", "loss": "huber", "huber_delta": 2.0}, keras.losses.Huber),
    ):
        found = task(**settings)
        assert type(found.loss) is wanted
        assert found.output_shape == (COLUMNS,)
    error = task("regression", loss="huber", huber_delta=2.0).loss([[0.0]], [[3.0]])
    assert float(error) == 2 * (3 - 2 / 2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "multilabel", "loss": "dice"}, "loss='dice' with several classes an image; use"),
        ({"kind": "multilabel", "loss": "huber"}, "loss='huber' with several classes an image"),
        ({"kind": "multilabel", "class_weights": "balanced"}, "remove it, or use loss='focal'"),
        ({"kind": "multilabel", "outputs": 5}, "num_outputs=5, but an image has 3 labels; remove"),
        ({"kind": "regression", "loss": "focal"}, "use one of squared_error, absolute_error, hub"),
        ({"kind": "regression", "class_weights": "balanced"}, "class_weights='balanced' with num"),
        ({"kind": "regression", "step": {"label_smoothing": 0.1}}, "label_smoothing=0.1 with num"),
        ({"kind": "regression", "step": {"cutmix_alpha": 1.0}}, "cutmix_alpha=1.0 with numbers as"),
    ],
)
def test_what_does_not_suit_is_refused_at_the_start(settings, words):
    with pytest.raises(UserError) as error:
        task(**settings)
    assert words in str(error.value)


def test_a_metric_of_another_task_is_answered_with_those_there_are():
    with pytest.raises(UserError) as error:
        tasks.check_monitor("val_accuracy", task("regression"))
    assert "'val_accuracy' is not a metric of this experiment" in str(error.value)
    assert "r2_score, val_loss, val_mean_absolute_error, val_r2_score" in str(error.value)


def test_numbers_of_moved_images_are_told(caplog):
    caplog.set_level("INFO", "tfaccel")

    def told(kind="regression", **augment):
        caplog.clear()
        source = types.SimpleNamespace(task=kind)
        tasks.tell_moved(types.SimpleNamespace(source=source, augment=AugmentConfig(**augment)))
        return caplog.text

    assert "at random (horizontal_flip), but their numbers stay" in told(horizontal_flip=True)
    assert "(window=random_crop, shift_pixels), but" in told(window="random_crop", shift_pixels=2)
    assert not told(brightness=0.2)
    assert not told("classes", horizontal_flip=True)


def test_the_best_epoch_has_the_least_error_and_the_largest_score():
    for name in ("val_mean_absolute_error", "val_loss"):
        assert not largest_is_best(name)
    for name in ("val_r2_score", "val_mean_average_precision", "val_f1_score"):
        assert largest_is_best(name)


@pytest.mark.parametrize("num_replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_mixup_and_smoothing_change_several_labels_as_numpy_does(num_replicas):
    for kind, settings in (
        ("multilabel", {"label_smoothing": 0.2}),
        ("multilabel", {"label_smoothing": 0.2, "mixup_alpha": 0.4}),
        ("regression", {"mixup_alpha": 0.4}),
    ):
        seen = []
        x, y, _ = rows_of(kind)
        model = compiled_for(kind, num_replicas, StepConfig(**settings))
        change = mixing.mixed(model, StepConfig(**settings))
        image, label = change(types.SimpleNamespace(index=0), (tf.constant(x), tf.constant(y)))
        part = settings.get("label_smoothing", 0)
        smoothed = y * (1 - part) + part / 2
        if "mixup_alpha" in settings:
            # Each row keeps one share of its input and of its labels.
            own = ((image - np.roll(x, -1, 0)) / (x - np.roll(x, -1, 0))).numpy().mean(1)[:, None]
            smoothed = own * smoothed + (1 - own) * np.roll(smoothed, -1, 0)
            assert np.abs(own - 1).max() > 0.01
        np.testing.assert_allclose(label, smoothed, atol=1e-4)
        seen = model.fit(x, y, batch_size=12, verbose=0).history
        assert all(map(np.isfinite, seen["loss"]))


def compiled_for(kind, num_replicas, step):
    keras.utils.set_random_seed(0)

    def make():
        image = keras.Input((6,))
        return keras.Model(image, keras.layers.Dense(COLUMNS)(image))

    found = task(kind)
    settings = {"optimizer": keras.optimizers.SGD(0.1), "xla": False, "config": step}
    return compiled(make, num_replicas, loss=found.loss, metrics=found.metrics, **settings)


def test_a_script_that_smooths_numbers_is_refused():
    for settings in ({"label_smoothing": 0.1}, {"cutmix_alpha": 1.0}):
        with pytest.raises(UserError, match="with the loss of a regression; they are for classes"):
            compiled_for("regression", 1, StepConfig(**settings))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["multilabel", "regression"])
def test_parts_of_a_batch_measure_what_the_batch_does(kind):
    x, y, _ = rows_of(kind)
    logs = []
    for parts, num_replicas in ((1, 1), (2, 2)):
        model = compiled_for(kind, num_replicas, StepConfig(accumulation_steps=parts))
        history = model.fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0).history
        logs.append({name: values[-1] for name, values in history.items()})
    assert logs[0].keys() == logs[1].keys()
    for name, value in logs[0].items():
        assert logs[1][name] == pytest.approx(value, abs=2e-5), name
