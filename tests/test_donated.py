"""A model's variables outlive a step for which there was no memory, and the process its end."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled, new_process

from tfaccel import seam
from tfaccel.memory_plan import OutOfMemoryError
from tfaccel.step.donated import Donated

FULL = tf.errors.ResourceExhaustedError(None, None, "Out of memory while trying to allocate 9GiB.")
X = np.linspace(-1, 1, 96, dtype=np.float32).reshape(16, 6)


class Full(keras.layers.Layer):
    """Where a step is traced, it fails as `fails` does, if that is set."""

    fails = None

    def call(self, inputs):
        if self.fails and not tf.executing_eagerly():
            with tf.init_scope():
                self.fails()
        return inputs


def failing(variables):
    """What XLA does when it runs: others write where the variables are, and it gives up."""

    def fail():
        for variable in variables:
            for each in seam.components(variable):
                each.assign(tf.ones_like(each))
        raise FULL

    return fail


def make():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(6), keras.layers.BatchNormalization(), Full()]
    )


def compiled_for(num_replicas):
    adam = keras.optimizers.Adam(0.1)
    model = compiled(make, num_replicas, optimizer=adam, loss="mse", metrics=["mae"])
    with model.distribute_strategy.scope():
        model.optimizer.build(model.trainable_variables)
    return model


def state(model):
    """Each variable's values on each replica."""
    variables = seam.variables_of(model)
    return [each.numpy() for variable in variables for each in seam.components(variable)]


def same(these, others):
    return all(np.array_equal(*each, equal_nan=True) for each in zip(these, others, strict=True))


@pytest.mark.parametrize("num_replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_step_that_never_ran_leaves_the_variables_as_they_were(num_replicas):
    model, twin = compiled_for(num_replicas), compiled_for(num_replicas)
    fit = {"batch_size": 8, "shuffle": False, "verbose": 0}
    for each in (model, twin):
        each.fit(X, X, **fit)
    for _ in range(2):  # what failed is no step that ran
        model.layers[-1].fails = failing(seam.variables_of(model))
        with pytest.raises(OutOfMemoryError):
            model.fit(X, X, **fit | {"batch_size": 16})
        model.layers[-1].fails = None
    assert model.fit(X, X, **fit).history == twin.fit(X, X, **fit).history
    assert same(state(model), state(twin))


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("trains", [True, False])
def test_what_is_put_back_is_of_each_replica(num_replicas, trains):
    model = compiled_for(num_replicas)
    for number, component in enumerate(seam.components(model.metrics_variables[0])):
        component.assign(tf.fill(component.shape, float(number)))
    before, variables = state(model), Donated(model, trains=trains)
    changed = seam.variables_of(model) if trains else model.metrics_variables
    with pytest.raises(tf.errors.ResourceExhaustedError), variables.given():
        variables.kept_before(failing(changed))()
    assert same(before, state(model))


def test_what_a_step_that_had_run_takes_along_is_said_and_no_number(caplog):
    model = compiled_for(2)
    weights, variables = model.get_weights(), Donated(model, trains=True)
    with pytest.raises(tf.errors.ResourceExhaustedError), variables.given():
        raise FULL
    floats = [each.ravel() for each in state(model) if each.dtype.kind == "f"]
    assert np.isnan(np.concatenate(floats)).all()
    assert "step: memory was full for a step that had run before, so that the var" in caplog.text
    model.set_weights(weights)
    assert same(weights, model.get_weights())


def test_other_errors_leave_the_variables_alone():
    model = compiled_for(1)
    before, variables = state(model), Donated(model, trains=True)

    def fail():
        raise tf.errors.AbortedError(None, None, "a worker was lost")

    with pytest.raises(tf.errors.AbortedError), variables.given():
        variables.kept_before(fail)()
    assert same(before, state(model))


PROGRAM = """
import contextlib, keras, numpy as np, tensorflow as tf, tfaccel

class Greedy(keras.layers.Layer):
    asks = False

    def call(self, inputs):
        if not self.asks or tf.executing_eagerly():
            return inputs
        seed = tf.cast(inputs[0, :2], tf.int32)  # 16 TiB
        return inputs + tf.sort(tf.random.stateless_uniform((2**36, 2**6), seed))[0, :8]

run = tfaccel.setup(gpu_ids={gpus})
with contextlib.nullcontext() if {is_stock} else run.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), Greedy()])
if {is_stock}:
    model.compile("adam", "mse", jit_compile=True)
else:
    run.compile(model, "adam", "mse")
x = np.ones((64, 8), np.float32)
model.fit(x, x, batch_size=32, verbose=0)
model.layers[-1].asks = True
before = model.get_weights() + [each.numpy() for each in model.optimizer.variables]
for method in (model.fit, model.fit, model.evaluate):
    try:
        method(x, x, batch_size=16, verbose=0)
    except (tfaccel.memory_plan.OutOfMemoryError, tf.errors.ResourceExhaustedError):
        print("full")
after = model.get_weights() + [each.numpy() for each in model.optimizer.variables]
print(all(map(np.array_equal, before, after)))
model.layers[-1].asks = False
model.fit(x, x, batch_size=8, verbose=0)
"""


# On the CPU TensorFlow waits for 10 s, each time. Where stock Keras passes, TensorFlow is mended.
@pytest.mark.parametrize(
    ("gpus", "is_stock"),
    [
        pytest.param("[]", True, marks=[pytest.mark.xfail(strict=True), pytest.mark.slow]),
        pytest.param("[]", False, marks=pytest.mark.slow),
        pytest.param("[0]", False, marks=pytest.mark.gpu),
        pytest.param("[0, 1]", False, marks=pytest.mark.multi_gpu),
    ],
)
def test_a_full_memory_costs_neither_variables_nor_the_process(gpus, is_stock):
    done = new_process(PROGRAM.replace("{gpus}", gpus).replace("{is_stock}", str(is_stock)))
    assert done.stdout.split() == ["full", "full", "full", "True"], done.stderr
    assert done.returncode == 0, done.stderr
