"""What people compile and fit, on two replicas, against stock Keras on one device, no strategy.

The rows are the same and in the same order: 10 rows in batches of 5, of which one replica has 3 and
the other 2. float32 sums in another order differ by roundings: RTOL allows for some steps of them.
"""

import functools
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled, strategy_of
from keras import layers
from tensorflow.python.distribute import values, values_util

from tfaccel import UserError
from tfaccel.config import StepConfig
from tfaccel.keras_internals.model_view import is_synchronized
from tfaccel.keras_internals.variables import components
from tfaccel.step import compile_model, finite, replica_steps

RTOL = 1e-4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(10, 3)).astype("float32")
Y = (X.sum(1) * 10).astype(int) % 3
FIT = {"batch_size": 5, "shuffle": False, "verbose": 0}


def loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def small():
    return keras.Sequential(
        [keras.Input((3,)), layers.Dense(4, activation="tanh"), layers.Dense(3, dtype="float32")]
    )


def acc():
    return ["accuracy"]


def seeded(make):
    keras.utils.set_random_seed(0)
    return make()


def both(make, num_replicas=2, *, optimizer=lambda: keras.optimizers.SGD(0.1), **settings):
    """The model on replicas, and by stock Keras on one device; compile arguments are made."""
    xla, config = settings.pop("xla", False), settings.pop("config", None)
    made = {"loss": loss, **settings}
    own = {name: each() for name, each in made.items()}
    seeds = functools.partial(seeded, make)
    ours = compiled(seeds, num_replicas, optimizer=optimizer, xla=xla, config=config, **own)
    theirs = seeded(make)
    # Eagerly, as a trace takes longer than the few steps that there are.
    theirs.compile(optimizer(), **{name: each() for name, each in made.items()}, run_eagerly=True)
    return ours, theirs


def assert_fits_alike(pair, x=X, y=Y, *, rtol=RTOL, **fit):
    """Fits both; compares the history and the weights."""
    histories = [each.fit(x, y, **{**FIT, "epochs": 2, **fit}).history for each in pair]
    assert list(histories[0]) == list(histories[1])
    assert_same_logs(*histories, rtol=rtol)
    assert_same_weights(*pair, rtol=rtol)


def assert_same_logs(ours, theirs, *, rtol=RTOL):
    assert ours.keys() == theirs.keys()
    for name in theirs:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=rtol, err_msg=name)


def assert_steps_alike(pair, x=X, y=Y, *, passes=1, rtol=RTOL):
    """Trains both on the same batches by hand, for a third of a fit; compares logs and weights."""
    for start in [*range(0, len(x), 5)] * passes:
        rows = slice(start, start + 5)
        logs = [each.train_on_batch(x[rows], y[rows], return_dict=True) for each in pair]
        assert_same_logs(*logs, rtol=rtol)
    assert_same_weights(*pair, rtol=rtol)


def assert_same_weights(ours, theirs, *, rtol=RTOL):
    for mine, wanted in zip(ours.weights, theirs.weights, strict=True):
        np.testing.assert_allclose(
            mine.numpy(), wanted.numpy(), rtol=rtol, atol=rtol, err_msg=mine.path
        )


# Models.


def two_towers():
    inputs = {"left": keras.Input((3,), name="left"), "right": keras.Input((2,), name="right")}
    joined = layers.Concatenate()([layers.Dense(2)(inputs["left"]), inputs["right"]])
    return keras.Model(inputs, {"a": layers.Dense(3)(joined), "b": layers.Dense(1)(joined)})


def test_several_inputs_and_outputs_in_dicts():
    pair = both(
        two_towers,
        loss=lambda: {"a": loss(), "b": "mse"},
        loss_weights=lambda: {"a": 1.0, "b": 0.5},
        metrics=lambda: {"a": ["accuracy"], "b": ["mae"]},
    )
    x, y = {"left": X[:5], "right": X[:5, :2]}, {"a": Y[:5], "b": X[:5, :1]}
    assert_same_logs(*(each.train_on_batch(x, y, return_dict=True) for each in pair))
    assert_same_weights(*pair)
    predicted = [each.predict_on_batch(x) for each in pair]
    np.testing.assert_allclose(predicted[0]["b"], predicted[1]["b"], rtol=RTOL, atol=RTOL)


class Subclassed(keras.Model):
    """Built at its first batch."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(4, activation="relu")
        self.last = layers.Dense(3)

    def call(self, x):
        return self.last(self.hidden(x))


class Above(keras.metrics.Metric):
    """How many outputs are above a half, in all."""

    def __init__(self):
        super().__init__(name="above")
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(keras.ops.sum(keras.ops.cast(y_pred > 0.5, "float32")))

    def result(self):
        return self.total


class FromThree(Above):
    """How many rows, from 3 on.

    Its result is a variable: of an epoch, stock Keras shows what validation has left in it. So both
    have to be of as many rows.
    """

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(keras.ops.cast(keras.ops.shape(y_pred)[0], "float32"))

    def reset_state(self):
        self.total.assign(3.0)


class FromFirstEpoch(keras.callbacks.Callback):
    """Notes what the strategy is asked once the first epoch has begun, for what metrics hold."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.asked, self._monkeypatch = [], monkeypatch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 0:
            self._note(values_util, "on_read_assign_cross_replica")
            self._note(values_util, "on_read_assign_add_cross_replica")
            self._note(values.SyncOnReadVariable, "_get_cross_replica")

    def _note(self, owner, name):
        original = getattr(owner, name)

        def noting(*args, **kwargs):
            self.asked.append(name)
            return original(*args, **kwargs)

        self._monkeypatch.setattr(owner, name, noting)


@functools.cache
def fitted_alike(make, xla, /):
    """Fits a model both ways and compares; returns ours, and what the strategy was asked."""
    pair = both(make, metrics=lambda: ["accuracy", FromThree()], xla=xla)
    with pytest.MonkeyPatch.context() as monkeypatch:
        asked = FromFirstEpoch(monkeypatch)
        assert_fits_alike(pair, validation_data=(X, Y), callbacks=[asked])
    return pair[0], asked.asked


@pytest.mark.parametrize(
    ("make", "xla"),
    [  # with XLA, tests/test_upstream.py shows that every row counts the same
        (small, False),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [(small, True), (Subclassed, False)]
        ),
    ],
)
def test_sequential_and_subclassed_models(make, xla):
    fitted_alike(make, xla)


@functools.cache
def stepped_in_one_function():
    """Trains and tests both ways; returns the graphs of ours. Needs `in_one_function`."""
    graphs, split_step = [], replica_steps.split_step

    def kept(*arguments, **settings):
        graphs.append(tf.compat.v1.get_default_graph())
        return split_step(*arguments, **settings)

    adamw = lambda: keras.optimizers.AdamW(global_clipnorm=0.1)  # noqa: E731
    pair = both(small, optimizer=adamw, xla=True, metrics=acc)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(replica_steps, "split_step", kept)
        assert_steps_alike(pair)
        tested = [each.test_on_batch(X[:5], Y[:5]) for each in pair]
    np.testing.assert_allclose(*tested, rtol=RTOL)
    return graphs


def test_the_whole_step_in_one_function(in_one_function):
    stepped_in_one_function()


def test_no_replica_waits_for_the_end_of_another_ones_step(in_one_function):
    """Which would be an edge from one device to another: the host, too, would wait for its end."""
    graphs = stepped_in_one_function()
    assert len(graphs) == 2  # a step of training, and one of a test
    for graph in graphs:
        steps = [each for each in graph.get_operations() if "PartitionedCall" in each.type]
        assert len({each.device for each in steps}) == 2
        for op in graph.get_operations():
            before = {*op.control_inputs, *(each.op for each in op.inputs)}
            assert {each.device for each in before} <= {op.device, ""}, op.name


@pytest.mark.parametrize("synchronized", [False, True])
def test_the_log_says_how_it_trains(in_one_function, caplog, synchronized):
    def make():
        batch_norm = layers.BatchNormalization(synchronized=synchronized)
        return keras.Sequential([keras.Input((3,)), batch_norm, layers.Dense(3)])

    with caplog.at_level("INFO", logger="tfaccel"):
        compiled(make, 2, optimizer="sgd", loss=loss(), xla=True)
    assert "step: one function with the sum over 2 replicas, with XLA" in caplog.text


def embedding():
    return keras.Sequential(
        [keras.Input((3,), dtype="int32"), layers.Embedding(5, 2), layers.Flatten()]
    )


def test_embedding_whose_gradients_are_indexed_slices():
    # Some rows of it are looked up by one replica alone, some by both, some by none.
    x = np.random.default_rng(0).integers(0, 4, (10, 3))
    assert_steps_alike(both(embedding, loss=lambda: "mse"), x, np.repeat(X, 2, axis=1))


@pytest.mark.parametrize(
    ("num_replicas", "xla"),
    [(1, False), (1, True), (2, False), pytest.param(2, True, marks=pytest.mark.slow)],
)
def test_embedding_with_adam_trains_as_a_dense_layer_on_one_hot_rows(num_replicas, xla):
    """Although an id comes twice in a batch: stock Keras's Adam squares each slice by itself."""
    adam = lambda: keras.optimizers.Adam(0.1)  # noqa: E731
    x, y = np.array([[0, 1, 1], [1, 2, 2]]), np.arange(12.0).reshape(2, 6)
    ours = compiled(embedding, num_replicas, optimizer=adam, xla=xla, loss="mse")
    theirs = keras.Sequential(
        [keras.Input((3, 5)), layers.Dense(2, use_bias=False), layers.Flatten()]
    )
    theirs.set_weights(ours.get_weights())
    theirs.compile(adam(), "mse", run_eagerly=True)
    for _ in range(3):
        logs = ours.train_on_batch(x, y, return_dict=True)
        wanted = theirs.train_on_batch(np.eye(5, dtype="float32")[x], y, return_dict=True)
        assert_same_logs(logs, wanted)
    assert_same_weights(ours, theirs)


def test_dropout_draws_another_mask_on_each_replica():
    drawn = []

    class Recording(layers.Layer):
        def call(self, x):
            tf.numpy_function(lambda mask: drawn.append(mask), [x], [])
            return x

    def make():
        return keras.Sequential(
            [keras.Input((8,)), layers.Dropout(0.5, seed=3), Recording(), layers.Dense(1)]
        )

    model, reference = both(make, loss=lambda: "mse")
    x = np.ones((4, 8), "float32")
    for each in (model, reference):
        for _ in range(3):
            each.train_on_batch(x, x[:, :1])
    masks = [each for each in drawn if len(each) == 2]
    assert len(masks) == 6
    assert len({each.tobytes() for each in masks}) == 6  # by replica and by step
    (state,) = [each for each in model.variables if "seed_generator_state" in each.path]
    states = [each.numpy().tolist() for each in components(state)]
    assert states[0] == states[1] == reference.layers[0].seed_generator.state.numpy().tolist()


# What is minimized and measured.


@functools.cache
def weighted():
    """Both, of which the first layer is frozen, after a step with each kind of weights; the logs.

    And what the first layer of ours was before.
    """

    def make():
        model = small()
        model.layers[0].trainable = False
        return model

    pair = both(make, weighted_metrics=acc)
    before = pair[0].layers[0].kernel.numpy()
    by_sample = np.linspace(0.5, 2, 5, dtype=np.float32)
    kinds = ({"sample_weight": by_sample}, {"class_weight": {0: 2.0, 1: 0.5, 2: 1.0}})
    logs = [[each.train_on_batch(X[:5], Y[:5], **kind) for each in pair] for kind in kinds]
    return pair, logs, before


def test_weights_of_samples_and_classes():
    pair, logs, _ = weighted()
    for each in logs:
        np.testing.assert_allclose(*each, rtol=RTOL)
    assert_same_weights(*pair)


@pytest.mark.parametrize(
    ("xla", "tested"), [(False, False), pytest.param(True, True, marks=pytest.mark.slow)]
)
def test_metrics_of_ones_own_and_made_outside_the_scope(xla, tested):
    def make():
        last = layers.Dense(1, activation="sigmoid")
        return keras.Sequential([keras.Input((3,)), last])

    def metrics():
        return [keras.metrics.AUC(name="auc"), keras.metrics.F1Score(threshold=0.5), Above()]

    pair = both(make, loss=lambda: "binary_crossentropy", metrics=metrics, xla=xla)
    y = (Y[:, np.newaxis] > 0).astype("float32")
    assert_steps_alike(pair, y=y)
    if tested:
        assert_same_logs(*(each.test_on_batch(X[:5], y[:5], return_dict=True) for each in pair))


def test_an_epoch_asks_the_strategy_for_no_metric():
    """Which would share out and add each value by itself: milliseconds between two epochs."""
    _, asked = fitted_alike(small, False)
    assert asked == []


def test_metrics_are_reset_to_what_their_sum_is_on_one_device():
    ours, _ = fitted_alike(small, False)
    for variable in ours.metrics_variables:
        for each in components(variable):
            each.assign(7.0)
    ours.reset_metrics()
    for variable in ours.metrics_variables:
        found = [each.numpy() for each in components(variable)]
        assert found == ([3.0, 0.0] if variable.path.startswith("above") else [0.0, 0.0])


class OwnStep(keras.Model):
    """Takes a mean of its own for its loss, and a metric of its own."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)
        self.largest = keras.metrics.Mean(name="largest")

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            errors = tf.nn.sparse_softmax_cross_entropy_with_logits(y, outputs)
            value = tf.reduce_mean(errors)
        grads = tape.gradient(value, self.trainable_weights)
        self.optimizer.apply_gradients(zip(grads, self.trainable_weights, strict=True))
        self.largest.update_state(tf.reduce_max(outputs, axis=1))
        return {"largest": self.largest.result(), "raw": value}

    @property
    def metrics(self):
        return [self.largest]


@pytest.mark.parametrize("xla", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_train_step_of_ones_own(xla):
    assert_steps_alike(both(OwnStep, xla=xla))


# Optimizers.


def test_adamw_by_a_schedule_clipped_and_ema_written_over_the_weights():
    def optimizer():
        return keras.optimizers.AdamW(
            keras.optimizers.schedules.CosineDecay(0.05, decay_steps=5),
            weight_decay=0.1,
            clipvalue=0.05,
            use_ema=True,
            ema_momentum=0.5,
            ema_overwrite_frequency=2,
        )

    assert_steps_alike(both(small, optimizer=optimizer), passes=2, rtol=1e-3)


def test_several_optimizers_in_one():
    def optimizer():
        each = {".*kernel": keras.optimizers.Adam(0.01)}
        return keras.optimizers.MultiOptimizer(
            keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1), each)
        )

    assert_steps_alike(both(small, optimizer=optimizer), rtol=1e-3)


def test_frozen_layers_stay():
    pair, _, before = weighted()
    np.testing.assert_array_equal(pair[0].layers[0].kernel.numpy(), before)
    assert_same_weights(*pair)


@pytest.mark.parametrize(
    ("dtype", "rtol"),
    [("float16", 1e-2), ("bfloat16", 5e-2)],  # a rounding is 5e-4, and 4e-3
)
def test_gradients_may_be_summed_in_half_precision(dtype, rtol):
    pair = both(small, config=StepConfig(allreduce_dtype=dtype))
    assert_steps_alike(pair, rtol=rtol)
    with pytest.raises(AssertionError):
        assert_same_weights(*pair, rtol=1e-6)  # which float32 keeps to


@pytest.fixture
def float16():
    """Models are made in mixed_float16."""
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize("xla", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_accumulation_clips_and_unscales_the_sum(float16, xla):
    clipped = lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.1)  # noqa: E731
    config = StepConfig(accumulation_steps=2)
    ours, theirs = both(small, optimizer=clipped, config=config, xla=xla)
    for each in (ours, theirs):
        each.train_on_batch(X[:5], Y[:5])
    assert ours.train_function.nonfinite.tolist() == [finite.FINE]
    assert_same_weights(ours, theirs, rtol=1e-2)  # a rounding of float16 is 1e-3


# The loss scale.


def one_weight():
    dense = layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    return keras.Sequential([keras.Input((1,)), dense])


def scaled(config, num_replicas=2, *, make=one_weight, loss="mse", **settings):
    """A model of one weight, 0 at first."""
    settings = {"optimizer": keras.optimizers.SGD(0.01), "xla": False, **settings}
    return compiled(make, num_replicas, config=config, loss=loss, **settings)


def sum_of_outputs(_, values):
    return tf.cast(values[:, 0], tf.float32)


def fit_rows(model, x, **settings):
    x = np.asarray(x, np.float32).reshape(-1, 1)
    return model.fit(x, x, **{**FIT, "batch_size": 2, **settings}).history


def test_a_static_loss_scale_stays(float16):
    model = scaled(StepConfig(loss_scale=128), loss=sum_of_outputs)
    history = fit_rows(model, [1, 3, 1, 3])
    assert list(history) == ["loss"]
    assert model.optimizer.loss_scale_factor == 128
    np.testing.assert_allclose(model.get_weights()[0], [[-0.04]], rtol=1e-3)


def test_the_loss_scale_follows_the_layers_of_a_model_that_was_saved(tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        one_weight().save(tmp_path / "one.keras")
        trained = scaled(StepConfig(), 1)
        expected = fit_rows(trained, [1, 3, 1, 3])["loss_scale"]
    finally:
        keras.config.set_dtype_policy("float32")
    model = scaled(StepConfig(), 1, make=lambda: keras.saving.load_model(tmp_path / "one.keras"))
    assert fit_rows(model, [1, 3, 1, 3])["loss_scale"] == expected
    assert_same_weights(model, trained, rtol=0)


DYNAMIC = StepConfig(loss_scale_initial=16.0, loss_scale_growth_steps=2)


@pytest.mark.slow  # on two replicas a saved model's does, below
def test_a_dynamic_loss_scale_starts_and_grows_as_asked(float16):
    model = scaled(DYNAMIC, num_replicas=1)
    history = fit_rows(model, np.ones(2), epochs=5)
    assert history["loss_scale"] == [16, 32, 32, 64, 64]


def test_a_saved_model_goes_on_with_its_loss_scale(float16, tmp_path):
    model = scaled(DYNAMIC)
    ones, twos = np.ones((2, 1), "float32"), np.full((2, 1), 2.0, "float32")
    scales = []
    for _ in range(5):
        model.train_on_batch(ones, ones)
        scales.append(model.optimizer.dynamic_scale.numpy())
    assert scales == [16, 32, 32, 64, 64]
    model.save(tmp_path / "model.keras")
    with strategy_of(2).scope():
        saved = keras.models.load_model(tmp_path / "model.keras")
    loaded = scaled(DYNAMIC, make=lambda: saved, optimizer=saved.optimizer)
    assert loaded.optimizer.dynamic_scale.numpy() == 64
    losses = [each.train_on_batch(twos, twos) for each in (model, loaded)]
    assert losses[0] == losses[1]
    for each in (model, loaded):  # one of the two good steps was before it was saved
        assert each.optimizer.dynamic_scale.numpy() == 128
    assert_same_weights(loaded, model, rtol=0)


# Beside fit.


def test_predict_keeps_rows_in_order():
    model = compiled(lambda: seeded(small), 3, optimizer="sgd", loss="mse", xla=False)
    # In batches of 4 rows and of one: of some batches, some replicas have no row.
    predicted = model.predict(X[:5], batch_size=4, verbose=0)
    np.testing.assert_allclose(predicted, model(X[:5]), rtol=RTOL, atol=RTOL)


@functools.cache
def by_hand():
    """What is returned of single batches, by name; of each ours, and stock Keras's."""
    scaled = lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))  # noqa: E731
    pair = both(small, optimizer=scaled, metrics=acc)
    return {
        "train 1": [each.train_on_batch(X[:1], Y[:1]) for each in pair],
        "train 1 more": [each.train_on_batch(X[1:2], Y[1:2], return_dict=True) for each in pair],
        "test 1": [each.test_on_batch(X[:1], Y[:1]) for each in pair],
        "predict 5": [each.predict_on_batch(X[:5]) for each in pair],
        "weights": [each.get_weights() for each in pair],
    }


def test_single_batches_by_hand():
    returned = by_hand()
    for name in ("train 1", "test 1"):
        np.testing.assert_allclose(*returned[name], rtol=RTOL, err_msg=name)
    for ours, theirs in (returned["predict 5"], *zip(*returned["weights"], strict=True)):
        np.testing.assert_allclose(ours, theirs, rtol=RTOL, atol=RTOL)


def test_train_on_batch_returns_what_keras_does():
    returned = by_hand()
    np.testing.assert_allclose(*returned["train 1"], rtol=1e-3)
    ours, theirs = returned["train 1 more"]
    assert list(ours) == ["accuracy", "loss"]
    assert_same_logs(ours, theirs, rtol=1e-3)


@pytest.mark.usefixtures("read_on_devices")
def test_a_dataset_and_a_generator():
    def make():
        inputs = keras.Input((3,), name="x")
        return keras.Model({"x": inputs}, layers.Dense(3)(inputs))

    rows = {"x": X}, Y, np.linspace(0.5, 2, 10, dtype=np.float32)

    dataset = tf.data.Dataset.from_tensor_slices(rows).batch(5)

    def generator():
        yield from dataset.as_numpy_iterator()

    pair = both(make)
    for data in (generator, lambda: dataset):
        histories = [each.fit(data(), epochs=1, verbose=0).history["loss"] for each in pair]
        np.testing.assert_allclose(*histories, rtol=RTOL)
        assert_same_weights(*pair)


# What is refused, in one sentence.


def compile_two(make=small, **settings):
    return compiled(make, 2, **{"optimizer": "sgd", "loss": loss(), "xla": False, **settings})


def test_each_replica_gets_its_own_of_a_layer_made_outside_the_scope(caplog):
    outside = layers.Dense(3, name="outside")
    outside.build((None, 4))
    before = outside.get_weights()
    with caplog.at_level("INFO", "tfaccel"):
        model = compile_two(lambda: keras.Sequential([keras.Input((4,)), outside]))
    assert "2 variables were made outside the scope, for example outside/kernel" in caplog.text
    np.testing.assert_array_equal(outside.kernel.numpy(), before[0])
    assert all(len(components(each)) == 2 for each in model.variables)


class AsInTheGuide(keras.Model):
    """The `train_step` of Keras's guide, whose logs have those of the metrics in a dict within."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            value = self.compute_loss(y=y, y_pred=outputs)
        grads = tape.gradient(value, self.trainable_weights)
        self.optimizer.apply_gradients(zip(grads, self.trainable_weights, strict=True))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(value)
            else:
                metric.update_state(y, outputs)
        return {each.name: each.result() for each in self.metrics}


def test_logs_within_logs():
    ours, theirs = both(AsInTheGuide, metrics=acc)
    for rows in (slice(4), slice(4, 8)):
        # As many rows on each replica: that loss is a mean of means.
        logs = [each.train_on_batch(X[rows], Y[rows], return_dict=True) for each in (ours, theirs)]
        assert logs[0].keys() == logs[1].keys() == {"accuracy", "loss"}
        for name in logs[1]:
            np.testing.assert_allclose(logs[0][name], logs[1][name], rtol=RTOL)
    assert_same_weights(ours, theirs)


def test_callbacks_read_numbers_of_variables():
    model = compile_two()
    assert float(model.optimizer.learning_rate) == pytest.approx(0.01)
    assert int(model.optimizer.iterations) == 0


class TwoOptimizers(OwnStep):
    """A second optimizer beside the compiled one, which is no attribute of the model."""

    def __init__(self):
        super().__init__()
        self.held = types.SimpleNamespace(other=keras.optimizers.Adam(name="other"))

    def train_step(self, data):
        logs = super().train_step(data)
        self.held.other.apply_gradients(
            [(tf.ones_like(each), each) for each in self.trainable_weights]
        )
        return logs


class TwoUpdates(OwnStep):
    """Applies gradients twice."""

    def train_step(self, data):
        super().train_step(data)
        return super().train_step(data)


def test_an_optimizer_that_the_model_does_not_have_is_refused():
    model = compile_two(TwoOptimizers)
    words = "train_step uses the optimizer other, .* attribute of the model"
    with pytest.raises(UserError, match=words) as error:
        model.fit(X, Y, **FIT)
    assert "\n" not in str(error.value)
    # What stood for Keras's own while the step was traced is gone.
    assert "apply" not in vars(model.optimizer)
    assert not tf.distribute.has_strategy()


# What a reader found.


class Counting(layers.Layer):
    """Counts rows, and says that there were some."""

    def build(self, _):
        settings = {"shape": (), "trainable": False, "initializer": "zeros"}
        self.rows = self.add_weight(**settings, aggregation="sum", name="rows")
        self.seen = self.add_weight(**settings, dtype="bool", name="seen")

    def call(self, x):
        self.rows.assign_add(keras.ops.cast(keras.ops.shape(x)[0], "float32"))
        self.seen.assign(True)
        return x


@pytest.mark.parametrize("pads", [pytest.param(False, marks=pytest.mark.slow), True])
def test_what_a_layer_counts_is_added(pads):
    def make():
        return keras.Sequential([keras.Input((3,)), Counting(), layers.Dense(3)])

    ours, _ = both(make, config=StepConfig(zero_weight_is_padding=pads))
    for rows in (3, 1):  # the one is one replica's
        ours.train_on_batch(X[:rows], Y[:rows], sample_weight=np.ones(rows, "float32"))
    assert float(ours.layers[0].rows.numpy()) == 4
    assert bool(ours.layers[0].seen.numpy())


@pytest.fixture(scope="module")
def unmoved():
    """A model on two replicas whose weights no step changes, for callbacks."""
    model = compile_two(optimizer=keras.optimizers.SGD(0.0))
    model.build((None, 3))
    return model


@pytest.mark.slow  # on one replica it does by default, in test_ahead.py
def test_a_callback_list_serves_twice(unmoved):
    model = unmoved
    callbacks = keras.callbacks.CallbackList([], add_history=True, model=model)
    for _ in range(2):
        model.fit(X[:5], Y[:5], callbacks=callbacks, **FIT)
    names = [type(each).__name__ for each in callbacks.callbacks]
    assert sorted(names) == sorted(set(names))


def test_weights_that_a_callback_loads_are_made_equal(unmoved):
    model = unmoved

    class Load(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            first, second = components(model.trainable_variables[0])
            first.assign(tf.ones_like(first))
            second.assign(tf.zeros_like(second))

    model.fit(X[:5], Y[:5], callbacks=[Load()], **FIT)
    for each in components(model.trainable_variables[0]):
        np.testing.assert_array_equal(each.numpy(), np.ones((3, 4)))


def test_a_model_without_an_optimizer_is_tested():
    ours, theirs = both(small, optimizer=lambda: None)
    np.testing.assert_allclose(
        *(each.test_on_batch(X[:5], Y[:5]) for each in (ours, theirs)), rtol=RTOL
    )


class WithoutOptimizer(OwnStep):
    def train_step(self, data):
        x, y = data[:2]
        return {"loss": tf.reduce_mean(self(x) - tf.cast(y, tf.float32)[:, tf.newaxis])}


def test_a_model_without_an_optimizer_may_have_a_train_step():
    model = compiled(WithoutOptimizer, 1, optimizer=None, loss=loss(), xla=False)
    assert np.isfinite(model.fit(X, Y, **FIT).history["loss"]).all()


def test_skipped_steps_are_those_that_overflowed():
    scaled = lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))  # noqa: E731
    for make in (TwoUpdates, WithoutOptimizer):
        model = compiled(make, 1, optimizer=scaled, loss=loss(), xla=False)
        assert model.fit(X, Y, **FIT).history["skipped_steps"] == [0]


def test_batch_norm_is_synchronized_where_there_are_several_and_for_as_long_as_asked():
    strategy = strategy_of(2)
    with strategy.scope():
        model = small_with_norm()
    asked = []
    for sync_batchnorm in (True, False):
        config = StepConfig(sync_batchnorm=sync_batchnorm)
        compile_model(model, strategy, config, xla=False, optimizer="sgd", loss="mse")
        asked.append(is_synchronized(model))
    assert asked == [True, False]
    alone = compiled(small_with_norm, 1, optimizer="sgd", config=StepConfig(sync_batchnorm=True))
    assert not is_synchronized(alone)


def small_with_norm():
    return keras.Sequential([keras.Input((3,)), layers.BatchNormalization(), layers.Dense(3)])


class Noise(layers.Layer):
    def call(self, x):
        return x + keras.random.normal((3,))


@pytest.mark.parametrize("xla", [pytest.param(False, marks=pytest.mark.slow), True])
def test_what_replicas_cannot_share_is_refused(xla):
    make = lambda: keras.Sequential([keras.Input((3,)), Noise()])  # noqa: E731
    model = compiled(make, 2, optimizer="sgd", loss="mse", xla=xla)
    with pytest.raises(UserError, match="which is not the model's"):
        model.fit(X, X, **FIT)


def mean_square(y, predicted):
    return keras.ops.mean(keras.ops.square(y - predicted))


def largest(y, predicted):
    return keras.ops.max(keras.ops.abs(y - predicted))


@pytest.mark.parametrize(
    ("num_replicas", "parts"),
    [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow)],
)
def test_what_is_made_of_all_rows_together_is_that_of_one_device(num_replicas, parts):
    config = StepConfig(accumulation_steps=parts)
    ours, theirs = both(
        small, num_replicas, loss=lambda: largest, metrics=lambda: [mean_square], config=config
    )
    logs = [each.train_on_batch(X[:5], X[:5], return_dict=True) for each in (ours, theirs)]
    assert_same_logs(*logs)
    assert_same_weights(ours, theirs)
