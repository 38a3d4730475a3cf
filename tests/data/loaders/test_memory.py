"""MemoryStream and decode_all against reference.py."""

import gc
import logging
import pathlib
import re
import weakref

import numpy as np
import PIL.Image
import pytest
import reference

from tfaccel.common.errors import UserError
from tfaccel.config import AugmentConfig, ImageConfig
from tfaccel.config.presets import preset
from tfaccel.data.feed import Feed
from tfaccel.data.loaders import decode
from tfaccel.data.loaders.memory import MemoryStream, decode_all
from tfaccel.data.placement import Placement
from tfaccel.data.shards import Plan
from tfaccel.data.source import ArraySource, Blobs, ImageSource, UnreadableError
from tfaccel.runtime.devices import Device

CPU = Device("/cpu:0", None)
LIKE_A_GPU = Device("/cpu:1", 0)  # another CPU device stands for it
IMAGES = ImageConfig(image_size=(8, 6), mean=0.5, std=0.5)
EVERY_DRAW = preset(
    "imagenet_color", crop_area=(0.01, 0.1), rotation_degrees=30.0, shift_pixels=2, hue_degrees=20.0
)
CLOSE = 0.15 / 127.5  # float16 between the two axes of a resize, times 1.4 * 1.4 of colours


@pytest.fixture
def source():
    pixels = np.random.default_rng(0).integers(0, 256, (17, 24, 20, 3), dtype=np.uint8)
    return ArraySource(pixels, np.arange(17, dtype=np.int32))


def feed_of(source, images, augment, *, rows=5, replicas=1, replica_index=0, **settings):
    plan = Plan(len(source), rows, replicas, seed=3, shuffle=True)
    return Feed(plan, augment, images.image_size, replica_index, **settings)


def stream_of(source, images, feed, *, device=CPU, on_device=True, dtype="float32"):
    placement = Placement(device, num_threads=2, seed=0)
    return MemoryStream(
        source, images, feed=feed, placement=placement, dtype=dtype, on_device=on_device
    )


def batches(stream, number):
    return [tuple(each.numpy() for each in next(stream)) for _ in range(number)]


def expected(source, images, feed, number):
    """What the reference makes of a batch."""
    ids, draws = feed.rows(number).ids, feed.draws(number)
    targets = [None] * len(source) if source.targets is None else source.targets
    rows = [
        reference.example(
            source.images[index],
            images,
            feed.augment,
            {kind: each[row] for kind, each in draws.items()},
            targets[index],
        )
        for row, index in enumerate(ids)
    ]
    if source.targets is None:
        return np.stack(rows), source.labels[ids]
    return tuple(np.stack(each) for each in zip(*rows, strict=True))


@pytest.mark.parametrize(
    ("device", "on_device", "kept"),
    [
        (CPU, True, "mapped"),
        (Device("/cpu:1", None), True, "in memory"),
        (LIKE_A_GPU, True, "mapped"),
        (LIKE_A_GPU, False, "mapped"),
        (LIKE_A_GPU, False, "in memory"),
        pytest.param(CPU, True, "in memory", marks=pytest.mark.slow),
        pytest.param(Device("/cpu:1", None), True, "mapped", marks=pytest.mark.slow),
        pytest.param(LIKE_A_GPU, True, "in memory", marks=pytest.mark.slow),
        *(
            pytest.param(Device("/gpu:0", 0), on_device, kept, marks=pytest.mark.gpu)
            for on_device in (True, False)
            for kept in ("in memory", "mapped")
        ),
    ],
)
def test_every_row_is_the_references(source, tmp_path, device, on_device, kept):
    if kept == "mapped":
        np.save(tmp_path / "images.npy", source.images)
        mapped = np.load(tmp_path / "images.npy", mmap_mode="r")
        source = ArraySource(mapped, source.labels)
    feed = feed_of(source, IMAGES, EVERY_DRAW)
    stream = stream_of(source, IMAGES, feed, device=device, on_device=on_device)
    for number in range(9):  # two epochs and a batch
        image, label = next(stream)
        for each in (image, label):
            assert each.device.endswith(device.name[1:].upper())
        wanted, wanted_label = expected(source, IMAGES, feed, number)
        np.testing.assert_allclose(image, wanted, atol=CLOSE)
        np.testing.assert_array_equal(label, wanted_label)
        assert label.dtype == np.int64


@pytest.mark.parametrize(
    ("device", "targets"),
    [
        (CPU, "image"),
        (LIKE_A_GPU, "mask"),
        pytest.param(CPU, "mask", marks=pytest.mark.slow),
        pytest.param(LIKE_A_GPU, "image", marks=pytest.mark.slow),
    ],
)
def test_pairs(source, targets, device):
    mask = source.images[..., :1] // 2
    pairs = ArraySource(
        source.images, None, targets=mask if targets == "mask" else 255 - source.images
    )
    images = ImageConfig(image_size=(8, 6), mean=0.5, std=0.5, targets=targets)
    feed = feed_of(pairs, images, EVERY_DRAW)
    stream = stream_of(pairs, images, feed, device=device)
    for number in range(5):
        for found, wanted in zip(next(stream), expected(pairs, images, feed, number), strict=True):
            assert found.dtype == wanted.dtype
            np.testing.assert_allclose(found, wanted, atol=CLOSE)


@pytest.mark.parametrize(
    ("device", "window"),
    [
        (CPU, "random_crop"),
        (LIKE_A_GPU, "center_crop"),
        (LIKE_A_GPU, "random_crop"),
        pytest.param(CPU, "center_crop", marks=pytest.mark.slow),
    ],
)
def test_crops_of_pairs(source, window, device):
    pairs = ArraySource(source.images, None, targets=source.images[..., :1] // 2)
    images = ImageConfig(image_size=(8, 7), mean=0.5, std=0.5, targets="mask")
    feed = feed_of(pairs, images, AugmentConfig(window=window, horizontal_flip=True))
    stream = stream_of(pairs, images, feed, device=device)
    for number in range(5):
        for found, wanted in zip(next(stream), expected(pairs, images, feed, number), strict=True):
            np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_float16(source):
    feed = feed_of(source, IMAGES, EVERY_DRAW)
    [(half, _)] = batches(stream_of(source, IMAGES, feed, dtype="float16"), 1)
    assert half.dtype == np.float16
    np.testing.assert_allclose(half, expected(source, IMAGES, feed, 0)[0], atol=CLOSE + 5e-4)


@pytest.mark.parametrize("device", [pytest.param(CPU, marks=pytest.mark.slow), LIKE_A_GPU])
def test_a_stream_that_starts_in_the_middle_goes_on_alike(source, device):
    whole, late = (
        stream_of(source, IMAGES, feed_of(source, IMAGES, EVERY_DRAW, first=first), device=device)
        for first in (0, 6)
    )
    for one, other in zip(batches(whole, 10)[6:], batches(late, 4), strict=True):
        for value, wanted in zip(one, other, strict=True):
            np.testing.assert_array_equal(value, wanted)


def test_two_replicas_make_the_batch_of_one(source):
    # Of two whole batches; half a batch is as large as those of other tests, so compiled already.
    images = np.concatenate([source.images, source.images[:3]])
    source = ArraySource(images, np.arange(20, dtype=np.int32))
    one, *two = (
        stream_of(
            source,
            IMAGES,
            feed_of(
                source, IMAGES, EVERY_DRAW, rows=10, replicas=replicas, replica_index=replica_index
            ),
        )
        for replicas, replica_index in ((1, 0), (2, 0), (2, 1))
    )
    for whole, *parts in zip(*(batches(each, 2) for each in (one, *two)), strict=True):
        for wanted, *halves in zip(whole, *parts, strict=True):
            # XLA may sum in another order for another number of rows.
            np.testing.assert_allclose(np.concatenate(halves), wanted, atol=1e-5)


@pytest.mark.parametrize(
    "device", [CPU, LIKE_A_GPU, pytest.param(Device("/gpu:0", 0), marks=pytest.mark.gpu)]
)
def test_what_is_dropped_is_freed(source, device, quick_collector):
    source = ArraySource(source.images.copy(), source.labels)
    stream = stream_of(source, IMAGES, feed_of(source, IMAGES, EVERY_DRAW), device=device)
    next(stream)
    freed = [weakref.ref(each) for each in (stream, source, source.images)]
    assert len(source.copies) == (device.cuda_ordinal is not None)
    del stream, source
    gc.collect()
    assert [each() for each in freed] == [None] * 3


def test_streams_of_a_source_share_the_devices_copy_also_one_after_the_other(source):
    copies = []
    for _ in range(2):
        stream = stream_of(source, IMAGES, feed_of(source, IMAGES, EVERY_DRAW), device=LIKE_A_GPU)
        next(stream)
        del stream
        copies.append(source.copies["pixels", LIKE_A_GPU])
    assert copies[0] is copies[1]


@pytest.mark.gpu
def test_more_than_two_to_the_31_pixels_on_a_gpu():
    pixels = np.empty((11_000, 256, 256, 3), np.uint8)  # 2.16e9
    pixels[:] = (np.arange(11_000) % 251)[:, None, None, None]
    source = ArraySource(pixels, np.arange(11_000, dtype=np.int32))
    images = ImageConfig(image_size=(2, 2))
    feed = feed_of(source, images, AugmentConfig(window="random_crop"), rows=500)
    stream = stream_of(source, images, feed, device=Device("/gpu:0", 0))
    for number in range(22):
        image, label = next(stream)
        wanted, wanted_label = expected(source, images, feed, number)
        np.testing.assert_allclose(image, wanted, atol=1e-5)
        np.testing.assert_array_equal(label, wanted_label)


def test_images_that_do_not_suit(source):
    grey = ImageConfig(image_size=(8, 6), channels=1)
    with pytest.raises(UserError, match="channels=1, but the arrays have 3; use channels=3"):
        stream_of(source, grey, feed_of(source, grey, AugmentConfig()))
    grey_pixels = source.images[..., :1]
    for targets, pixels, other, words in (
        ("image", source.images, grey_pixels, "have 1 channel; expected 3, for targets='image'"),
        ("image", grey_pixels, source.images, "have 3 channels; expected 1, for targets='image'"),
        ("mask", source.images, source.images, "have 3 channels; expected 1, for targets='mask'"),
    ):
        pairs = ArraySource(pixels, None, targets=other)
        images = ImageConfig(image_size=(8, 6), channels=pixels.shape[-1], targets=targets)
        with pytest.raises(UserError, match=words):
            stream_of(pairs, images, feed_of(pairs, images, AugmentConfig()))
    large = ImageConfig(image_size=(25, 6))
    for window in ("center_crop", "random_crop"):
        with pytest.raises(UserError, match=rf"have 24x20 pixels, less than the 25x6 .*'{window}'"):
            stream_of(source, large, feed_of(source, large, AugmentConfig(window=window)))


# decode_all

SETTINGS = {"stored_size": (20, 16), "channels": 3, "targets": "image", "num_threads": 2}
# Pillow keeps whole grey levels after each axis, in fixed point.
PILLOW = 1.01


@pytest.fixture
def files(tmp_path):
    """150 images, more than two blocks, of various sizes, as PNG and as JPEG."""
    random = np.random.default_rng(0)
    names = []
    for index in range(150):
        names.append(str(tmp_path / f"{index:03d}.{'jpg' if index % 2 else 'png'}"))
        image = random.integers(0, 256, (10 + index % 60, 70 - index % 50, 3), dtype=np.uint8)
        PIL.Image.fromarray(image).save(names[-1])
    return ImageSource(Blobs(tuple(names)), np.arange(150, dtype=np.int32), ("a", "b"))


@pytest.mark.parametrize("channels", [1, 3])
def test_decoded_images_are_stretched(files, channels, caplog):
    caplog.set_level(logging.INFO, "tfaccel")
    found = decode_all(files, **{**SETTINGS, "channels": channels})
    assert re.search(r"decoded 150 images into 0 MiB of memory in [\d.]+ s", caplog.text)
    assert (found.labels is files.labels, found.class_names) == (True, ("a", "b"))
    assert found.targets is None
    for index, name in enumerate(files.images.files):
        image = PIL.Image.open(name).convert("L" if channels == 1 else "RGB")
        pixels = np.asarray(image).reshape(*image.size[::-1], channels)
        wanted = reference.resize(pixels, (20, 16))
        np.testing.assert_allclose(found.images[index], wanted, atol=PILLOW, err_msg=name)


def test_decoded_masks_keep_their_values(files, tmp_path):
    masks = [str(tmp_path / f"mask{index}.png") for index in range(len(files))]
    for name, mask in zip(files.images.files, masks, strict=True):
        PIL.Image.open(name).convert("L").save(mask)
    pairs = ImageSource(files.images, None, targets=Blobs(tuple(masks)))
    found = decode_all(pairs, **{**SETTINGS, "targets": "mask"})
    assert found.targets.shape == (150, 20, 16, 1)
    for index, name in enumerate(files.images.files):
        pixels = np.asarray(PIL.Image.open(name).convert("L"))[..., None]
        wanted = reference.resize(pixels, (20, 16), nearest=True)
        np.testing.assert_array_equal(found.targets[index], wanted, err_msg=name)
    found = decode_all(ImageSource(files.images, None, targets=files.images), **SETTINGS)
    np.testing.assert_array_equal(found.targets, found.images)


def test_every_bad_file_is_counted(files):
    pathlib.Path(files.images.files[70]).write_text("not an image")
    pathlib.Path(files.images.files[141]).unlink()
    message = rf"2 of 150 images cannot be decoded, first {files.images.files[70]} \(not an image"
    with pytest.raises(UnreadableError, match=message) as raised:
        decode_all(files, **SETTINGS)
    assert raised.value.ids == (70, 141)


def test_a_pair_of_two_sizes_is_named(files, tmp_path):
    other = str(tmp_path / "other.png")
    PIL.Image.fromarray(np.zeros((3, 4), np.uint8)).save(other)
    targets = Blobs((*files.images.files[:-1], other))
    pairs = ImageSource(files.images, None, targets=targets)
    with pytest.raises(
        UserError,
        match=r"149.jpg has 39x21 pixels \(height x width\), but its target .*other.png has 3x4",
    ):
        decode_all(pairs, **SETTINGS)


def test_long_ones_say_how_far_they_are(files, monkeypatch):
    told = []
    monkeypatch.setattr(decode.waits, "reached", told.append)
    decode_all(files, **SETTINGS)
    assert told[-5:] == [f"{each} of 150" for each in (32, 64, 96, 128, 150)]
