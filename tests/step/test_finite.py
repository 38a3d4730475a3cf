"""P8: NaN and infinity end training or are left out, with the step named, and never applied.

Each reference is the same training without the batch that is not finite, bit for bit.
A model is trained on both from one start, so that its step is traced once.
"""

import functools
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled, in_workers
from keras import layers

from tfaccel.config import StepConfig
from tfaccel.step import finite, totals
from tfaccel.step.totals import Span
from tfaccel.training.callbacks.finite import NonFiniteError, RollBackError

RNG = np.random.default_rng(0)
BATCH = 8
X = RNG.normal(size=(5 * BATCH, 6)).astype(np.float32)
Y = RNG.normal(size=(5 * BATCH, 1)).astype(np.float32)
LAST = BATCH - 1  # a row of the last replica
BAD = 2  # the batch that is not finite; its step is called 3
AHEAD = 1  # steps that are begun before one is looked at

ONE_AND_TWO = pytest.mark.parametrize(
    ("num_replicas", "xla"),
    [  # with XLA, a row of NaN that a ReLU hides is left out, below
        (2, False),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [(1, False), (1, True), (2, True)]
        ),
    ],
)

ONE_WITHOUT_XLA = pytest.mark.parametrize(
    ("num_replicas", "xla"),
    [
        (1, False),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [(1, True), (2, False)]),
    ],
)


def hiding(rate=0.0):
    """A clipped ReLU makes a finite number of NaN, and its gradient is 0: 0 times NaN is NaN."""
    keras.utils.set_random_seed(0)
    hidden = [layers.Dense(4, name="first"), layers.Activation("relu6"), layers.Dropout(rate)]
    return keras.Sequential([keras.Input((6,)), *hidden, layers.Dense(1, name="last")])


def with_dropout():
    return hiding(rate=0.2)


def with_statistics():
    keras.utils.set_random_seed(0)
    hidden = [layers.Dense(4, name="first"), layers.BatchNormalization(name="norm")]
    return keras.Sequential([keras.Input((6,)), *hidden, layers.Dense(1, name="last")])


def linear():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((6,)), layers.Dense(1, name="last")])


def adam():
    return keras.optimizers.Adam(0.01)


def sgd():
    return keras.optimizers.SGD(0.01)


def model_of(make, num_replicas, policy="skip", **settings):
    config = StepConfig(nonfinite=policy, **settings.pop("step", {}))
    settings = {"loss": "mse", "optimizer": sgd, **settings}
    return compiled(make, num_replicas, config=config, **settings)


def spoilt(values, *, row=1, value=np.nan):
    """A copy in which one row of the batch BAD is not finite."""
    values = values.copy()
    values[BAD * BATCH + row] = value
    return values


def without_bad(values):
    return np.delete(values, np.s_[BAD * BATCH : (BAD + 1) * BATCH], axis=0)


def fit(model, x, y, **settings):
    settings = {"batch_size": BATCH, "shuffle": False, "verbose": 0, **settings}
    return model.fit(x, y, **settings).history


def state_of(model):
    """Every variable of the model and the optimizer but the random seeds, of every replica."""
    variables = [*model.variables, *model.optimizer.variables]
    return {
        f"{index} {each.name.removeprefix(model.name)}": [
            value.numpy() for value in each._value.values
        ]
        for index, each in enumerate(variables)
        if "seed" not in each.path
    }


def begins_at(model):
    """Returns a function that puts the model back to how it is now, before it is trained."""
    start = [each.numpy() for each in model.variables]

    def put_back():
        state = [*zip(model.variables, start, strict=True)]
        for each in model.optimizer.variables:
            if each is not model.optimizer._learning_rate:
                state.append((each, np.zeros(each.shape)))
        for variable, value in state:
            for own in variable._value.values:  # which takes less than to assign to all at once
                own.assign(value.astype(variable.dtype))

    return put_back


def trained_on(model, *data):
    """Trains a new model on each data set, from the same start; returns last logs and states.

    By hand, which takes less than to fit it.
    """
    put_back, found = begins_at(model), []
    for x, y in data:
        put_back()
        model.reset_metrics()
        for start in range(0, len(y), BATCH):
            rows = slice(start, start + BATCH)
            logs = model.train_on_batch(x[rows], y[rows], return_dict=True)
        found.append((logs, state_of(model)))
    return found


def assert_alike(ours, theirs):
    """Of two states."""
    assert ours.keys() == theirs.keys()
    for key, values in ours.items():
        for value, wanted in zip(values, theirs[key], strict=True):
            np.testing.assert_array_equal(value, wanted, err_msg=key)


def is_finite(model):
    return all(np.isfinite(each).all() for values in state_of(model).values() for each in values)


@pytest.mark.slow  # of stock Keras, as in test_upstream.py
@pytest.mark.parametrize("xla", [False, True])
def test_p8_in_stock_keras_a_nan_row_behind_a_relu_spoils_weights_and_no_loss(xla):
    model = hiding()
    model.compile("adam", "mse", jit_compile=xla)
    history = fit(model, spoilt(X), Y, callbacks=[keras.callbacks.TerminateOnNaN()])
    if xla:  # without it, the ReLU of one kind of CPU hides NaN, another's does not
        assert np.isfinite(history["loss"]).all()
    assert np.isnan(model.get_layer("first").kernel.numpy()).any()


@functools.cache
def of_statistics(num_replicas, xla):
    """What comes of a batch norm whose third step has a row of NaN, an infinite label, neither."""
    settings = {"optimizer": adam, "metrics": ["mae"], "xla": xla}
    return trained_on(
        model_of(with_statistics, num_replicas, **settings),
        (spoilt(X, row=LAST), Y),
        (X, spoilt(Y, row=LAST, value=np.inf)),
        (without_bad(X), without_bad(Y)),
    )


@ONE_AND_TWO
def test_p8_a_left_out_step_is_as_if_it_had_not_been(num_replicas, xla):
    # Weights, batch norm's statistics, Adam's slots and iterations, on every replica.
    (logs, ours), _, (wanted, reference) = of_statistics(num_replicas, xla)
    # The loss was NaN, and that step is not in the epoch's mean.
    assert logs == wanted
    assert_alike(ours, reference)


@ONE_AND_TWO
def test_p8_finite_statistics_of_a_left_out_step_are_left_out_too(num_replicas, xla):
    _, (_, ours), (_, reference) = of_statistics(num_replicas, xla)
    assert_alike(ours, reference)


@pytest.mark.parametrize(
    ("num_replicas", "xla"), [(1, True), pytest.param(2, False, marks=pytest.mark.slow)]
)
def test_p8_a_nan_that_a_relu_hides_from_the_loss_is_left_out(num_replicas, xla):
    (logs, ours), (_, reference) = trained_on(
        model_of(hiding, num_replicas, xla=xla),
        (spoilt(X), Y),
        (without_bad(X), without_bad(Y)),
    )
    assert_alike(ours, reference)
    assert set(logs) == {"loss"}
    assert np.isfinite(logs["loss"])


@pytest.mark.parametrize("num_replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_p8_random_seeds_go_on_past_a_left_out_step(num_replicas):
    model = model_of(with_dropout, num_replicas, xla=False)
    put_back, seeds = begins_at(model), []
    for x in (np.full_like(X, np.nan), X):
        put_back()
        before = model.get_weights()
        model.train_on_batch(x[:BATCH], Y[:BATCH])
        state = model.layers[2].seed_generator.state
        seeds.append([each.numpy() for each in (state, *state._value.values)])
        is_left_out = all(map(np.array_equal, model.get_weights(), before))
        assert is_left_out == (x is not X)
    np.testing.assert_array_equal(*seeds)


@pytest.mark.parametrize(
    ("parts", "xla"),
    [(2, False), *(pytest.param(each, True, marks=pytest.mark.slow) for each in (2, 3))],
)
def test_p8_accumulation_leaves_the_step_out_too(parts, xla):
    settings = {"step": {"accumulation_steps": parts}}
    (logs, ours), (wanted, reference) = trained_on(
        model_of(with_statistics, 1, xla=xla, **settings),
        (spoilt(X), Y),
        (without_bad(X), without_bad(Y)),
    )
    assert logs == wanted
    assert_alike(ours, reference)


def test_p8_slices_of_an_embedding_are_watched():
    def make():
        keras.utils.set_random_seed(0)
        embedding = layers.Embedding(9, 3, name="ids")
        parts = [embedding, layers.Flatten(), layers.Dense(1, name="last")]
        return keras.Sequential([keras.Input((2,), dtype="int32"), *parts])

    ids = RNG.integers(0, 9, (5 * BATCH, 2))
    (_, ours), (_, reference) = trained_on(
        model_of(make, 1, xla=False),
        (ids, spoilt(Y)),
        (without_bad(ids), without_bad(Y)),
    )
    assert_alike(ours, reference)


@ONE_WITHOUT_XLA
def test_p8_stop_names_step_and_layer(num_replicas, xla):
    model = model_of(hiding, num_replicas, "stop", xla=xla)
    with pytest.raises(NonFiniteError) as error:
        fit(model, spoilt(X, row=LAST), Y)
    assert str(error.value) == (
        "the gradient of first/kernel (layer first, Dense) is not finite at step 3, and was not "
        "applied; look for NaN or infinity in the step's images and labels, and for labels beyond "
        "the model's outputs, or lower the learning rate"
    )
    assert not isinstance(error.value, RollBackError)
    assert int(model.optimizer.iterations.numpy()) == BAD + AHEAD
    assert is_finite(model)


@pytest.mark.parametrize("xla", [False, True])
@pytest.mark.parametrize(
    ("bad", "wanted"),  # places in either span, and which gradient is the first with one
    [
        (((), ()), 5),
        (((0,), ()), 1),
        (((1,), ()), 1),
        (((2,), ()), 3),
        (((3, 2), ()), 3),
        (((), (0,)), 0),
        (((), (2,)), 0),
        (((), (3,)), 4),
        (((3,), (3,)), 3),
        (((2,), (0, 3)), 0),
    ],
)
def test_p8_the_first_gradient_of_all_spans_is_found(bad, wanted, xla):
    values = np.zeros((2, 4), np.float32)
    for span, places in zip(values, bad, strict=True):
        span[list(places)] = np.nan
    # Gradient 2 has no values.
    bad = np.isnan(values)
    spans = Span(bad[0], [1, 2, 3], [2, 0, 2]), Span(bad[1], [0, 4], [3, 1])
    find = tf.function(lambda: finite.index_in_spans(spans, 5), jit_compile=xla, autograph=False)
    assert find().numpy() == wanted


@pytest.mark.parametrize("xla", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_p8_the_first_layer_is_named_wherever_its_gradient_lies(monkeypatch, xla):
    monkeypatch.setattr(totals, "_JOINED_AT_ONCE", 14)  # of 15: its gradient alone lies last
    model = model_of(hiding, 2, "stop", xla=xla)
    y = Y[:BATCH].copy()
    y[LAST] = np.nan
    with pytest.raises(NonFiniteError, match="the gradient of first/kernel"):
        model.train_on_batch(X[:BATCH], y)


def test_p8_the_step_counts_over_epochs_and_executions():
    model = model_of(hiding, 1, "stop", xla=False, steps_per_execution=4)
    fit(model, X, Y)
    clean = np.concatenate([X[: 3 * BATCH], X])
    with pytest.raises(NonFiniteError, match="at step 6,"):
        fit(model, np.concatenate([clean[: 3 * BATCH], spoilt(X)]), np.concatenate([Y[:24], Y]))


@pytest.mark.parametrize("num_replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_p8_an_infinite_label_stops(num_replicas):
    model = model_of(linear, num_replicas, "stop", xla=False)
    with pytest.raises(NonFiniteError, match=r"gradient of last/kernel .* at step 3,"):
        fit(model, X, spoilt(Y, value=np.inf))


def test_p8_an_infinite_loss_stops_though_its_gradient_is_finite():
    model = model_of(linear, 1, "stop", xla=False, loss="mae")  # the gradient is its sign
    with pytest.raises(NonFiniteError, match=r"loss or metric .* is not finite at step 3,"):
        fit(model, X, spoilt(Y, value=np.inf))


@pytest.mark.parametrize("num_replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_p8_rollback_asks_for_the_last_checkpoint(num_replicas):
    model = model_of(hiding, num_replicas, "rollback", xla=False)
    with pytest.raises(RollBackError, match="at step 3,"):
        fit(model, spoilt(X), Y)


@pytest.mark.parametrize(
    ("num_replicas", "xla", "policy"),
    [
        (1, False, "stop"),
        pytest.param(1, True, "stop", marks=pytest.mark.slow),
        pytest.param(1, False, "skip", marks=pytest.mark.slow),
        (2, False, "skip"),
        pytest.param(2, True, "skip", marks=pytest.mark.slow),
        (1, False, "rollback"),
    ],
)
def test_p8_weights_that_overflow_end_training_under_every_policy(num_replicas, xla, policy):
    # The gradient is about 100, and finite; the product is not.
    optimizer = keras.optimizers.SGD(3e38)
    model = model_of(linear, num_replicas, policy, optimizer=optimizer, xla=xla)
    expected = RollBackError if policy == "rollback" else NonFiniteError
    with pytest.raises(expected) as error:
        fit(model, 10 * X, 10 * Y)
    assert str(error.value) == (
        "the weights last/kernel (layer last, Dense) are not finite after step 1; lower the "
        "learning rate, or restore weights that are finite"
    )


class Statistics(layers.Layer):
    """Keeps a mean that nothing of the output depends on."""

    def build(self, shape):
        self.mean = self.add_weight(shape=shape[1:], trainable=False, name="mean")
        self.smallest = self.add_weight(
            initializer=keras.initializers.Constant(np.inf), shape=(), trainable=False, name="min"
        )

    def call(self, x):
        self.mean.assign(0.5 * self.mean + 0.5 * tf.reduce_mean(1 / x[:, :1] * x, axis=0))
        return x


def counting():
    keras.utils.set_random_seed(0)
    parts = [Statistics(name="kept"), layers.Dense(1, name="last")]
    return keras.Sequential([keras.Input((6,)), *parts])


@ONE_WITHOUT_XLA
def test_p8_a_statistic_alone_is_left_as_it_was(num_replicas, xla):
    x = spoilt(X, value=0.0)  # 1 / 0, which only the layer's mean sees
    model = model_of(counting, num_replicas, "stop", xla=xla)
    put_back, mean = begins_at(model), model.layers[0].mean
    with pytest.raises(NonFiniteError, match=r"the value of kept/mean \(layer kept, Statistics\)"):
        fit(model, x, Y)
    assert int(model.optimizer.iterations.numpy()) == 3 + AHEAD  # the gradients were finite
    ours = [each.numpy() for each in mean._value.values]
    put_back()
    others = slice((BAD + AHEAD) * BATCH)
    fit(model, without_bad(X)[others], without_bad(Y)[others])
    for mine, wanted in zip(ours, mean._value.values, strict=True):
        np.testing.assert_array_equal(mine, wanted.numpy())


@pytest.fixture
def float16():
    """Models are made in mixed_float16."""
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


@pytest.mark.usefixtures("float16")
@pytest.mark.parametrize(
    ("num_replicas", "xla"), [pytest.param(1, True, marks=pytest.mark.slow), (2, False)]
)
def test_p8_an_overflow_of_float16_is_no_fault(num_replicas, xla):
    step = {"loss_scale_initial": 1024.0}
    model = model_of(with_statistics, num_replicas, "stop", xla=xla, step=step)
    history = fit(model, spoilt(X, row=LAST, value=1e6), Y)  # in float16, infinity
    assert history["skipped_steps"] == [1]
    assert history["loss_scale"] == [512.0]
    assert np.isfinite(history["loss"]).all()
    assert is_finite(model)


@pytest.mark.usefixtures("float16")
def test_p8_statistics_of_a_step_that_overflows_by_its_scale_alone_are_kept():
    step = {"loss_scale_initial": 2.0**60}
    model = model_of(with_statistics, 1, "stop", xla=False, step=step)
    norm, kernel = model.get_layer("norm"), model.get_layer("first").kernel
    before = kernel.numpy()
    history = fit(model, X[:BATCH], Y[:BATCH])
    assert history["skipped_steps"] == [1]
    assert history["loss"][0] > 0
    np.testing.assert_array_equal(kernel.numpy(), before)
    assert np.abs(norm.moving_mean.numpy()).min() > 0


@pytest.mark.usefixtures("float16")
def test_p8_with_a_fixed_loss_scale_an_overflow_is_a_fault():
    model = model_of(linear, 1, "stop", xla=False, step={"loss_scale": 64.0})
    with pytest.raises(NonFiniteError, match=r"last/kernel .* at step 3,.*let last compute"):
        fit(model, spoilt(X, value=60000.0), Y)


def test_p8_a_batch_by_hand_stops_too():
    model = model_of(hiding, 1, "stop", xla=False)
    model.train_on_batch(X, Y)
    with pytest.raises(NonFiniteError, match="at step 2,"):
        model.train_on_batch(spoilt(X), Y)


def test_p8_it_is_said_where_nothing_is_watched(caplog):
    model = model_of(hiding, 1, "stop", xla=False)
    model.compile("sgd", "mse", jit_compile=False)  # not by `run.compile`
    fit(model, spoilt(X), Y)
    assert "this is stock Keras's step, which applies NaN" in caplog.text


def test_p8_skip_warns_once_an_epoch_and_counts(caplog):
    model = model_of(hiding, 1, xla=False)
    x = spoilt(X)
    x[0] = np.nan
    with caplog.at_level(logging.WARNING, "tfaccel"):
        fit(model, x, Y, epochs=2)
    said = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert [each.split("; ")[0] for each in said] == [
        "step: the gradient of first/kernel (layer first, Dense) is not finite at step 1, and was "
        "not applied",
        "step: 2 steps of epoch 1 were not finite and were skipped",
        "step: the gradient of first/kernel (layer first, Dense) is not finite at step 6, and was "
        "not applied",
        "step: 2 steps of epoch 2 were not finite and were skipped",
    ]


def test_p8_the_step_of_a_loader_is_its_place_in_the_data(setup, folder):
    run = setup(xla=False)
    with run.scope():
        model = keras.Sequential(
            [keras.Input((12, 10, 1)), layers.Flatten(), layers.Dense(1, name="last")]
        )
    run.compile(model, keras.optimizers.SGD(1e30), "mse")
    loader = run.image_folder(folder, image_size=(12, 10), channels=1, global_batch_size=8)
    loader.start_at(epoch=3, step=2)
    with pytest.raises(NonFiniteError) as error:
        model.fit(loader, initial_epoch=3, epochs=4, verbose=0)
    step = int(str(error.value).split(" step ")[1].split(",")[0].split(";")[0])
    assert 3 * loader.num_batches + 2 < step <= loader.position


def test_p8_a_step_of_the_users_own_may_update_in_a_branch_of_its_own():
    class Branching(keras.Model):
        """Updates where the loss is above 0, and logs what no metric is."""

        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(1, name="last")

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                value = self.compute_loss(x, y, self(x, training=True))
            grads = tape.gradient(value, self.trainable_weights)
            self._loss_tracker.update_state(value)

            def update():
                self.optimizer.apply(grads, self.trainable_weights)
                return 1

            tf.cond(value > 0, update, lambda: 0)
            return {"loss": self._loss_tracker.result(), "twice": 2 * value}

    model = model_of(Branching, 1, xla=False, metrics=None)
    history = fit(model, spoilt(X, row=0, value=1e30), Y)
    assert list(history) == ["loss", "twice"]
    assert np.isfinite([each[0] for each in history.values()]).all()
    assert all(np.isfinite(each).all() for each in model.get_weights())


WORKER = """
import keras, numpy as np, tfaccel
from keras import layers

run = tfaccel.setup(gpu_ids=(), xla=True)
with run.scope():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(4, name="first"),
                              layers.Activation("relu6"), layers.Dense(1)])
run.compile(model, "adam", "mse")
x = np.ones((40, 6), "float32")
x[23] = np.nan  # the last row of step 3: worker 1's
loader = run.examples(list(zip(x, np.ones((40, 1), "float32"))), global_batch_size=8)
try:
    model.fit(loader, verbose=0)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.slow
def test_p8_workers_stop_alike_where_the_rows_of_one_are_not_finite():
    first, second = in_workers(WORKER, 2)
    assert first == second
    assert "gradient of first/kernel" in first
    assert "at step 3," in first
