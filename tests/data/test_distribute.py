import gc
import os
import pathlib
import shutil
import weakref

import keras
import numpy as np
import PIL.Image
import psutil
import pytest
import tensorflow as tf
from conftest import compiled, strategy_of

import tfaccel
from tfaccel import UserError
from tfaccel.cluster import Cluster
from tfaccel.config import ImageConfig
from tfaccel.data import image_folder, shards
from tfaccel.data.distribute import Loader
from tfaccel.runtime import Device, Runtime

NUM_IMAGES = 37
CPU = Device("/cpu:0", None)
SETTINGS = {"image_size": (12, 10), "channels": 1, "global_batch_size": 8}


@pytest.fixture
def load(setup, folder):
    run = setup()
    return lambda **settings: run.image_folder(folder, **{**SETTINGS, **settings})


def rows_of(loader):
    """One epoch's labels and first pixels, which tell the images apart."""
    batches = [(label.numpy(), image.numpy()) for image, label in loader]
    return np.concatenate([label for label, _ in batches]), np.concatenate(
        [image for _, image in batches]
    )


def test_pixels_are_the_files_own(load, in_file_order):
    # Pillow's decode is the reference. PNG is exact; 1e-6 is float32's division by 255.
    images, labels = in_file_order
    label, image = rows_of(load())
    np.testing.assert_array_equal(label, labels)
    np.testing.assert_allclose(image[..., 0], images / np.float32(255), atol=1e-6)


def test_images_are_resized_and_made_rgb(load, in_file_order):
    image, _ = next(iter(load(image_size=(24, 20), channels=3)))
    assert image.shape == (8, 24, 20, 3)
    grey = in_file_order[0][:8] / 255
    # Doubled: the mean over an image moves by the border only.
    np.testing.assert_allclose(image.numpy().mean((1, 2, 3)), grey.mean((1, 2)), atol=0.02)


def test_float16_images_for_a_float16_policy(setup, folder):
    loader = setup(precision="mixed_float16").image_folder(folder, **SETTINGS)
    assert next(iter(loader))[0].dtype == tf.float16 == loader.element_spec[0].dtype


def test_float32_images_for_a_bfloat16_policy(setup, folder):
    loader = setup(precision="mixed_bfloat16").image_folder(folder, **SETTINGS)
    assert next(iter(loader))[0].dtype == tf.float32 == loader.element_spec[0].dtype


def test_every_epoch_has_each_image_once_in_a_new_order(load, in_file_order):
    images, _ = in_file_order
    loader = load(shuffle=True)
    assert len(loader) == 5
    orders = []
    for epoch in range(3):
        _, image = rows_of(loader)
        keys = (image[:, :, :, 0] * 255).round().astype(np.uint8).tobytes()
        assert sorted(keys) == sorted(images.tobytes())
        expected = shards.epoch_order(NUM_IMAGES, seed=0, epoch=epoch, shuffle=True)
        np.testing.assert_allclose(image[..., 0], images[expected] / np.float32(255), atol=1e-6)
        orders.append(keys)
    assert len(set(orders)) == 3


def test_one_pipeline_serves_every_epoch(load):
    loader = load(shuffle=True)
    rows_of(loader)
    stream = loader._streams[0]
    rows_of(loader)
    assert loader._streams[0] is stream


def test_a_look_at_the_first_batch_costs_nothing(load):
    # Keras takes one batch for its shapes, then starts again.
    looked_at, untouched = load(shuffle=True), load(shuffle=True)
    next(iter(looked_at))
    np.testing.assert_array_equal(rows_of(looked_at)[1], rows_of(untouched)[1])


def test_an_abandoned_epoch_is_not_finished_by_the_next(load):
    loader = load()
    abandoned = iter(loader)
    for _ in range(3):
        next(abandoned)
    assert len(rows_of(loader)[0]) == NUM_IMAGES


def test_rotation_is_drawn_anew_for_each_image_and_epoch(load):
    plain, rotated = load(), load(rotation_degrees=30.0)
    still = rows_of(plain)[1]
    first, second = rows_of(rotated)[1], rows_of(rotated)[1]
    assert all(np.abs(a - b).max() > 0.05 for a, b in zip(still, first, strict=True))
    assert all(np.abs(a - b).max() > 0.05 for a, b in zip(first, second, strict=True))


def test_horizontal_flip_mirrors_about_half(load):
    still, flipped = rows_of(load())[1], rows_of(load(horizontal_flip=True))[1]
    mirrored = [np.allclose(a, b[:, ::-1]) for a, b in zip(still, flipped, strict=True)]
    same = [np.allclose(a, b) for a, b in zip(still, flipped, strict=True)]
    assert all(a != b for a, b in zip(mirrored, same, strict=True))
    assert 8 < sum(mirrored) < 29  # of 37; outside with probability below 1e-3


def test_same_seed_same_draws_other_seed_others(setup, folder):
    def draws(seed):
        settings = {**SETTINGS, "shuffle": True, "rotation_degrees": 30.0}
        return rows_of(setup(seed=seed).image_folder(folder, **settings))[1]

    first = draws(3)
    np.testing.assert_array_equal(first, draws(3))
    assert np.abs(first - draws(4)).max() > 0.05


def make_loader(folder, *, num_replicas, **images):
    devices = tuple(Device(f"/cpu:{index}", None) for index in range(num_replicas))
    runtime = Runtime(devices, "float32", xla=False, seed=0, dali_threads=1)
    strategy = strategy_of(num_replicas)
    return Loader(
        image_folder.scan(folder),
        ImageConfig(**{**SETTINGS, **images}),
        runtime=runtime,
        cluster=Cluster(),
        strategy=strategy,
        shuffle=True,
    ), strategy


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_replicas_see_the_global_batches_of_one(folder, num_replicas):
    one, _ = make_loader(folder, num_replicas=1, global_batch_size=12)
    several, strategy = make_loader(folder, num_replicas=num_replicas, global_batch_size=12)
    # 37 images: the last batch of an epoch has one row, for one of the replicas.
    for epoch in range(2):
        for step, (whole, split) in enumerate(zip(one, several, strict=True)):
            for wanted, parts in zip(whole, split, strict=True):
                parts = strategy.experimental_local_results(parts)
                sizes = [part.shape[0] for part in parts]
                assert sorted(sizes) == sorted(
                    [12 // num_replicas] * num_replicas
                    if step < 3
                    else [0] * (num_replicas - 1) + [1]
                ), epoch
                np.testing.assert_array_equal(np.concatenate(parts), wanted)


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_replicas_fit_evaluate_and_predict_as_one(folder, num_replicas):
    def make():
        keras.utils.set_random_seed(0)
        return keras.Sequential(
            [keras.Input((12, 10, 1)), keras.layers.Flatten(), keras.layers.Dense(3)]
        )

    outcomes = []
    for replicas in (1, num_replicas):
        loader, _ = make_loader(folder, num_replicas=replicas, global_batch_size=12)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model = compiled(make, replicas, optimizer="sgd", loss=loss, metrics=["accuracy"])
        history = model.fit(loader, epochs=2, verbose=0).history
        # The loader shuffles: the same rows in the same order, whatever the replicas.
        predicted = model.predict(loader, verbose=0)
        assert predicted.shape == (37, 3)
        evaluated = model.evaluate(loader, verbose=0)
        outcomes.append((history["loss"], history["accuracy"], evaluated, predicted))
    for one, several in zip(*outcomes, strict=True):
        np.testing.assert_allclose(one, several, rtol=1e-4, atol=1e-6)


def test_every_replica_draws_its_own_rotations(folder, tmp_path):
    (tmp_path / "only").mkdir()
    for name in range(8):  # one image, eight times: only the draws can tell the copies apart
        shutil.copy(folder / "a" / "00.png", tmp_path / "only" / f"{name}.png")
    loader, strategy = make_loader(
        tmp_path, num_replicas=2, global_batch_size=8, rotation_degrees=90.0
    )
    image, _ = next(iter(loader))
    seen = np.concatenate(strategy.experimental_local_results(image))
    assert len(np.unique(seen.reshape(8, -1), axis=0)) == 8


def test_replicas_of_the_second_worker_count_on(folder):
    # The global replica index decides: two workers of one replica read what two replicas do.
    two, strategy = make_loader(folder, num_replicas=2, global_batch_size=12)
    second = strategy.experimental_local_results(next(iter(two))[1])[1]
    loader, _ = make_loader(folder, num_replicas=1, global_batch_size=12)
    loader._num_replicas, loader._first_replica = 2, 1
    np.testing.assert_array_equal(next(iter(loader))[1], second)


def test_a_batch_that_the_replicas_cannot_share_is_refused(folder):
    with pytest.raises(UserError, match="=9 is not divisible by 2 replicas; use 8 or 10"):
        make_loader(folder, num_replicas=2, global_batch_size=9)


def test_class_weights_ride_along(load):
    loader = load()
    next(iter(loader))  # a look before it does not spare the first batch
    with loader.class_weights({0: 2.0, 2: 0.5}):
        for _, label, weight in loader:
            np.testing.assert_array_equal(weight, np.array([2.0, 1.0, 0.5])[label.numpy()])
    assert [len(batch) for batch in loader] == [2] * 5


def test_an_iterator_that_a_newer_one_replaced_says_so(load):
    loader = load()
    older, newer = iter(loader), iter(loader)
    next(older)
    next(newer)
    with pytest.raises(UserError, match="a newer one draws"):
        next(older)
    assert len(list(newer)) == 4


def test_after_a_bad_file_was_mended_the_epoch_is_whole(setup, folder, tmp_path):
    root = pathlib.Path(shutil.copytree(folder, tmp_path / "copy"))
    bad, good = root / "b" / "16.png", (folder / "b" / "16.png").read_bytes()
    bad.write_text("not an image")
    loader = setup().image_folder(root, **SETTINGS)
    for _ in range(2):  # it fails again as long as it is there
        with pytest.raises(UserError, match=r"b/16\.png"):
            list(loader)
    bad.write_bytes(good)
    assert [len(label) for _, label in loader] == [8, 8, 8, 8, 5]


def test_a_pipeline_that_is_no_longer_needed_is_freed(load):
    loader = load()
    abandoned = iter(loader)
    for _ in range(2):
        next(abandoned)
    stream = weakref.ref(loader._streams[0])
    next(iter(loader))  # an epoch left half way starts a new pipeline
    gc.collect()
    assert stream() is None

    threads = []
    for _ in range(4):
        list(load())
        gc.collect()
        threads.append(psutil.Process().num_threads())
    assert threads[-1] == threads[0]


def test_a_batch_larger_than_the_data_is_all_of_it(load):
    loader = load(global_batch_size=10**10)
    assert len(loader) == 1
    assert [len(label) for _, label in loader] == [37]


def test_names_that_are_not_utf8_are_read(load, folder, tmp_path, setup):
    root = pathlib.Path(shutil.copytree(folder, tmp_path / "copy"))
    os.rename(root / "a", os.fsencode(root) + b"/\xe9 \xff")
    loader = setup().image_folder(root, **SETTINGS)
    assert len(rows_of(loader)[0]) == NUM_IMAGES


@pytest.fixture(scope="module")
def jpegs(tmp_path_factory):
    """24 smooth colour photographs of various sizes, as JPEG files of one class."""
    root = tmp_path_factory.mktemp("jpegs") / "train"
    (root / "only").mkdir(parents=True)
    random = np.random.default_rng(0)
    for index in range(24):
        coarse = PIL.Image.fromarray(random.integers(0, 256, (4, 4, 3), dtype=np.uint8))
        size = random.integers(40, 90, 2).tolist()
        image = coarse.resize(size, PIL.Image.Resampling.BICUBIC)
        image.save(root / "only" / f"{index:02d}.jpg", quality=95)
    return root


def jpeg_batches(run, root):
    settings = {"image_size": (32, 32), "channels": 3, "global_batch_size": 8}
    return np.concatenate([image for image, _ in run.image_folder(root, **settings)])


def check_jpegs(ours, jpegs):
    for image, file in zip(ours, sorted(jpegs.glob("*/*")), strict=True):
        decoded = PIL.Image.open(file).resize((32, 32), PIL.Image.Resampling.BILINEAR)
        # Both shrink with an antialiasing triangle filter. Decoders and rounding differ, and at
        # strong edges of colour so does the chroma's interpolation.
        difference = np.abs(image - np.asarray(decoded) / 255)
        assert difference.mean() < 1.5 / 255
        assert difference.max() < 10 / 255


def test_jpegs_decode_as_pillow_decodes_them(setup, jpegs):
    check_jpegs(jpeg_batches(setup(), jpegs), jpegs)


@pytest.mark.gpu
def test_jpegs_decode_on_the_gpu_as_pillow_decodes_them(jpegs):
    check_jpegs(jpeg_batches(tfaccel.setup(gpu_ids=[0]), jpegs), jpegs)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["a/00.png", "b/16.png"])
def test_a_bad_file_on_a_gpu_is_an_error_that_names_it(folder, tmp_path, name):
    root = pathlib.Path(shutil.copytree(folder, tmp_path / "copy"))
    (root / name).write_bytes((root / name).read_bytes()[:70])
    run = tfaccel.setup(gpu_ids=[0])
    with pytest.raises(UserError, match=name):
        rows_of(run.image_folder(root, **SETTINGS))


@pytest.mark.gpu
def test_every_epoch_on_a_gpu_is_that_of_the_cpu(folder, in_file_order):
    images, labels = in_file_order
    loader = tfaccel.setup(gpu_ids=[0]).image_folder(folder, **SETTINGS, shuffle=True)
    for epoch in range(3):
        label, image = rows_of(loader)
        order = shards.epoch_order(NUM_IMAGES, seed=0, epoch=epoch, shuffle=True)
        np.testing.assert_array_equal(label, labels[order])
        np.testing.assert_allclose(image[..., 0], images[order] / np.float32(255), atol=1e-6)


class CountBatches(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.count = 0

    def on_train_batch_end(self, batch, logs=None):
        self.count += 1


def test_keras_knows_the_length_of_the_epoch(setup, folder):
    run = setup(xla=False)
    loader = run.image_folder(folder, **SETTINGS)
    with run.scope():
        model = keras.Sequential([keras.Input((12, 10, 1)), keras.layers.Flatten()])
        model.add(keras.layers.Dense(3))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    run.compile(model, "sgd", loss, metrics=["accuracy"])
    counter = CountBatches()
    model.fit(loader, validation_data=loader, epochs=2, verbose=0, callbacks=[counter])
    assert counter.params["steps"] == 5
    assert counter.count == 10
