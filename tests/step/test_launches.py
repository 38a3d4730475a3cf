"""Batches of the user's own data, several in one launch, against the same ones one by one."""

import functools
import itertools
import os
import signal

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled, strategy_of
from keras import layers

from tfaccel.common.errors import UserError
from tfaccel.config import StepConfig
from tfaccel.data import gathered
from tfaccel.data.distribute import Loader
from tfaccel.data.user_examples import open_examples
from tfaccel.keras_internals.launches import gathering, on_host
from tfaccel.runtime.devices import Device
from tfaccel.step import functions

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 20, (44, 6)).astype(np.int32)
LABELS = (TOKENS.sum(axis=1) % 3).astype(np.int32)
WEIGHTS = RNG.uniform(0.5, 2, 44).astype(np.float32)
ROWS = 4  # of a batch: 11 batches, which executions of 4 steps end with one of 3
# Inside a loop XLA may fuse otherwise, and so round otherwise.
ROUNDED = {"rtol": 1e-6, "atol": 1e-6}


def of_tokens():
    """Leaves to the next step weights, slots, statistics and seeds."""
    keras.utils.set_random_seed(0)
    text = keras.Input((None,), dtype="int32")
    x = layers.GlobalAveragePooling1D()(layers.Embedding(20, 8)(text))
    x = layers.Dropout(0.2)(layers.BatchNormalization()(x))
    return keras.Model(text, layers.Dense(3, dtype="float32")(x))


def without_draws():
    """What draws nothing trains alike on any number of replicas."""
    keras.utils.set_random_seed(0)
    text = keras.Input((None,), dtype="int32")
    x = layers.GlobalAveragePooling1D()(layers.Embedding(20, 8)(text))
    return keras.Model(text, layers.Dense(3, dtype="float32")(x))


def model_of(steps, *, make=of_tokens, replicas=1, xla=True, **settings):
    return compiled(
        make,
        replicas,
        optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        xla=xla,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=steps,
        **settings,
    )


@pytest.fixture
def launches(monkeypatch):
    """The numbers of steps of all launches that train, in order."""
    found, of_one, of_several = [], functions._Step._on, functions._Step.in_a_row

    def on(step, *args, **kwargs):
        found.extend([1] * step.trains)
        return of_one(step, *args, **kwargs)

    def in_a_row(step, deferred, **kwargs):
        found.extend([len(deferred[0])] * step.trains)
        return of_several(step, deferred, **kwargs)

    monkeypatch.setattr(functions._Step, "_on", on)
    monkeypatch.setattr(functions._Step, "in_a_row", in_a_row)
    return found


class InBatches(keras.utils.PyDataset):
    """The tokens."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        rows = slice(ROWS * index, ROWS * index + ROWS)
        return TOKENS[rows], LABELS[rows], WEIGHTS[rows]


def endless():
    number = 0
    while True:
        rows = np.arange(ROWS * number, ROWS * number + ROWS) % 44
        yield TOKENS[rows], LABELS[rows]
        number += 1


def drawn():
    """A data set that draws in each pass."""
    rows = tf.data.Dataset.from_tensor_slices((TOKENS, LABELS)).batch(ROWS).take(8)
    return rows.map(lambda x, y: ((x + tf.random.uniform(tf.shape(x), 0, 20, tf.int32)) % 20, y))


# What `fit` is given, and the launches of an epoch with executions of 4 steps.
DATA = {
    "arrays": (lambda: {"x": TOKENS, "y": LABELS, "batch_size": ROWS}, [4, 4, 3]),
    "a smaller last batch": (
        lambda: {"x": TOKENS[:18], "y": LABELS[:18], "batch_size": ROWS},
        [4, 1],
    ),
    "a PyDataset": (lambda: {"x": InBatches()}, [4, 4]),
    "a generator": (lambda: {"x": endless(), "steps_per_epoch": 8}, [4, 4]),
    "a data set that draws": (lambda: {"x": drawn()}, [4, 4]),
    "a part of a data set": (
        lambda: {"x": drawn().repeat(2), "steps_per_epoch": 8},
        [4, 4],
    ),
}


def trained(steps, fit, *, epochs=2, **settings):
    model = model_of(steps, **settings)
    history = model.fit(**fit, epochs=epochs, verbose=0).history
    return model, history


def assert_alike(ours, one_by_one, **within):
    (model, history), (reference, expected) = ours, one_by_one
    assert history.keys() == expected.keys()
    for name, values in history.items():
        np.testing.assert_allclose(values, expected[name], **(within or ROUNDED), err_msg=name)
    for weight, wanted in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(weight, wanted, **(within or ROUNDED))


@functools.cache
def one_by_one(kind):
    """Trained each step by itself, and without XLA."""
    return trained(1, DATA[kind][0](), make=without_draws, xla=False)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(each, marks=pytest.mark.slow)
        if each in ("arrays", "a data set that draws")  # other cases have such data, too
        else each
        for each in DATA
    ],
)
def test_an_execution_of_gathered_batches_trains_as_its_steps_do(kind, launches):
    fit, in_epoch = DATA[kind]
    ours = trained(4, fit(), make=without_draws)
    assert launches == 2 * in_epoch
    assert_alike(ours, one_by_one(kind))


def test_a_launch_leaves_to_the_next_what_its_steps_do(launches):
    fit, in_epoch = DATA["a smaller last batch"]
    ours = trained(4, fit())
    assert launches == 2 * in_epoch
    launches.clear()
    assert_alike(ours, trained(1, fit()))
    assert set(launches) == {1}


def named():
    keras.utils.set_random_seed(0)
    text, more = keras.Input((6,), dtype="int32", name="text"), keras.Input((6,), name="more")
    x = layers.Flatten()(layers.Embedding(20, 4)(text))
    return keras.Model(
        {"text": text, "more": more}, layers.Dense(3)(layers.Concatenate()([x, more]))
    )


def test_batches_may_be_any_nest(launches):
    x = {"text": TOKENS, "more": TOKENS.astype(np.float32)}

    def fit():
        data = tf.data.Dataset.from_tensor_slices((x, LABELS, WEIGHTS))
        return {"x": data.batch(ROWS, drop_remainder=True)}

    ours = trained(11, fit(), make=named)
    assert launches == [11, 11]
    # The inputs are as large as the numbers of tokens, and so are the roundings of sums.
    of_single_steps = trained(1, fit(), make=named, xla=False)
    assert_alike(ours, of_single_steps, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "kind", [pytest.param("arrays", marks=pytest.mark.slow), "a smaller last batch"]
)
def test_several_replicas_take_gathered_batches(kind, in_one_function, launches):
    fit, in_epoch = DATA[kind]
    ours = trained(4, fit(), make=without_draws, replicas=2)
    assert launches == 2 * in_epoch
    assert_alike(ours, one_by_one(kind))


def test_each_replica_gets_its_rows_on_its_device(in_one_function, read_on_devices):
    """By TensorFlow's own iterators, which leave batches to gather on the host."""
    model, allowance = model_of(4, make=without_draws, replicas=2), gathered.Allowance()
    data = tf.data.Dataset.from_tensor_slices({"x": TOKENS}).batch(ROWS)
    gather = gathering(model, data.element_spec, allowance)
    strategy = model.distribute_strategy
    batches = gather(
        lambda _: iter(strategy.experimental_distribute_dataset(data, on_host(gather)))
    )
    for index, deferred in enumerate(batches.take(4)):
        (own,) = deferred.inputs.values()
        assert own.device.endswith(f"CPU:{index}")
        wanted = TOKENS[: 4 * ROWS].reshape(4, 2, 2, 6)[:, index]
        np.testing.assert_array_equal(tf.bitcast(own, tf.int32), wanted)
    batch = next(batches)
    for index, part in enumerate(strategy.experimental_local_results(batch["x"])):
        assert part.device.endswith(f"CPU:{index}")
        np.testing.assert_array_equal(part, TOKENS[16:20].reshape(2, 2, 6)[index])


def test_rows_that_replicas_cannot_share_equally_go_by_themselves(
    in_one_function, launches, caplog
):
    fit = {"x": TOKENS[:27], "y": LABELS[:27], "batch_size": 5}  # of the replicas, 3 and 2
    with caplog.at_level("INFO", "tfaccel"):
        ours = trained(3, fit, make=without_draws, replicas=2)
    assert set(launches) == {1}
    assert caplog.text.count("the replicas do not share equally goes by itself") == 1
    assert_alike(ours, trained(1, fit, make=without_draws, xla=False))


def test_parts_of_gathered_batches_are_accumulated(launches):
    fit, in_epoch = DATA["a generator"]
    ours = trained(4, fit(), make=without_draws, config=StepConfig(accumulation_steps=2))
    assert launches == 2 * in_epoch
    assert_alike(ours, one_by_one("a generator"))


@pytest.mark.parametrize("replicas", [1, 2])
def test_without_xla_they_go_one_by_one_for_a_reason(replicas, launches, caplog):
    fit, _ = DATA["arrays"]
    with caplog.at_level("INFO", "tfaccel"):
        ours = trained(4, fit(), make=without_draws, replicas=replicas, xla=False)
    assert set(launches) == {1}
    assert caplog.text.count("go one by one, because XLA does not compile the steps") == 1
    assert_alike(ours, one_by_one("arrays"))


def test_xla_that_is_turned_off_at_the_first_step_is_a_reason(launches, caplog):
    class Counts(layers.Layer):
        """Has an operation that XLA lacks."""

        def call(self, x):
            return x + 0 * tf.strings.to_number(tf.strings.as_string(tf.stop_gradient(x)))

    def make():
        keras.utils.set_random_seed(0)
        return keras.Sequential([keras.Input((6,)), layers.Dense(3), Counts()])

    fit, _ = DATA["arrays"]
    with caplog.at_level("INFO", "tfaccel"):
        ours = trained(4, fit(), make=make)
    assert launches == [4, *[1] * 7, *[1] * 11]  # the first was gathered already
    assert caplog.text.count("go one by one, because XLA does not compile the steps") == 1
    assert_alike(ours, trained(1, fit(), make=make, xla=False))


def lengthy(*lengths):
    """Batches of tokens of these lengths."""

    def batches():
        for number, length in enumerate(lengths):
            x = np.random.default_rng(number).integers(0, 20, (ROWS, length))
            yield x.astype(np.int32), x[:, 0].astype(np.int32) % 3

    spec = tf.TensorSpec((None, None), tf.int32), tf.TensorSpec((None,), tf.int32)
    return {"x": tf.data.Dataset.from_generator(batches, output_signature=spec)}


def test_batches_of_several_lengths_become_launches_of_few_lengths(launches):
    lengths = [3] * 4 + [3, 3, 5, 5] + [5, 3, 3, 3] + [5, 5, 5, 5]
    ours = trained(4, lengthy(*lengths), epochs=1, make=without_draws)
    # Of 3 tokens: 4 and 2; three are 2 and 1. Of 5: 2 and 1, then 4.
    assert launches == [4, 2, 2, 1, 2, 1, 4]
    model = ours[0]
    counts = [
        each.__wrapped__.experimental_get_tracing_count()
        for (_, make, _), each in model.train_function._step._made.items()
        if make
    ]
    assert counts == [4]  # two numbers of each length, and no others
    assert_alike(ours, trained(1, lengthy(*lengths), epochs=1, make=without_draws, xla=False))


def test_steps_are_skipped_as_one_by_one(launches):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        fit = {**DATA["arrays"][0](), "sample_weight": np.ones(44, np.float32)}
        fit["sample_weight"][20:24] = np.inf  # the batch of index 5
        config = StepConfig(nonfinite="skip")
        fit["shuffle"] = False
        ours = trained(4, fit, epochs=1, make=without_draws, config=config)
        assert launches == [4, 4, 3]
        one_by_one = trained(1, fit, epochs=1, make=without_draws, config=config)
    finally:
        keras.config.set_dtype_policy("float32")
    assert ours[1]["skipped_steps"] == one_by_one[1]["skipped_steps"]
    assert ours[1]["skipped_steps"][0] >= 1
    assert_alike(ours, one_by_one)


@pytest.mark.parametrize("sees", [False, True])
def test_a_fault_has_its_code_and_step(sees):
    model = model_of(4, make=without_draws)
    fit = {**DATA["a smaller last batch"][0](), "shuffle": False}
    fit["sample_weight"] = np.ones(18, np.float32)
    fit["sample_weight"][16:] = np.nan  # the last batch, which is smaller
    see = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)
    with pytest.raises(Exception, match="at step 5"):
        model.fit(**fit, verbose=0, callbacks=[see] if sees else [])
    assert (model.train_function.nonfinite != functions.finite.FINE).tolist() == [True]


def test_tests_go_one_by_one_and_count_every_row(launches):
    fit = {**DATA["a PyDataset"][0](), "validation_data": (TOKENS[:42], LABELS[:42])}
    ours = trained(4, fit, make=without_draws)
    assert not any(make for _, make, _ in ours[0].test_function._step._made)
    wanted = trained(1, fit, make=without_draws, xla=False)
    assert_alike(ours, wanted)
    test = {"x": TOKENS[:42], "y": LABELS[:42], "verbose": 0}
    found, wanted = (each.evaluate(**test) for each in (ours[0], wanted[0]))
    np.testing.assert_allclose(found, wanted, **ROUNDED)


def test_callbacks_see_the_logs_of_each_execution():
    def seen(steps, **settings):
        found = []
        see = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda step, logs: found.append((step, logs["loss"]))
        )
        model = model_of(steps, make=without_draws, **settings)
        model.fit(**DATA["a PyDataset"][0](), epochs=2, verbose=0, callbacks=[see])
        # At an epoch's end, Keras counts the steps of a whole execution.
        return [each for each in found if each[0] in (3, 7)]

    for (step, loss), (wanted_step, wanted) in zip(seen(4), seen(1, xla=False), strict=True):
        assert step == wanted_step
        np.testing.assert_allclose(loss, wanted, **ROUNDED)


def test_large_batches_are_fewer_in_a_launch(launches, monkeypatch, caplog):
    monkeypatch.setattr(gathered, "MOST_BYTES", 3 * 4 * (24 + 4))  # three batches, not four
    fit, _ = DATA["a smaller last batch"]
    with caplog.at_level("INFO", "tfaccel"):
        ours = trained(4, fit(), make=without_draws)
    assert launches == 2 * [2, 2, 1]
    assert caplog.text.count("data: a launch takes 2 batches, because 4 batches would take") == 1
    assert_alike(ours, one_by_one("a smaller last batch"))


@pytest.mark.parametrize("steps_per_epoch", [pytest.param(8, marks=pytest.mark.slow), 6])
def test_an_endless_generator_is_where_keras_leaves_it(steps_per_epoch):
    def firsts(steps):
        seen, model = [], model_of(steps, make=without_draws, xla=steps > 1)
        fit = {"x": endless(), "steps_per_epoch": steps_per_epoch, "epochs": 3}
        note = lambda *_: seen.append(model.get_weights()[0])  # noqa: E731
        model.fit(**fit, verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=note)])
        return seen

    # Keras runs whole executions: of 6 steps two of 4, so that each epoch has 8.
    if steps_per_epoch % 4 == 0:
        for found, wanted in zip(firsts(4), firsts(1), strict=True):
            np.testing.assert_allclose(found, wanted, **ROUNDED)
    else:
        stock = without_draws()
        stock.compile(
            keras.optimizers.SGD(0.1, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            steps_per_execution=4,
        )
        fit = {"x": endless(), "steps_per_epoch": steps_per_epoch, "epochs": 3, "verbose": 0}
        stock.fit(**fit)
        np.testing.assert_allclose(firsts(4)[-1], stock.get_weights()[0], rtol=1e-5, atol=1e-6)


class Texts:
    """The examples, one at a time."""

    def __init__(self, fails=None):
        self.fails = fails

    def __len__(self):
        return 42

    def __getitem__(self, index):
        if index == self.fails:
            raise KeyError("of the user")
        return TOKENS[index], LABELS[index], WEIGHTS[index]


def examples(*, replicas=1, fails=None, **settings):
    """A loader of them, of 11 batches; the last has padding."""
    plan = {"steps_per_epoch": None, "last_batch": "pad", "shuffle": True} | settings
    data = open_examples(
        Texts(fails), global_batch_size=ROWS, num_replicas=replicas, seed=3, **plan
    )
    devices = [Device(f"/cpu:{index}", None) for index in range(replicas)]
    settings = {"seed": 3, "num_threads": 2, "first_replica": 0, "strategy": strategy_of(replicas)}
    return Loader(data, devices=devices, **settings)


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_examples_of_ones_own_go_in_launches(replicas, in_one_function, launches):
    test = examples(replicas=replicas)
    fit = {"x": examples(replicas=replicas), "validation_data": test}
    ours = trained(4, fit, make=without_draws, replicas=replicas)
    assert launches == 2 * [4, 4, 3]
    assert not any(make for _, make, _ in ours[0].test_function._step._made)
    one_by_one = {"x": examples(), "validation_data": examples()}
    assert_alike(ours, trained(1, one_by_one, make=without_draws, xla=False))


def test_examples_go_on_in_the_middle_of_an_epoch(launches):
    """As after a resume from a checkpoint."""
    trained_on = []
    for steps in (4, 1):
        loader = examples()
        loader.start_at(epoch=0, step=6)
        fit = {"x": loader}
        trained_on.append(trained(steps, fit, make=without_draws, xla=steps > 1))
        assert loader.position == 22
    assert launches[:5] == [4, 1, 4, 4, 3]
    assert_alike(*trained_on)


def test_a_later_fit_goes_on_with_the_epochs_of_the_first():
    found = []
    for steps in (4, 1):
        fit = {"x": TOKENS[:32], "y": LABELS[:32], "batch_size": ROWS}
        model, _ = trained(steps, fit, epochs=1, make=without_draws, xla=steps > 1)
        history = model.fit(**fit, epochs=3, initial_epoch=1, verbose=0).history
        found.append((model, history))
    assert_alike(*found)


def test_a_fault_of_an_example_comes_after_the_steps_before_it(launches):
    model = model_of(4, make=without_draws)
    with pytest.raises(UserError, match="reading example 22 failed"):
        model.fit(examples(fails=22, shuffle=False), verbose=0)
    assert launches == [4, 1]


class OfUserError(Exception):
    """Raised by a user's code."""


def failing(number):
    """A generator that fails after so many batches."""
    for index, batch in enumerate(endless()):
        if index == number:
            raise OfUserError("of the user")
        yield batch


@pytest.mark.parametrize("number", [pytest.param(6, marks=pytest.mark.slow), 8])
def test_an_error_of_the_data_comes_after_the_steps_before_it(number, launches):
    weights, errors = [], []
    for steps in (4, 1):
        launches.clear()
        model = model_of(steps, make=without_draws, xla=steps > 1)
        with pytest.raises(Exception, match="of the user") as raised:
            model.fit(failing(number), verbose=0)
        assert sum(launches) == number
        weights.append(model.get_weights())
        errors.append(raised.type)
    assert errors[0] is errors[1]
    for found, wanted in zip(*weights, strict=True):
        np.testing.assert_allclose(found, wanted, **ROUNDED)


def test_ctrl_c_stops_a_fit_that_waits_for_data():
    def stuck():
        for index, batch in enumerate(itertools.islice(endless(), 2_000)):
            if index == 6:
                os.kill(os.getpid(), signal.SIGINT)
            yield batch

    model = model_of(4, make=without_draws)
    # A shell starts programs in the background with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            model.fit(stuck(), steps_per_epoch=1_000_000, verbose=0)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_pass_that_stops_half_way_is_not_continued():
    """Of a data set that draws in every pass, of which the end was read ahead."""

    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = True

    def weights(steps):
        model, data = model_of(steps, make=without_draws, xla=steps > 1), drawn().take(8)
        model.fit(data, callbacks=[Stops()] * (steps > 1), steps_per_epoch=4, verbose=0)
        model.fit(data, epochs=2, verbose=0)
        return model.get_weights()

    # One by one, too, four of eight batches are read, so that the next pass has a new iterator.
    for found, wanted in zip(weights(4), weights(1), strict=True):
        np.testing.assert_allclose(found, wanted, **ROUNDED)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: tf.ragged.constant([[1, 2], [3], [4, 5, 6], [7]]), "a batch has a RaggedTensor"),
        (lambda: tf.sparse.eye(4, 6), "a batch has a SparseTensor"),
        (lambda: tf.constant(["a", "b", "c", "d"]), "a batch has values of dtype string"),
    ],
)
def test_other_batches_go_one_by_one_for_a_reason(make, reason, caplog):
    model = model_of(2)
    data = tf.data.Dataset.from_tensors((make(), tf.zeros(4, tf.int32))).repeat(4)
    with caplog.at_level("INFO", "tfaccel"):
        for _ in range(2):
            gather = gathering_of(model, data)
    assert gather is None
    assert caplog.text.count(f"go one by one, because {reason}") == 1


def gathering_of(model, data):
    return gathering(model, data.element_spec, gathered.Allowance())


def test_what_decides_is_said_once(caplog):
    model = model_of(4, make=without_draws)
    with caplog.at_level("INFO", "tfaccel"):
        for _ in range(2):
            model.fit(**DATA["a PyDataset"][0](), verbose=0)
    assert caplog.text.count("step: batches of up to 4 steps go in one launch") == 1


def test_one_step_in_an_execution_gathers_nothing(caplog):
    with caplog.at_level("INFO", "tfaccel"):
        model_of(1, make=without_draws, xla=False).fit(**DATA["arrays"][0](), verbose=0)
    assert "one launch" not in caplog.text
    assert "one by one" not in caplog.text


# On a GPU.


def on_gpu(setup, steps, precision):
    run = setup(gpu_ids=[0], precision=precision, tf32=False)
    with run.scope():
        model = without_draws()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    run.compile(model, optimizer, loss, metrics=["accuracy"], steps_per_execution=steps)
    return model


@pytest.mark.gpu
@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize(("precision", "rtol"), [("float32", 1e-4), ("mixed_float16", 3e-2)])
def test_on_a_gpu_gathered_batches_train_as_one_by_one(setup, kind, precision, rtol):
    fit, _ = DATA[kind]
    found = []
    for steps in (4, 1):
        model = on_gpu(setup, steps, precision)
        found.append((model, model.fit(**fit(), epochs=2, verbose=0).history))
    assert_alike(*found, rtol=rtol, atol=1e-5 if precision == "float32" else 1e-3)


@pytest.mark.gpu
def test_on_a_gpu_one_launch_has_all_steps_and_its_batches(setup, launches, monkeypatch):
    places, of_several = set(), functions._Step.in_a_row

    def in_a_row(step, deferred, **kwargs):
        for each in deferred[0].inputs.values():
            places.add((each.backing_device[-5:], each.dtype.name))
        return of_several(step, deferred, **kwargs)

    monkeypatch.setattr(functions._Step, "in_a_row", in_a_row)
    model = on_gpu(setup, 11, "float32")
    model.fit(**DATA["arrays"][0](), epochs=2, verbose=0)
    assert launches == [11, 11]
    assert places == {("GPU:0", "uint32")}  # int32 tensors would be in the host's memory
    (function,) = model.train_function._step._made.values()
    assert function.__wrapped__.experimental_get_tracing_count() == 1
    assert int(model.optimizer.iterations) == 22
