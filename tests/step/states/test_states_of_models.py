"""`StepConfig.state_dtype` in `fit`: replicas, XLA, float16, checkpoints, files, and refusals."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled
from keras import layers

from tfaccel.common.errors import UserError
from tfaccel.config import StepConfig
from tfaccel.keras_internals.optimizer_states import State, states_of
from tfaccel.step import compile_model
from tfaccel.step.states.codecs import CODECS
from tfaccel.training.checkpoint import state as state_lib
from tfaccel.training.replica_checksums import Audit

DTYPES = ("float32", "bfloat16", "8bit")
FEWER = pytest.mark.parametrize("dtype", DTYPES[1:])
SLOW = pytest.mark.slow
DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(64, 16)).astype("float32")
Y = (X @ DRAW.normal(size=(16, 4))).argmax(axis=1)
FIT = {"batch_size": 16, "shuffle": False, "verbose": 0}


def network():
    keras.utils.set_random_seed(7)
    return keras.Sequential(
        [
            keras.Input((16,)),
            layers.Dense(256, "relu", name="hidden"),  # 4,096 values, and a bias of 256
            layers.Dense(20, dtype="float32", name="logits"),  # 5,120 values
        ]
    )


def adam(**settings):
    return keras.optimizers.Adam(1e-2, **settings)


def model_of(dtype, num_replicas=1, *, make=network, optimizer=adam, xla=False, step=None, **args):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    config = StepConfig(state_dtype=dtype, **(step or {}))
    return compiled(
        make, num_replicas, optimizer=optimizer, loss=loss, xla=xla, config=config, **args
    )


def trained(dtype, num_replicas=1, *, epochs=2, **settings):
    model = model_of(dtype, num_replicas, **settings)
    return model, model.fit(X, Y, epochs=epochs, **FIT).history["loss"]


@functools.cache
def on_one_replica(dtype):
    """A model after ten epochs, and the loss of each. It is not to be changed."""
    return trained(dtype, epochs=10)


def ready(dtype, **settings):
    """A model whose states are there, with the value 0."""
    model = model_of(dtype, **settings)
    with model.distribute_strategy.scope():
        model.optimizer.build(model.trainable_variables)
    return model


def dtypes_of(model):
    """The dtypes of the states of each weight, by its name."""
    return {
        weight.path.split("/", 1)[1]: [
            "float32" if each.codec is None else each.codec.name
            for each in states_of(model)
            if f"_{weight.path.replace('/', '_')}_" in f"_{each.path.split('/')[-1]}"
        ]
        for weight in model.trainable_variables
    }


def values_of(model):
    """The values of all states, in float32."""
    return [
        (each.read() if each.codec is not None else each.parts[0].value).numpy()
        for each in states_of(model)
    ]


@FEWER
def test_large_weights_have_small_states(dtype, caplog):
    caplog.set_level("INFO", "tfaccel")
    model, _ = trained(dtype, epochs=1, optimizer=lambda: adam(use_ema=True))
    assert dtypes_of(model) == {
        "hidden/kernel": [dtype] * 2,
        "hidden/bias": ["float32"] * 2,
        "logits/kernel": [dtype] * 2,
        "logits/bias": ["float32"] * 2,
    }
    large, small = 4096 + 5120, 256 + 20
    stored = {"bfloat16": 2 * large, "8bit": large + 4 * (16 + 20)}[dtype]
    parts = [part for each in states_of(model) for part in each.parts]
    assert state_lib.bytes_of(parts) == 2 * (stored + 4 * small)
    averages = [each for each in model.optimizer.variables if each.path.endswith("average")]
    assert [each.dtype for each in averages] == ["float32"] * 4
    (told,) = [each for each in caplog.messages if "keeps its states" in each]
    assert f"as {dtype} in 0.0 in place of 0.1 MiB" in told


class Words(keras.Model):
    """A model that makes its weights in its first step, after it is compiled."""

    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(7)
        self.table, self.logits = layers.Embedding(500, 16, name="table"), layers.Dense(20)
        self.wide = layers.Dense(256, "relu", name="wide")

    def call(self, words):
        return self.logits(self.wide(self.table(words)[:, 0]))


def test_embeddings_are_float32_with_8_bits_alone():
    for dtype in DTYPES[1:]:
        model = model_of(dtype, make=Words)
        model.fit(np.arange(32).reshape(16, 2), Y[:16], **FIT)
        shapes = {each.shape for each in states_of(model) if each.codec is not None}
        table = {(500, 16)} if dtype == "bfloat16" else set()
        assert shapes == {(16, 256), (256, 20)} | table


@FEWER
def test_the_loss_is_that_of_float32(dtype):
    """Within 2% after 40 steps, in which the loss falls to a tenth."""
    _, wanted = on_one_replica("float32")
    _, losses = on_one_replica(dtype)
    assert losses[-1] < 0.1 * losses[0]
    assert losses[-1] == pytest.approx(wanted[-1], rel=0.02)
    assert losses != wanted


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("8bit", marks=SLOW)])
def test_two_replicas_are_equal_and_train_as_one(dtype):
    """The batch has two parts on each replica."""
    _, wanted = on_one_replica(dtype)
    model, losses = trained(dtype, 2, epochs=3, step={"accumulation_steps": 2})
    np.testing.assert_allclose(losses, wanted[:3], rtol=2e-3)
    Audit(model).check(when="at the end")
    for each in model.optimizer.variables:
        one, other = each.value.values
        np.testing.assert_array_equal(one, other)
    assert any(np.any(each) for each in values_of(model))


@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=SLOW), "8bit"])
def test_replicas_whose_states_differ_are_found_and_made_equal(dtype, caplog):
    model = ready(dtype, num_replicas=2)
    part = next(each for each in states_of(model) if each.codec is not None).parts[0]
    for number, own in enumerate(part.value.values):
        own.assign(tf.fill(own.shape, tf.cast(number + 5, own.dtype)))
    Audit(model).make_equal()
    assert any(f"different values of {part.path}" in each for each in caplog.messages)
    for own in part.value.values:
        assert np.all(own.numpy() == 5)


@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=SLOW), "8bit"])
def test_xla_computes_the_same_also_in_a_launch_of_several_steps(dtype):
    _, wanted = on_one_replica(dtype)
    _, losses = trained(dtype, xla=True, steps_per_execution=2)
    np.testing.assert_allclose(losses, wanted[:2], rtol=2e-3)


@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=SLOW), "8bit"])
def test_a_step_that_overflows_leaves_the_states(dtype):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = model_of(dtype)
        history = model.fit(X, Y, **FIT).history
        before = values_of(model)
        assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        assert any(np.any(each) for each in before)
        assert history["skipped_steps"] == [0]
        history = model.fit(1e6 * X, Y, **FIT).history
    finally:
        keras.config.set_dtype_policy("float32")
    assert history["skipped_steps"] == [4]
    for now, then in zip(values_of(model), before, strict=True):
        np.testing.assert_array_equal(now, then)


def test_a_resumed_run_draws_the_same():
    whole, _ = trained("bfloat16", epochs=1)
    arrays = state_lib.variables(whole)
    whole.fit(X, Y, **FIT)
    resumed = ready("bfloat16")
    state_lib.put_variables(resumed, arrays)
    resumed.fit(X, Y, **FIT)
    for one, other in zip(whole.weights, resumed.weights, strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(values_of(whole), values_of(resumed), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.fixture(scope="module")
def built():
    """A model of each dtype, with random states."""
    found = {dtype: ready(dtype, optimizer=lambda: adam(use_ema=True)) for dtype in DTYPES}
    for model in found.values():
        draw = np.random.default_rng(5)
        for each in states_of(model):
            values = draw.normal(size=each.shape).astype("float32")
            values = values if each.is_signed else values**2
            (each if each.codec is not None else each.parts[0]).assign(values)
    return found


def as_kept(values, dtype, *, is_signed):
    """Values that are stored in a dtype, rounded to the nearest."""
    if dtype == "float32":
        return values
    codec = CODECS[dtype]
    stored = codec.encode(tf.constant(values), is_signed=is_signed, bits=None)
    return codec.decode(stored, values.shape, is_signed=is_signed).numpy()


@pytest.mark.parametrize("after", DTYPES)
@pytest.mark.parametrize("before", DTYPES)
def test_a_checkpoint_is_converted(before, after, built, caplog):
    caplog.set_level("INFO", "tfaccel")
    arrays = state_lib.variables(built[before])
    given = values_of(built[before])
    model = ready(after, optimizer=lambda: adam(use_ema=True))
    caplog.clear()
    state_lib.put_variables(model, arrays)
    for now, then, state in zip(values_of(model), given, states_of(model), strict=True):
        is_large = state.codec is not None or then.size >= 4096
        wanted = as_kept(then, after, is_signed=state.is_signed) if is_large else then
        np.testing.assert_array_equal(now, then if before == after else wanted)
    for now, then in zip(model.weights, built[before].weights, strict=True):
        np.testing.assert_array_equal(now, then)
    told = [each for each in caplog.messages if "converted" in each]
    assert told == (
        []
        if before == after
        else [
            f"checkpoint: 4 optimizer states saved as {before}, converted to {after} "
            "(step.state_dtype)"
        ]
    )
    again = state_lib.variables(model)
    wanted = state_lib.variables(built[after])
    assert [each.dtype for each in again.values()] == [each.dtype for each in wanted.values()]


def test_a_checkpoint_of_another_model_is_refused(built):
    arrays = state_lib.variables(built["8bit"])
    model = ready("float32", optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9))
    with pytest.raises(UserError, match="the checkpoint has 22 variables, but this model"):
        state_lib.put_variables(model, arrays)


@FEWER
def test_stock_keras_loads_the_file_and_a_loaded_model_is_converted(dtype, built, tmp_path):
    built[dtype].save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for found, wanted in zip(
        [each.parts[0].numpy() for each in states_of(loaded)], values_of(built[dtype]), strict=True
    ):
        np.testing.assert_array_equal(found, wanted)
    with built[dtype].distribute_strategy.scope():
        loaded = keras.models.load_model(tmp_path / "model.keras")
    compile_again(loaded, dtype, loaded.loss)
    assert [each.codec for each in states_of(loaded)] == [
        each.codec for each in states_of(built[dtype])
    ]
    for found, wanted in zip(values_of(loaded), values_of(built[dtype]), strict=True):
        np.testing.assert_array_equal(found, wanted)


@FEWER
def test_an_optimizer_that_is_compiled_again_keeps_its_states(dtype, built):
    model = built[dtype]
    before = [each.path for each in model.optimizer.variables]
    values = values_of(model)
    for wanted in (dtype, "float32", dtype, dtype):
        compile_again(model, wanted, model.loss)
        assert {each.codec and each.codec.name for each in states_of(model)} == (
            {None} if wanted == "float32" else {wanted, None}
        )
    assert len(before) == len(model.optimizer.variables)
    places = lambda paths: [each.split("/")[-1].split("_", 2)[-1] for each in paths]  # noqa: E731
    assert places(before) == places(each.path for each in model.optimizer.variables)
    for now, then in zip(values_of(model), values, strict=True):
        np.testing.assert_array_equal(now, then)
    if dtype == "8bit":
        model.fit(X[:16], Y[:16], **FIT)
        assert any(np.any(now != then) for now, then in zip(values_of(model), values, strict=True))


def compile_again(model, dtype, loss):
    config = StepConfig(state_dtype=dtype)
    strategy = model.distribute_strategy
    compile_model(model, strategy, config, xla=False, optimizer=model.optimizer, loss=loss)


class Two(keras.Model):
    """Two networks, each with an optimizer and an update in one step."""

    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(3)
        self.nets = [keras.Sequential([keras.Input((16,)), layers.Dense(300)]) for _ in range(2)]
        self.built = True

    def compile(self, **others):
        super().compile(**others)
        self.others = [keras.optimizers.Lion(1e-3), keras.optimizers.SGD(1e-3, momentum=0.9)]

    def train_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        for net, optimizer in zip(self.nets, self.others, strict=True):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(net(x) - 1))
            gradients = tape.gradient(loss, net.trainable_variables)
            optimizer.apply_gradients(zip(gradients, net.trainable_variables, strict=True))
        return {"loss": loss}


def test_each_optimizer_of_a_step_of_ones_own_has_them():
    config = StepConfig(state_dtype="8bit")
    model = compiled(Two, 2, optimizer=None, xla=False, config=config)
    losses = model.fit(X, Y, **FIT, epochs=2).history["loss"]
    assert losses[1] < losses[0]
    packed = [each for each in states_of(model) if each.codec is not None]
    assert [each.path.split("/")[0].split("_")[0] for each in packed] == ["lion", "sgd"]
    assert all(np.any(each.read()) for each in packed)
    Audit(model).check(when="at the end")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: keras.optimizers.Adafactor(),
            "with the optimizer Adafactor; expected one of Adam",
        ),
        (lambda: type("Own", (keras.optimizers.Adam,), {})(), "with the optimizer Own; expected"),
        (lambda: keras.optimizers.RMSprop(centered=True), r"with RMSprop\(centered=True\), whose"),
    ],
)
def test_others_are_refused(make, message):
    with pytest.raises(UserError, match=f"state_dtype='8bit' {message}"):
        model_of("8bit", optimizer=make)
    model_of("float32", optimizer=make)


def test_an_optimizer_without_states_says_so(caplog):
    caplog.set_level("INFO", "tfaccel")
    model_of("8bit", optimizer=lambda: keras.optimizers.SGD(0.1))
    assert "step: state_dtype=8bit changes nothing, as SGD keeps no states" in caplog.messages


def test_a_state_reads_and_assigns_outside_a_step(built):
    state = next(each for each in states_of(built["bfloat16"]) if each.codec is not None)
    assert isinstance(state, State)
    kept = values_of(built["bfloat16"])[0]
    state.assign_add(tf.ones(state.shape))
    np.testing.assert_allclose(state.read(), kept + 1, rtol=2**-8)
    state.assign(kept)
    np.testing.assert_array_equal(state.read(), kept)


def test_an_unknown_dtype_is_refused():
    with pytest.raises(UserError, match="state_dtype='int8'"):
        StepConfig(state_dtype="int8")
