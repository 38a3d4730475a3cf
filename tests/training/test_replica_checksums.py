"""Replicas that hold other values are found and named, and made equal at the start."""

import functools
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled
from keras import layers

from tfaccel.config import StepConfig
from tfaccel.keras_internals.model_view import state_of
from tfaccel.keras_internals.variables import components
from tfaccel.training import replica_checksums
from tfaccel.training.callbacks.replica_audit import ReplicaAudit
from tfaccel.training.replica_checksums import Audit, ReplicasDifferError

X = np.ones((12, 2), "float32")


def make():
    return keras.Sequential(
        [
            keras.Input((2,), name="input"),
            layers.Dense(2, name="dense"),
            layers.BatchNormalization(name="norm"),
            layers.Dropout(0.5, seed=1, name="dropout"),
        ],
        name="model",
    )


def compile_on(num_replicas, audit_steps=1000, **settings):
    config = StepConfig(audit_steps=audit_steps, sync_batchnorm=False)
    optimizer = keras.optimizers.AdamW(1e-3)
    return compiled(
        make, num_replicas, optimizer=optimizer, xla=False, config=config, loss="mse", **settings
    )


@pytest.fixture(scope="module")
def trained():
    """A model on three replicas after a step, and its audit."""
    model = compile_on(3)
    model.train_on_batch(X[:3], X[:3])
    return model, Audit(model)


def variable_of(model, path):
    return next(each for each in state_of(model) if path in each.path)


def plant(variable, *, on, value=None):
    """Changes one replica's component of a variable, by default in its last bit."""
    component = components(variable)[on]
    before = component.numpy()
    if value is None:
        is_float = np.issubdtype(before.dtype, np.floating)
        value = np.nextafter(before, before.dtype.type(9)) if is_float else before + 1
    component.assign(value)
    return lambda: component.assign(before)


def test_equal_replicas_pass(trained):
    trained[1].check(when="now")


def test_variables_of_all_shapes_share_few_programs(trained):
    trained[1].check(when="now")
    before = replica_checksums._program.cache_info().misses
    units = (67, 68, 69, 3)
    model = compiled(
        lambda: keras.Sequential([keras.Input((2,)), *(layers.Dense(each) for each in units)]),
        2,
        optimizer="sgd",
    )
    for _ in range(2):
        Audit(model).check(when="now")
    after = replica_checksums._program.cache_info().misses
    assert after - before == 1  # for 4,097 to 16,384 values; the one for fewer is there


@pytest.mark.parametrize("size", [1023, 1024, 1025, 4**10, 4**10 + 1])
def test_the_last_of_many_values_counts(size):
    values = tf.range(size, dtype=tf.float32)
    other = tf.concat([values[:-1], [-1.0]], 0)
    one, same, differs = replica_checksums._checksums(
        [tf.Variable(each) for each in (values, values, other)]
    ).numpy()
    assert one == same
    assert one != differs


def test_more_variables_than_a_program_has_rows_keep_their_order():
    values = [[float(each)] for each in range(70)]
    sums = replica_checksums._checksums([tf.Variable(each) for each in values]).numpy()
    alone = [replica_checksums._checksums([tf.Variable(each)]).numpy()[0] for each in values]
    assert list(sums) == alone
    assert len(set(alone)) == 70


@pytest.mark.parametrize("replica", [0, 1, 2])
@pytest.mark.parametrize(
    "path",
    [
        "dense/kernel",
        "norm/moving_variance",
        "dense_kernel_velocity",
        "iteration",
        "learning_rate",
        "seed_generator_state",
    ],
)
def test_a_change_on_one_replica_is_named(trained, path, replica):
    model, audit = trained
    variable = variable_of(model, path)
    put_back = plant(variable, on=replica)
    # Where replica 0 is the one that changed, replica 1 is the first that differs from it.
    words = (
        f"replica {replica or 1} and replica 0 have different values of {variable.path} at step 7, "
    )
    try:
        with pytest.raises(ReplicasDifferError) as error:
            audit.check(when="at step 7")
    finally:
        put_back()
    assert str(error.value).startswith(words)
    assert "\n" not in str(error.value)
    audit.check(when="now")


@pytest.mark.parametrize(
    "values", [[[1, 2], [3, 4]], [[2, 1], [3, 4]], [[1, 2], [3, -4]], [[np.nan, 2], [3, 4]]]
)
def test_other_values_have_other_checksums(trained, values):
    model, audit = trained
    kernel = variable_of(model, "dense/kernel")
    before = kernel.numpy()
    kernel.assign([[1, 2], [3, 4]])
    plant(kernel, on=1, value=values)
    try:
        if values == [[1, 2], [3, 4]]:
            audit.check(when="now")
        else:
            with pytest.raises(ReplicasDifferError):
                audit.check(when="now")
    finally:
        kernel.assign(before)


def test_replicas_that_are_equally_nan_are_equal(trained):
    model, audit = trained
    kernel = variable_of(model, "dense/kernel")
    before = kernel.numpy()
    kernel.assign(np.full((2, 2), np.nan))
    audit.check(when="now")
    kernel.assign(before)


def test_metrics_are_each_replicas_own(trained):
    model, audit = trained
    plant(model.metrics_variables[0], on=1, value=5.0)
    audit.check(when="now")


def test_make_equal_gives_replica_0s_values(trained, caplog):
    model, audit = trained
    planted = {"dense/kernel": 1, "norm/moving_mean": 2, "iteration": 1, "seed_generator_state": 2}
    variables = {path: variable_of(model, path) for path in planted}
    wanted = {path: components(each)[0].numpy() for path, each in variables.items()}
    for path, replica in planted.items():
        plant(variables[path], on=replica)
    audit.make_equal()
    for path, variable in variables.items():
        for component in components(variable):
            np.testing.assert_array_equal(component.numpy(), wanted[path], path)
    (record,) = [each for each in caplog.records if "different values" in each.message]
    assert "replica 1 and replica 0 have different values of model/dense/kernel" in record.message
    audit.check(when="now")
    audit.make_equal()
    assert len([each for each in caplog.records if "different values" in each.message]) == 1


def test_make_equal_keeps_every_bit(trained):
    model, audit = trained
    kernel, counter = (variable_of(model, path) for path in ("dense/kernel", "iteration"))
    before = kernel.numpy(), counter.numpy()
    kernel.assign([[-0.0, np.nan], [np.inf, 0.1]])
    counter.assign(2**53 + 1)  # more than float64 counts
    wanted = kernel.numpy().tobytes()
    plant(kernel, on=2, value=np.ones((2, 2)))
    audit.make_equal()
    assert [each.numpy().tobytes() for each in components(kernel)] == [wanted] * 3
    assert [int(each.numpy()) for each in components(counter)] == [2**53 + 1] * 3
    kernel.assign(before[0])
    counter.assign(before[1])


# While a model is trained.


class Plant(keras.callbacks.Callback):
    """Changes a weight of replica 1 at the end of the execution whose last step this is."""

    def __init__(self, step):
        super().__init__()
        self.step, self.seen = step, 0

    def on_train_batch_end(self, batch, logs=None):
        self.seen += self.model.steps_per_execution
        if self.seen == self.step:
            # More than the last bit, which the next update may round away.
            plant(self.model.layers[0].kernel, on=1, value=np.eye(2))


@functools.cache
def compile_on_two(audit_steps, steps_per_execution):
    """A model that several tests train: each `fit` begins with equal replicas."""
    return compile_on(2, audit_steps, steps_per_execution=steps_per_execution)


@pytest.mark.parametrize(
    ("audit_steps", "steps_per_execution", "planted_at", "found"),
    [
        pytest.param(2, 1, 3, "at step 4", marks=pytest.mark.slow),
        # Over the end of the epoch.
        pytest.param(4, 1, 6, "at step 8", marks=pytest.mark.slow),
        (4, 3, 3, "at step 6"),  # whole executions
        (1000, 1, 3, "at the end of training"),
        pytest.param(0, 1, 3, None, marks=pytest.mark.slow),
    ],
)
def test_training_stops_at_the_next_audit(audit_steps, steps_per_execution, planted_at, found):
    model = compile_on_two(audit_steps, steps_per_execution)
    epochs = 2 if planted_at == 6 else 1  # of 6 steps each
    fit = {"batch_size": 2, "epochs": epochs, "verbose": 0, "callbacks": [Plant(planted_at)]}
    if not found:
        model.fit(X, X, **fit)
        return
    with pytest.raises(ReplicasDifferError) as error:
        model.fit(X, X, **fit)
    words = f"replica 1 and replica 0 have different values of model/dense/kernel {found}, "
    assert words in str(error.value)


@pytest.mark.parametrize("audit_steps", [pytest.param(0, marks=pytest.mark.slow), 1000])
def test_training_starts_with_replica_0s_values(audit_steps):
    model = compile_on_two(audit_steps, 1)
    kernel = model.layers[0].kernel
    components(kernel)[1].assign(np.full((2, 2), 7.0))
    model.fit(X[:2], X[:2], batch_size=2, verbose=0)
    one, other = (each.numpy() for each in components(kernel))
    np.testing.assert_array_equal(one, other)
    assert np.abs(one).max() < 5


def test_one_replica_is_not_audited(monkeypatch):
    model = compile_on(1, audit_steps=1)
    monkeypatch.setattr(Audit, "_first_difference", lambda self: pytest.fail("audited"))
    model.fit(X[:2], X[:2], batch_size=2, verbose=0)


def test_of_a_loader_the_audit_names_the_step_where_an_epoch_ends_early():
    """5 steps an epoch and two in an execution: after 2, 4, 5, 7, 9 and 10 steps."""
    said, loader = [], types.SimpleNamespace(position=100)
    audit = ReplicaAudit(3)
    audit.loader = loader
    audit.__dict__["_audit"] = types.SimpleNamespace(check=lambda *, when: said.append(when))
    audit.on_train_begin()
    for step in (2, 4, 5, 7, 9, 10):
        loader.position = 100 + step
        audit.on_train_batch_end(0)
    assert said == [f"at step {each}" for each in (104, 107, 110)]
