"""All loaders do the same operations on whole grey levels: memory, tf_data and DALI on the CPU."""

import numpy as np
import PIL.Image
import pytest
import reference
import tensorflow as tf

from tfaccel.config import AugmentConfig, DaliConfig, ImageConfig
from tfaccel.config.presets import preset
from tfaccel.data.feed import Feed
from tfaccel.data.loaders.dali import DaliStream, TogetherStream
from tfaccel.data.loaders.memory import MemoryStream, decode_all
from tfaccel.data.loaders.tf_data import TfDataStream
from tfaccel.data.placement import Placement
from tfaccel.data.shards import Plan
from tfaccel.data.source import Blobs, ImageSource
from tfaccel.runtime.devices import Device

CPU = Device("/cpu:0", None)
SIZE = (24, 20)
IMAGES = ImageConfig(image_size=(20, 18), mean=0.5, std=0.5)
# One whole grey level of images that are normalised by a half.
LEVEL = 1.01 / 127.5
# Crops are not resized and flips move whole pixels, so every loader has the same whole levels.
EXACT = {"window": "random_crop", "horizontal_flip": True, "vertical_flip": True}
CASES = {
    "erasing": {"erase_probability": 0.6, "erase_fill": "random"},
    "blur": {"blur_probability": 0.6},
    "levels": {"posterize_probability": 0.5, "solarize_probability": 0.5},
    "randaugment": {"policy": "randaugment"},
    "randaugment_timm": {"policy": "randaugment_timm", "policy_magnitude_std": 0.5},
    "trivialaugment": {"policy": "trivialaugment"},
}
ALL = {**CASES["erasing"], **CASES["blur"], **CASES["levels"], **CASES["randaugment"]}


@pytest.fixture(scope="module")
def pixels():
    """23 images of smooth colours with noise."""
    random = np.random.default_rng(0)
    images = []
    for _ in range(23):
        coarse = PIL.Image.fromarray(random.integers(0, 256, (4, 4, 3), dtype=np.uint8))
        smooth = coarse.resize(SIZE[::-1], PIL.Image.Resampling.BICUBIC)
        noise = random.integers(-9, 10, (*SIZE, 3))
        images.append(np.clip(np.asarray(smooth) + noise, 0, 255).astype(np.uint8))
    return images


@pytest.fixture(scope="module")
def source(pixels, tmp_path_factory):
    """Them as PNG files."""
    return ImageSource(files_of(pixels, tmp_path_factory.mktemp("png")), np.arange(23) % 3)


def files_of(pixels, root):
    names = [str(root / f"{index:02d}.png") for index in range(len(pixels))]
    for name, image in zip(names, pixels, strict=True):
        PIL.Image.fromarray(image).save(name)
    return Blobs(tuple(names))


def feed_of(augment, *, rows=8, images=IMAGES, replicas=1, replica_index=0, first=0):
    plan = Plan(23, rows, num_replicas=replicas, seed=3, shuffle=True)
    return Feed(plan, augment, images.image_size, replica_index, first)


def stream_of(loader, source, feed, *, images=IMAGES, device=CPU, dtype="float32"):
    placement = Placement(device, num_threads=2, seed=0)
    settings = {"feed": feed, "placement": placement, "dtype": dtype}
    if loader == "tf_data":
        return TfDataStream(source, images, **settings)
    if loader == "dali":
        return DaliStream(source, images, dali=DaliConfig(), decode_on_gpu=False, **settings)
    kept = {"stored_size": SIZE, "channels": 3, "targets": images.targets, "num_threads": 2}
    return MemoryStream(decode_all(source, **kept), images, on_device=True, **settings)


def batches(stream, number):
    return [tuple(each.numpy() for each in next(stream)) for _ in range(number)]


def same(one, other):
    for batch, like in zip(one, other, strict=True):
        for value, wanted in zip(batch, like, strict=True):
            np.testing.assert_array_equal(value, wanted)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "case",
    [
        "erasing",
        pytest.param("blur", marks=SLOW),
        pytest.param("levels", marks=SLOW),
        "randaugment",
        pytest.param("randaugment_timm", marks=SLOW),
        pytest.param("trivialaugment", marks=SLOW),
    ],
)
def test_each_loader_gives_the_same(pixels, source, case):
    augment = AugmentConfig(**EXACT, **CASES[case])
    feed = feed_of(augment)
    made = {
        each: batches(stream_of(each, source, feed), 5) for each in ("memory", "tf_data", "dali")
    }  # two epochs, but for a batch
    same(made["memory"], made["tf_data"])
    same(made["memory"], made["dali"])
    plain = batches(stream_of("memory", source, feed_of(AugmentConfig(**EXACT))), 5)
    for number, (image, label) in enumerate(made["memory"]):
        ids, draws = feed.rows(number).ids, feed.draws(number)
        np.testing.assert_array_equal(label, ids % 3)
        rows = [{kind: each[row] for kind, each in draws.items()} for row in range(8)]
        wanted = np.stack(
            [
                reference.example(pixels[index], IMAGES, augment, row)
                for index, row in zip(ids, rows, strict=True)
            ]
        )
        assert (np.abs(image - wanted) > LEVEL).mean() < 0.02
        assert (image != plain[number][0]).mean() > 0.02  # something was done


@pytest.mark.parametrize(
    "loader", [pytest.param("memory", marks=SLOW), pytest.param("tf_data", marks=SLOW), "dali"]
)
def test_replicas_and_resumed_streams_draw_the_same(source, loader):
    augment = AugmentConfig(**EXACT, **ALL)
    whole = batches(stream_of(loader, source, feed_of(augment)), 4)
    same(whole[2:], batches(stream_of(loader, source, feed_of(augment, first=2)), 2))
    parts = [
        batches(stream_of(loader, source, feed_of(augment, replicas=2, replica_index=each)), 2)
        for each in range(2)
    ]
    together = [
        tuple(np.concatenate(each) for each in zip(*halves, strict=True))
        for halves in zip(*parts, strict=True)
    ]
    same(whole[:2], together)


@pytest.mark.parametrize(
    "loader", ["memory", pytest.param("tf_data", marks=SLOW), pytest.param("dali", marks=SLOW)]
)
def test_float16_is_float32_rounded_and_on_the_replicas_device(source, loader):
    feed, other = feed_of(AugmentConfig(**EXACT, **ALL)), Device("/cpu:1", None)
    single = batches(stream_of(loader, source, feed), 2)
    stream = stream_of(loader, source, feed, dtype="float16", device=other)
    for image, label in single:
        half, same_label = next(stream)
        assert half.device.endswith("CPU:1")
        assert half.dtype == tf.float16
        np.testing.assert_array_equal(half, image.astype(np.float16))
        np.testing.assert_array_equal(label, same_label)


@pytest.mark.parametrize("targets", [pytest.param("image", marks=SLOW), "mask"])
def test_pairs_are_the_same_in_each_loader(pixels, tmp_path, targets):
    for name in ("inputs", "targets"):
        (tmp_path / name).mkdir()
    is_mask = targets == "mask"
    second = [each[..., 0] if is_mask else 255 - each for each in pixels]
    files = [files_of(pixels, tmp_path / "inputs"), files_of(second, tmp_path / "targets")]
    source = ImageSource(files[0], None, targets=files[1])
    ignored = {"ignore_class": 255} if is_mask else {}
    images = ImageConfig(image_size=(20, 18), mean=0.5, std=0.5, targets=targets, **ignored)
    feed = feed_of(AugmentConfig(**EXACT, **ALL), images=images)
    made = {
        each: batches(stream_of(each, source, feed, images=images), 3)
        for each in ("memory", "tf_data", "dali")
    }
    same(made["memory"], made["tf_data"])
    same(made["memory"], made["dali"])
    assert made["dali"][0][1].dtype == (np.uint8 if is_mask else np.float32)


def test_dali_gives_the_batches_of_a_launch_together(source):
    feed = feed_of(AugmentConfig(**EXACT, **ALL))
    single = batches(stream_of("dali", source, feed), 6)
    placement = Placement(CPU, num_threads=2, seed=0)
    stream = TogetherStream(
        source,
        IMAGES,
        feed=feed,
        most=2,
        placement=placement,
        dtype="float32",
        dali=DaliConfig(),
        decode_on_gpu=False,
    )
    found = []
    while len(found) < 6:
        together = next(stream)
        found += [tuple(map(np.array, together.at(index))) for index in range(len(together))]
    same(single, found)


@pytest.mark.parametrize("loader", ["memory", "tf_data", "dali"])
def test_resized_windows_have_the_same_operations(pixels, source, loader):
    """Loaders resize to levels that differ by one here and there, which operations may enlarge."""
    smooth = {"crop_area": (0.1, 0.6), "brightness": 0.2}  # no window shrinks
    augment = preset("deit", **smooth, blur_probability=0.5)
    feed = feed_of(augment)
    image, _ = next(stream_of(loader, source, feed))
    ids, draws = feed.rows(0).ids, feed.draws(0)
    rows = [{kind: each[row] for kind, each in draws.items()} for row in range(8)]
    wanted = np.stack(
        [
            reference.example(pixels[index], IMAGES, augment, row, repeat_border=loader == "dali")
            for index, row in zip(ids, rows, strict=True)
        ]
    )
    difference = np.abs(image - wanted) * 127.5
    assert difference.mean() < 0.5
    assert np.percentile(difference, 95) < 1.1
