"""Every epoch reads in an order of its own, by seed and epoch alone, whatever `fit` is given."""

import keras
import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf
from conftest import compiled, strategy_of

from tfaccel.data.shards import epoch_order as order_of
from tfaccel.keras_internals import epoch_draws, epoch_order
from tfaccel.keras_internals.epoch_order import _batches_shuffled
from tfaccel.step import finite, functions

X = np.arange(10, dtype="float32")[:, None]
SEED = 3


@pytest.fixture(scope="module")
def models():
    """A model on one replica and one on two, which all tests here train."""

    def make():
        return keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])

    optimizer = keras.optimizers.SGD(1e-6)
    settings = {"optimizer": lambda: optimizer.from_config(optimizer.get_config()), "loss": "mse"}
    return {number: compiled(make, number, xla=False, **settings) for number in (1, 2)}


@pytest.fixture(autouse=True)
def anew():
    """As in a new process with the seed 3."""
    epoch_order._NUM_BEGUN.clear()
    keras.utils.set_random_seed(SEED)
    yield
    keras.utils.set_random_seed(0)


@pytest.fixture
def read(monkeypatch):
    """Fits with steps that change nothing, and returns which rows those of each epoch were of."""
    steps = []

    def noting(self, batch, *, padded):
        if self.trains:
            parts = self._strategy.experimental_local_results(tf.nest.flatten(batch)[0])
            parts = [tf.sparse.to_dense(p) if isinstance(p, tf.SparseTensor) else p for p in parts]
            steps.append([float(row) for part in parts for row in part.numpy()[:, 0]])
        return {"loss": tf.constant(0.0), finite.LOG: tf.constant(finite.FINE, tf.int64)}

    monkeypatch.setattr(functions._Step, "__call__", noting)

    class Epochs(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.epochs.append(steps.copy())
            steps.clear()

    def fit(model, *args, epochs=3, **settings):
        callback = Epochs()
        callback.epochs = []
        steps.clear()
        model.fit(*args, epochs=epochs, verbose=0, callbacks=[callback], **settings)
        return callback.epochs

    return fit


def cut(rows, batch_size):
    return [list(rows[i : i + batch_size]) for i in range(0, len(rows), batch_size)]


def orders(epochs, *, rows=10, batch_size=4, seed=SEED):
    """The rows of each step of the epochs, by the arithmetic that loaders go by."""
    return [
        cut(order_of(rows, seed=seed, epoch=epoch, shuffle=True).tolist(), batch_size)
        for epoch in epochs
    ]


@pytest.mark.parametrize("num_replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_arrays_have_a_new_order_in_each_epoch_and_in_the_next_fit(models, read, num_replicas):
    model = models[num_replicas]
    assert read(model, X, X, batch_size=4, epochs=2) == orders([0, 1])
    assert read(model, X, X, batch_size=4, epochs=1) == orders([2])
    assert read(model, X, X, batch_size=4, epochs=6, initial_epoch=5) == orders([5])
    assert read(model, X, X, batch_size=4, epochs=1, shuffle=False) == [cut([*range(10)], 4)]


def test_the_order_is_that_of_the_seed_alone(models, read):
    keras.utils.set_random_seed(8)
    np.random.rand(3)
    assert read(models[1], X, X, batch_size=4, epochs=1) == orders([0], seed=8)


@pytest.mark.parametrize(
    "settings",
    [
        {"x": tf.constant(X), "y": tf.constant(X)},
        {"x": [X], "y": [X], "sample_weight": np.ones(10)},
        {"x": X, "y": np.arange(10) % 2, "class_weight": {0: 1.0, 1: 2.0}},
        {"x": scipy.sparse.csr_matrix(X), "y": X},
        {"x": np.r_[X, X[:2]], "y": np.r_[X, X[:2]], "validation_split": 1 / 6},
        pytest.param(
            {"x": X, "y": X, "validation_data": (X, X), "steps_per_epoch": 3},
            marks=pytest.mark.slow,  # as where the validation is split off
        ),
    ],
    ids=["tensors", "weights", "class weights", "sparse", "split", "validation"],
)
def test_so_have_all_kinds_of_arrays(models, read, settings):
    assert read(models[1], batch_size=4, epochs=2, **settings) == orders([0, 1])


@pytest.mark.parametrize("num_replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_rows_are_shuffled_within_each_batch(models, read, num_replicas):
    epochs = read(models[num_replicas], X, X, batch_size=4, shuffle="batch", epochs=2)
    expected = [_batches_shuffled(10, 4, seed=SEED, epoch=each).tolist() for each in range(2)]
    assert epochs == [cut(each, 4) for each in expected]
    assert [[sorted(step) for step in each] for each in epochs] == [cut([*range(10)], 4)] * 2
    assert epochs[0] != epochs[1]


def test_steps_per_epoch_cuts_a_pass_whose_parts_a_later_start_finds(models, read):
    first, second = orders([0, 1], batch_size=2)
    expected = [first[:2], first[2:4], first[4:], second[:2], second[2:4]]
    cut_short = {"batch_size": 2, "steps_per_epoch": 2, "epochs": 5}
    assert read(models[1], X, X, **cut_short) == expected
    epoch_order._NUM_BEGUN.clear()
    assert read(models[1], X, X, **cut_short, initial_epoch=1) == expected[1:]
    epoch_order._NUM_BEGUN.clear()
    read(models[1], X, X, batch_size=2, steps_per_epoch=2, epochs=1)
    # A `fit` that is none's continuation begins with a whole pass.
    assert read(models[1], X, X, batch_size=2, steps_per_epoch=2, epochs=1) == [second[:2]]


class Batches(keras.utils.PyDataset):
    """The rows by twos."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return X[2 * index : 2 * index + 2], X[2 * index : 2 * index + 2]


def batches(epochs):
    orders_ = [order_of(5, seed=SEED, epoch=epoch, shuffle=True) for epoch in epochs]
    return [[[2 * index, 2 * index + 1] for index in order] for order in orders_]


@pytest.mark.parametrize(
    ("num_replicas", "workers"),
    [
        (2, 2),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [(1, 1), (1, 2), (2, 1)]),
    ],
)
def test_batches_of_a_pydataset_have_one_too(models, read, num_replicas, workers):
    model = models[num_replicas]
    assert read(model, Batches(workers=workers), shuffle=True, epochs=2) == batches([0, 1])
    assert read(model, Batches(workers=workers), shuffle=True, epochs=1) == batches([2])
    in_order = cut([*range(10)], 2)
    assert read(model, Batches(workers=workers), shuffle=False, epochs=1) == [in_order]


class Drawing(Batches):
    """Batches of NumPy's random numbers."""

    def __getitem__(self, index):
        return np.random.uniform(size=(2, 1)), X[:2]


@pytest.mark.slow  # it forks processes
def test_forked_workers_of_a_pydataset_draw_anew_in_each_epoch(models, read):
    drawn = [
        read(models[1], Drawing(workers=2, use_multiprocessing=True), shuffle=False, epochs=2)
        for _ in range(2)
    ]
    numbers = [each for epochs in drawn for epoch in epochs for step in epoch for each in step]
    assert len(set(numbers)) == len(numbers) == 40
    epoch_order._NUM_BEGUN.clear()
    data = Drawing(workers=1, use_multiprocessing=True)
    assert read(models[1], data, shuffle=False, epochs=2) == drawn[0]


@pytest.mark.parametrize("num_replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_run_that_was_killed_goes_on_bit_for_bit_by_keras_backup(models, tmp_path, num_replicas):
    model = models[num_replicas]
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    start = model.get_weights()

    class Killed(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise KeyboardInterrupt

    def train(*callbacks):
        epoch_order._NUM_BEGUN.clear()
        model.set_weights(start)
        model.fit(X, X, epochs=2, batch_size=4, verbose=0, callbacks=[*callbacks])
        return model.get_weights()

    expected = train()
    with pytest.raises(KeyboardInterrupt):
        train(backup, Killed())
    np.testing.assert_equal(train(keras.callbacks.BackupAndRestore(tmp_path / "backup")), expected)
    model._initial_epoch = None


def test_a_loader_begins_where_the_epoch_does(setup, read):
    run = setup(seed=SEED)
    with run.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    run.compile(model, "sgd", "mse")

    class Rows:
        def __len__(self):
            return 10

        def __getitem__(self, index):
            return X[index], X[index]

    def loader():
        return run.examples(Rows(), global_batch_size=5, shuffle=True)

    expected = orders([0, 1, 2, 3], batch_size=5)
    assert read(model, loader(), epochs=3, initial_epoch=2) == expected[2:3]
    parts = [steps for epoch in expected for steps in ([epoch[0]], [epoch[1]])]
    assert read(model, loader(), epochs=4, initial_epoch=3, steps_per_epoch=1) == parts[3:4]
    gone_on = loader()
    assert read(model, gone_on, epochs=2) == expected[:2]
    assert read(model, gone_on, epochs=1) == expected[2:3]
    assert read(model, gone_on, epochs=4, initial_epoch=3) == expected[3:]


def _drawn(unknown_length, batch_size=4):
    """A data set of one random number for each row, in 0 to 1."""
    dataset = tf.data.Dataset.from_tensor_slices(X).map(lambda x: (tf.random.uniform((1,)), x))
    dataset = dataset.filter(lambda x, y: True) if unknown_length else dataset
    return dataset.batch(batch_size).prefetch(1)


@pytest.mark.parametrize(
    ("num_replicas", "unknown_length"),
    [
        (2, True),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [(1, False), (2, False)]),
    ],
)
@pytest.mark.usefixtures("read_on_devices")
def test_a_data_set_draws_on_from_epoch_to_epoch(models, read, num_replicas, unknown_length):
    model, dataset = models[num_replicas], _drawn(unknown_length)
    epochs = read(model, dataset, epochs=1) + read(model, dataset, epochs=1)
    assert [[len(step) for step in epoch] for epoch in epochs] == [[4, 4, 2]] * 2
    numbers = [each for epoch in epochs for step in epoch for each in step]
    assert len(set(numbers)) == 20
    again = read(model, _drawn(unknown_length), epochs=2)
    assert again == epochs  # by the seed
    cut_short = read(model, _drawn(unknown_length), epochs=2, steps_per_epoch=2)
    assert cut_short == [epochs[0][:2], epochs[0][2:]]


def test_a_data_set_without_draws_is_read_as_keras_reads_it(models, read):
    dataset = tf.data.Dataset.from_tensor_slices((X, X)).shuffle(10).batch(4)
    first, second = read(models[1], dataset, epochs=2)
    assert sorted(np.concatenate(first)) == sorted(np.concatenate(second)) == [*range(10)]
    assert first != second
    assert not epoch_draws.draws(dataset)
    assert "_tfaccel_stream" not in vars(dataset)


def test_draws_are_found_wherever_a_data_set_makes_them():
    def flipped(x):
        return tf.cond(
            x[0] > 3, lambda: tf.image.random_brightness(x[None, None], 0.1)[0, 0], lambda: x
        )

    rows = tf.data.Dataset.from_tensor_slices(X)
    nested = tf.data.Dataset.range(2).interleave(lambda _: rows.map(flipped))
    assert epoch_draws.draws(tf.data.Dataset.zip((rows, nested)).take(2))
    assert not epoch_draws.draws(rows.map(lambda x: tf.random.stateless_uniform((1,), (1, 2))))
    assert epoch_draws.calls_python(rows.map(lambda x: tf.numpy_function(np.abs, [x], tf.float32)))
    assert not epoch_draws.calls_python(nested)


def test_a_fit_within_a_fit_has_an_order_of_its_own(models, read):
    class Other(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            stock.fit(X, X, verbose=0)

    with strategy_of(1).scope():
        stock = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    stock.compile("sgd", "mse", run_eagerly=True)
    callbacks = keras.callbacks.CallbackList([Other()], model=models[1])
    models[1].fit(X, X, batch_size=4, epochs=1, verbose=0, callbacks=callbacks)
    assert read(models[1], X, X, batch_size=4, epochs=1) == orders([1])
    assert stock not in epoch_order._NUM_BEGUN


@pytest.mark.parametrize("is_stock", [False, True])
def test_rows_are_in_order_where_the_step_runs_eagerly(models, is_stock):
    seen = []

    class Noting(keras.layers.Layer):
        def call(self, x):
            if tf.executing_eagerly():
                seen.append(x.numpy()[:, 0].astype(int).tolist())
            return x

    def make():
        return keras.Sequential([keras.Input((1,)), Noting(), keras.layers.Dense(1)])

    model = compiled(make, 1, xla=False, optimizer="sgd", loss="mse", run_eagerly=True)
    if is_stock:
        with strategy_of(1).scope():
            model.compile("sgd", "mse", run_eagerly=True)  # without tfaccel's functions
        assert model.train_function is None
    model.fit(
        X, X, batch_size=2, epochs=4, steps_per_epoch=2, initial_epoch=1, verbose=0, shuffle=True
    )
    first, second = orders([0, 1], batch_size=2)
    assert seen == [*first[2:], *second[:2]]


# How often an input is read.


@pytest.mark.parametrize("kind", ["arrays", "data set"])
def test_no_pass_is_begun_that_nobody_reads(models, monkeypatch, kind):
    model, begun = models[2], []
    x = X if kind == "arrays" else tf.data.Dataset.from_tensor_slices((X, X)).batch(4)
    rest = {"y": X, "batch_size": 4, "shuffle": False} if kind == "arrays" else {}
    validation = (X, X) if kind == "arrays" else x
    two = tf.data.Dataset.range(2).batch(2)
    stock = type(model.distribute_strategy.experimental_distribute_dataset(two))
    own = stock.__iter__
    monkeypatch.setattr(stock, "__iter__", lambda each: begun.append(1) or own(each))
    model.fit(x, epochs=3, validation_data=validation, validation_batch_size=4, verbose=0, **rest)
    assert len(begun) == 3 + 3
    rest.pop("shuffle", None)
    losses = [model.evaluate(x, verbose=0, **rest) for _ in range(2)]
    assert len(begun) == 6 + 2
    assert losses[0] == losses[1] == pytest.approx(np.mean((model.predict_on_batch(X) - X) ** 2))
    rest.pop("y", None)
    np.testing.assert_array_equal(model.predict(x, verbose=0, **rest), model.predict_on_batch(X))
    assert len(begun) == 8 + 1


def test_what_another_model_reads_in_a_fit_is_kerass_own_affair(models):
    """A callback's model has neither the order nor the iterators of the one that is trained."""
    other = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    other.compile("sgd", "mse")
    seen = []
    predict = lambda epoch, logs: seen.append(other.predict(X, verbose=0))  # noqa: E731
    callback = keras.callbacks.LambdaCallback(on_epoch_begin=predict, on_epoch_end=predict)
    models[2].fit(X, X, batch_size=4, validation_data=(X, X), verbose=0, callbacks=[callback])
    np.testing.assert_allclose(seen, [other.predict_on_batch(X)] * 2, rtol=1e-6)
