"""Steps that make their own batches, or are given several, against the same ones one by one."""

import functools
import pathlib
import weakref

import keras
import numpy as np
import PIL.Image
import pytest
import tensorflow as tf
from conftest import compiled, strategy_of
from keras import layers

from tfaccel import sources
from tfaccel.config import AugmentConfig, DaliConfig, ImageConfig, StepConfig
from tfaccel.config.presets import preset
from tfaccel.data import images as images_lib
from tfaccel.data.deferred import span
from tfaccel.data.distribute import Loader
from tfaccel.data.draws import LEVEL_KINDS
from tfaccel.data.feed import Feed
from tfaccel.data.images import ImageData
from tfaccel.data.shards import Plan
from tfaccel.data.source import ArraySource, Blobs, ImageSource, UnreadableError
from tfaccel.runtime.devices import Device
from tfaccel.training.callbacks.finite import NonFiniteError

AUGMENT = preset("cifar", shift_pixels=2)
RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (37, 8, 8, 3), dtype=np.uint8)
LABELS = (np.arange(37) % 3).astype(np.int32)
NUM_STEPS = 4  # of 12 rows; the last has one row and padding


def make_loader(
    *,
    last_batch="pad",
    shuffle=True,
    augment=AUGMENT,
    pixels=PIXELS,
    replicas=1,
    files=None,
    bad_files="error",
):
    """Of pixels in a device's memory; or of files, as DALI gives them on a GPU."""
    names = ("a", "b", "c")
    source = ArraySource(pixels, LABELS.copy(), class_names=names)
    if files is not None:
        source = ImageSource(Blobs(files), LABELS.copy(), class_names=names)
    plan = Plan(37, 12, replicas, seed=4, shuffle=shuffle, last_batch=last_batch)
    images = ImageConfig(image_size=(8, 8), mean=0.5, std=0.25, bad_files=bad_files)
    kind = "memory" if files is None else "dali_gpu"
    data = ImageData(source, images, augment, plan, kind, "float32", DaliConfig(), source)
    settings = {"seed": 4, "num_threads": 1, "first_replica": 0, "strategy": strategy_of(replicas)}
    ordinals = range(replicas) if files is None else [None] * replicas
    devices = [Device(f"/cpu:{number}", ordinal) for number, ordinal in enumerate(ordinals)]
    return Loader(data, devices=devices, **settings)


class OfRoot(keras.Model):
    """Its loss, the root of a mean over rows, needs the mean of all parts of a batch."""

    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(0)
        shape = keras.Input((8, 8, 3))
        self.network = keras.Sequential([shape, layers.Flatten(), layers.Dense(3)])
        self.built = True

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            away = self.network(x, training=True) - tf.one_hot(tf.cast(y, tf.int32), 3)
            loss = tf.sqrt(tf.reduce_mean(tf.square(away)))
        weights = self.trainable_variables
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"loss": loss}


def test_parts_that_are_joined_within_the_step_may_be_deferred():
    trained = []
    for steps, parts in ((1, 1), (3, 2)):
        settings = {"xla": False, "config": StepConfig(accumulation_steps=parts)}
        optimizer = keras.optimizers.SGD(0.1)
        model = compiled(OfRoot, 1, optimizer=optimizer, steps_per_execution=steps, **settings)
        loader = make_loader(last_batch="drop", shuffle=False, augment=AugmentConfig())
        losses = model.fit(loader, epochs=2, verbose=0).history["loss"]
        trained.append([*losses, *model.get_weights()])
    for found, wanted in zip(*reversed(trained), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.fixture
def files(tmp_path):
    """The pixels as files."""
    names = [str(tmp_path / f"{index:02d}.png") for index in range(len(PIXELS))]
    for name, pixels in zip(names, PIXELS, strict=True):
        PIL.Image.fromarray(pixels).save(name)
    return tuple(names)


def convolutional():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(4, 3, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dropout(0.2),
            layers.Dense(3, dtype="float32"),
        ]
    )


def build():
    """As much as a step can leave to the next one: weights, slots, statistics and seeds."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Flatten(),
            layers.BatchNormalization(center=False, scale=False),
            layers.Dropout(0.2),
            layers.Dense(3, dtype="float32"),
        ]
    )


def linear():
    """Compiled in half the time, where it is not shown how the model trains."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Flatten(),
            layers.Dense(3),
            layers.Activation("linear", dtype="float32"),
        ]
    )


def model_of(steps_per_execution, *, make=build, xla=True, config=None, replicas=1):
    return compiled(
        make,
        replicas,
        optimizer=lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        xla=xla,
        config=config,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=steps_per_execution,
    )


def trained(steps_per_execution, *, start=0, last_batch="pad", tested=False, **settings):
    """A trained model, its history and its loader."""
    fit = {"class_weight": settings.pop("class_weight", None)}
    data = {"replicas": settings.get("replicas", 1), "files": settings.pop("files", None)}
    fit["validation_data"] = make_loader(shuffle=False, **data) if tested else None
    model = model_of(steps_per_execution, **settings)
    loader = make_loader(last_batch=last_batch, **data)
    loader.start_at(epoch=0, step=start)
    history = model.fit(loader, epochs=2, verbose=0, **fit).history
    return model, history, loader


@functools.cache
def one_by_one():
    """Trained on the pixels in memory, and tested, each step by itself and without XLA.

    What draws nothing trains alike on any number of replicas, with XLA or without.
    """
    return trained(1, make=linear, tested=True, xla=False)


# Tests take as long to trace as training does.
may_test = pytest.mark.parametrize("tested", [pytest.param(True, marks=pytest.mark.slow), False])


@may_test
def test_several_replicas_make_their_batches_too(in_one_function, tested):
    ours = trained(2, replicas=2, make=linear, tested=tested)
    assert_alike(ours, one_by_one())
    assert ours[2]._deferred is not None
    assert one_by_one()[2]._deferred is None


def assert_alike(ours, one_by_one):
    # Inside a loop XLA may fuse otherwise, and so round otherwise.
    (model, history, loader), (reference, expected, read) = ours, one_by_one
    assert history.keys() == expected.keys() & history.keys()  # that one may be tested, too
    for name, values in history.items():
        np.testing.assert_allclose(values, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)
    for weight, wanted in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(weight, wanted, rtol=1e-4, atol=1e-6)
    assert loader.position == read.position


@pytest.fixture
def policy(request):
    keras.config.set_dtype_policy(request.param)
    yield
    keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize(("first", "most"), [(0, 4), (0, 3), (2, 3), (7, 1), (5, 9), (8, 2)])
def test_spans_cover_every_epoch_in_order(first, most):
    feed = Feed(Plan(37, 12, 1), AUGMENT, (8, 8), 0, first=first)
    spans = [span(feed, number, most=most) for number in range(12)]
    assert [each for found in spans for each in found] == list(range(spans[-1].stop))
    for each in spans:
        assert 1 <= len(each) <= most
        epochs = {(first + number) // NUM_STEPS for number in each}
        assert len(epochs) == 1
        ends_epoch = (first + each.stop) % NUM_STEPS == 0
        assert len(each) == most or ends_epoch


@pytest.fixture(params=["memory", "dali"])
def loaded(request):
    """What `make_loader` makes a loader of."""
    return {"files": request.getfixturevalue("files")} if request.param == "dali" else {}


@pytest.mark.parametrize("last_batch", ["pad", "drop"])
def test_what_is_taken_are_the_batches_that_come_one_by_one(last_batch, loaded):
    loader, one_by_one = (make_loader(last_batch=last_batch, **loaded) for _ in range(2))
    for _ in range(2):
        batches, iterator = [], iter(loader)
        while (taken := iterator.take(3)) is not None:
            (deferred,) = taken
            for index in range(len(deferred)):
                own = {name: each[index] for name, each in deferred.inputs.items()}
                batches.append(deferred.make({**own, **deferred.shared}))
        for ours, wanted in zip(batches, one_by_one, strict=True):
            for part, expected in zip(ours, wanted, strict=True):
                np.testing.assert_array_equal(part, expected)
        assert next(iterator, None) is None
    assert loader.position == one_by_one.position
    assert loader.waited_s > 0


@may_test
@pytest.mark.parametrize("xla", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("policy", ["mixed_float16"], indirect=True)
def test_an_execution_trains_and_tests_as_its_steps_do(policy, xla, tested):
    assert_alike(*(trained(each, xla=xla, tested=tested) for each in (2, 1)))


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"class_weight": {0: 3.0, 1: 0.5}}, marks=pytest.mark.slow),
        {"class_weight": {0: 3.0}, "last_batch": "drop", "start": 2, "xla": False},
        pytest.param({"start": 2, "xla": False}, marks=pytest.mark.slow),
        pytest.param({"config": StepConfig(accumulation_steps=3)}, marks=pytest.mark.slow),
    ],
)
def test_whatever_else_is_asked_for(settings):
    assert_alike(*(trained(each, make=linear, **settings) for each in (9, 1)))


def test_batches_of_dali_are_trained_on_together_and_tested_one_by_one(files):
    ours = trained(2, make=linear, tested=True, files=files)
    assert_alike(ours, one_by_one())
    trains, tests = (
        {bool(make) for _, make, _ in function._step._made}
        for function in (ours[0].train_function, ours[0].test_function)
    )
    assert (trains, tests) == ({True}, {False})
    (function,) = ours[0].train_function._step._made.values()
    assert function.__wrapped__.experimental_get_tracing_count() == 1


def room_for(number, *, replicas=1):
    """What gives a device's memory in which so many batches may wait, and no more."""
    batch = 12 // replicas * (PIXELS[0].size + 1) * 4  # of float32, and int32
    room = int((number + 0.5) * images_lib.HELD * batch / images_lib.TOGETHER_SHARE)
    return lambda _: room


@pytest.mark.parametrize(
    "settings",
    [
        {"xla": False},
        pytest.param({"xla": True, "too_large": True}, marks=pytest.mark.slow),
    ],
)
def test_batches_of_dali_come_one_by_one(files, settings, monkeypatch, caplog):
    if settings.pop("too_large", False):
        monkeypatch.setattr(images_lib, "all_bytes", room_for(2))  # which does not divide 3
    with caplog.at_level("INFO", logger="tfaccel"):
        model, _, loader = trained(3, files=files, make=linear, **settings)
    assert loader._deferred is None
    assert not any(make for _, make, _ in model.train_function._step._made)
    assert (
        caplog.text.count("takes one batch, because 3 batches would take up to") == settings["xla"]
    )


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_an_execution_has_several_launches_where_one_would_be_too_large(
    replicas, in_one_function, files, monkeypatch, caplog
):
    monkeypatch.setattr(images_lib, "all_bytes", room_for(3, replicas=replicas))
    with caplog.at_level("INFO", logger="tfaccel"):
        ours = trained(4, make=linear, replicas=replicas, files=files)
    assert_alike(ours, one_by_one())
    assert ours[0].train_function._step._lengths == {2}
    assert caplog.text.count("a launch takes 2 batches, because 4 batches would take up to") == 1


@pytest.mark.parametrize("step", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("waits", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_fault_is_named_by_its_step_of_several_launches(step, waits, files, monkeypatch):
    monkeypatch.setattr(images_lib, "all_bytes", room_for(2))
    model, loader = model_of(4, make=linear), make_loader(files=files, shuffle=False)
    loader.data.source.labels[12 * (step - 1) : 12 * step] = 7  # no class: the loss is NaN
    see = keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_: None)
    with pytest.raises(NonFiniteError, match=f"at step {step},"):
        model.fit(loader, callbacks=[see] if waits else [], verbose=0)


def test_the_smallest_gpu_decides_how_many_come_together(files, monkeypatch):
    rooms = [room_for(4, replicas=2)(None), room_for(2, replicas=2)(None)]
    monkeypatch.setattr(images_lib, "all_bytes", lambda device: rooms[int(device.name[-1])])
    taken = iter(make_loader(files=files, replicas=2)).take(4)
    assert [len(each) for each in taken] == [2, 2]


def test_fewer_may_come_together_where_many_were_too_large(files, monkeypatch, caplog):
    loader = make_loader(files=files)
    monkeypatch.setattr(images_lib, "all_bytes", room_for(2))
    iterator = iter(loader)
    with caplog.at_level("INFO", logger="tfaccel"):
        assert iterator.take(3) is None
    assert caplog.text.count("takes one batch, because 3 batches would take up to") == 1
    assert [len(each) for each in iterator.take(2)] == [2]
    assert iterator.take(2, may_wait=False) is None


@pytest.mark.parametrize(
    ("steps_per_execution", "replicas"),
    [
        (NUM_STEPS, 2),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [(1, 1), (1, 2), (NUM_STEPS, 1)]),
    ],
)
def test_a_dropped_loader_ends_at_once(steps_per_execution, replicas, files, no_collector):
    """The collector comes seldom: ten loaders in turn had 1,783 threads and 6 GB of a GPU."""
    model = model_of(steps_per_execution, make=linear, xla=False, replicas=replicas)
    loader, test = (make_loader(files=files, replicas=replicas) for _ in range(2))
    model.fit(loader, validation_data=test, epochs=2, verbose=0)
    model.evaluate(test, verbose=0)
    next(iter(loader))  # an epoch that is left half way
    ends = [weakref.ref(each) for each in (loader, test)]
    del loader, test
    assert [end() for end in ends] == [None, None]


def without_end(loader, rows):
    """Gives rows a class of their own, and returns the class weights that make its loss infinite.

    Without XLA a label that is no class is refused, and its loss is not NaN.
    """
    loader.data.source.labels[:] = 0
    loader.data.source.labels[rows] = 2
    return {2: float("inf")}


def test_a_fit_within_another_leaves_it_its_loader():
    model, loader = model_of(1, make=linear, xla=False), make_loader(shuffle=False)
    weights = without_end(loader, slice(24, 36))

    def fit_more(step, logs):
        if step == 0 and loader.position == 1:
            model.fit(make_loader(), verbose=0)

    within = keras.callbacks.LambdaCallback(on_train_batch_end=fit_more)
    with pytest.raises(NonFiniteError, match="at step 3,"):
        model.fit(loader, class_weight=weights, callbacks=[within], verbose=0)


def test_masks_are_brought_to_the_device_once():
    loader = make_loader()
    for _ in range(3):
        all_taken(iter(loader))
    assert len(loader._masks) == 2  # of two whole batches, and of an epoch's last two


@pytest.mark.slow  # as two launches of so many, but of a model that has more state
def test_batches_of_two_replicas_come_together(in_one_function, files):
    ours = trained(2, replicas=2, xla=True, files=files)
    assert_alike(ours, trained(1, replicas=2, xla=False))
    assert ours[2]._deferred is not None


def all_taken(iterator):
    taken = []
    while (deferred := iterator.take(2)) is not None:
        taken += deferred
    return taken


@pytest.mark.parametrize("bad_files", ["error", "skip"])
def test_a_file_that_vanishes_is_an_error_or_left_out(files, bad_files):
    loader = make_loader(files=files, bad_files=bad_files, shuffle=False)
    whole = list(make_loader(files=files, shuffle=False))
    pathlib.Path(files[30]).unlink()  # of the third batch
    iterator = iter(loader)
    if bad_files == "error":
        with pytest.raises(UnreadableError, match="30"):
            all_taken(iterator)
        return
    taken = all_taken(iterator)
    assert [len(each) for each in taken] == [2, 2]
    real = tf.concat([each.inputs["real"] for each in taken], axis=0)
    wanted = np.stack([weight for _, _, weight in whole])
    wanted[2, 30 - 24] = 0
    np.testing.assert_array_equal(real, wanted)
    np.testing.assert_array_equal(taken[1].inputs["image"][0][:6], whole[2][0][:6])


def test_it_is_compiled_once_for_each_number_of_steps(caplog):
    model, loader = model_of(3, make=linear, xla=False), make_loader()
    with caplog.at_level("INFO", logger="tfaccel"):
        model.fit(loader, epochs=2, verbose=0)
        loader.start_at(epoch=1)  # a new stream, which does the same
        model.fit(loader, epochs=2, verbose=0)
    assert (
        caplog.text.count("compiling again, because this launch has 1 steps and others have 3") == 1
    )
    assert caplog.text.count("compiling again") == 1
    (function,) = model.train_function._step._made.values()
    # Of 3 steps, and of the epoch's last.
    assert function.__wrapped__.experimental_get_tracing_count() == 2


def test_a_batch_between_two_executions_is_the_next_one():
    loader, one_by_one = make_loader(), list(make_loader())
    iterator = iter(loader)
    iterator.take(2)
    np.testing.assert_array_equal(next(iterator)[0], one_by_one[2][0])
    left = iterator.take(2)
    assert [len(each) for each in left] == [1]
    np.testing.assert_array_equal(left[0].first()[0], one_by_one[3][0])


def test_the_first_batch_is_kept_where_it_is_asked_for():
    loader = make_loader()
    loader.keep_next(5)
    iter(loader).take(3)
    image, label, weight = loader.kept
    wanted = next(iter(make_loader()))
    for part, expected in zip((image, label, weight), wanted, strict=True):
        np.testing.assert_array_equal(part, expected[:5])


def test_a_fault_is_named_by_its_step():
    model, loader = model_of(4, make=linear, xla=False), make_loader(shuffle=False)
    weights = without_end(loader, slice(12, 36))
    loader.start_at(epoch=1)
    with pytest.raises(NonFiniteError, match="at step 6,"):
        model.fit(loader, class_weight=weights, initial_epoch=1, epochs=2, verbose=0)


@pytest.mark.parametrize("policy", ["mixed_float16"], indirect=True)
@pytest.mark.parametrize("launches", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_skipped_steps_of_an_execution_are_counted(policy, launches, files, monkeypatch):
    monkeypatch.setattr(images_lib, "all_bytes", room_for(4 // launches))
    seen = []

    class See(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append((int(logs["skipped_steps"]), float(logs["loss_scale"])))

    config = StepConfig(loss_scale_initial=2.0**40)  # so large that gradients overflow
    model, loader = model_of(4, make=linear, config=config), make_loader(files=files)
    model.fit(loader, epochs=1, verbose=0, callbacks=[See()])
    assert seen == [(4, 2.0**36)]
    assert model.train_function._step._lengths == {4 // launches}


@pytest.mark.parametrize("xla", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_predictions_and_tests_count_every_image_once(xla):
    model, one_by_one = (model_of(each, make=linear, xla=xla and each > 1) for each in (4, 1))
    test = make_loader(shuffle=False)
    wanted = one_by_one.evaluate(make_loader(shuffle=False), verbose=0)
    np.testing.assert_allclose(model.evaluate(test, verbose=0), wanted, rtol=1e-6)
    assert model.predict(test, verbose=0).shape == (37, 3)


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "rtol"), [("float32", 1e-3), ("mixed_float16", 3e-2)])
@pytest.mark.parametrize("kind", ["memory", "dali_gpu"])
def test_on_a_gpu_an_execution_trains_as_its_steps_do(setup, kind, files, precision, rtol):
    def history_of(steps_per_execution):
        run = setup(gpu_ids=[0], precision=precision, tf32=False)
        images = {"image_size": (8, 8), "mean": 0.5, "std": 0.25, "loader": kind}
        source = sources.arrays(PIXELS, LABELS)
        if kind == "dali_gpu":
            source = ImageSource(Blobs(files), LABELS.copy(), class_names=("a", "b", "c"))
        loader = run.loader(source, augment=AUGMENT, shuffle=True, global_batch_size=12, **images)
        with run.scope():
            model = convolutional()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        args = {"metrics": ["accuracy"], "steps_per_execution": steps_per_execution}
        run.compile(model, keras.optimizers.SGD(0.05, momentum=0.9), loss, **args)
        history = model.fit(loader, validation_data=loader, epochs=3, verbose=0).history
        took = {bool(make) for _, make, _ in model.train_function._step._made}
        assert took == {steps_per_execution > 1}
        return history

    together, one_by_one = history_of(NUM_STEPS), history_of(1)
    for name in ("loss", "val_loss"):
        np.testing.assert_allclose(together[name], one_by_one[name], rtol=rtol, err_msg=name)


@pytest.mark.parametrize(
    ("window", "comes"),
    [
        pytest.param("random_crop", True, marks=pytest.mark.slow),  # as others here by default
        pytest.param("center_crop", True, marks=pytest.mark.slow),
        ("random_resized_crop", False),
        pytest.param("stretch", False, marks=pytest.mark.slow),
    ],
)
def test_images_that_are_resized_come_one_by_one(window, comes, caplog):
    augment = preset("none", window=window)
    pixels = np.repeat(np.repeat(PIXELS, 2, axis=1), 2, axis=2)
    iterator = iter(make_loader(augment=augment, pixels=pixels))
    with caplog.at_level("INFO", logger="tfaccel"):
        assert (iterator.take(2) is not None) == comes
        next(iterator)
        assert (iterator.take(2) is not None) == comes
    assert caplog.text.count("because images in memory are resized") == (not comes)


BLURS = {"blur_probability": 0.5, "posterize_probability": 0.5, "solarize_probability": 0.5}
ERASES = {"erase_probability": 0.9, "erase_fill": "random"}


@pytest.mark.parametrize(
    "augment",
    [
        AugmentConfig(policy="trivialaugment", horizontal_flip=True, **ERASES),
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (
                AugmentConfig(window="random_crop", policy="randaugment", policy_fill="mean"),
                AugmentConfig(policy="randaugment_timm", rotation_degrees=20, **ERASES),
                AugmentConfig(brightness=0.3, hue_degrees=20, horizontal_flip=True, **BLURS),
            )
        ),
    ],
)
def test_operations_on_grey_levels_are_the_same_in_the_program_of_a_step(augment):
    pixels = np.repeat(np.repeat(PIXELS, 2, axis=1), 2, axis=2)
    if augment.window != "random_crop":
        pixels = pixels[:, :8, :8]
    together, one_by_one = (make_loader(augment=augment, pixels=pixels) for _ in range(2))
    (deferred,) = iter(together).take(NUM_STEPS)
    assert deferred.inputs.keys() & set(LEVEL_KINDS)

    @tf.function(jit_compile=True, autograph=False)
    def all_made(inputs, shared):
        """All batches by a loop in one program, as the step makes them."""

        def body(index, images, labels):
            own = {name: each[index] for name, each in inputs.items()}
            image, label, *_ = deferred.make({**own, **shared})
            return index + 1, images.write(index, image), labels.write(index, label)

        start = tf.TensorArray(tf.float32, NUM_STEPS), tf.TensorArray(tf.int64, NUM_STEPS)
        _, *made = tf.while_loop(
            lambda index, *_: index < NUM_STEPS,
            body,
            (0, *start),
            maximum_iterations=NUM_STEPS,
        )
        return [each.stack() for each in made]

    images, labels = all_made(dict(deferred.inputs), dict(deferred.shared))
    for found, label, (wanted, wanted_label, *_) in zip(images, labels, one_by_one, strict=True):
        np.testing.assert_array_equal(label, wanted_label)
        # The mean and the standard deviation may round otherwise in another program.
        np.testing.assert_allclose(found, wanted, atol=1e-6)


@pytest.mark.slow  # the test above shows that the batches are the same
def test_an_execution_of_images_with_a_policy_trains_as_its_steps_do():
    def trained_by(steps_per_execution):
        model, loader = model_of(steps_per_execution, make=linear), make_loader(augment=policy)
        history = model.fit(loader, epochs=2, verbose=0).history
        return model, history, loader

    policy = preset("none", policy="trivialaugment", erase_probability=0.5)
    together = trained_by(2)
    assert together[2]._deferred is not None
    assert_alike(together, trained_by(1))


def test_on_the_cpu_they_come_one_by_one():
    found = make_loader().data.at_a_time([Device("/cpu:0", None)], 2)
    assert found == (1, "the device is the CPU")


class Nested(keras.Sequential):
    def train_step(self, data):
        return super().train_step(data) | {"own": {"a": tf.constant(1.5)}}


def test_logs_may_nest(monkeypatch):
    seen = []
    monkeypatch.setattr(keras, "Sequential", Nested)
    read = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(logs))
    model_of(4, make=linear, xla=False).fit(make_loader(), epochs=1, verbose=0, callbacks=[read])
    assert any(float(value) == 1.5 for value in tf.nest.flatten(seen[0]))
