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


def two_lines():
    """As many outputs, in fewer operations to trace."""
    keras.utils.set_random_seed(0)
    x = keras.Input((4,))
    return keras.Model(
        x, {"a": layers.Dense(1, "sigmoid", name="a")(x), "b": layers.Dense(1, name="b")(x)}
    )


def compile_args():
    return {
        "loss": {"a": "binary_crossentropy", "b": "mse"},
        "loss_weights": {"a": 1.0, "b": 0.5},
        "metrics": {"b": ["mae"]},
        "weighted_metrics": {"a": [keras.metrics.Precision(name="right")]},
    }


def sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def padded_by(padding, *arrays):
    """The arrays and rows of padding, whose values would show in any sum."""

    def pad(each):
        # Weights are the last, and 0 for padding.
        value = 0 if each is arrays[-1] else 50
        return np.concatenate([each, np.full((padding, *each.shape[1:]), value, each.dtype)])

    return tf.nest.map_structure(pad, arrays)


def batches(*arrays, padding=0, size=6):
    """Batches of 6 rows: the last has 2, and 4 of padding."""
    return tf.data.Dataset.from_tensor_slices(padded_by(padding, *arrays)).batch(size)


def trained(model, data, *, epochs=1):
    """Its history and weights."""
    history = model.fit(data, epochs=epochs, shuffle=False, verbose=0).history
    return history, weights_of(model)


def weights_of(model):
    return [keras.ops.convert_to_numpy(each) for each in model.weights]


def stepped(model, *batch, tested=False):
    """Its logs and weights after two steps on one batch, which takes less than `fit` on it."""
    logs = []
    for on_batch in [model.train_on_batch] * 2 + [model.test_on_batch] * tested:
        model.reset_metrics()
        logs.append(on_batch(*batch, return_dict=True))
    return {name: [each[name] for each in logs] for name in logs[0]}, weights_of(model)


def by_keras(make, *, optimizer=sgd, **compile_args):
    # Not `model.compile`: where a batch's shape is unknown, stock Keras counts an output's loss
    # once per batch. Eagerly they are known, and nothing is traced.
    return compiled(make, 1, optimizer=optimizer, xla=False, run_eagerly=True, **compile_args)


def assert_same(ours, wanted, rtol=RTOL):
    assert ours[0].keys() == wanted[0].keys()
    for name, values in wanted[0].items():
        np.testing.assert_allclose(ours[0][name], values, rtol=rtol, err_msg=name)
    for weight, value in zip(ours[1], wanted[1], strict=True):
        np.testing.assert_allclose(weight, value, rtol=rtol, atol=rtol)


def padded(make, num_replicas, *, optimizer=sgd, xla=False, parts=1, **compile_args):
    config = StepConfig(zero_weight_is_padding=True, accumulation_steps=parts)
    return compiled(make, num_replicas, optimizer=optimizer, xla=xla, config=config, **compile_args)


def by_hand(model, data):
    """The logs of an epoch of training and of one of testing on the batches, and the weights."""
    logs = []
    for on_batch in (model.train_on_batch, model.test_on_batch):
        model.reset_metrics()
        logs.append([on_batch(*batch, return_dict=True) for batch in data.as_numpy_iterator()][-1])
    return {name: [each[name] for each in logs] for name in logs[0]}, weights_of(model)


@pytest.fixture(scope="module")
def wanted():
    return by_hand(by_keras(two_outputs, **compile_args()), batches(X, Y, WEIGHTS))


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
    assert_same(by_hand(model, batches(X, Y, WEIGHTS, padding=4)), wanted)


@pytest.mark.parametrize("num_replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_mean_by_weights_over_pixels_divides_by_those_of_all_pixels(num_replicas):
    def make():
        keras.utils.set_random_seed(0)
        image = keras.Input((2, 3, 4))
        return keras.Model(image, layers.Dense(1)(image))

    random = np.random.default_rng(0)
    x, y = (random.normal(size=(4, 2, 3, count)).astype(np.float32) for count in (4, 1))
    args = {"loss": keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")}
    batch = padded_by(2, x, y, np.ones(4, np.float32))
    ours = stepped(padded(make, num_replicas, **args), *batch, tested=True)
    assert_same(ours, stepped(by_keras(make, **args), x, y, tested=True))


def test_without_the_flag_a_weight_of_0_is_a_row():
    batch = padded_by(2, X[:4], Y["b"][:4], WEIGHTS[:4])
    args = {"loss": "mse", "metrics": ["mae"], "weighted_metrics": ["mse"]}
    stock = one_output()
    stock.compile(sgd(), **args, run_eagerly=True)
    model = compiled(one_output, 2, optimizer=sgd, xla=False, **args)
    assert_same(stepped(model, *batch), stepped(stock, *batch))


def test_batches_without_weights_are_as_ever():
    args = {"loss": "mse", "metrics": ["mae"]}
    ours = stepped(padded(one_output, 2, **args), X, Y["b"], tested=True)
    assert_same(ours, stepped(by_keras(one_output, **args), X, Y["b"], tested=True))


def test_a_row_that_counts_for_one_output_is_no_padding():
    weights = {"a": WEIGHTS * (np.arange(8) > 0), "b": WEIGHTS}
    args = {"loss": compile_args()["loss"], "weighted_metrics": {"b": ["mae"]}}
    ours = stepped(padded(two_lines, 2, **args), X, Y, weights)
    assert_same(ours, stepped(by_keras(two_lines, **args), X, Y, weights))


def test_masked_time_steps_and_padded_rows_together():
    def make():
        keras.utils.set_random_seed(0)
        return keras.Sequential(
            [keras.Input((3,)), layers.Embedding(60, 4, mask_zero=True), layers.Dense(1)]
        )

    tokens = np.array([[1, 2, 3], [4, 5, 0], [6, 0, 0], [7, 8, 0]])
    steps = (tokens * 0.1)[..., None].astype(np.float32)
    batch = tokens, steps, np.repeat(WEIGHTS[:4, None], 3, axis=1)  # weights: [rows, time]
    args = {"loss": "mse", "metrics": ["mae"], "weighted_metrics": ["mse"]}
    ours = stepped(padded(make, 1, **args), *padded_by(2, *batch))
    assert_same(ours, stepped(by_keras(make, **args), *batch))


@pytest.mark.parametrize("num_replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_mixed_float16(num_replicas):
    def make():
        layer = layers.Dense(1, kernel_initializer="zeros", dtype="mixed_float16")
        return keras.Sequential([keras.Input((4,)), layer])

    scaled = lambda: keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=128.0)  # noqa: E731
    model = padded(make, num_replicas, optimizer=scaled, xla=True, loss="mse", metrics=["mae"])
    batch = X[:6], Y["b"][:6], WEIGHTS[:6]
    history, weights = trained(model, batches(*batch, padding=2, size=8), epochs=2)
    assert history.pop("skipped_steps") == [0, 0]
    assert history.pop("loss_scale") == [128, 128]
    reference = by_keras(make, optimizer=scaled, loss="mse", metrics=["mae"])
    wanted = stepped(reference, *batch)
    # float16 rounds by 5e-4; a few roundings add up.
    assert_same((history, weights[:2]), (wanted[0], wanted[1][:2]), rtol=5e-3)


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


@pytest.mark.parametrize("xla", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_replica_of_padding_alone_adds_nothing_not_even_nan(xla):
    model = padded(Own, 2, xla=xla, metrics=["mae"])
    # Two rows on replica 0, none elsewhere.
    batch = X[:2], Y["b"][:2], np.ones(2, np.float32)
    ours = stepped(model, *padded_by(2, *batch), tested=True)
    assert_same(ours, stepped(by_keras(Own, metrics=["mae"]), *batch, tested=True))


def test_a_batch_of_padding_alone_changes_nothing_but_the_step():
    model = padded(one_output, 2, optimizer="sgd", loss="mse")
    before = weights_of(model)
    logs, weights = stepped(model, X, Y["b"], np.zeros(8, np.float32))
    np.testing.assert_array_equal(logs["loss"], 0)
    assert int(model.optimizer.iterations) == 2
    for weight, value in zip(weights, before, strict=True):
        np.testing.assert_array_equal(weight, value)


def one_output():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((4,)), layers.Dense(1, kernel_regularizer="l2")])


class NoWeights(keras.metrics.Mean):
    def update_state(self, y_true, y_pred):
        super().update_state(y_pred)


def scalar(y_true, y_pred):
    return tf.reduce_mean((y_true - y_pred) ** 2)


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


PIXEL_METRICS = {
    "AUC": keras.metrics.AUC,
    "Precision": keras.metrics.Precision,
    "BinaryIoU": lambda: keras.metrics.BinaryIoU(threshold=0.5),
    "MeanIoU": lambda: keras.metrics.MeanIoU(2, sparse_y_pred=False),
    "OneHotMeanIoU": lambda: keras.metrics.OneHotMeanIoU(2),
}


@pytest.mark.parametrize(
    ("name", "outputs", "rows"),  # 4 is also the width, which Keras takes rows' weights for
    [
        slow("AUC", 1, 5),
        ("AUC", 1, 4),
        slow("Precision", 1, 5),
        slow("Precision", 1, 4),
        slow("BinaryIoU", 1, 5),
        ("BinaryIoU", 1, 4),
        slow("MeanIoU", 2, 5),
        ("MeanIoU", 2, 4),
        slow("OneHotMeanIoU", 2, 5),
        ("OneHotMeanIoU", 2, 4),
    ],
)
def test_metrics_of_pixels_leave_out_padding(name, outputs, rows):
    metric = PIXEL_METRICS[name]
    draw = np.random.default_rng(0)
    x = draw.random((rows, 4, 4, outputs), dtype=np.float32)
    y = draw.integers(0, 2, (rows, 4, 4, 1)).astype(np.float32)
    y = np.concatenate([1 - y, y], -1) if "OneHot" in name else y
    weights = np.array([1.0] * (rows - 2) + [0.0] * 2, np.float32)

    def identity():
        return keras.Sequential([keras.Input(x.shape[1:]), keras.layers.Activation("linear")])

    loss = keras.losses.MeanSquaredError()
    model = padded(identity, 1, loss=loss, metrics=[metric()])
    found = model.test_on_batch(x, y, weights)[1]
    expected = metric()
    expected.update_state(y[: rows - 2], x[: rows - 2])
    assert found == pytest.approx(float(expected.result()), abs=1e-6)


class SecondIoU(keras.metrics.MeanIoU):
    """Of the second of two outputs, which are made classes."""

    def __init__(self, name="second"):
        super().__init__(num_classes=2, name=name)

    def update_state(self, y_true, y_pred, sample_weight=None):
        classes = tf.cast(y_pred[..., 1] > 0.5, tf.int32)
        super().update_state(y_true[..., 1], classes, sample_weight)


class FlatIoU(SecondIoU):
    """Flattens the values, and gives its states a rule."""

    merge_state = "sum"

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(
            *(tf.reshape(each, [-1, 2]) for each in (y_true, y_pred)), sample_weight
        )


class OneHotIoU(keras.metrics.OneHotMeanIoU):
    """Leaves out the first column of pixels."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(y_true[:, :, 1:], y_pred[:, :, 1:], sample_weight)


class SecondAUC(keras.metrics.AUC):
    """Of the second output."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(y_true[..., 1], y_pred[..., 1], sample_weight)


OWN_PIXEL_METRICS = {
    "second": SecondIoU,
    "flat": lambda: FlatIoU(name="flat"),
    "one_hot": lambda: OneHotIoU(2, name="one_hot"),
    "auc": lambda: SecondAUC(name="auc"),
}


@pytest.mark.parametrize("rows", [4, slow(5)])  # 4 is also the width
@pytest.mark.parametrize("num_replicas", [2, slow(1), slow(3)])
def test_own_metrics_of_pixels_leave_out_padding(rows, num_replicas):
    draw = np.random.default_rng(0)
    x = draw.random((rows, 4, 4, 2), dtype=np.float32)
    y = np.float32(draw.random((rows, 4, 4, 2)) > 0.5)
    weights = np.array([1.0] * (rows - 1) + [0.0], np.float32)
    identity = [keras.Input(x.shape[1:]), keras.layers.Activation("linear")]
    model = padded(
        lambda: keras.Sequential(identity),
        num_replicas,
        loss=keras.losses.MeanSquaredError(),
        metrics=[make() for make in OWN_PIXEL_METRICS.values()],
    )
    found = model.test_on_batch(x, y, weights, return_dict=True)
    for name, make in OWN_PIXEL_METRICS.items():
        expected = make()
        expected.update_state(y[:-1], x[:-1])
        assert found[name] == pytest.approx(float(expected.result()), abs=1e-6), name


@pytest.mark.parametrize(
    ("refused", "why"),
    [
        ({"loss": "mse", "metrics": [NoWeights()]}, "no parameter sample_weight"),
        ({"loss": keras.losses.MeanSquaredError(reduction=None)}, "reduction=None"),
    ],
)
def test_what_cannot_leave_out_padding_is_refused_when_compiled(refused, why):
    with pytest.raises(UserError, match=why):
        padded(one_output, 1, **refused)


@pytest.mark.parametrize(
    ("refused", "why"),
    [
        ({"loss": scalar}, "one value for each row"),
        ({"loss": "mse", "metrics": [scalar]}, "the metric scalar cannot leave out padding"),
    ],
)
@pytest.mark.parametrize("xla", [pytest.param(False, marks=pytest.mark.slow), True])
def test_what_cannot_leave_out_padding_is_refused_when_traced(refused, why, xla):
    model = padded(one_output, 1, xla=xla, **refused)
    with pytest.raises(UserError, match=why):
        model.evaluate(X, Y["b"], sample_weight=WEIGHTS, verbose=0)
    assert keras.metrics.Mean.update_state.__module__.startswith("keras")  # all is put back
