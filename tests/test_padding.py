"""Padded batches against the same rows without the padding, by Keras's own step on one replica."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled
from keras import layers

from tfaccel import UserError
from tfaccel.config import StepConfig

RNG = np.random.default_rng(0)
X = RNG.random((8, 4), dtype=np.float32)
Y = {"a": np.float32(X[:, :1] > 0.5), "b": X[:, 1:2] * 3}
WEIGHTS = np.array([1, 0.5, 2, 1, 1, 3, 1, 0.5], np.float32)
# float32: Keras divides the sum by the rows, here each row is multiplied by rows / real rows.
RTOL = 1e-5


def two_outputs():
    keras.utils.set_random_seed(0)
    x = keras.Input((4,))
    hidden = layers.Dense(8, activation="tanh", kernel_regularizer="l2")(x)
    return keras.Model(
        x, {"a": layers.Dense(1, "sigmoid", name="a")(hidden), "b": layers.Dense(1, name="b")(x)}
    )


def compile_args():
    return {
        "loss": {"a": "binary_crossentropy", "b": "mse"},
        "loss_weights": {"a": 1.0, "b": 0.5},
        "metrics": {"a": ["accuracy"], "b": ["mae"]},
        "weighted_metrics": {"a": [keras.metrics.AUC(name="auc")], "b": ["mae"]},
    }


def sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def batches(*arrays, padding=0, size=6):
    """Batches of 6 rows: the last has 2, and 4 of padding, whose values would show in any sum."""

    def pad(each):
        # Weights are the last, and 0 for padding.
        value = 0 if each is arrays[-1] else 50
        return np.concatenate([each, np.full((padding, *each.shape[1:]), value, each.dtype)])

    return tf.data.Dataset.from_tensor_slices(tf.nest.map_structure(pad, arrays)).batch(size)


def trained(model, data, *, tested=False):
    """Its history and weights; a test is traced anew on every replica, so most have none."""
    test = data if tested else None
    history = model.fit(data, validation_data=test, epochs=2, shuffle=False, verbose=0).history
    return history, [keras.ops.convert_to_numpy(each) for each in model.weights]


def by_keras(make, data, *, tested=False, optimizer=sgd, **compile_args):
    # Not `model.compile`: where a batch's shape is unknown, stock Keras counts an output's loss
    # once per batch. One replica without the flag is Keras's step as it is, with shapes known.
    model = compiled(make, 1, optimizer=optimizer, xla=False, **compile_args)
    return trained(model, data, tested=tested)


def assert_same(ours, wanted, rtol=RTOL):
    assert ours[0].keys() == wanted[0].keys()
    for name, values in wanted[0].items():
        np.testing.assert_allclose(ours[0][name], values, rtol=rtol, err_msg=name)
    for weight, value in zip(ours[1], wanted[1], strict=True):
        np.testing.assert_allclose(weight, value, rtol=rtol, atol=rtol)


def padded(make, num_replicas, *, optimizer=sgd, xla=False, parts=1, **compile_args):
    config = StepConfig(zero_weight_is_padding=True, accumulation_steps=parts)
    return compiled(make, num_replicas, optimizer=optimizer, xla=xla, config=config, **compile_args)


@pytest.fixture(scope="module")
def wanted():
    return by_keras(two_outputs, batches(X, Y, WEIGHTS), tested=True, **compile_args())


# Of the last batch, with 2 replicas one has padding alone, with 3 two; so have 2 of 3 parts.
@pytest.mark.parametrize(
    ("num_replicas", "xla", "parts"),
    [
        (2, 0, 1),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [
                (1, 0, 1),
                (1, 1, 1),
                (1, 0, 3),
                (1, 1, 3),
                (2, 1, 1),
                (2, 0, 3),
                (3, 0, 1),
                (3, 1, 2),
            ]
        ),
    ],
)
def test_padded_batches_train_and_test_as_batches_without_padding(wanted, num_replicas, xla, parts):
    model = padded(two_outputs, num_replicas, xla=bool(xla), parts=parts, **compile_args())
    assert_same(trained(model, batches(X, Y, WEIGHTS, padding=4), tested=True), wanted)


def test_without_the_flag_a_weight_of_0_is_a_row():
    data = batches(X, Y["b"], WEIGHTS, padding=4)
    args = {"loss": "mse", "metrics": ["mae"], "weighted_metrics": ["mse"]}
    stock = one_output()
    stock.compile(sgd(), **args, jit_compile=False)
    model = compiled(one_output, 2, optimizer=sgd, xla=False, **args)
    assert_same(trained(model, data), trained(stock, data))


def test_batches_without_weights_are_as_ever():
    data = tf.data.Dataset.from_tensor_slices((X, Y["b"])).batch(6)
    args = {"loss": "mse", "metrics": ["mae"]}
    ours = trained(padded(one_output, 2, **args), data, tested=True)
    assert_same(ours, by_keras(one_output, data, tested=True, **args))


def test_a_row_that_counts_for_one_output_is_no_padding():
    weights = {"a": WEIGHTS * (np.arange(8) > 0), "b": WEIGHTS}
    data = tf.data.Dataset.from_tensor_slices((X, Y, weights)).batch(4)
    args = {"loss": ["binary_crossentropy", "mse"], "weighted_metrics": [["accuracy"], ["mae"]]}
    args = {name: dict(zip("ab", value, strict=True)) for name, value in args.items()}
    ours = trained(padded(two_outputs, 2, **args), data)
    assert_same(ours, by_keras(two_outputs, data, **args))


def test_masked_time_steps_and_padded_rows_together():
    def make():
        keras.utils.set_random_seed(0)
        return keras.Sequential(
            [keras.Input((3,)), layers.Embedding(60, 4, mask_zero=True), layers.Dense(1)]
        )

    tokens = np.array([[1, 2, 3], [4, 5, 0], [6, 0, 0], [7, 8, 0]] * 2)
    steps = (tokens * 0.1)[..., None].astype(np.float32)
    weights = np.repeat(WEIGHTS[:, None], 3, axis=1)  # [rows, time]
    args = {"loss": "mse", "metrics": ["mae"], "weighted_metrics": ["mse"]}
    model = padded(make, 1, **args)
    ours = trained(model, batches(tokens, steps, weights, padding=4))
    assert_same(ours, by_keras(make, batches(tokens, steps, weights), **args))


@pytest.mark.parametrize("num_replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_mixed_float16(num_replicas):
    def make():
        layer = layers.Dense(1, kernel_initializer="zeros", dtype="mixed_float16")
        return keras.Sequential([keras.Input((4,)), layer])

    scaled = lambda: keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=128.0)  # noqa: E731
    model = padded(make, num_replicas, optimizer=scaled, xla=True, loss="mse", metrics=["mae"])
    history, weights = trained(model, batches(X, Y["b"], WEIGHTS, padding=4))
    assert history["skipped_steps"][-1] == 0
    same = {"optimizer": scaled, "loss": "mse", "metrics": ["mae"]}
    reference = by_keras(make, batches(X, Y["b"], WEIGHTS), **same)
    # float16 rounds by 5e-4; a few roundings add up.
    assert_same((history, weights[:2]), (reference[0], reference[1][:2]), rtol=5e-3)


class Own(keras.Model):
    """Its own loss is NaN where all weights are 0, and its own metric counts batches."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1, kernel_initializer="zeros")
        self.seen = keras.metrics.Mean(name="seen")

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        squares = tf.reduce_mean((y - y_pred) ** 2, axis=-1)
        loss = tf.reduce_sum(squares * sample_weight) / tf.reduce_sum(sample_weight)
        self.seen.update_state(loss)
        return loss


@pytest.mark.parametrize("xla", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_replica_of_padding_alone_adds_nothing_not_even_nan(xla):
    model = padded(Own, 2, xla=xla, metrics=["mae"])
    ones = np.ones(2, np.float32)  # one real batch: two rows on replica 0, none elsewhere
    ours = trained(model, batches(X[:2], Y["b"][:2], ones, padding=2), tested=True)
    data = batches(X[:2], Y["b"][:2], ones)
    assert_same(ours, by_keras(Own, data, tested=True, metrics=["mae"]))


def test_a_batch_of_padding_alone_changes_nothing_but_the_step():
    model = padded(two_outputs, 2, optimizer="sgd", loss=compile_args()["loss"])
    before = [keras.ops.convert_to_numpy(each) for each in model.weights]
    history, weights = trained(model, batches(X, Y, np.zeros(8, np.float32), size=8))
    np.testing.assert_array_equal(history["loss"], 0)
    for weight, value in zip(weights, before, strict=True):
        np.testing.assert_array_equal(weight, value)


def one_output():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((4,)), layers.Dense(1)])


class NoWeights(keras.metrics.Mean):
    def update_state(self, y_true, y_pred):
        super().update_state(y_pred)


def scalar(y_true, y_pred):
    return tf.reduce_mean((y_true - y_pred) ** 2)


@pytest.mark.parametrize("rows", [5, 4])  # 4 is also the width, which Keras takes rows' weights for
@pytest.mark.parametrize(
    ("metric", "outputs"),
    [
        (keras.metrics.AUC, 1),
        (keras.metrics.Precision, 1),
        (lambda: keras.metrics.BinaryIoU(threshold=0.5), 1),
        (lambda: keras.metrics.MeanIoU(2, sparse_y_pred=False), 2),
        (lambda: keras.metrics.OneHotMeanIoU(2), 2),
    ],
    ids=["AUC", "Precision", "BinaryIoU", "MeanIoU", "OneHotMeanIoU"],
)
def test_metrics_of_pixels_leave_out_padding(metric, outputs, rows):
    draw = np.random.default_rng(0)
    x = draw.random((rows, 4, 4, outputs), dtype=np.float32)
    y = draw.integers(0, 2, (rows, 4, 4, 1)).astype(np.float32)
    y = np.concatenate([1 - y, y], -1) if "OneHot" in type(metric()).__name__ else y
    weights = np.array([1.0] * (rows - 2) + [0.0] * 2, np.float32)

    def identity():
        return keras.Sequential([keras.Input(x.shape[1:]), keras.layers.Activation("linear")])

    loss = keras.losses.MeanSquaredError()
    model = padded(identity, 1, loss=loss, metrics=[metric()])
    found = model.evaluate(x, y, sample_weight=weights, verbose=0, batch_size=rows)[1]
    expected = metric()
    expected.update_state(y[: rows - 2], x[: rows - 2])
    assert found == pytest.approx(float(expected.result()), abs=1e-6)


@pytest.mark.parametrize(
    ("refused", "why"),
    [
        ({"loss": "mse", "metrics": [NoWeights()]}, "no parameter sample_weight"),
        ({"loss": keras.losses.MeanSquaredError(reduction=None)}, "reduction=None"),
        ({"loss": "mse", "run_eagerly": True}, "run_eagerly"),
    ],
)
def test_what_cannot_leave_out_padding_is_refused_when_compiled(refused, why):
    with pytest.raises(UserError, match=why):
        padded(one_output, 1, **refused)


@pytest.mark.parametrize(
    ("refused", "why"),
    [
        ({"loss": scalar}, "one for each row"),
        ({"loss": "mse", "metrics": [scalar]}, "the metric scalar cannot leave out padding"),
    ],
)
@pytest.mark.parametrize("xla", [False, True])
def test_what_cannot_leave_out_padding_is_refused_when_traced(refused, why, xla):
    model = padded(one_output, 1, xla=xla, **refused)
    with pytest.raises(UserError, match=why):
        model.evaluate(X, Y["b"], sample_weight=WEIGHTS, verbose=0)
    assert keras.metrics.Mean.update_state.__module__.startswith("keras")  # all is put back
