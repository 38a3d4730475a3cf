import dataclasses
import json
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled, in_new_process, strategy_of

from tfaccel import UserError
from tfaccel.config import AugmentConfig
from tfaccel.data.distribute import Loader, check_same_classes
from tfaccel.data.feed import Feed
from tfaccel.data.shards import Plan
from tfaccel.data.source import UnreadableError
from tfaccel.runtime.devices import Device

FEATURES = np.random.default_rng(0).normal(size=(37, 5)).astype(np.float32)
LABELS = (np.arange(37) % 3).astype(np.int32)


@dataclasses.dataclass
class Numbers:
    """Data without files: rows of FEATURES. Counts the streams that it makes."""

    plan: Plan
    class_names: tuple = ("a", "b", "c")
    skips_bad: bool = False
    unreadable: frozenset = frozenset()
    streams: int = 0
    num_outputs: int = 2

    @property
    def spec(self):
        rows = self.plan.rows_per_replica
        specs = tf.TensorSpec((rows, 5), tf.float32), tf.TensorSpec((rows,), tf.int32)
        return specs[: self.num_outputs]

    def feed(self, replica_index, *, first=0, lost=frozenset()):
        return Feed(self.plan, AugmentConfig(), (1, 1), replica_index, first, lost)

    def stream(self, placement, feed):
        self.streams += 1
        number = 0
        while True:
            ids = feed.rows(number).ids
            bad = self.unreadable & set(ids.tolist())
            if bad:
                raise UnreadableError(f"{sorted(bad)} cannot be read", tuple(sorted(bad)))
            with tf.device(placement.device.name):
                batch = tf.constant(FEATURES[ids]), tf.constant(LABELS[ids])
            yield batch[: self.num_outputs]
            number += 1


def make_loader(num_replicas=1, *, batch=12, num_examples=37, shuffle=True, plan=None, **data):
    plan = plan or {}
    plan = Plan(num_examples, batch, num_replicas, seed=4, shuffle=shuffle, **plan)
    return Loader(
        Numbers(plan, **data),
        devices=[Device(f"/cpu:{index}", None) for index in range(num_replicas)],
        seed=4,
        num_threads=1,
        first_replica=0,
        strategy=strategy_of(num_replicas),
    )


def rows_of(loader, num_replicas=1, iterator=None):
    """The real rows' features of each batch of an epoch, in order."""
    local = strategy_of(num_replicas).experimental_local_results
    batches = []
    for batch in iterator or loader:
        x, weight = (np.concatenate(local(batch[index])) for index in (0, -1))
        batches.append(x[weight > 0])
    return batches


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_replicas_see_the_batches_of_one(num_replicas):
    one, several = make_loader(), make_loader(num_replicas)
    assert len(one) == len(several) == 4
    for _ in range(2):
        for wanted, ours in zip(rows_of(one), rows_of(several, num_replicas), strict=True):
            np.testing.assert_array_equal(ours, wanted)


def test_shapes_are_static_and_a_full_batch_weighs_one():
    loader = make_loader()
    for step, batch in enumerate(loader):
        for tensor, spec in zip(batch, loader.element_spec, strict=True):
            assert (tensor.shape, tensor.dtype) == (spec.shape, spec.dtype)
        assert batch[2].numpy().sum() == (12 if step < 3 else 1)


@pytest.mark.parametrize(
    ("last_batch", "num_examples", "steps"),
    [("drop", 37, 3), ("repeat", 37, 4), ("pad", 36, 3)],
)
def test_without_padding_there_are_no_weights(last_batch, num_examples, steps):
    loader = make_loader(num_examples=num_examples, plan={"last_batch": last_batch})
    batches = list(loader)
    assert len(batches) == len(loader) == steps
    assert all(len(batch) == 2 and len(batch[1]) == 12 for batch in batches)


def test_one_stream_serves_every_epoch():
    loader = make_loader()
    orders = [np.concatenate(rows_of(loader)).tobytes() for _ in range(3)]
    assert len(set(orders)) == 3
    assert loader.data.streams == 1


def test_an_epoch_left_half_way_is_not_finished_by_the_next():
    loader, other = make_loader(), make_loader()
    abandoned = iter(loader)
    for _ in range(2):
        next(abandoned)
    rows_of(other)
    np.testing.assert_array_equal(
        np.concatenate(rows_of(loader)), np.concatenate(rows_of(other))
    )  # the second epoch, whole
    with pytest.raises(UserError, match="a newer iterator draws"):
        next(abandoned)


def test_a_stream_that_can_skip_is_kept():
    class Skipping:
        def __init__(self, loader):
            self._feed, self._number = loader.data.feed(0), 0

        def skip_to(self, first):
            self._number = first
            return True

        def __next__(self):
            ids = self._feed.rows(self._number).ids
            self._number += 1
            return tf.constant(FEATURES[ids]), tf.constant(LABELS[ids])

    loader, other = make_loader(), make_loader()
    streams = []
    loader._stream = lambda index: streams.append(Skipping(loader)) or streams[-1]
    next(iter(loader))
    rows_of(other)
    np.testing.assert_array_equal(np.concatenate(rows_of(loader)), np.concatenate(rows_of(other)))
    assert len(streams) == 1


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_start_at_gives_what_an_uninterrupted_run_gives(num_replicas):
    whole, resumed = make_loader(), make_loader(num_replicas)
    epochs = [rows_of(whole) for _ in range(3)]
    resumed.start_at(epoch=1, step=2)
    for ours, wanted in (
        (rows_of(resumed, num_replicas), epochs[1][2:]),
        (rows_of(resumed, num_replicas), epochs[2]),
    ):
        np.testing.assert_array_equal(np.concatenate(ours), np.concatenate(wanted))
    # At an epoch's end there is nothing left of it, and the next one follows.
    resumed.start_at(epoch=1, step=4)
    assert resumed.begins_late
    assert list(resumed) == []
    assert not resumed.begins_late
    ours = rows_of(resumed, num_replicas)
    np.testing.assert_array_equal(np.concatenate(ours), np.concatenate(epochs[2]))
    with pytest.raises(UserError, match="a step of at most 4"):
        resumed.start_at(epoch=0, step=5)


def test_a_failed_epoch_begins_anew():
    loader = make_loader(unreadable=frozenset({30}))
    for _ in range(2):  # it fails again as long as it is there
        with pytest.raises(UnreadableError):
            rows_of(loader)
    loader.data.unreadable = frozenset()
    np.testing.assert_array_equal(
        np.concatenate(rows_of(loader)), np.concatenate(rows_of(make_loader()))
    )


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_skipping_an_example_that_vanishes_loses_no_other(num_replicas, caplog):
    loader = make_loader(num_replicas, skips_bad=True, unreadable=frozenset({3, 30}))
    for _ in range(2):
        rows = np.concatenate(rows_of(loader, num_replicas))
        wanted = np.delete(FEATURES, [3, 30], axis=0)
        assert sorted(rows.tolist()) == sorted(wanted.tolist())
    assert "skipped from this batch on" in caplog.text


def linear(seed=0):
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])


LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def model_on(num_replicas, make=linear, *, xla=False):
    settings = {"optimizer": "sgd", "loss": LOSS, "metrics": ["accuracy"]}
    return compiled(make, num_replicas, xla=xla, **settings)


def stock_on(loader, *, epochs):
    """Plain Keras, which has trained on plain arrays: the real rows of each batch."""
    stock = linear()
    stock.compile("sgd", LOSS, jit_compile=False)
    for _ in range(epochs):
        for x, y, *weight in loader:
            real = weight[0].numpy() > 0 if weight else slice(None)
            stock.train_on_batch(x.numpy()[real], y.numpy()[real])
    return stock


@pytest.mark.parametrize(
    ("num_replicas", "batch"),
    [
        (2, 12),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [(1, 12), (1, 36), (2, 36)]),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [(3, 12), (3, 36)]),
    ],
)
def test_every_example_counts_once_whatever_the_batch_and_the_replicas(num_replicas, batch):
    # The reference has no batches at all. 1e-6 is the issue's own tolerance.
    model = model_on(num_replicas, xla=True)
    loader = make_loader(num_replicas, batch=batch, shuffle=False)
    logits = FEATURES @ model.layers[0].kernel.numpy() + model.layers[0].bias.numpy()
    exponents = np.exp(logits - logits.max(axis=1, keepdims=True))
    chances = exponents / exponents.sum(axis=1, keepdims=True)
    loss, accuracy = model.evaluate(loader, verbose=0)
    np.testing.assert_allclose(loss, -np.log(chances[np.arange(37), LABELS]).mean(), rtol=1e-6)
    np.testing.assert_allclose(accuracy, (logits.argmax(axis=1) == LABELS).mean(), rtol=1e-6)
    predicted = model.predict(loader, verbose=0)
    np.testing.assert_allclose(predicted, logits, rtol=1e-5, atol=1e-6)
    assert model.predict(loader, steps=1, verbose=0).shape == (min(batch, 37), 3)


def print_evaluations(num_replicas, batch):
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration()] * num_replicas
    tf.config.set_logical_device_configuration(cpu, logical)
    found = []
    for each in (1, num_replicas):
        loader = make_loader(each, batch=batch)
        real = np.concatenate(rows_of(loader, each))
        model = model_on(each, xla=True)
        found.append((sorted(real.tolist()), model.evaluate(loader, verbose=0)))
    print(json.dumps(found))


@pytest.mark.slow
@pytest.mark.parametrize("batch", [16, 40])  # of 37: 8 replicas have 5 rows left, or 37
def test_p5_on_eight_replicas_every_example_counts_once(batch):
    # In a process of its own: tests have three devices.
    here = pathlib.Path(__file__).parent
    start = f"import sys; sys.path[:0] = [{str(here)!r}, {str(here.parent)!r}]"
    call = f"import test_distribute; test_distribute.print_evaluations(8, {batch})"
    printed = in_new_process(f"{start}; {call}")
    (rows_of_one, of_one), (rows_of_eight, of_eight) = json.loads(printed.splitlines()[-1])
    assert rows_of_eight == rows_of_one == sorted(FEATURES.tolist())
    np.testing.assert_allclose(of_eight, of_one, rtol=1e-6)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_data_without_labels_is_predicted_in_order(num_replicas):
    model = model_on(num_replicas)
    loader = make_loader(num_replicas, shuffle=False, num_outputs=1)
    logits = FEATURES @ model.layers[0].kernel.numpy() + model.layers[0].bias.numpy()
    predicted = model.predict(loader, verbose=0)
    np.testing.assert_allclose(predicted, logits, rtol=1e-5, atol=1e-6)


def test_training_on_padded_batches_is_training_on_the_rows_that_there_are():
    # 1e-5: sums in another order.
    model = model_on(2)
    model.fit(make_loader(2), epochs=2, verbose=0)
    reference = stock_on(make_loader(), epochs=2)
    for ours, wanted in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=1e-6)


class OwnStep(keras.Model):
    """Trains as Keras's guide has it, by a step that knows no weights."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            value = self.compute_loss(x, y, self(x, training=True))
        grads = tape.gradient(value, self.trainable_weights)
        self.optimizer.apply_gradients(zip(grads, self.trainable_weights, strict=True))
        return {"loss": value}


def own_step():
    like = linear()
    return OwnStep(like.inputs, like.outputs)


@pytest.mark.parametrize("num_replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_step_of_ones_own_takes_batches_that_come_out_even(num_replicas):
    model = model_on(num_replicas, own_step)
    model.fit(make_loader(num_replicas, num_examples=36), epochs=2, verbose=0)
    reference = stock_on(make_loader(num_examples=36), epochs=2)
    for ours, wanted in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=1e-6)


def test_a_step_of_ones_own_that_takes_no_weights_is_told_of_padding():
    with pytest.raises(
        UserError, match=r"train_step of the model .* the batch is \(x, y, weight\)"
    ):
        model_on(1, own_step).fit(make_loader(), verbose=0)


def test_plain_arrays_after_a_loader_keep_keras_own_weights():
    # Zero weights are padding in a loader's batches alone: Keras divides by all rows.
    model = model_on(1)
    model.evaluate(make_loader(), verbose=0)
    weights = (np.arange(37) % 2).astype(np.float32)
    stock = linear()
    stock.compile(loss=LOSS, jit_compile=False)
    ours = model.evaluate(FEATURES, LABELS, sample_weight=weights, batch_size=37, verbose=0)[0]
    wanted = stock.evaluate(FEATURES, LABELS, sample_weight=weights, batch_size=37, verbose=0)
    np.testing.assert_allclose(ours, wanted, rtol=1e-6)


def test_keras_knows_the_length_and_goes_on_from_where_the_loader_stands():
    steps = []

    class Count(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            steps.append(0)

        def on_train_batch_end(self, batch, logs=None):
            steps[-1] += 1

    counter = Count()
    loader = make_loader()
    loader.start_at(epoch=1, step=3)
    model = model_on(1)
    model.fit(
        loader,
        validation_data=make_loader(),
        initial_epoch=1,
        epochs=3,
        verbose=0,
        callbacks=[counter],
    )
    assert counter.params["steps"] == 4
    assert steps == [1, 4]


def test_class_weights_ride_along():
    loader = make_loader()
    with loader.class_weights({0: 2.0, 2: 0.5}):
        for _, label, weight in loader:
            wanted = np.array([2.0, 1.0, 0.5])[label.numpy()]
            real = weight.numpy() > 0
            assert real.any()
            np.testing.assert_array_equal(weight[real], wanted[real])
    assert max(weight.numpy().max() for _, _, weight in loader) == 1


def test_class_weights_ride_along_without_padding():
    loader = make_loader(plan={"last_batch": "drop"})
    with loader.class_weights({0: 2.0}):
        _, label, weight = next(iter(loader))
    np.testing.assert_array_equal(weight, np.where(label.numpy() == 0, 2.0, 1.0))


@pytest.mark.parametrize("num_replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_weight_of_zero_is_no_padding(num_replicas):
    # The reference: plain Keras, plain arrays. Accuracy is not weighted, so all rows count in it.
    weights = {0: 0.0, 1: 2.0}
    model, stock = model_on(num_replicas), linear()
    stock.compile("sgd", LOSS, metrics=["accuracy"], jit_compile=False)
    loader = make_loader(num_replicas, num_examples=36, shuffle=False)
    ours = model.fit(loader, class_weight=weights, verbose=0).history
    wanted = stock.fit(
        FEATURES[:36],
        LABELS[:36],
        batch_size=12,
        shuffle=False,
        class_weight=weights | {2: 1.0},
        verbose=0,
    ).history
    for name in ("loss", "accuracy"):
        np.testing.assert_allclose(ours[name], wanted[name], rtol=1e-5)


def test_a_predict_that_stops_early_or_takes_several_steps_at_once():
    class Stop(keras.callbacks.Callback):
        def on_predict_batch_end(self, batch, logs=None):
            self.model.stop_predicting = True

    model = model_on(1)
    loader = make_loader(shuffle=False)
    assert model.predict(loader, callbacks=[Stop()], verbose=0).shape == (12, 3)
    model.steps_per_execution = 2
    assert model.predict(loader, steps=3, verbose=0).shape == (37, 3)


def test_an_interrupt_between_drawing_and_giving_loses_no_example(monkeypatch):
    loader, other = make_loader(), make_loader()

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patches:
        patches.setattr(loader, "_weighted", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(iter(loader))
    np.testing.assert_array_equal(np.concatenate(rows_of(loader)), np.concatenate(rows_of(other)))


@pytest.mark.parametrize("last_batch", ["drop", "repeat"])
def test_what_vanishes_counts_as_nothing_without_padding_too(last_batch):
    loader = make_loader(
        skips_bad=True, unreadable=frozenset({3, 30}), plan={"last_batch": last_batch}
    )
    rows = np.concatenate(rows_of(loader))
    assert not (rows[:, None] == FEATURES[[3, 30]]).all(axis=-1).any()
    firsts = (rows == FEATURES[0]).all(axis=1).sum()
    assert firsts <= (2 if last_batch == "repeat" else 1)


@pytest.mark.parametrize(("num_examples", "num_gone"), [(37, 30), (5, 5)])
def test_a_folder_that_is_gone_is_an_error(num_examples, num_gone):
    gone = frozenset(range(num_gone))
    loader = make_loader(num_examples=num_examples, skips_bad=True, unreadable=gone)
    with pytest.raises(UserError, match="whether the disk or the folder"):
        rows_of(loader)


def test_a_metric_that_cannot_leave_out_padding_is_refused():
    class Rows(keras.metrics.Mean):
        def update_state(self, y_true, y_pred):
            return super().update_state(len(y_pred))

    model = compiled(linear, 1, optimizer="sgd", loss="mse", metrics=[Rows()])
    with pytest.raises(UserError, match="no parameter sample_weight"):
        model.evaluate(make_loader(), verbose=0)


def test_classes_must_be_numbered_alike():
    with pytest.raises(UserError, match=r"the test images have no class 'c'.*train.class_names"):
        check_same_classes(("a", "b", "c"), ("a", "b"))
    with pytest.raises(UserError, match=r"have the classes a, b, c, .*, the test images c, b"):
        check_same_classes(("a", "b", "c"), ("c", "b", "a"))
    check_same_classes(("a", "b", "c"), ())


def test_a_test_set_may_lack_the_last_numbered_classes():
    train, test = ("0", "1", "2"), ("0", "1")
    check_same_classes(train, test)
    with pytest.raises(UserError, match="the training images have no class '2'"):
        check_same_classes(test, train)


def test_evaluate_refuses_classes_that_are_numbered_anew():
    model = model_on(1)

    def loader_of(*class_names):
        return make_loader(num_examples=12, class_names=class_names)

    model.evaluate(loader_of("x", "y"), verbose=0)  # never trained here
    train = loader_of("a", "b", "c")
    model.fit(train, verbose=0)
    model.evaluate(train, verbose=0)
    with pytest.raises(
        UserError, match="the test images have no class 'a', but the other images have it"
    ):
        model.evaluate(loader_of("b", "c"), verbose=0)
    model.fit(loader_of("b", "c"), verbose=0)  # a new training is another matter
    model.evaluate(loader_of("b", "c"), verbose=0)
