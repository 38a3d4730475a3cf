import os
import pathlib
import shutil

import keras
import numpy as np
import PIL.Image
import pytest
import tensorflow as tf
from conftest import compiled, strategy_of

from tfaccel import DaliConfig, ImageConfig, UserError, preset
from tfaccel.data import shards, sources
from tfaccel.data.choose import NUM_SAMPLED
from tfaccel.data.distribute import Loader
from tfaccel.data.images import open_images
from tfaccel.data.source import ImageSource
from tfaccel.data.sources import pillow
from tfaccel.runtime.devices import Device, Runtime

NUM_IMAGES = 37
LOADERS = ("dali_cpu", "tf_data", "memory", "cache")
SETTINGS = {"image_size": (12, 10), "channels": 1, "global_batch_size": 12}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def open_on(devices, source, *, augment="none", shuffle=True, dali=None, **images):
    return open_images(
        source,
        ImageConfig(**{**SETTINGS, **images}),
        preset(augment) if isinstance(augment, str) else augment,
        shuffle=shuffle,
        num_replicas=len(devices),
        runtime=Runtime(devices, "float32", xla=False, seed=0, loader_threads=1),
        num_local=1,
        num_threads=1,
        dali=dali or DaliConfig(),
    )


def make_loader(source, *, num_replicas=1, **settings):
    devices = tuple(Device(f"/cpu:{index}", None) for index in range(num_replicas))
    data = open_on(devices, source, **settings)
    return Loader(
        data,
        devices=devices,
        seed=0,
        num_threads=1,
        first_replica=0,
        strategy=strategy_of(num_replicas),
    )


def rows_of(loader, num_replicas=1):
    """An epoch's real images and labels, in order."""
    local = strategy_of(num_replicas).experimental_local_results
    batches = [[np.concatenate(local(each)) for each in batch] for batch in loader]
    image, label, *weight = (np.concatenate(each) for each in zip(*batches, strict=True))
    real = weight[0] > 0 if weight else slice(None)
    return image[real], label[real]


@pytest.mark.parametrize("loader", LOADERS)
def test_every_loader_gives_the_files_own_pixels_once_in_the_plans_order(
    folder, in_file_order, loader
):
    # Pillow's decode is the reference. PNG is exact; 1e-6 is float32's division by 255.
    images, labels = in_file_order
    loader = make_loader(sources.class_folders(folder), loader=loader)
    assert len(loader) == 4
    for epoch in range(3):
        image, label = rows_of(loader)
        order = shards.epoch_order(NUM_IMAGES, seed=0, epoch=epoch, shuffle=True)
        np.testing.assert_array_equal(label, labels[order])
        np.testing.assert_allclose(image[..., 0], images[order] / np.float32(255), atol=1e-6)


@pytest.mark.parametrize(
    "loader",
    [pytest.param(each, marks=[pytest.mark.slow] * (each == "tf_data")) for each in LOADERS],
)
def test_replicas_and_a_resume_see_the_augmented_images_of_one(folder, loader):
    source = sources.class_folders(folder)
    augment = preset("mnist", shift_pixels=1, horizontal_flip=True, contrast=0.3)
    settings = {"augment": augment, "loader": loader}
    one = make_loader(source, **settings)
    _, resumed, whole = (rows_of(one) for _ in range(3))
    two = make_loader(source, num_replicas=2, **settings)
    two.start_at(epoch=1, step=2)
    for ours, each in zip(rows_of(two, 2), resumed, strict=True):
        np.testing.assert_allclose(ours, each[24:], atol=1e-6)
    for ours, each in zip(rows_of(two, 2), whole, strict=True):
        np.testing.assert_allclose(ours, each, atol=1e-6)


def test_a_batch_said_for_each_replica(folder):
    settings = {"global_batch_size": None, "batch_per_replica": 4}
    loader = make_loader(sources.class_folders(folder), num_replicas=3, **settings)
    assert (loader.global_batch_size, len(loader)) == (12, 4)


@pytest.mark.parametrize(
    ("dali", "said"),
    [
        (
            DaliConfig(),
            "32 MiB of GPU memory and twice 32 MiB of pinned memory, the hardware decoder with "
            "enough for 2400x1632 pixels;",
        ),
        (
            DaliConfig(
                device_memory_padding=2**26, host_memory_padding=None, preallocate_width_hint=None
            ),
            "64 MiB of GPU memory and twice DALI's own default of pinned memory, the hardware "
            "decoder with DALI's own default;",
        ),
    ],
)
def test_what_the_decoder_takes_on_a_gpu_is_said(folder, caplog, dali, said):
    caplog.set_level("INFO", "tfaccel")
    source = sources.class_folders(folder)
    open_on((Device("/gpu:0", 0),), source, loader="dali_gpu", dali=dali)
    assert f"each thread of the decoder starts with {said}" in caplog.text


@pytest.mark.parametrize("recorded", ["+COLLECTIVES", "fusion,collectives", "-CUBLAS,+COLLECTIVES"])
def test_dali_is_refused_beside_sums_that_xla_records(folder, monkeypatch, recorded):
    monkeypatch.setenv("XLA_FLAGS", f"--xla_a=1 --xla_gpu_enable_command_buffer={recorded}")
    source = sources.class_folders(folder)
    make_loader(source, loader="memory")
    with pytest.raises(UserError, match=r"remove COLLECTIVES .*, or use another loader$"):
        make_loader(source, loader="dali_cpu")


def test_dali_is_not_refused_beside_other_flags_of_xla(folder, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=+CUBLAS,-COLLECTIVES")
    make_loader(sources.class_folders(folder), loader="dali_cpu")


@pytest.mark.parametrize(
    "augment",
    [
        "imagenet_color",
        pytest.param("imagenet_eval", marks=pytest.mark.slow),
        pytest.param("cifar", marks=pytest.mark.slow),
    ],
)
def test_loaders_agree_on_augmented_images(folder, augment):
    # The same draws in each. Resizing is antialiased in DALI, and not in the others where a window
    # is random, and they round to whole pixel values at other places: 0.02 is 5 of 255 in the mean.
    source = sources.class_folders(folder)
    found = {
        loader: rows_of(
            make_loader(source, augment=augment, loader=loader, channels=3, image_size=(10, 10))
        )[0]
        for loader in LOADERS
    }
    for loader, images in found.items():
        assert np.abs(images - found["dali_cpu"]).mean() < 0.02, loader


def test_float16_images_for_a_float16_policy(setup, folder):
    for precision, dtype in (("mixed_float16", "float16"), ("mixed_bfloat16", "float32")):
        loader = setup(precision=precision).image_folder(folder, **SETTINGS)
        image = next(iter(loader))[0]
        assert image.dtype.name == loader.element_spec[0].dtype.name == dtype


@pytest.mark.parametrize(
    "loader",
    [LOADERS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in LOADERS[1:])],
)
def test_two_epochs_of_fit_evaluate_and_predict_build_one_pipeline(folder, loader, caplog):
    caplog.set_level("INFO")
    source = sources.class_folders(folder)
    train, test = make_loader(source, loader=loader), make_loader(source, loader=loader)
    keras.utils.set_random_seed(0)
    layers = [keras.Input((12, 10, 1)), keras.layers.Flatten(), keras.layers.Dense(3)]
    model = compiled(
        lambda: keras.Sequential(layers),
        1,
        xla=False,
        optimizer="sgd",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    made = []
    for each in (train, test):
        each._stream = lambda index, make=each._stream: made.append(index) or make(index)
    for _ in range(2):
        model.fit(train, validation_data=test, epochs=2, verbose=0)
    model.evaluate(test, verbose=0)
    assert model.predict(test, verbose=0).shape == (NUM_IMAGES, 3)
    assert made == [0, 0]


@pytest.mark.parametrize("loader", LOADERS)
def test_a_second_epoch_starts_no_pipeline(folder, loader, monkeypatch):
    """Which takes 20 to 300 ms with images as small as these; a batch of one that runs took 4."""
    loader = make_loader(sources.class_folders(folder), loader=loader, augment="mnist")
    made, make = [], loader._stream
    monkeypatch.setattr(loader, "_stream", lambda index: made.append(index) or make(index))
    assert [len(list(loader)) for _ in range(3)] == 3 * [len(loader)]
    assert made == [0]


@pytest.mark.parametrize("loader", [each for each in LOADERS if each != "dali_cpu"])  # no data set
def test_no_stream_waits_for_tensorflows_tuner_at_its_end(folder, loader, monkeypatch):
    loader, tuned = make_loader(sources.class_folders(folder), loader=loader), []
    begin = tf.data.Dataset.__iter__

    def noted(dataset):
        tuned.append(dataset.options().autotune.enabled)
        return begin(dataset)

    monkeypatch.setattr(tf.data.Dataset, "__iter__", noted)
    next(iter(loader))
    assert tuned == [False]


BAD = ("a/00.png", "b/16.png", "c/05.png")


@pytest.fixture
def damaged(folder, tmp_path):
    """The images, three of them cut short."""
    root = pathlib.Path(shutil.copytree(folder, tmp_path / "copy"))
    for name in BAD:
        (root / name).write_bytes((root / name).read_bytes()[:70])
    return root


@pytest.mark.parametrize("loader", LOADERS)
def test_a_bad_file_is_an_error_that_names_it(damaged, loader):
    with pytest.raises(UserError, match=r"a/00\.png|b/16\.png|c/05\.png"):
        rows_of(make_loader(sources.class_folders(damaged), loader=loader))


@pytest.mark.parametrize("loader", LOADERS)
def test_bad_files_are_left_out_and_the_epoch_is_as_long_as_the_rest(
    damaged, loader, in_file_order, caplog
):
    caplog.set_level("INFO")
    loader = make_loader(sources.class_folders(damaged), loader=loader, bad_files="skip")
    assert loader.num_examples == NUM_IMAGES - 3
    assert len(loader) == 3
    for _ in range(2):
        image, label = rows_of(loader)
        assert np.bincount(label).tolist() == [12, 11, 11]
        assert len(np.unique(image.reshape(len(image), -1), axis=0)) == NUM_IMAGES - 3
    assert "3 of 37" in caplog.text or "3 truncated" in caplog.text


@pytest.mark.parametrize("loader", ["dali_cpu", "tf_data"])
def test_a_file_that_vanishes_in_the_run_costs_itself_alone(folder, tmp_path, loader):
    root = pathlib.Path(shutil.copytree(folder, tmp_path / "copy"))
    source = sources.class_folders(root)
    loader = make_loader(source, loader=loader, bad_files="skip")
    assert len(rows_of(loader)[0]) == NUM_IMAGES
    (root / "a" / "03.png").unlink()
    for epoch in range(2):
        # What was read ahead when it vanished may still have it.
        assert len(rows_of(loader)[0]) in ((NUM_IMAGES, NUM_IMAGES - 1)[epoch:])


def test_names_that_are_not_utf8_are_read(folder, tmp_path):
    root = pathlib.Path(shutil.copytree(folder, tmp_path / "copy"))
    os.rename(root / "a", os.fsencode(root) + b"/\xe9 \xff")
    for loader in LOADERS:
        found = make_loader(sources.class_folders(root), loader=loader)
        assert len(rows_of(found)[0]) == NUM_IMAGES


@pytest.mark.parametrize("loader", ["memory", "cache", "tf_data", "dali_cpu"])
def test_sixteen_bit_images_are_not_made_white(tmp_path, loader):
    (tmp_path / "a").mkdir()
    deep = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000
    PIL.Image.fromarray(deep).save(tmp_path / "a" / "deep.png")
    with pytest.raises(UserError, match=r"deep.png has 16-bit or float samples"):
        make_loader(sources.class_folders(tmp_path), loader=loader)


NUM_LATE = 70
# What the sample of an opening passes over.
LATE = sorted(set(range(NUM_LATE)) - set(np.linspace(0, NUM_LATE - 1, NUM_SAMPLED).astype(int)))


@pytest.fixture(scope="module")
def late_kinds(tmp_path_factory):
    """Class folders of which the images in LATE are of kinds that decoders read in other ways."""
    root = tmp_path_factory.mktemp("late")
    (root / "a").mkdir()
    grey = np.arange(64, dtype=np.uint8).reshape(8, 8)
    palette = PIL.Image.fromarray(np.stack([grey, grey[::-1], grey.T], -1)).quantize(16)
    for index in range(NUM_LATE):
        place = root / "a" / f"{index:02d}"
        if index not in LATE:
            PIL.Image.fromarray(grey).save(place.with_suffix(".png"))
        elif index == LATE[0]:
            PIL.Image.fromarray(grey * np.uint16(257)).save(place.with_suffix(".png"))
        elif index == LATE[1]:
            frames = [PIL.Image.fromarray(255 - grey)]
            palette.convert("RGB").save(place.with_suffix(".png"), append_images=frames, save_all=1)
        else:
            palette.save(place.with_suffix(".bmp"))
    return root


@pytest.mark.parametrize("loader", ["dali_cpu", "tf_data"])
def test_a_later_image_of_an_odd_kind_is_named_when_it_is_read(late_kinds, loader):
    source = sources.class_folders(late_kinds)
    settings = {"loader": loader, "image_size": (8, 8), "global_batch_size": NUM_LATE}
    opened = make_loader(source, shuffle=False, **settings)
    with pytest.raises(UserError, match=rf"{len(LATE)} of {NUM_LATE} images just read .* a kind"):
        rows_of(opened)


@pytest.mark.parametrize("loader", ["memory", "cache"])
def test_pillow_reads_all_of_them_but_those_of_16_bits(late_kinds, loader):
    source = sources.class_folders(late_kinds)
    settings = {"loader": loader, "image_size": (8, 8), "global_batch_size": NUM_LATE}
    with pytest.raises(UserError, match=rf"1 of {NUM_LATE} .*{LATE[0]:02d}.png \(has 16-bit"):
        make_loader(source, **settings)
    left = source.without(np.array(LATE[:1]))
    image, _ = rows_of(make_loader(left, shuffle=False, channels=3, **settings))
    for index in LATE[1:]:
        with PIL.Image.open(left.images.files[index - 1]) as opened:
            right = np.asarray(opened.convert("RGB"))
        levels = image[index - 1] / 2 * 255 + 127.5 if image.min() < 0 else image[index - 1] * 255
        np.testing.assert_allclose(levels, right, atol=0.6)


@pytest.mark.parametrize("loader", LOADERS)
def test_a_later_mask_is_looked_at_when_it_is_read(tmp_path, loader):
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    for index in range(NUM_LATE):
        PIL.Image.new("RGB", (8, 8)).save(tmp_path / "in" / f"{index:02d}.png")
        mode = "P" if index == LATE[0] else "L"
        PIL.Image.new(mode, (8, 8)).save(tmp_path / "out" / f"{index:02d}.png")
    source = sources.image_pairs(tmp_path / "in", tmp_path / "out")
    settings = {"targets": "mask", "channels": 3, "image_size": (8, 8), "loader": loader}
    with pytest.raises(UserError, match=rf"out/{LATE[0]:02d}\.png \(is of Pillow's mode P"):
        rows_of(make_loader(source, global_batch_size=NUM_LATE, shuffle=False, **settings))


@pytest.mark.parametrize("loader", LOADERS)
def test_a_wrong_size_in_the_sample_is_named_as_the_loader_opens(tmp_path, loader):
    for side in ("in", "out"):
        (tmp_path / side).mkdir()
        for index in range(4):
            size = (8, 9) if (side, index) == ("out", 2) else (8, 8)
            PIL.Image.new("L", size).save(tmp_path / side / f"{index}.png")
    pairs = sources.image_pairs(tmp_path / "in", tmp_path / "out")
    settings = {"loader": loader, "image_size": (8, 8), "global_batch_size": 4}
    with pytest.raises(UserError, match=r"in/2.png has 8x8 .*out/2.png has 9x8; expected the same"):
        make_loader(pairs, **settings)
    if loader in ("dali_cpu", "tf_data"):  # the others keep images of one size alone
        single = ImageSource(pairs.targets, np.zeros(4, np.int32), ("a",))
        settings["image_size"] = (9, 8)
        with pytest.raises(UserError, match=r"out/0.png has 8x8 .*use a smaller image_size"):
            make_loader(single, augment=preset("none", window="center_crop"), **settings)


def test_hues_of_grey_images_are_refused(folder):
    with pytest.raises(UserError, match="grey images, which have no hue"):
        make_loader(sources.class_folders(folder), augment=preset("none", hue_degrees=5.0))


def test_masks_with_a_palette_in_other_formats_are_refused(tmp_path):
    # Every decoder would give the palette's colours as grey, not the classes.
    for side, mode, name in (("in", "RGB", "one.png"), ("out", "P", "one.tif")):
        (tmp_path / side).mkdir()
        PIL.Image.new(mode, (8, 8)).save(tmp_path / side / name)
    source = sources.image_pairs(tmp_path / "in", tmp_path / "out")
    with pytest.raises(UserError, match=r"out/one.tif is of Pillow's mode P; .* masks"):
        make_loader(source, targets="mask", channels=3, image_size=(8, 8))


def test_a_later_mask_of_another_kind_is_refused_or_left_out(tmp_path):
    for side in ("in", "out"):
        (tmp_path / side).mkdir()
        for index in range(6):
            mode = "L" if side == "out" and index != 4 else "RGB"
            PIL.Image.new(mode, (8, 8)).save(tmp_path / side / f"{index}.png")
    source = sources.image_pairs(tmp_path / "in", tmp_path / "out")
    settings = {"targets": "mask", "channels": 3, "image_size": (8, 8)}
    with pytest.raises(UserError, match=r"out/4.png is of Pillow's mode RGB; .* masks"):
        make_loader(source, **settings)
    assert make_loader(source, bad_files="skip", **settings).num_examples == 5


def test_images_of_many_sizes_are_stored_only_at_a_size_that_was_given(tmp_path):
    (tmp_path / "a").mkdir()
    for index in range(4):
        PIL.Image.new("L", (20 + index, 16)).save(tmp_path / "a" / f"{index}.png")
    source = sources.class_folders(tmp_path)
    settings = {"augment": "imagenet_eval", "loader": "memory", "global_batch_size": 2}
    with pytest.raises(UserError, match=r"keeps images of one size, but .* give stored_size"):
        make_loader(source, **settings)
    loader = make_loader(source, **settings, stored_size=(16, 16))
    assert rows_of(loader)[0].shape == (4, 12, 10, 1)


def test_a_mask_is_of_pairs_alone(folder):
    with pytest.raises(UserError, match=r"targets='mask' needs pairs of images"):
        make_loader(sources.class_folders(folder), targets="mask")


@pytest.mark.parametrize("loader", LOADERS)
def test_the_numbers_of_a_palette_s_colours_are_the_classes(tmp_path, loader):
    """As in Pascal VOC's masks, whose pixels without a class have the number 255."""
    draw, masks = np.random.default_rng(0), []
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    for index in range(12):
        mask = draw.integers(0, 21, (12, 10)).astype(np.uint8)
        mask[0] = 255
        masks.append(mask)
        image = PIL.Image.fromarray(mask).convert("P")
        image.putdata(mask.ravel().tolist())
        image.putpalette([each * factor % 256 for each in range(256) for factor in (37, 91, 17)])
        image.save(tmp_path / "masks" / f"{index:02d}.png")
        PIL.Image.fromarray(mask).save(tmp_path / "images" / f"{index:02d}.png")
    pairs = sources.image_pairs(tmp_path / "images", tmp_path / "masks")
    made = make_loader(pairs, shuffle=False, loader=loader, targets="mask", ignore_class=255)
    images, found = rows_of(made)
    np.testing.assert_array_equal(found[..., 0], masks)
    np.testing.assert_allclose(255 * images[..., 0], masks, atol=1e-3)


def test_a_sampled_mask_is_opened_once_by_all_checks(tmp_path, monkeypatch):
    for part in ("images", "masks"):
        (tmp_path / part).mkdir()
        for index in range(3):
            grey = PIL.Image.fromarray(np.full((8, 8), index, np.uint8))
            grey.save(tmp_path / part / f"{index}.png")
    own, opened = pillow.header, []

    def header(blobs, index):
        opened.append(blobs.name(index))
        return own(blobs, index)

    monkeypatch.setattr(pillow, "header", header)
    source = sources.image_pairs(tmp_path / "images", tmp_path / "masks")
    settings = {"image_size": (8, 8), "channels": 1, "targets": "mask", "global_batch_size": 3}
    make_loader(source, loader="tf_data", **settings)
    assert all(opened.count(str(tmp_path / "masks" / f"{index}.png")) == 1 for index in range(3))
