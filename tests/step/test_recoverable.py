"""A model's variables outlive a step for which there was no memory, and the process its end."""

import functools
import signal

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled, new_process

from tfaccel.keras_internals.model_view import variables_of
from tfaccel.keras_internals.variables import components
from tfaccel.step import functions, predict, recoverable
from tfaccel.step.recoverable import Recoverable
from tfaccel.training.memory_errors import OutOfMemoryError

FULL = "Out of memory while trying to allocate 9.00GiB."
X = np.linspace(-1, 1, 96, dtype=np.float32).reshape(16, 6)
FIT = {"batch_size": 8, "shuffle": False, "verbose": 0}


class Fails(Recoverable):
    """Where `says` is set, a call does what XLA's does: others write what it changes, it ends."""

    says, made = None, []
    in_xla = True  # what a step changes is read of its trace, the same for XLA or not

    def __init__(self, compile_, step, model):
        if not self.in_xla:
            compile_ = functools.partial(tf.function, autograph=False)
        super().__init__(compile_, step, model)

    def _make(self):
        super()._make()
        self.made.append(self)
        self._function = _Function(self, self._function)


class _Function:
    def __init__(self, step, function):
        self._step, self._function = step, function
        self.experimental_get_tracing_count = function.experimental_get_tracing_count

    def __call__(self, *arguments):
        if Fails.says is None:
            return self._function(*arguments)
        self._function.get_concrete_function(*arguments)  # traced, if it was not
        now = self._step._changed if self._step._now is None else self._step._now
        for each in now.values():
            each.assign(np.ones(each.read().shape, each.dtype.as_numpy_dtype))
        raise tf.errors.ResourceExhaustedError(None, None, Fails.says)


@pytest.fixture(autouse=True)
def made(monkeypatch):
    """The recoverable steps that a test makes."""
    for each in (functions, predict):
        monkeypatch.setattr(each, "Recoverable", Fails)
    monkeypatch.setattr(Fails, "made", made := [])
    monkeypatch.setattr(Fails, "says", None)
    return made


@pytest.fixture
def not_in_xla(monkeypatch):
    """Recoverable steps are made as for XLA, and XLA does not compile them, which takes longer."""
    monkeypatch.setattr(Fails, "in_xla", False)


class Noisy(keras.layers.Layer):
    """Draws, in tests too."""

    def __init__(self, name):
        super().__init__(name=name)
        self.seeds = keras.random.SeedGenerator(1, name="seeds")

    def call(self, inputs):
        return inputs + 0.01 * keras.random.normal(keras.ops.shape(inputs), seed=self.seeds)


def make():
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Dense(6, trainable=False, name="frozen"),
        keras.layers.Dense(6, name="dense"),
        keras.layers.BatchNormalization(name="norm"),
        Noisy(name="noisy"),
    ]
    return keras.Sequential([keras.Input((6,)), *layers], name="model")


def trained(num_replicas):
    adam = keras.optimizers.Adam(0.1, name="adam")
    model = compiled(make, num_replicas, optimizer=adam, loss="mse", metrics=["mae"])
    model.fit(X, X, **FIT)
    return model


def state(model):
    """Each variable's values on each replica."""
    return {
        (variable.path, replica): each.numpy()
        for variable in variables_of(model)
        for replica, each in enumerate(components(variable))
    }


def check_same(these, others):
    assert these.keys() == others.keys()
    differ = [key for key in these if not np.array_equal(these[key], others[key])]
    assert not differ


@pytest.mark.parametrize("num_replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_step_that_never_ran_leaves_the_variables_as_they_were(
    num_replicas, monkeypatch, not_in_xla
):
    model = trained(num_replicas)
    model.reset_metrics()  # as `fit` does
    before = state(model)
    wanted, after = model.fit(X, X, **FIT).history, state(model)
    for variable in variables_of(model):
        for replica, each in enumerate(components(variable)):
            each.assign(before[variable.path, replica])
    for _ in range(2):  # the second time the step has been traced, and has not run
        monkeypatch.setattr(Fails, "says", FULL)
        with pytest.raises(OutOfMemoryError):
            model.fit(X, X, **FIT | {"batch_size": 16})
        monkeypatch.setattr(Fails, "says", None)
    model.reset_metrics()
    check_same(state(model), before)
    assert model.fit(X, X, **FIT).history == wanted
    check_same(state(model), after)


@pytest.mark.parametrize("num_replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_a_step_changes_is_known(num_replicas, made, not_in_xla):
    model = trained(num_replicas)
    calls = {
        "predict": lambda: model.predict(X, verbose=0),
        "train": lambda: model.train_on_batch(X[:8], X[:8]),
        "test": lambda: model.evaluate(X, X, verbose=0),
    }
    moved = {}
    for name, call in calls.items():
        before = state(model)
        call()
        after = state(model)
        moved[name] = {key for key in after if not np.array_equal(before[key], after[key])}
    keys = {
        id(each.handle): (variable.path, replica)
        for variable in variables_of(model)
        for replica, each in enumerate(components(variable))
    }
    # In the order in which they were first needed.
    for name, step in zip(("train", "predict", "test"), made, strict=True):
        # On several replicas TensorFlow has a variable of its own, by which it orders its sums.
        known = {keys[handle] for handle in step._changed if handle in keys}
        assert moved[name]
        assert moved[name] <= known
        paths = {path for path, _ in known - moved[name]}
        assert not any("learning_rate" in each or "frozen" in each for each in paths)
        assert name == "train" or not any("kernel" in each for each in paths)


def some_model(num_replicas=1):
    return compiled(make, num_replicas, optimizer="sgd", loss="mse")


def no_memory(monkeypatch, step, *arguments, says=FULL):
    monkeypatch.setattr(Fails, "says", says)
    with pytest.raises(tf.errors.ResourceExhaustedError):
        step(*arguments)
    monkeypatch.setattr(Fails, "says", None)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_what_is_put_back_is_of_each_replica(num_replicas, monkeypatch):
    model = some_model(num_replicas)
    metric = model.metrics_variables[0]
    for number, component in enumerate(components(metric)):
        component.assign(float(number))

    def count():
        for component in components(metric):
            component.assign_add(1.0)
        for component in components(model.weights[2]):
            component.assign_add(tf.ones_like(component))
        return tf.constant(0)

    before = state(model)
    no_memory(monkeypatch, Fails(tf.function, count, model))
    check_same(state(model), before)


def test_what_a_step_that_had_run_changes_is_lost_and_that_is_said(monkeypatch, caplog):
    model = trained(1)
    weights = model.get_weights()
    monkeypatch.setattr(Fails, "says", FULL)
    with pytest.raises(OutOfMemoryError):
        model.fit(X, X, **FIT)
    words = (
        "step: memory ran out, and the variables that the step changes lost their values (they are"
    )
    assert f"{words} NaN, or 0)" in caplog.text
    for (path, _), value in state(model).items():
        is_kept = any(name in path for name in ("learning_rate", "frozen"))
        assert np.isfinite(value).all() == (is_kept or value.dtype.kind != "f"), path
    monkeypatch.setattr(Fails, "says", None)
    model.set_weights(weights)
    assert np.isfinite(model.predict_on_batch(X)).all()


def doubling(variable):
    return lambda *_: variable.assign(variable * 2)


@pytest.mark.parametrize("says", ["OOM when allocating tensor with shape[8]", "aborted"])
def test_other_errors_leave_the_variables_alone(says, monkeypatch):
    model = some_model()
    step = Fails(tf.function, doubling(model.weights[2]), model)
    step()
    no_memory(monkeypatch, step, says=says)
    assert np.array_equal(model.weights[2], np.ones((6, 6)))  # as who failed left it
    no_memory(monkeypatch, step)
    assert np.isnan(model.weights[2]).all()  # it had run


def test_a_step_that_ended_otherwise_has_not_run(monkeypatch):
    model = some_model()
    step = Fails(tf.function, doubling(model.weights[2]), model)
    no_memory(monkeypatch, step, says="OOM when allocating tensor with shape[8]")
    no_memory(monkeypatch, step)
    assert np.array_equal(model.weights[2], np.ones((6, 6)))


def test_nothing_is_lost_where_nothing_is_changed(monkeypatch, caplog):
    model = some_model()
    step = Fails(tf.function, lambda: tf.reduce_sum(model.weights[2]), model)
    step()
    no_memory(monkeypatch, step)
    assert "lost" not in caplog.text


def test_what_another_batch_changes_is_left_alone(monkeypatch, caplog):
    model = some_model()
    frozen, weight = model.weights[0], model.weights[2]
    as_built = weight.numpy()
    step = Fails(
        tf.function,
        lambda rows: doubling(frozen if rows.shape[0] == 1 else weight)(),
        model,
    )
    step(tf.zeros(1))
    before = frozen.numpy()
    no_memory(monkeypatch, step, tf.zeros(2))
    assert np.array_equal(frozen, before)
    assert np.array_equal(weight, as_built)
    assert "lost" not in caplog.text


def test_variables_of_a_users_own_are_found(monkeypatch):
    model, own = some_model(), {}

    def count():
        if not own:  # as TensorFlow allows of a function's first trace
            own["one"] = tf.Variable(1.0)
            own["any"] = tf.Variable([1.0, 2.0], shape=[None])
        own["any"].assign(own["any"] * 2.0)
        return own["one"].assign_add(1.0)

    step = Fails(functools.partial(tf.function, autograph=False), count, model)
    step()
    no_memory(monkeypatch, step)
    assert np.isnan(own["one"].numpy())
    assert np.isnan(own["any"].numpy()).all()


def test_no_more_than_a_part_of_the_hosts_memory_is_taken(monkeypatch, caplog):
    model = some_model()
    monkeypatch.setattr(recoverable, "free_bytes", lambda *_: 287)  # of two kernels of 6 x 6
    caplog.set_level("INFO", "tfaccel")
    no_memory(monkeypatch, Fails(tf.function, doubling(model.weights[2]), model))
    words = "if it runs out of memory, the model's variables will be lost, because a copy of them"
    assert words in caplog.text
    assert np.isnan(model.weights[2]).all()


def test_functions_run_eagerly_too():
    model = some_model()
    step = Recoverable(tf.function, doubling(model.weights[2]), model)
    before = model.weights[2].numpy()
    tf.config.run_functions_eagerly(True)
    try:
        step()
    finally:
        tf.config.run_functions_eagerly(False)
    assert np.array_equal(model.weights[2], 2 * before)


PROGRAM = """
import contextlib, keras, numpy as np, tensorflow as tf, tfaccel
from tfaccel.keras_internals.variables import components
from tfaccel.keras_internals.model_view import variables_of

class Greedy(keras.layers.Layer):
    asks = False

    def call(self, inputs):
        if not self.asks or tf.executing_eagerly():
            return inputs
        seed = tf.cast(inputs[0, :2], tf.int32)
        values = tf.random.stateless_uniform(({rows}, 64), seed)
        # In a loop of a length that XLA does not know, they have to be in memory.
        _, values = tf.while_loop(
            lambda index, _: index < seed[0],
            lambda index, values: (index + 1, values / 2),
            (0, values),
        )
        return inputs + tf.stop_gradient(values[0, :8])

def state():
    found = variables_of(model)
    return [one.numpy() for each in found for one in components(each)]

run = tfaccel.setup(gpu_ids={gpus}, xla=True)
with contextlib.nullcontext() if {is_stock} else run.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), Greedy()])
if {is_stock}:
    model.compile("adam", "mse", jit_compile=True)
else:
    run.compile(model, "adam", "mse")
x = np.ones((64, 8), np.float32)
model.fit(x, x, batch_size=32, verbose=0)
model.layers[-1].asks = True
model.reset_metrics()  # as `fit` does
before = state()
for method in (model.fit, model.fit, model.evaluate):
    try:
        method(x, x, batch_size=16, verbose=0)
    except (tfaccel.training.memory_errors.OutOfMemoryError, tf.errors.ResourceExhaustedError):
        print("full", flush=True)
print(len(before), all(map(np.array_equal, before, state())))
model.layers[-1].asks = False
model.fit(x, x, batch_size=8, verbose=0)
"""


def run_program(gpus, *, is_stock):
    # On the host 16 TiB, as less may be given that is not there; of a GPU's memory 256 GiB.
    rows = 2**36 if gpus == "[]" else 2**30
    settings = {"gpus": gpus, "is_stock": is_stock, "rows": rows}
    program = PROGRAM
    for name, value in settings.items():
        program = program.replace(f"{{{name}}}", str(value))
    return new_process(program)


@pytest.mark.parametrize(
    ("gpus", "num_replicas"),
    [
        pytest.param("[]", 1, marks=pytest.mark.slow),  # TensorFlow waits for 10 s, each time
        pytest.param("[0]", 1, marks=pytest.mark.gpu),
        pytest.param("[0, 1]", 2, marks=pytest.mark.multi_gpu),
    ],
)
def test_a_full_memory_costs_neither_variables_nor_the_process(gpus, num_replicas):
    done = run_program(gpus, is_stock=False)
    assert done.stdout.split()[:3] == 3 * ["full"], done.stderr
    number, is_same = done.stdout.split()[3:]
    # Kernel and bias, two momenta of each, two numbers of the optimizer's and of the loss's.
    assert int(number) == 10 * num_replicas
    assert is_same == "True"
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_tensorflow_still_needs_it():
    done = run_program("[]", is_stock=True)
    assert done.returncode in (-signal.SIGABRT, -signal.SIGSEGV), done.stderr
    assert "full" in done.stdout
