"""A step of the model's own computes on each replica what one device computes.

Each test traces one step with many operations. The step returns their values and their gradients as
logs. The reference is the same step as Python on one device, with all rows.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled

from tfaccel.common.errors import UserError

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(8, 4, 3)).astype("float32")  # [rows, time, channels]
LABELS = np.array([0, 2, 1, 1, 0, 2, 1, 0], "int32")
WEIGHTS = np.array([[0.5, -1.5, 1.0], [2.0, 0.3, -0.7], [1.0, 1.0, -0.2]], "float32")


class Steps(keras.Model):
    """A model of one matrix, whose step is a function of it and of a batch."""

    def __init__(self, step):
        super().__init__()
        self.matrix = self.add_weight(shape=(3, 3), name="matrix")
        self.moving = self.add_weight(shape=(3,), name="moving", trainable=False)
        self.matrix.assign(WEIGHTS)
        self.step = step
        self.built = True

    def train_step(self, data):
        return self.step(self, *data)


def on_one_device(step, rows, **batch_settings):
    model = Steps(step)
    return model, _arrays(model.train_step(batch(rows, **batch_settings)))


def on_replicas(step, rows, num_replicas=2, *, config=None, **batch_settings):
    model = compiled(
        lambda: Steps(step),
        num_replicas,
        optimizer=keras.optimizers.SGD(0.1),
        xla=False,
        config=config,
    )
    model.optimizer.build(model.trainable_variables)
    return model, _arrays(model.train_function(iter([batch(rows, **batch_settings)])))


def batch(rows):
    return tf.constant(ROWS[:rows]), tf.constant(LABELS[:rows])


def _arrays(logs):
    return {name: np.asarray(value, np.float64) for name, value in logs.items()}


def check(step, rows, num_replicas=2, *, rtol=1e-4, atol=1e-5):
    """Raises AssertionError, with the names of the values that are not those of one device."""
    (_, wanted), (_, got) = on_one_device(step, rows), on_replicas(step, rows, num_replicas)
    wrong = [
        f"{name}: {got[name]}, one device {value}"
        for name, value in wanted.items()
        if name not in got or not np.allclose(got[name], value, rtol=rtol, atol=atol)
    ]
    assert not wrong, "\n".join(wrong)
    assert all(np.isfinite(value).all() for value in wanted.values())


def valued(functions, x, y, matrix, *, each=False):
    """Returns the values of functions of (h, y), and the gradient of the sum of all values.

    h is x @ matrix. Values are weighted by position, so that no gradient is zero by chance. With
    `each`, the gradient of each function is returned apart, which takes longer.
    """
    logs, sums = {}, {}
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        h = x @ tf.convert_to_tensor(matrix)
        for name, function in functions.items():
            value = function(h, y)
            logs[name] = value = tf.cast(value, tf.float32)
            weights = tf.range(1.0, 1.0 + value.shape.num_elements())
            weights *= 0.5 + 0.01 * len(sums)
            sums[name] = tf.reduce_sum(value * tf.reshape(weights, value.shape))
        if not each:
            sums = {"all": sum(sums.values())}
    for name, value in sums.items():
        of_matrix, of_rows = tape.gradient(value, [matrix, x])
        if of_matrix is not None:
            logs[f"{name}, gradient"] = of_matrix
            logs[f"{name}, gradient of rows"] = tf.reduce_sum(of_rows * tf.cos(x), [0, 1])
    return logs


REDUCTIONS = {
    "sum": lambda h, y: tf.reduce_sum(h),
    "sum of rows": lambda h, y: tf.reduce_sum(h, 0),
    "sum, negative axis": lambda h, y: tf.reduce_sum(h, -3),
    "sum, keepdims": lambda h, y: tf.reduce_sum(h, [0, 1], keepdims=True),
    "sum of Keras": lambda h, y: keras.ops.sum(h, axis=(0, 2)),
    "sum of features, then of rows": lambda h, y: tf.reduce_sum(tf.reduce_sum(h, 2), 0),
    "sum of features": lambda h, y: tf.reduce_mean(tf.reduce_sum(h, [1, 2]) ** 2),
    "sum with ints": lambda h, y: tf.reduce_sum(y),
    "number of true": lambda h, y: tf.reduce_sum(tf.cast(y == 1, tf.int64)),
    "mean": lambda h, y: tf.reduce_mean(h),
    "mean of rows": lambda h, y: tf.reduce_mean(h, 0),
    "mean, several axes": lambda h, y: tf.reduce_mean(h, [0, -1], keepdims=True),
    "max": lambda h, y: tf.reduce_max(h),
    "max of rows": lambda h, y: tf.reduce_max(h, 0),
    "max of ints": lambda h, y: tf.reduce_max(y),
    "min of rows": lambda h, y: tf.reduce_min(h, [0, 1]),
    "product": lambda h, y: tf.reduce_prod(1 + 0.1 * h, [0, 1]),
    "any": lambda h, y: tf.reduce_any(h > 2.0, 0),
    "all": lambda h, y: tf.reduce_all(h > -2.0, 0),
    "norm": lambda h, y: tf.norm(h),
    "norm of rows": lambda h, y: tf.norm(h, axis=0),
    "Euclidean norm": lambda h, y: tf.math.reduce_euclidean_norm(h, 0),
    "deviation": lambda h, y: tf.math.reduce_std(h, [0, 1]),
    "deviation of Keras": lambda h, y: keras.ops.std(h, axis=0),
    "variance": lambda h, y: tf.math.reduce_variance(h),
    "moments": lambda h, y: tf.stack(tf.nn.moments(h, [0, 1])),
    "logsumexp": lambda h, y: tf.reduce_logsumexp(h, 0),
    "logsumexp of Keras": lambda h, y: keras.ops.logsumexp(h),
    "squares": lambda h, y: tf.nn.l2_loss(h),
    "matmul of rows": lambda h, y: tf.matmul(h[:, 0], h[:, 1], transpose_a=True),
    "matmul of transposed": lambda h, y: tf.transpose(h[:, 0]) @ h[:, 1],
    "matmul, batched": lambda h, y: tf.matmul(
        tf.transpose(h, [1, 0, 2]), tf.transpose(h, [1, 0, 2]), transpose_a=True
    ),
    "einsum": lambda h, y: tf.einsum("btc,bsc->ts", h, h),
    "einsum of Keras": lambda h, y: keras.ops.einsum("btc,btd->cd", h, h),
    "einsum to a number": lambda h, y: tf.einsum("btc,btc->", h, h),
    "tensordot": lambda h, y: tf.tensordot(h, h, [[0, 1], [0, 1]]),
    "segments": lambda h, y: tf.math.unsorted_segment_sum(h[:, 0], y, 3),
    "means of segments": lambda h, y: tf.math.unsorted_segment_mean(h[:, 0], y, 3),
    "largest of segments": lambda h, y: tf.math.unsorted_segment_max(h[:, 0], y, 3)[:1],
    "segments of Keras": lambda h, y: keras.ops.segment_sum(h[:, 0], y, 3),
    "one-hot": lambda h, y: tf.matmul(tf.one_hot(y, 3), h[:, 0], transpose_a=True),
    "rows and time as one axis": lambda h, y: tf.reduce_sum(tf.reshape(h, [-1, 3]), 0),
    "mean of rows and time": lambda h, y: tf.reduce_mean(tf.reshape(h, [-1, 3]), 0),
    "transposed": lambda h, y: tf.reduce_mean(tf.transpose(h, [2, 0, 1]), [1, 2]),
    "chosen rows": lambda h, y: tf.reduce_mean(tf.boolean_mask(h, y != 1), 0),
    "chosen rows, summed": lambda h, y: tf.reduce_sum(tf.boolean_mask(h, y != 1)),
    "chosen values": lambda h, y: tf.reduce_mean(tf.boolean_mask(h, h > 0)),
    "largest of chosen": lambda h, y: tf.reduce_max(tf.boolean_mask(h, y != 1), 0),
    "masked mean": lambda h, y: (
        tf.reduce_sum(tf.where(h > 0, h, 0)) / tf.reduce_sum(tf.cast(h > 0, tf.float32))
    ),
    "twice": lambda h, y: tf.reduce_mean((h - tf.reduce_mean(h, 0)) ** 2),
    "covariance": lambda h, y: (
        lambda c: tf.matmul(c, c, transpose_a=True) / (tf.cast(tf.shape(h)[0], tf.float32) - 1.0)
    )(h[:, 0] - tf.reduce_mean(h[:, 0], 0)),
    "stacked twice": lambda h, y: tf.reduce_mean(tf.concat([h, 2 * h], 0), 0),
    "loss of Keras": lambda h, y: keras.losses.SparseCategoricalCrossentropy(from_logits=True)(
        y, h[:, 0]
    ),
    "loss of Keras, summed": lambda h, y: keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="sum"
    )(y, h[:, 0]),
    "average loss": lambda h, y: tf.nn.compute_average_loss(tf.reduce_sum(h, [1, 2]) ** 2),
}
HALVES = {
    "float16": lambda h, y: tf.reduce_sum(tf.cast(h, tf.float16), 0),
    "bfloat16": lambda h, y: tf.reduce_mean(tf.cast(h, tf.bfloat16), 0),
    "float16, largest": lambda h, y: tf.reduce_max(tf.cast(h, tf.float16), 0),
}
NUMBERS = {
    "by tf.shape": lambda h, y: tf.reduce_sum(h) / tf.cast(tf.shape(h)[0], tf.float32),
    "by shape": lambda h, y: tf.reduce_sum(h) / h.shape[0],
    "by float of shape": lambda h, y: tf.reduce_sum(h) / float(h.shape[0]),
    "by size": lambda h, y: tf.reduce_sum(h) / tf.cast(tf.size(h), tf.float32),
    "times 1 / rows": lambda h, y: tf.reduce_sum(h) * (1 / h.shape[0]),
    "by keras.ops.shape": lambda h, y: keras.ops.sum(h) / keras.ops.shape(h)[0],
    "rows as a number": lambda h, y: tf.cast(tf.shape(y)[0], tf.float32),
    "by a constant": lambda h, y: tf.reduce_sum(h) / 7.0,
    "by rows less one": lambda h, y: tf.reduce_sum(h) / (h.shape[0] - 1),
    "by a tensor of rows less one": lambda h, y: (
        tf.reduce_sum(h) / tf.cast(tf.shape(h)[0] - 1, tf.float32)
    ),
    "times 1 / (rows - 1)": lambda h, y: tf.reduce_sum(h) * (1 / (h.shape[0] - 1)),
    "rows and time": lambda h, y: (
        tf.reduce_sum(h) / tf.cast(tf.shape(h)[0] * tf.shape(h)[1], tf.float32)
    ),
    "by rows of ones": lambda h, y: tf.reduce_sum(h) / tf.reduce_sum(tf.ones_like(y, tf.float32)),
}


def step_of(functions, **settings):
    return lambda model, x, y: valued(functions, x, y, model.matrix, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "num_replicas", "each"), [(5, 2, True), (4, 2, False), (8, 3, False)]
)
def test_reductions_cover_the_rows_of_all_replicas(rows, num_replicas, each):
    check(step_of(REDUCTIONS | NUMBERS, each=each), rows, num_replicas, rtol=1e-3)


def test_some_reductions_cover_the_rows_of_all_replicas():
    names = [*list(REDUCTIONS)[::5], *list(NUMBERS)[::3]]
    check(step_of({each: (REDUCTIONS | NUMBERS)[each] for each in names}), 5, rtol=1e-3)


def test_half_precision_is_summed_over_all_rows():
    check(step_of(HALVES), 5, rtol=2e-2, atol=0.1)


def loss_of_row(row, matrix):
    """The loss of one row [time, 3] behind one step of gradient descent on it, as in MAML."""
    with tf.GradientTape() as tape:
        tape.watch(matrix)
        loss = tf.reduce_mean(tf.square(row @ matrix))
    return tf.reduce_mean(tf.square(row @ (matrix - 0.1 * tape.gradient(loss, matrix)) - 1.0))


def rounds(names, model, x, y):
    """Loops with a round for each row, and others."""
    logs = {}
    loops = {
        "map_fn": lambda m: tf.map_fn(lambda row: loss_of_row(row, m), x),
        "vectorized_map": lambda m: tf.vectorized_map(lambda row: loss_of_row(row, m), x),
        "scan": lambda m: tf.scan(lambda state, row: row @ m + 0.0 * state, x, x[0]),
        "while_loop": lambda m: tf.while_loop(
            lambda index, _: index < 3, lambda index, h: (index + 1, tf.tanh(h @ m)), (0, x)
        )[1],
        "cond": lambda m: tf.cond(y[0] < 5, lambda: tf.reduce_sum(x @ m, 2), lambda: x[..., 0]),
        "map of Keras": lambda m: keras.ops.map(lambda row: tf.reduce_sum((row @ m) ** 2), x),
    }
    for name, loop in loops.items():
        if names and name not in names:
            continue
        with tf.GradientTape() as tape:
            losses = loop(tf.convert_to_tensor(model.matrix))
            logs[name] = loss = tf.reduce_mean(losses) + 0.1 * tf.reduce_max(losses)
        logs[f"{name}, gradient"] = tape.gradient(loss, model.matrix)
    with tf.GradientTape() as tape:
        h = tf.reduce_sum(x @ tf.convert_to_tensor(model.matrix), [1, 2])
    logs["jacobian"] = tf.reduce_sum(tape.jacobian(h, model.matrix) ** 2, 0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        h = tf.reduce_sum((x @ tf.convert_to_tensor(model.matrix)) ** 2, 1)
    logs["batch_jacobian"] = tf.reduce_mean(tape.batch_jacobian(h, x), 0)
    return logs


@pytest.mark.parametrize("names", [("map_fn",), pytest.param((), marks=pytest.mark.slow)])
def test_what_a_loop_computes_of_one_row_is_not_joined(names):
    check(functools.partial(rounds, names), 5)


@pytest.mark.parametrize(
    "summed",
    [
        lambda x: tf.while_loop(
            lambda n, _: n < 3, lambda n, _: (n + 1, tf.reduce_sum(x)), (0, 0.0)
        ),
        lambda x: tf.cond(tf.reduce_any(x > 0), lambda: tf.reduce_sum(x), lambda: 0.0),
    ],
)
def test_values_that_are_joined_in_a_loop_or_a_branch_are_refused(summed):
    with pytest.raises(UserError, match=r"joins values.*in a tf.while_loop.*if of Python"):
        on_replicas(lambda model, x, y: {"loss": tf.nest.flatten(summed(x))[-1]}, 5)


def gradients(model, x, y):
    """Gradients of scalars and of vectors, with respect to weights, rows and fast weights."""
    logs = {}
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        matrix = tf.convert_to_tensor(model.matrix)
        h = x @ matrix
        loss = tf.reduce_mean(h**2)
        by_row = tf.reduce_sum(h**2, [1, 2])
    logs["of a number"] = tape.gradient(loss, model.matrix)
    logs["of rows"] = tape.gradient(by_row, model.matrix)
    logs["of rows, with output_gradients"] = tape.gradient(
        by_row, model.matrix, output_gradients=tf.cast(y, tf.float32)
    )
    logs["of a number, with output_gradients"] = tape.gradient(
        loss, model.matrix, output_gradients=tf.constant(3.0)
    )
    logs["of several"] = tape.gradient([loss, by_row, 2 * loss], model.matrix)
    logs["with respect to rows"] = tf.reduce_sum(tape.gradient(loss, x) ** 2, 0)
    logs["of rows, with respect to rows"] = tf.reduce_sum(tape.gradient(by_row, x) ** 2, 0)
    logs["unconnected"] = tape.gradient(loss, model.moving) is None and tf.constant(1.0)
    both = tape.gradient(loss, {"matrix": model.matrix, "rows": h})
    logs["in a dict"] = both["matrix"] + tf.reduce_sum(both["rows"])
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            loss = tf.reduce_mean((x @ tf.convert_to_tensor(model.matrix)) ** 2)
        fast = model.matrix - 0.1 * inner.gradient(loss, model.matrix)
        loss = tf.reduce_mean((x @ fast - 1.0) ** 2)
    logs["through fast weights"] = outer.gradient(loss, model.matrix)
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            inner.watch(x)
            h = tf.tanh(x @ tf.convert_to_tensor(model.matrix))
        slopes = inner.gradient(h, x)
        loss = tf.reduce_mean((tf.sqrt(tf.reduce_sum(slopes**2, [1, 2])) - 1.0) ** 2)
    logs["of a penalty of slopes"] = outer.gradient(loss, model.matrix)
    logs["global norm"] = tf.linalg.global_norm([logs["of a number"], matrix])
    return logs


@pytest.mark.parametrize("rows", [5, pytest.param(4, marks=pytest.mark.slow)])
def test_gradients_are_those_of_one_device(rows):
    check(gradients, rows)


def test_a_replica_without_rows_adds_nothing():
    names = ("mean", "max", "max of ints", "norm", "any", "all", "product", "chosen rows, summed")
    functions = {each: REDUCTIONS[each] for each in names}

    def step(model, x, y):
        return valued(functions, x, y, model.matrix) | gradients(model, x, y)

    check(step, 1)
