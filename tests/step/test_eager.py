"""Steps that run as Python: N replicas are equal to stock Keras on one device."""

import functools
import json
import logging
import traceback

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled, in_workers
from keras import layers

from tfaccel.common.errors import UserError
from tfaccel.config import StepConfig
from tfaccel.keras_internals.variables import components

SLOW = pytest.mark.slow
ROWS = 13  # batches of 6, 6 and 1: on 3 replicas the last one has one row for the first alone
X = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 3, ROWS).astype(np.int32)
WEIGHT = np.random.default_rng(2).uniform(0.5, 2, ROWS).astype(np.float32)
FIT = {"batch_size": 6, "epochs": 2, "shuffle": False, "verbose": 0}
REPLICAS = (1, 2, 3)
FEW = [pytest.param(1, marks=SLOW), 2, pytest.param(3, marks=SLOW)]  # of which one is not slow


def classifier(*more):
    keras.utils.set_random_seed(3)
    return keras.Sequential([keras.Input((4,)), layers.Dense(5, "tanh"), *more, layers.Dense(3)])


def with_norm():
    return classifier(layers.BatchNormalization(momentum=0.9))


def arguments():
    return {
        "optimizer": keras.optimizers.AdamW(0.05, global_clipnorm=0.5),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": ["accuracy"],
        "weighted_metrics": [keras.metrics.SparseTopKCategoricalAccuracy(2, name="top")],
    }


def stock(make=classifier, **more):
    model = make()
    model.compile(**arguments() | more, run_eagerly=True)
    return model


def eager(num_replicas, make=classifier, *, config=None, xla=True, **more):
    return compiled(
        make, num_replicas, config=config, xla=xla, run_eagerly=True, **arguments() | more
    )


def assert_same(ours, theirs, rtol=1e-5):
    for mine, wanted in zip(ours.variables, theirs.variables, strict=True):
        mine, wanted = keras.ops.convert_to_numpy(mine), keras.ops.convert_to_numpy(wanted)
        np.testing.assert_allclose(mine, wanted, rtol=rtol, atol=1e-6)


def assert_same_logs(ours, theirs, rtol=1e-5):
    assert list(ours) == list(theirs)
    for name, values in theirs.items():
        np.testing.assert_allclose(ours[name], values, rtol=rtol, err_msg=name)


@pytest.mark.parametrize("num_replicas", FEW)
def test_every_method_is_stock_kerass(num_replicas):
    ours, theirs = eager(num_replicas), stock()
    logs = [
        each.fit(X, Y, sample_weight=WEIGHT, validation_data=(X[:7], Y[:7]), **FIT).history
        for each in (ours, theirs)
    ]
    assert_same_logs(*logs)
    test = {"sample_weight": WEIGHT, "batch_size": 6, "verbose": 0, "return_dict": True}
    assert_same_logs(*(each.evaluate(X, Y, **test) for each in (ours, theirs)))
    predicted = [each.predict(X, batch_size=6, verbose=0) for each in (ours, theirs)]
    np.testing.assert_allclose(*predicted, rtol=1e-5, atol=1e-6)
    by_batch = [
        (
            *each.train_on_batch(X[:5], Y[:5]),
            *each.test_on_batch(X[:5], Y[:5]),
            *np.ravel(each.predict_on_batch(X[:5])),
        )
        for each in (ours, theirs)
    ]
    np.testing.assert_allclose(*by_batch, rtol=1e-5, atol=1e-6)
    assert_same(ours, theirs)


OWN = {"metrics": None, "weighted_metrics": None}  # a step of one's own that updates no metrics


class Looking(keras.Model):
    """A `train_step` of its own, with a look inside as a debugger has it."""

    def __init__(self, look):
        super().__init__()
        self.inner, self.look = classifier(), look
        self.build((None, 4))

    def call(self, x):
        return self.inner(x)

    def train_step(self, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True), weight)
        self.look("loss", x, loss)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"own": loss}

    def predict_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        y = self(x)
        self.look("predicted", x, y)
        return y


@pytest.mark.parametrize("num_replicas", REPLICAS)
def test_a_step_is_plain_python_on_each_replica(num_replicas):
    seen = []

    def look(what, x, value):
        seen.append(
            (what, len(x), tf.is_tensor(x) and value.device[-5:], value.numpy().mean(dtype=float))
        )

    model = eager(num_replicas, lambda: Looking(look), **OWN)
    loss = model.train_on_batch(X[:6], Y[:6], return_dict=True)["own"]
    assert [each[:3] for each in seen] == [
        ("loss", 6 // num_replicas, f"CPU:{index}") for index in range(num_replicas)
    ]
    assert np.mean([each[3] for each in seen]) == pytest.approx(loss, rel=1e-6)
    seen.clear()
    predicted = model.predict(X[:6], batch_size=6, verbose=0)
    assert len(seen) == num_replicas
    assert np.mean([each[3] for each in seen]) == pytest.approx(predicted.mean(), rel=1e-5)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_an_error_shows_the_users_own_line(num_replicas):
    def look(what, x, value):
        if float(tf.reduce_sum(x)) != 0:
            raise ArithmeticError("my mistake")  # here it is

    model = eager(num_replicas, lambda: Looking(look), **OWN)
    with pytest.raises(ArithmeticError, match="my mistake") as error:
        model.fit(X, Y, **FIT)
    lines = [each.line for each in traceback.extract_tb(error.value.__traceback__)]
    assert 'raise ArithmeticError("my mistake")  # here it is' in lines
    assert 'self.look("loss", x, loss)' in lines
    assert not model.optimizer.iterations.numpy()
    predicted = np.array(model.inner(X))  # the variables are those of the strategy again
    assert np.isfinite(predicted).all()


def test_a_collective_on_one_replica_alone_is_explained():
    class Uneven(layers.Layer):
        def call(self, x):
            if not tf.is_symbolic_tensor(x) and x.numpy().max() < 2:
                return x
            return self.norm(x, training=True)

        def build(self, shape):
            self.norm = layers.BatchNormalization(synchronized=True)
            self.norm.build(shape)

    model = eager(2, lambda: Branching(Uneven()), **OWN)
    x = np.float32([[1, 1, 1, 1], [5, 5, 5, 5]])
    with pytest.raises(UserError, match=r"replica 0 makes the collective .* where replica 1 makes"):
        model.train_on_batch(x, Y[:2])


class Branching(keras.Model):
    def __init__(self, layer):
        super().__init__()
        self.uneven, self.dense = layer, layers.Dense(3)
        self.uneven.build((None, 4))
        self.dense.build((None, 4))
        self.built = True

    def call(self, x, training=None):
        return self.dense(self.uneven(x))


@pytest.mark.parametrize("num_replicas", [2, pytest.param(3, marks=SLOW)])
def test_synchronized_batch_norm_is_that_of_one_device(num_replicas):
    ours = eager(num_replicas, with_norm, config=StepConfig(sync_batchnorm=True))
    theirs = stock(with_norm)
    logs = [each.fit(X, Y, **FIT).history for each in (ours, theirs)]
    assert_same_logs(*logs, rtol=1e-4)  # the variance of sums is rounded otherwise
    assert_same(ours, theirs, rtol=1e-4)


def test_losses_added_by_layers_are_each_replicas_own(caplog):
    class Adds(layers.Layer):
        def call(self, x):
            self.add_loss(0.1 * tf.reduce_mean(tf.square(x)))
            return x

    make = lambda: classifier(Adds(), layers.BatchNormalization())  # noqa: E731
    ours = eager(2, make, config=StepConfig(sync_batchnorm=True))
    theirs = stock(make)
    even = {**FIT, "batch_size": 6}
    with caplog.at_level(logging.INFO, "tfaccel"):
        logs = [each.fit(X[:12], Y[:12], **even).history for each in (ours, theirs)]
    assert_same_logs(*logs, rtol=1e-4)
    assert "taken for rows" not in caplog.text


class Joins(Looking):
    """A step that joins values of a known and of an unknown number of rows, and scales by them."""

    def __init__(self):
        keras.Model.__init__(self)
        self.inner = classifier()
        self.mean = self.add_weight(name="mean", trainable=False, initializer="zeros")
        self.build((None, 4))

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            answers = self(x, training=True)
            each = keras.losses.sparse_categorical_crossentropy(y, answers, from_logits=True)
            chosen = tf.boolean_mask(each, tf.not_equal(y, (Y[-1] + 1) % 3))
            share = tf.reduce_sum(each) / tf.cast(tf.shape(x)[0], tf.float32)
            deviation = answers - tf.reduce_mean(answers, 0)
            spread = tf.sqrt(tf.reduce_mean(tf.square(deviation)) + 0.1)
            worst = tf.reduce_max(each)
            loss = 0.5 * share + 0.3 * tf.reduce_mean(chosen) + 0.2 * spread * worst / x.shape[0]
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.mean.assign(0.9 * self.mean + 0.1 * spread)
        return {"loss": loss, "own": loss, "worst": worst}


@pytest.mark.parametrize("eagerly", [True, pytest.param(False, marks=SLOW)])
@pytest.mark.parametrize("num_replicas", FEW)
def test_joined_values_are_those_of_the_plan(num_replicas, eagerly, caplog):
    settings = arguments() | {"optimizer": keras.optimizers.SGD(0.2), **OWN}
    ours = compiled(Joins, num_replicas, xla=False, run_eagerly=eagerly, **settings)
    theirs = stock(Joins, optimizer=keras.optimizers.SGD(0.2), **OWN)
    with caplog.at_level(logging.INFO, "tfaccel"):
        logs = [each.fit(X, Y, **FIT).history for each in (ours, theirs)]
    assert "taken for rows" not in caplog.text
    assert_same_logs(*logs, rtol=1e-4)
    assert_same(ours, theirs, rtol=1e-4)


@pytest.mark.parametrize("num_replicas", FEW)
def test_a_batch_in_parts_is_one_batch(num_replicas):
    ours = eager(num_replicas, config=StepConfig(accumulation_steps=2))
    theirs = stock()
    logs = [each.fit(X, Y, sample_weight=WEIGHT, **FIT).history for each in (ours, theirs)]
    assert_same_logs(*logs)
    assert_same(ours, theirs)


class Averaging(Joins):
    """A step that adds to its own variables what all rows, or none, decide; the first row may."""

    def __init__(self, *, of_first_row=0.0):
        keras.Model.__init__(self)
        self.inner, self.of_first_row = classifier(), of_first_row
        self.mean, self.steps = (
            self.add_weight(name=name, trainable=False, initializer="zeros")
            for name in ("mean", "steps")
        )
        self.build((None, 4))

    def train_step(self, data):
        logs = super().train_step(data)
        self.steps.assign_add(1.0)
        self.mean.assign_add(logs["worst"])
        if self.of_first_row:
            self.mean.assign_add(self.of_first_row * data[0][0, 0])
        return logs


@pytest.mark.parametrize("num_replicas", [1, *(pytest.param(n, marks=SLOW) for n in (2, 3))])
def test_parts_assign_once(num_replicas):
    optimizer = functools.partial(keras.optimizers.SGD, 0.2)
    config = StepConfig(accumulation_steps=2)
    ours = eager(num_replicas, Averaging, config=config, optimizer=optimizer, **OWN)
    theirs = stock(Averaging, optimizer=optimizer(), **OWN)
    logs = [each.fit(X, Y, **FIT).history for each in (ours, theirs)]
    assert_same_logs(*logs, rtol=1e-4)
    assert_same(ours, theirs, rtol=1e-4)


def test_parts_that_assign_different_values_are_refused():
    make = functools.partial(Averaging, of_first_row=1.0)
    model = eager(1, make, config=StepConfig(accumulation_steps=2), **OWN)
    with pytest.raises(UserError, match=r"differs between the parts .* accumulation_steps=1"):
        model.train_on_batch(X[:6], Y[:6])


def history_of(num_replicas, *, eagerly, config=None, make=classifier, **more):
    """What `fit` logs, and the model, of the compiled step or of the eager one."""
    model = compiled(
        make, num_replicas, config=config, xla=False, run_eagerly=eagerly, **arguments() | more
    )
    return model.fit(X, Y, **FIT).history, model


MIXED = StepConfig(label_smoothing=0.1, mixup_alpha=0.2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_replicas", "config"),
    [
        (2, MIXED),
        (1, MIXED),
        (1, StepConfig(accumulation_steps=2)),
        (3, StepConfig(accumulation_steps=3)),
        (2, StepConfig(allreduce_dtype="float16")),
    ],
)
def test_it_is_the_compiled_step(num_replicas, config):
    more = {"loss": keras.losses.CategoricalCrossentropy(from_logits=True), "metrics": []}
    more["weighted_metrics"] = []
    more = more if config.mixes_labels else {}
    histories, models = zip(
        *(
            history_of(num_replicas, eagerly=eagerly, config=config, **more)
            for eagerly in (True, False)
        ),
        strict=True,
    )
    assert_same_logs(*histories)
    assert_same(*models)


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_loss_scale_that_overflows_skips_the_step_on_every_replica(num_replicas):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        scaled = lambda: keras.optimizers.LossScaleOptimizer(  # noqa: E731
            keras.optimizers.SGD(0.1), initial_scale=2.0**17
        )
        histories = [
            history_of(num_replicas, eagerly=eagerly, optimizer=scaled(), weighted_metrics=[])[0]
            for eagerly in (True, False)
        ]
    finally:
        keras.config.set_dtype_policy("float32")
    assert sum(histories[0]["skipped_steps"]) > 0
    assert_same_logs(*histories, rtol=2e-3)  # float16


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_an_infinite_gradient_is_found(num_replicas):
    x = X.copy()
    x[7] = np.inf
    with pytest.raises(RuntimeError, match="step 2") as error:
        eager(num_replicas).fit(x, Y, **FIT)
    assert "not finite" in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_padding_is_left_out(num_replicas):
    config = StepConfig(zero_weight_is_padding=True)
    weight = np.ones(ROWS, np.float32)
    weight[9:] = 0
    ours, theirs = eager(num_replicas, config=config), stock()
    ours = ours.evaluate(X, Y, sample_weight=weight, batch_size=ROWS, verbose=0)
    theirs = theirs.evaluate(X[:9], Y[:9], batch_size=ROWS, verbose=0)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


class TwoUpdates(Looking):
    """Two optimizers; the second sees what the first has changed."""

    def __init__(self):
        super().__init__(lambda *_: None)
        self.second = keras.optimizers.SGD(0.1)

    def train_step(self, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        for optimizer in (self.optimizer, self.second):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True), weight)
            gradients = tape.gradient(loss, self.trainable_variables)
            optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"own": loss}


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", REPLICAS)
def test_two_optimizers_update_in_their_places(num_replicas):
    ours, theirs = (
        make(*count, TwoUpdates, optimizer=keras.optimizers.SGD(0.2), **OWN)
        for make, *count in ((eager, num_replicas), (stock,))
    )
    logs = [each.fit(X, Y, **FIT).history["own"] for each in (ours, theirs)]
    np.testing.assert_allclose(*logs, rtol=1e-5)
    assert_same(ours, theirs)


@pytest.mark.slow
def test_a_model_that_builds_its_layers_in_the_step():
    class Lazy(keras.Model):
        def __init__(self):
            super().__init__()
            keras.utils.set_random_seed(3)
            self.first, self.norm, self.last = (
                layers.Dense(5),
                layers.BatchNormalization(),
                layers.Dense(3),
            )

        def call(self, x, training=None):
            return self.last(self.norm(self.first(x), training=training))

    ours = eager(2, Lazy, config=StepConfig(sync_batchnorm=True))
    assert np.isfinite(ours.fit(X, Y, **FIT).history["loss"]).all()


class LazyLooking(Looking):
    """The same, whose variables do not exist before its first step."""

    def __init__(self, look):
        keras.Model.__init__(self)
        keras.utils.set_random_seed(3)
        norm = layers.BatchNormalization(momentum=0.9)
        self.all = [layers.Dense(5, "tanh"), norm, layers.Dense(3)]
        self.look = look

    def call(self, x, training=None):
        for each in self.all:
            x = each(x, training=training) if each is self.all[1] else each(x)
        return x


@pytest.mark.parametrize("synchronized", [pytest.param(False, marks=SLOW), True])
def test_a_step_of_ones_own_may_make_its_variables(synchronized):
    looks = []
    look = lambda what, x, value: looks.append(float(value.numpy()))  # noqa: E731
    config = StepConfig(sync_batchnorm=synchronized)
    model = eager(2, lambda: LazyLooking(look), config=config, **OWN)
    loss = [model.train_on_batch(X[:6], Y[:6], return_dict=True)["own"] for _ in range(3)]
    assert len(looks) == 6  # with values, each time
    np.testing.assert_allclose(np.mean(np.reshape(looks, (3, 2)), axis=1), loss, rtol=1e-5)
    assert loss[2] < loss[0]
    for variable in model.variables:
        first, second = components(variable)
        np.testing.assert_array_equal(first, second, err_msg=variable.path)


def test_it_may_be_asked_for_at_any_time_and_says_so_once(caplog):
    model = compiled(classifier, 2, xla=False, **arguments())
    with caplog.at_level(logging.INFO, "tfaccel"):
        tf.config.run_functions_eagerly(True)
        try:
            history = model.fit(X, Y, **FIT).history
        finally:
            tf.config.run_functions_eagerly(False)
    assert_same_logs(history, stock().fit(X, Y, **FIT).history)
    assert caplog.text.count("Python, one operation after the other") == 1


WORKER = """
import json, keras, numpy as np, tfaccel
from keras import layers

run = tfaccel.setup(gpu_ids=(), xla=False)
with run.scope():
    keras.utils.set_random_seed(3)
    norm = layers.BatchNormalization(momentum=0.9)
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(5, "tanh"), norm, layers.Dense(3)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
run.compile(model, keras.optimizers.SGD(0.1), loss, run_eagerly=True,
            step=tfaccel.StepConfig(sync_batchnorm=True))
x = np.random.default_rng(0).normal(size=(13, 4)).astype(np.float32)
y = np.random.default_rng(1).integers(0, 3, 13).astype(np.int32)
history = model.fit(x, y, batch_size=6, epochs=2, shuffle=False, verbose=0).history
predicted = model.predict(x, batch_size=6, verbose=0)
print(json.dumps([history["loss"], predicted.tolist(), model.layers[0].kernel.numpy().tolist()]))
"""


@pytest.mark.slow
def test_two_processes_are_one_device_too():
    first, second = map(json.loads, in_workers(WORKER, 2))
    theirs = stock(with_norm, optimizer=keras.optimizers.SGD(0.1), metrics=None)
    history = theirs.fit(X, Y, **FIT).history
    wanted = history["loss"], theirs.predict(X, batch_size=6, verbose=0)
    for found in (first, second):
        for values, expected in zip(found, (*wanted, theirs.layers[0].kernel), strict=True):
            np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-5)
