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

import tfaccel
from tfaccel.common.errors import UserError
from tfaccel.config import StepConfig
from tfaccel.step import functions

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(8, 4, 3)).astype("float32")  # [rows, time, channels]
LABELS = np.array([0, 2, 1, 1, 0, 2, 1, 0], "int32")
WEIGHTS = np.array([[0.5, -1.5, 1.0], [2.0, 0.3, -0.7], [1.0, 1.0, -0.2]], "float32")


class Steps(keras.Model):
    """A model of one matrix, whose step is a function of it and of a batch."""

    def __init__(self, step):
        super().__init__()
        self.matrix = self.add_weight(shape=(3, 3), name="matrix")
        self.moving = self.add_weight(shape=(3,), initializer="zeros", trainable=False)
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
    names = [*list(REDUCTIONS)[::8], *list(NUMBERS)[::4]]
    check(step_of({each: (REDUCTIONS | NUMBERS)[each] for each in names}), 5, rtol=1e-3)


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("names", [("map_fn",), ()])
def test_what_a_loop_computes_of_one_row_is_not_joined(names):
    check(functools.partial(rounds, names), 5)


def test_values_that_are_joined_in_a_loop_are_refused():
    def step(model, x, y):
        summed = lambda n, _: (n + 1, tf.reduce_sum(x))  # noqa: E731
        return {"loss": tf.while_loop(lambda n, _: n < 3, summed, (0, 0.0))[1]}

    with pytest.raises(UserError, match=r"joins values.*in a tf.while_loop.*loop of Python"):
        on_replicas(step, 5)


def test_values_are_joined_in_a_branch_that_all_replicas_take():
    def step(model, x, y):
        any_above = tf.reduce_any(x > 0)
        return {"loss": tf.cond(any_above, lambda: tf.reduce_sum(x), lambda: tf.reduce_max(x))}

    check(step, 5)


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


def gathered(model, x, y):
    """Losses over gathered rows. On one device the collectives do nothing."""
    context, logs = tf.distribute.get_replica_context(), {}
    with tf.GradientTape(persistent=True) as tape:
        h = tf.math.l2_normalize(x[:, 0] @ tf.convert_to_tensor(model.matrix), 1)
        every, labels = tfaccel.collectives.all_gather((h, y))
        also = context.all_gather(h, axis=0)
        scores = h @ tf.transpose(every)
        columns = tfaccel.collectives.all_gather(tf.transpose(h), axis=-1)
        losses = {
            "mean of gathered rows": tf.reduce_mean(every**2 * [1.0, 2.0, 3.0]),
            "gathered by the context": tf.reduce_sum(also**3),
            "own rows against all": tf.reduce_mean(tf.reduce_logsumexp(scores, 1)),
            "all rows against all": tf.reduce_logsumexp(every @ tf.transpose(every) / 0.5),
            "by row": -tf.nn.log_softmax(scores)[:, 0],
            "labels": tf.reduce_mean(
                tf.reduce_sum(tf.cast(y[:, None] == labels, tf.float32) * scores, 1)
            ),
            "columns": tf.reduce_sum(tf.reduce_max(columns, 1)),
            "by the rows of all": tf.reduce_sum(h) / tf.cast(tf.shape(every)[0], tf.float32),
            "by the number of replicas": h[0, 0] * 0.0
            + 2.0 / tfaccel.collectives.world_size() * (tfaccel.collectives.world_size()),
            "by gathered rows less one": tf.reduce_sum(every) / (every.shape[0] - 1),
        }
    for name, loss in losses.items():
        logs[name] = tf.reduce_mean(loss)
        logs[f"{name}, gradient"] = tape.gradient(loss, model.matrix)
    return logs


@pytest.mark.slow
def test_gathered_rows_are_those_of_one_device():
    check(gathered, 5)


def collective(model, x, y):
    """What the collectives give, of values that are equal on all replicas, or of ranks."""
    ours, context = tfaccel.collectives, tf.distribute.get_replica_context()
    rank = float(ours.rank())
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(ours.all_reduce(model.matrix * (1.0 + rank)))
    return {
        "ranks": ours.all_gather(tf.constant([ours.rank(), 10 + ours.local_rank()])),
        "world": tf.constant(float(ours.world_size())),
        "mean": ours.all_reduce(rank, op="mean"),
        "largest": ours.all_reduce(tf.constant(ours.rank(), tf.int8), op="max"),
        "any": tf.cast(ours.all_reduce(tf.constant(rank == 1), op="max"), tf.float32),
        "all": tf.cast(ours.all_reduce(tf.constant(rank == 1), op="min"), tf.float32),
        "first": ours.broadcast(tf.constant(5.0 + rank)),
        "second": ours.broadcast({"a": tf.constant(5 + ours.rank())}, root_rank=1)["a"],
        "by the context": context.all_reduce("SUM", tf.constant(2.0 + rank)),
        "mean by the context": context.all_reduce(tf.distribute.ReduceOp.MEAN, rank),
        "gradient": tape.gradient(total, model.matrix),
        "own rows": tf.reduce_sum(tf.ones_like(y)),
        "rows of all": ours.all_reduce(tf.reduce_sum(tf.ones_like(y))),
    }


def test_collectives_in_a_step_join_the_replicas():
    _, got = on_replicas(collective, 5)
    assert got["ranks"].tolist() == [0, 10, 1, 11]
    values = {name: float(value) for name, value in got.items() if value.ndim == 0}
    assert values == {
        "world": 2,
        "mean": 0.5,
        "largest": 1,
        "any": 1,
        "all": 0,
        "first": 5,
        "second": 6,
        "by the context": 5,
        "mean by the context": 0.5,
        "own rows": pytest.approx(2.6),  # the mean over rows of 2, 2, 3, 3 and 3
        "rows of all": 5,
    }
    np.testing.assert_allclose(got["gradient"], np.full((3, 3), 3.0))


def in_a_branch(model, x, y):
    """The gradient of a loss that sums over rows in a branch."""
    with tf.GradientTape() as tape:
        h = x[:, 0] @ tf.convert_to_tensor(model.matrix)
        loss = tf.cond(tf.shape(h)[-1] > 2, lambda: tf.reduce_mean(h**2), lambda: tf.reduce_max(h))
    return {"loss": loss, "gradient": tape.gradient(loss, model.matrix)}


def test_a_branch_that_sums_over_rows_has_a_gradient():
    check(in_a_branch, 5)


class Gathering(keras.Model):
    """Trains with every collective of tfaccel in its step."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)
        self.dense.build((None, 2))
        self.built = True

    def train_step(self, data):
        ours, (x, _) = tfaccel.collectives, data
        with tf.GradientTape() as tape:
            rows = ours.all_gather(ours.broadcast(self.dense(x)))
            loss = ours.all_reduce(tf.reduce_sum(rows), op="mean") * ours.world_size()
            loss += ours.rank() + ours.local_rank()
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"sum": loss}


def test_collectives_in_a_step_of_one_replica_keep_the_gradient(setup):
    run = setup(xla=False)
    with run.scope():
        model = Gathering()
    run.compile(model, keras.optimizers.SGD(0.5))
    logs = model.fit(np.ones((2, 2), np.float32), np.ones(2), batch_size=2, verbose=0).history
    assert logs["sum"] == [4.0]
    np.testing.assert_array_equal(model.dense.kernel.numpy(), [[0.0], [0.0]])  # 1 - 0.5 * 2


@pytest.mark.slow
def test_a_replica_without_rows_adds_nothing():
    names = ("mean", "max", "max of ints", "norm", "any", "all", "product", "chosen rows, summed")
    functions = {each: REDUCTIONS[each] for each in names}

    def step(model, x, y):
        logs = valued(functions, x, y, model.matrix) | gradients(model, x, y)
        logs["of gathered rows"] = tf.reduce_mean(tfaccel.collectives.all_gather(x) ** 2)
        return logs

    check(step, 1)


def test_reductions_cover_own_rows_if_the_config_says_so():
    def step(model, x, y):
        return {"rows": tf.reduce_sum(tf.ones_like(y)), "by shape": x[0, 0, 0] * 0.0 + x.shape[0]}

    _, got = on_replicas(step, 5, config=StepConfig(reductions="own_replica"))
    assert float(got["rows"]) == pytest.approx(2.6)  # the mean over rows of 2, 2, 3, 3 and 3


def test_a_step_that_cannot_be_traced_with_more_rows_takes_axis_0(caplog):
    caplog.set_level("INFO", logger="tfaccel")

    def step(model, x, y):
        if x.shape[0] > 4:
            raise ValueError("too many rows")
        return {"sum": tf.reduce_sum(x, 0), "features": tf.reduce_mean(tf.reduce_sum(x, [1, 2]))}

    check(lambda model, x, y: step(model, x, y) if not tf.executing_eagerly() else {}, 5)
    _, got = on_replicas(step, 5)
    np.testing.assert_allclose(got["sum"], ROWS[:5].sum(0), rtol=1e-5)
    np.testing.assert_allclose(got["features"], ROWS[:5].sum((1, 2)).mean(), rtol=1e-5)
    assert any("axis 0" in each.message and "too many rows" in each.message
               for each in caplog.records)  # fmt: skip


class OfFeatures(keras.layers.Layer):
    """A user's layer that sums features; there are as many as rows, or twice as many."""

    def call(self, x):
        return x / (1.0 + tf.reduce_sum(x**2, axis=-1, keepdims=True))


@pytest.mark.parametrize(("parts", "num_plans"), [((), 0), ((OfFeatures,), 1)])
def test_a_step_of_keras_sums_after_the_pass(monkeypatch, parts, num_plans):
    plans, planned = [], functions.planned
    monkeypatch.setattr(
        functions,
        "planned",
        lambda *args, **how: (plans.append(planned(*args, **how)), plans[-1])[1],
    )

    def make():
        keras.utils.set_random_seed(0)
        dense = [keras.layers.Dense(12), keras.layers.Dense(1)]
        return keras.Sequential(
            [keras.Input((12,)), dense[0], *[each() for each in parts], dense[1]]
        )

    x, y = ROWS.reshape(8, 12)[:6], LABELS[:6, None].astype("float32")
    model = compiled(make, 2, optimizer="sgd", loss="mse", xla=False)
    stock = make()
    stock.compile("sgd", "mse", jit_compile=False)
    wanted = stock.train_on_batch(x, y)
    np.testing.assert_allclose(model.train_on_batch(x, y), wanted, rtol=1e-5)
    assert len(plans) == num_plans
    assert not any(each.joins for each in plans)
    assert model.train_function._step._join != functions.WITHIN


def test_what_a_step_assigns_is_averaged_only_if_it_differs_between_replicas():
    def step(model, x, y):
        model.moving.assign(0.5 * model.moving + tf.reduce_sum(x, [0, 1]))
        return {"rows": tf.reduce_sum(y)}

    def of_own_rows(model, x, y):
        model.moving.assign(tf.ones(3) * tf.cast(y[0], tf.float32))
        return {"rows": tf.reduce_sum(y)}

    model, _ = on_replicas(step, 5)
    np.testing.assert_allclose(model.moving.numpy(), ROWS[:5].sum((0, 1)), rtol=1e-5)
    model, _ = on_replicas(of_own_rows, 5)
    mean = (2 * LABELS[0] + 3 * LABELS[2]) / 5  # the first label of each replica, by its rows
    np.testing.assert_allclose(model.moving.numpy(), np.full(3, mean), rtol=1e-5)


def test_functions_of_the_user_are_joined_too():
    @tf.function
    def helper(x, matrix):
        if tf.constant(True):
            x = x + 0.0
        return tf.reduce_mean((x @ matrix) ** 2), tf.reduce_max(x, 0)

    @tf.function
    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss, largest = helper(x, tf.convert_to_tensor(model.matrix))
        return {"loss": loss, "largest": largest, "slope": tape.gradient(loss, model.matrix)}

    check(step, 5)
