"""A step that compares or reorders the rows of its batch without gathering them is told so.

Most tests only plan a step for two replicas, which runs nothing: `told` has what is said then.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled

import tfaccel
from tfaccel.config import StepConfig
from tfaccel.step import compared_rows, functions

ROWS = np.random.default_rng(0).normal(size=(8, 4, 3)).astype("float32")  # [rows, time, channels]
LABELS = np.array([0, 2, 1, 1, 0, 2, 1, 0], "int32")
CURE = "gather the rows first, with tfaccel.collectives.all_gather"


class Steps(keras.Model):
    """A model whose step is a function of it and of a batch."""

    def __init__(self, step):
        super().__init__()
        self.matrix = self.add_weight(shape=(3, 3), name="matrix")
        self.queue = self.add_weight(shape=(12, 3), name="queue", trainable=False)
        self.one_batch = self.add_weight(shape=(4, 3), name="one_batch", trainable=False)
        self.plain = tf.Variable(tf.zeros([12, 3]), trainable=False)
        self.moving = self.add_weight(shape=(3,), name="moving", trainable=False)
        self.step, self.built = step, True

    def train_step(self, data):
        return {"loss": self.step(self, *data)}


def slow(value):
    return pytest.param(value, marks=pytest.mark.slow)


def warnings_in(caplog) -> list[str]:
    return [each.message for each in caplog.records if "its own rows" in each.message]


class _Planned(BaseException):
    """Ends a step behind its first plan."""


@pytest.fixture
def told(caplog, monkeypatch):
    """Returns a function that plans a step, and returns the warnings."""
    direct = compared_rows.say

    def say(*args):
        direct(*args)
        raise _Planned

    def plan(step, rows=8):
        caplog.clear()
        monkeypatch.setattr(compared_rows, "say", say)
        model = compiled(lambda: Steps(step), 2, optimizer="sgd", xla=False)
        with pytest.raises(_Planned):
            model.train_function(iter([(tf.constant(ROWS[:rows]), tf.constant(LABELS[:rows]))]))
        return warnings_in(caplog)

    return plan


def unit(x):
    return tf.math.l2_normalize(x[:, 0], 1)


def mean_over_classes(scores):
    """Returns a mean over rows of a loss with one class for each row, as SimCLR has it."""
    labels = tf.range(tf.shape(scores)[0])
    loss = keras.losses.sparse_categorical_crossentropy(labels, scores, from_logits=True)
    return tf.reduce_mean(loss)


def supervised_contrast(x, y):
    is_other = tf.cast(y[:, None] != y[None, :], tf.float32)
    return tf.reduce_mean(tf.reduce_sum(is_other, 1))


def in_a_function(x):
    @tf.function
    def reverse(x):
        return tf.reverse(x, [0])

    return tf.reduce_mean(x * reverse(x))


def in_a_branch(x):
    pick = x[0, 0, 0] > 0
    return tf.reduce_mean(x * tf.cond(pick, lambda: tf.roll(x, 1, 0), lambda: x))


PAIRS, SORTED, ORDER, KEPT = map(
    compared_rows._SAYS.get,
    (compared_rows.PAIRS, compared_rows.SORTED, compared_rows.ORDER, compared_rows.KEPT),
)
# What is said, the operation, and the step as a function of a model and of a batch.
COMPARES = {
    "matmul": (PAIRS, "matmul", lambda m, x, y: mean_over_classes(
        tf.matmul(unit(x), unit(x + 1), transpose_b=True))),
    "matmul of Keras": (PAIRS, "matmul", lambda m, x, y: mean_over_classes(
        keras.ops.matmul(unit(x), keras.ops.transpose(unit(x + 1))))),
    "matmul of two views": (PAIRS, "matmul", lambda m, x, y: mean_over_classes(
        tf.matmul(*[tf.concat([unit(x), unit(x + 1)], 0)] * 2, transpose_b=True))),
    "matmul with a queue": (PAIRS, "matmul", lambda m, x, y: mean_over_classes(
        tf.matmul(unit(x), tf.concat([unit(x + 1), m.queue], 0), transpose_b=True))),
    "einsum": (PAIRS, "einsum", lambda m, x, y: mean_over_classes(
        tf.einsum("ic,jc->ij", unit(x), unit(x + 1)))),
    "einsum, ellipsis": (PAIRS, "einsum", lambda m, x, y: mean_over_classes(
        tf.einsum("i...c,j...c->...ij", unit(x), unit(x + 1)))),
    "einsum of Keras": (PAIRS, "matmul", lambda m, x, y: mean_over_classes(
        keras.ops.einsum("ic,jc->ij", unit(x), unit(x + 1)))),
    "tensordot": (PAIRS, "matmul", lambda m, x, y: mean_over_classes(
        tf.tensordot(unit(x), unit(x + 1), [[1], [1]]))),
    "distances": (PAIRS, "a difference", lambda m, x, y: tf.reduce_mean(
        tf.nn.relu(tf.reduce_sum((unit(x)[:, None] - unit(x)[None]) ** 2, -1)))),
    "labels": (PAIRS, "!=", lambda m, x, y: supervised_contrast(x, y)),
    "times of survival": (PAIRS, ">=", lambda m, x, y: tf.reduce_mean(
        tf.where(x[:, 0, 0][:, None] >= x[:, 0, 0], 1.0, 0.0))),
    "sort": (SORTED, "sort or top_k", lambda m, x, y: tf.reduce_mean(
        tf.sort(tf.reduce_sum(x, [1, 2]))[:2])),
    "sort of Keras": (SORTED, "sort or top_k", lambda m, x, y: tf.reduce_mean(
        keras.ops.sort(x, axis=0)[:2])),
    "argsort": (SORTED, "sort or top_k", lambda m, x, y: tf.reduce_mean(
        tf.gather(x, tf.argsort(x[:, 0, 0]))[:2])),
    "top_k": (SORTED, "sort or top_k", lambda m, x, y: tf.reduce_mean(
        tf.math.top_k(tf.reduce_sum(x, [1, 2]), 2)[0])),
    "argmax": (SORTED, "argmax", lambda m, x, y: x[0, 0, 0] * tf.cast(
        tf.argmax(x[:, 0, 0], 0), tf.float32)),
    "cumsum": (SORTED, "cumsum", lambda m, x, y: tf.reduce_mean(tf.cumsum(x) ** 2)),
    "reverse": (ORDER, "reverse", lambda m, x, y: tf.reduce_mean(x * tf.reverse(x, [0]))),
    "slice": (ORDER, "a slice", lambda m, x, y: tf.reduce_mean(x * x[::-1])),
    "flip of Keras": (ORDER, "reverse", lambda m, x, y: tf.reduce_mean(x * keras.ops.flip(x, 0))),
    "roll": (ORDER, "roll", lambda m, x, y: tf.reduce_mean(x * tf.roll(x, 1, 0))),
    "roll by concat": (ORDER, "concat", lambda m, x, y: tf.reduce_mean(
        x * tf.concat([x[1:], x[:1]], 0))),
    "shuffle": (ORDER, "shuffle", lambda m, x, y: tf.reduce_mean(
        x * tf.gather(x, tf.random.shuffle(tf.range(tf.shape(x)[0]))))),
    "gather by neighbours": (ORDER, "gather", lambda m, x, y: tf.reduce_mean(
        x * tf.gather(x, (tf.range(tf.shape(x)[0]) + 1) % tf.shape(x)[0]))),
    "gather by indices of data": (ORDER, "gather", lambda m, x, y: tf.reduce_mean(
        x * tf.gather(x, y))),
    "in a tf.function": (ORDER, "reverse", lambda m, x, y: in_a_function(x)),
    "in a branch": (ORDER, "roll", lambda m, x, y: in_a_branch(x)),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPARES)
def test_a_step_that_compares_own_rows_is_told(name, told):
    says, what, step = COMPARES[name]
    found = [each for each in told(step) if says in each]
    assert len(found) == 1
    assert f"({what}, test_compared_rows.py:" in found[0] or f"; {what}, test_" in found[0]
    assert CURE in found[0]


# Steps that keep rows, and what is said to be assigned.
KEEPS = {
    "a queue": ("queue", lambda m, x, y: m.queue.assign(
        tf.concat([unit(x), m.queue[: -y.shape[0]]], 0))[0, 0]),
    "a queue of one batch": ("one_batch", lambda m, x, y: m.one_batch.assign(unit(x))[0, 0]),
    "a queue by slices": ("queue", lambda m, x, y: m.queue.assign(
        tf.concat([unit(x), m.queue], 0)[:12])[0, 0]),
    "a queue at a pointer": ("queue", lambda m, x, y: m.queue.assign(
        tf.tensor_scatter_nd_update(m.queue, tf.range(y.shape[0])[:, None], unit(x)))[0, 0]),
    "a queue of Keras": ("queue", lambda m, x, y: m.queue.assign(
        keras.ops.scatter_update(m.queue, keras.ops.arange(y.shape[0])[:, None], unit(x)))[0, 0]),
    "a bank of examples": ("queue", lambda m, x, y: m.queue.assign(
        tf.tensor_scatter_nd_update(m.queue, y[:, None], unit(x)))[0, 0]),
    "counts": ("moving", lambda m, x, y: m.moving.assign(
        tf.tensor_scatter_nd_add(m.moving, y[:, None], unit(x)[:, 0]))[0]),
    "the first row": ("moving", lambda m, x, y: m.moving.assign(x[0, 0])[0]),
    "rows in a tf.Variable": ("a tf.Variable", lambda m, x, y: m.plain.assign(
        tf.concat([unit(x), m.plain], 0)[:12])[0, 0]),
    "entries of a tf.Variable": ("a variable's entries", lambda m, x, y: m.plain.scatter_nd_update(
        y[:, None], unit(x))[0, 0]),
}  # fmt: skip


@pytest.mark.parametrize("name", KEEPS)
def test_a_step_that_keeps_own_rows_is_told(name, told):
    what, step = KEEPS[name]
    (found,) = [each for each in told(step) if KEPT in each]
    assert f"{what}, test_compared_rows.py:" in found
    assert CURE in found


def gathered(each):
    return tfaccel.collectives.all_gather(each)


def attended(x):
    scores = tf.nn.softmax(tf.matmul(x, x, transpose_b=True))
    return tf.reduce_mean(tf.einsum("bts,bsc->btc", scores, tf.reverse(x, [1])))


def picked(x, y):
    """Returns a tensor of one step of each row, by the flat index that older BERTs have."""
    index = tf.range(tf.shape(x)[0]) * x.shape[1] + y
    return tf.gather(tf.reshape(x, [-1, x.shape[-1]]), index)


# Steps that are right on several replicas, as functions of a model and of a batch.
FITS = {
    "gathered": lambda m, x, y: mean_over_classes(
        tf.matmul(gathered(unit(x)), gathered(unit(x + 1)), transpose_b=True)),
    "one side gathered": lambda m, x, y: tf.reduce_mean(
        tf.matmul(unit(x), gathered(unit(x)), transpose_b=True)),
    "gathered, and a queue": lambda m, x, y: tf.reduce_mean(
        tf.matmul(unit(x), tf.concat([gathered(unit(x)), m.queue], 0), transpose_b=True)),
    "a queue without its last rows": lambda m, x, y: tf.reduce_mean(
        tf.matmul(unit(x), m.queue[: -y.shape[0]], transpose_b=True)),
    "labels of all": lambda m, x, y: supervised_contrast(x, gathered(y)),
    "sorted after a gather": lambda m, x, y: tf.sort(gathered(x[:, 0, 0]))[0],
    "attention": lambda m, x, y: attended(x),
    "features": lambda m, x, y: tf.reduce_mean(tf.sort(x)[:, ::-1] + tf.math.top_k(x, 1)[0]),
    "weights": lambda m, x, y: tf.reduce_mean(unit(x) @ m.matrix),
    "outer product": lambda m, x, y: tf.reduce_mean(unit(x)[:, None] * x[:, 0, :, None]),
    "pairs of positions": lambda m, x, y: tf.reduce_mean(x[:, :, None] - x[:, None]),
    "covariance": lambda m, x, y: tf.reduce_mean(tf.matmul(unit(x), unit(x), transpose_a=True)),
    "chosen rows": lambda m, x, y: tf.reduce_mean(tf.boolean_mask(x, x[:, 0, 0] > -9.0)),
    "gather by a mask": lambda m, x, y: tf.reduce_mean(tf.gather(x, tf.where(y > 0)[:, 0])),
    "gather in a row": lambda m, x, y: tf.reduce_mean(tf.gather(x, y, axis=1, batch_dims=1)),
    "gather by flat indices": lambda m, x, y: tf.reduce_mean(picked(x, y)),
    "gather by two indices": lambda m, x, y: tf.reduce_mean(
        tf.gather_nd(x, tf.stack([tf.range(tf.shape(x)[0]), y], 1))),
    "gather of repeated rows": lambda m, x, y: tf.reduce_mean(
        tf.gather(x, tf.repeat(tf.range(tf.shape(x)[0]), 2))),
    "repeat and tile": lambda m, x, y: tf.reduce_mean(
        tf.repeat(x, 2, axis=0) - tf.tile(x, [2, 1, 1])),
    "two batches in one": lambda m, x, y: tf.add_n(
        [tf.reduce_mean(each) for each in tf.split(tf.concat([x, x + 1], 0), 2)]),
    "halves": lambda m, x, y: tf.reduce_mean(x[: x.shape[0] // 2] - x[x.shape[0] // 2 :]),
    "one hot": lambda m, x, y: tf.reduce_mean(tf.one_hot(y, 3) * unit(x)),
    "rows one by one": lambda m, x, y: tf.reduce_mean(
        tf.map_fn(lambda row: tf.reduce_max(tf.reverse(row, [0]), 0), x)),
    "time one by one": lambda m, x, y: tf.reduce_mean(
        tf.scan(lambda state, now: state + now, tf.transpose(x, [1, 0, 2]), unit(x))),
    "slope of a row": lambda m, x, y: tf.reduce_mean(tf.gradients(tf.sort(x, 1), x)[0]),
    "mean is kept": lambda m, x, y: m.moving.assign(0.9 * m.moving + tf.reduce_mean(x, [0, 1]))[0],
    "a queue of gathered rows": lambda m, x, y: m.queue.assign(
        tf.concat([gathered(unit(x)), m.queue[: -2 * y.shape[0]]], 0))[0, 0],
    "gathered rows are kept": lambda m, x, y: m.queue.assign(
        tf.concat([gathered(unit(x)), m.queue], 0)[:12])[0, 0],
}  # fmt: skip


@pytest.mark.parametrize("name", FITS)
def test_a_step_that_compares_no_own_rows_is_not_told(name, told):
    assert told(FITS[name]) == []


def simclr(m, x, y):
    with tf.GradientTape() as tape:
        one, other = (tf.math.l2_normalize(each[:, 0] @ m.matrix, 1) for each in (x, x + 0.1))
        loss = mean_over_classes(tf.matmul(one, other, transpose_b=True))
    m.optimizer.apply([tape.gradient(loss, m.matrix)], [m.matrix])
    return loss


def gathered_simclr(m, x, y):
    return simclr(m, gathered(x), gathered(y))


def run_twice(step, **settings):
    model = compiled(lambda: Steps(step), 2, optimizer="sgd", xla=False, **settings)
    model.optimizer.build(model.trainable_variables)
    batches = [(tf.constant(ROWS[:rows]), tf.constant(LABELS[:rows])) for rows in (8, 6)]
    for each in batches:
        model.train_function(iter([each]))


def test_each_model_is_told_once(caplog):
    for num_models in (1, 2):
        run_twice(simclr)
        assert len(warnings_in(caplog)) == num_models


@pytest.mark.slow
def test_a_step_that_gathers_is_not_told(caplog):
    run_twice(gathered_simclr)
    assert warnings_in(caplog) == []


@pytest.mark.parametrize(
    ("settings", "num_warnings"),
    [
        pytest.param({"run_eagerly": True}, 1, marks=pytest.mark.slow),
        pytest.param({"config": StepConfig(accumulation_steps=2)}, 1, marks=pytest.mark.slow),
        ({"config": StepConfig(reductions="own_replica")}, 0),
    ],
)
def test_who_asks_for_own_rows_is_not_told(settings, num_warnings, caplog):
    run_twice(simclr, **settings)
    assert len(warnings_in(caplog)) == num_warnings


def contrast(y, features):
    """Returns a loss of each row that compares it with all rows."""
    scores = tf.matmul(features, features, transpose_b=True)
    return keras.losses.sparse_categorical_crossentropy(
        tf.range(tf.shape(scores)[0]), scores, from_logits=True
    )


def neighbours(y, features):
    return tf.reduce_sum((features - tf.reverse(features, [0])) ** 2, -1)


@pytest.mark.parametrize(
    ("loss", "says", "what"),
    [(contrast, PAIRS, "matmul"), (neighbours, ORDER, "reverse")],
)
def test_a_loss_that_compares_own_rows_is_told(loss, says, what, caplog):
    def make():
        return keras.Sequential([keras.Input((12,)), keras.layers.Dense(5)])

    model = compiled(make, 2, optimizer="sgd", loss=loss, xla=False)
    model.train_on_batch(ROWS.reshape(8, 12), LABELS[:, None])
    (found,) = warnings_in(caplog)
    assert says in found
    assert f"({what}, test_compared_rows.py:" in found


def layers_of_keras(has_operations):
    """Returns a model of Keras's layers in which time, features and a replica's rows are 4."""
    tokens = keras.Input((4,), dtype="int32")
    x = keras.layers.Embedding(5, 4, mask_zero=True)(tokens)
    x = x + keras.layers.MultiHeadAttention(2, 4)(x, x)
    x = keras.layers.Attention(use_scale=True)([x, x])
    x = keras.layers.BatchNormalization()(keras.layers.LayerNormalization()(x))
    x = keras.layers.GRU(4, return_sequences=True, go_backwards=True)(x)
    x = keras.layers.Dot(2)([x, keras.layers.Permute((2, 1))(x)])
    x = keras.layers.Conv1D(4, 2, padding="causal")(keras.layers.Dense(4)(x))
    if has_operations:
        x = keras.ops.flip(keras.ops.sort(x, axis=1), axis=1) @ keras.ops.transpose(x, (0, 2, 1))
    return keras.Model(tokens, keras.layers.Dense(4)(keras.layers.GlobalAveragePooling1D()(x)))


# An operation asks for a plan if an axis has as many entries as a replica has rows.
@pytest.mark.parametrize("has_operations", [False, slow(True)])
@pytest.mark.parametrize("call", ["test_on_batch", slow("train_on_batch")])
def test_layers_of_keras_are_not_told(call, has_operations, caplog, monkeypatch):
    plans, direct = [], functions.planned

    def planned(*args, **how):
        plans.append(direct(*args, **how))
        return plans[-1]

    monkeypatch.setattr(functions, "planned", planned)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    settings = {"optimizer": "adam", "loss": loss, "metrics": ["accuracy"], "xla": False}
    model = compiled(lambda: layers_of_keras(has_operations), 2, **settings)
    getattr(model, call)(LABELS[:, None] + np.arange(4) % 2, LABELS)
    assert warnings_in(caplog) == []
    assert len(plans) == has_operations
