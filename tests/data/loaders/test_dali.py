"""DaliStream against reference.py, on the CPU and, with -m gpu, on a GPU."""

import errno
import gc
import os
import pathlib
import re
import shutil
import time
import weakref
from unittest import mock

import numpy as np
import PIL.Image
import psutil
import pytest
import reference
import tensorflow as tf

from tfaccel.common.errors import UserError
from tfaccel.config import AugmentConfig, DaliConfig, ImageConfig
from tfaccel.config.presets import preset
from tfaccel.data.feed import Feed
from tfaccel.data.loaders import dali as dali_loader
from tfaccel.data.loaders import dali_graph
from tfaccel.data.loaders.dali import DaliStream
from tfaccel.data.loaders.dali_handoff import Handoff
from tfaccel.data.placement import Placement
from tfaccel.data.shards import Plan
from tfaccel.data.source import Blobs, ImageSource, UnreadableError
from tfaccel.data.sources.pillow import PILLOW_SUFFIXES
from tfaccel.runtime.devices import Device

CPU = Device("/cpu:0", None)
WINDOWS = ("stretch", "resized_center_crop", "center_crop", "random_crop", "random_resized_crop")
EVERY_DRAW = AugmentConfig(
    window="random_resized_crop",
    crop_area=(0.3, 1.0),
    horizontal_flip=True,
    vertical_flip=True,
    rotation_degrees=30.0,
    shift_pixels=3,
    brightness=0.4,
    contrast=0.4,
    saturation=0.4,
    hue_degrees=30.0,
)
# DALI keeps whole grey levels between its operators: each may be off by a half, and a little.
HALF_LEVEL = 0.51 / 255


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request):
    return CPU if request.param == "cpu" else Device("/gpu:0", 0)


@pytest.fixture(scope="module")
def pixels():
    """17 images of noise over coarse colours, of 20 to 90 pixels, some of them long and narrow."""
    random = np.random.default_rng(0)
    sizes = [tuple(each) for each in random.integers(24, 90, (13, 2)).tolist()]
    images = []
    for height, width in [*sizes, (20, 90), (90, 20), (20, 20), (21, 25)]:
        coarse = random.integers(0, 256, (3, 3, 3), dtype=np.uint8)
        smooth = PIL.Image.fromarray(coarse).resize((width, height), PIL.Image.Resampling.BICUBIC)
        noise = random.integers(-40, 41, (height, width, 3))
        images.append(np.clip(np.asarray(smooth) + noise, 0, 255).astype(np.uint8))
    return images


@pytest.fixture(scope="module")
def source(pixels, tmp_path_factory):
    """Them as PNG files."""
    return files_of(pixels, tmp_path_factory.mktemp("png"))


def files_of(pixels, root, suffix="png", **settings):
    names = []
    for index, image in enumerate(pixels):
        names.append(str(root / f"{index:02d}.{suffix}"))
        PIL.Image.fromarray(image).save(names[-1], **settings)
    return ImageSource(Blobs(tuple(names)), np.arange(len(pixels), dtype=np.int32) % 3)


def pairs_of(inputs, targets, root):
    folders = [root / "inputs", root / "targets"]
    for folder in folders:
        folder.mkdir()
    images, targets = (
        files_of(each, to).images for each, to in zip((inputs, targets), folders, strict=True)
    )
    return ImageSource(images, None, targets=targets)


def as_ranges(blobs, path):
    """The same bytes in one file, with others between them."""
    data = [pathlib.Path(file).read_bytes() for file in blobs.files]
    path.write_bytes(b"".join(b"between" + each for each in data))
    sizes = np.array([len(each) for each in data])
    offsets = np.cumsum(sizes + 7) - sizes
    return Blobs((str(path),), np.zeros(len(data), np.int32), offsets, sizes)


def feed_of(source, augment, images, *, rows=17, shuffle=False, **settings):
    plan = Plan(len(source), rows, num_replicas=1, seed=3, shuffle=shuffle)
    return Feed(plan, augment, images.image_size, replica_index=0, **settings)


def stream_of(source, images, feed, *, device=CPU, decode_on_gpu=None, **settings):
    settings = {"dtype": "float32", "dali": DaliConfig(), **settings}
    on_gpu = device is not CPU if decode_on_gpu is None else decode_on_gpu
    placement = Placement(device, num_threads=2, seed=0)
    return DaliStream(
        source, images, feed=feed, placement=placement, decode_on_gpu=on_gpu, **settings
    )


def first_batch(source, augment, images, **settings):
    stream = stream_of(source, images, feed_of(source, augment, images), **settings)
    return tuple(each.numpy() for each in next(stream))


def expected(pixels, images, augment, targets=None):
    """What the reference makes of the first batch of all images, in their order."""
    feed = Feed(Plan(len(pixels), len(pixels), 1, seed=3), augment, images.image_size, 0)
    draws = feed.draws(0)
    rows = [
        reference.example(
            each,
            images,
            augment,
            {kind: values[row] for kind, values in draws.items()},
            None if targets is None else targets[row],
            repeat_border=True,
        )
        for row, each in enumerate(pixels)
    ]
    return (
        np.stack(rows)
        if targets is None
        else tuple(np.stack(each) for each in zip(*rows, strict=True))
    )


@pytest.mark.parametrize("window", WINDOWS)
def test_windows(pixels, source, device, window):
    augment, images = AugmentConfig(window=window), ImageConfig(image_size=(20, 16))
    image, label = first_batch(source, augment, images, device=device)
    np.testing.assert_allclose(image, expected(pixels, images, augment), atol=HALF_LEVEL)
    np.testing.assert_array_equal(label, np.arange(17) % 3)


def test_a_random_window_that_never_fits_is_the_centre(pixels, source):
    augment = AugmentConfig(
        window="random_resized_crop", crop_area=(0.9, 1.0), crop_ratio=(1.7, 1.9)
    )
    images = ImageConfig(image_size=(20, 16))
    image, _ = first_batch(source, augment, images)
    np.testing.assert_allclose(image, expected(pixels, images, augment), atol=HALF_LEVEL)


def test_images_are_made_larger(pixels, source, device):
    images = ImageConfig(image_size=(100, 120))
    image, _ = first_batch(source, AugmentConfig(), images, device=device)
    np.testing.assert_allclose(image, expected(pixels, images, AugmentConfig()), atol=HALF_LEVEL)


# What follows cuts a fixed window without resizing, to see one operation alone.
CROP = {"window": "center_crop"}


@pytest.mark.parametrize(
    "changes",
    [
        {"horizontal_flip": True},
        {"vertical_flip": True},
        {"horizontal_flip": True, "vertical_flip": True},
        {"rotation_degrees": 40.0},
        {"shift_pixels": 5, "horizontal_flip": True, "vertical_flip": True},
        {"rotation_degrees": 10.0, "shift_pixels": 5, "horizontal_flip": True},
        {"brightness": 0.5},
        {"contrast": 0.5},
        {"saturation": 0.9},
        {"hue_degrees": 60.0},
        {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue_degrees": 20.0},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_one_operation(pixels, source, device, changes):
    augment, images = AugmentConfig(**CROP, **changes), ImageConfig(image_size=(20, 18))
    image, _ = first_batch(source, augment, images, device=device)
    np.testing.assert_allclose(image, expected(pixels, images, augment), atol=HALF_LEVEL)


def test_grey_images_vary_in_brightness_and_contrast(pixels, tmp_path, device):
    grey = [each[..., 0] for each in pixels]
    augment = AugmentConfig(**CROP, brightness=0.4, contrast=0.4, rotation_degrees=10.0)
    images = ImageConfig(image_size=(20, 18), channels=1)
    image, _ = first_batch(files_of(grey, tmp_path), augment, images, device=device)
    wanted = expected([each[..., None] for each in grey], images, augment)
    # A half level of the warp, times 1.4 * 1.4, and another.
    np.testing.assert_allclose(image, wanted, atol=3 * HALF_LEVEL)


def test_everything_at_once(pixels, source, device):
    images = ImageConfig(image_size=(20, 16))
    image, _ = first_batch(source, EVERY_DRAW, images, device=device)
    # Half a level of resizing and of warping, times some 1.4 * 1.4 * 2, and another.
    difference = np.abs(image - expected(pixels, images, EVERY_DRAW))
    assert difference.max() < 4 / 255
    assert difference.mean() < 0.7 / 255


def test_mean_and_std(pixels, source, device):
    images = ImageConfig(image_size=(20, 16), mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.5))
    image, _ = first_batch(source, AugmentConfig(), images, device=device)
    wanted = expected(pixels, images, AugmentConfig())
    np.testing.assert_allclose(image, wanted, atol=HALF_LEVEL / 0.2)


def test_float16_is_float32_rounded(source, device):
    images = ImageConfig(image_size=(20, 16), mean=0.5, std=0.3)
    half, single = (
        first_batch(source, EVERY_DRAW, images, device=device, dtype=dtype)[0]
        for dtype in ("float16", "float32")
    )
    assert half.dtype == np.float16
    # The GPU's kernel computes in float16 too: one unit in the last place of its largest term,
    # 1 / 0.3, a tenth of a grey level (seen on an H200: 0.0014).
    limit = 2**-9 if device.cuda_ordinal is not None else 2**-12
    np.testing.assert_allclose(half.astype(np.float32), single, rtol=2**-10, atol=limit)


@pytest.mark.parametrize("window", ["stretch", "random_resized_crop"])
def test_jpegs_as_pillow_decodes_them_and_not_turned(pixels, tmp_path, device, window):
    turned = PIL.Image.Exif()
    turned[0x0112] = 6  # what cameras say of a portrait
    # Smooth, or decoders differ by much in what JPEG left of the noise.
    smooth = [
        np.asarray(PIL.Image.fromarray(each).resize((80, 60)).resize((9, 9))) for each in pixels
    ]
    smooth = [
        np.asarray(PIL.Image.fromarray(each).resize((60 + index, 50), PIL.Image.Resampling.BICUBIC))
        for index, each in enumerate(smooth)
    ]
    source = files_of(smooth, tmp_path, "jpg", quality=90, exif=turned)
    decoded = [np.asarray(PIL.Image.open(file)) for file in source.images.files]
    augment, images = AugmentConfig(window=window), ImageConfig(image_size=(20, 16))
    image, _ = first_batch(source, augment, images, device=device)
    difference = np.abs(image - expected(decoded, images, augment))
    if device is CPU:
        assert difference.max() < HALF_LEVEL
    else:  # another decoder
        assert difference.mean() < 1.5 / 255
        assert difference.max() < 10 / 255


@pytest.mark.parametrize("window", ["stretch", "center_crop"])
def test_colours_that_jpeg_stores_for_four_pixels_are_interpolated(tmp_path, device, window, capfd):
    rng = np.random.default_rng(0)
    colours = rng.integers(64, 192, size=(17, 64, 80, 3))
    grey = colours.mean(axis=-1, keepdims=True)  # alike everywhere: colours alone differ
    source = files_of(list((colours - grey + 128).astype(np.uint8)), tmp_path, "jpg", quality=95)
    decoded = [np.asarray(PIL.Image.open(file)) for file in source.images.files]
    images = ImageConfig(image_size=(64, 80))
    augment = AugmentConfig(window=window)
    image, _ = first_batch(source, augment, images, device=device)
    difference = np.abs(image - expected(decoded, images, augment))
    repeated = [each[::2, ::2].repeat(2, axis=0).repeat(2, axis=1) for each in decoded]
    assert np.abs(np.stack(repeated) - np.stack(decoded, dtype=np.int32)).mean() > 5  # or no test
    assert difference.mean() < (HALF_LEVEL if device is CPU else 1 / 255)
    assert "fancy" not in capfd.readouterr().err  # or the CPU decoded


@pytest.mark.parametrize(
    ("window", "on", "interpolates"),
    [
        ("resized_center_crop", "mixed", True),
        ("center_crop", "mixed", True),
        ("random_resized_crop", "mixed", False),
        ("random_crop", "mixed", False),
        ("center_crop", "cpu", False),  # which always does
    ],
)
def test_a_part_of_an_image_is_never_asked_to_be_interpolated(
    monkeypatch, window, on, interpolates
):
    operators = mock.MagicMock()
    monkeypatch.setattr(dali_graph, "fn", operators)
    inputs = dict.fromkeys(("image", "label", "corner", "size"))
    settings = {"decode": {"device": on}, "dtype": "float32"}
    dali_graph.batch(inputs, ImageConfig(), AugmentConfig(window=window), **settings)
    decoders = operators.decoders
    asked = decoders.image if interpolates else decoders.image_slice
    asked.assert_called_once()
    assert asked.call_args.kwargs.get("jpeg_fancy_upsampling", False) == interpolates
    assert operators.slice.called == interpolates


def test_grey_and_transparent_files_among_colour_ones(pixels, tmp_path, device):
    files = files_of(pixels[:4], tmp_path).images.files
    modes = ("L", "RGBA", "1", "P")
    for file, mode in zip(files, modes, strict=True):
        PIL.Image.open(file).convert(mode).save(file)
    decoded = [np.asarray(PIL.Image.open(file).convert("RGB")) for file in files]
    source, images = ImageSource(Blobs(files), np.zeros(4, np.int32)), ImageConfig((20, 16))
    image, _ = first_batch(source, AugmentConfig(), images, device=device)
    np.testing.assert_allclose(image, expected(decoded, images, AugmentConfig()), atol=HALF_LEVEL)


def test_every_format_is_cut_by_its_header(pixels, tmp_path, device):
    smooth = [PIL.Image.fromarray(each).resize((5, 4)).resize((50, 40)) for each in pixels]
    files = [str(tmp_path / f"{index}{each}") for index, each in enumerate(PILLOW_SUFFIXES)]
    for image, file in zip(smooth, files, strict=False):
        image.save(file)
    decoded = [np.asarray(PIL.Image.open(file)) for file in files]
    source = ImageSource(Blobs(tuple(files)), np.zeros(len(files), np.int32))
    augment = AugmentConfig(window="random_resized_crop")
    images = ImageConfig(image_size=(20, 16))
    image, _ = first_batch(source, augment, images, device=device)
    tolerance = HALF_LEVEL if device is CPU else 10 / 255  # another decoder of JPEG
    np.testing.assert_allclose(image, expected(decoded, images, augment), atol=tolerance)


def batches(stream, number):
    return [tuple(each.numpy() for each in next(stream)) for _ in range(number)]


def test_pairs_stay_aligned_over_three_epochs(pixels, tmp_path, device):
    source = pairs_of(pixels, pixels, tmp_path)
    plain = {"brightness": 0.0, "contrast": 0.0, "saturation": 0.0, "hue_degrees": 0.0}
    augment = AugmentConfig(**{**vars(EVERY_DRAW), **plain})
    images = ImageConfig(image_size=(20, 16), mean=0.5, std=0.5)
    feed = feed_of(source, augment, images, rows=5, shuffle=True)
    for image, target in batches(stream_of(source, images, feed, device=device), 3 * 4):
        assert image.std() > 0.1
        np.testing.assert_array_equal(image, target)


def test_targets_share_all_draws_but_colour(pixels, tmp_path, device):
    source = pairs_of(pixels, pixels[:8] + pixels[8:], tmp_path)
    images = ImageConfig(image_size=(20, 16))
    _, target = first_batch(source, EVERY_DRAW, images, device=device)
    _, wanted = expected(pixels, images, EVERY_DRAW, targets=pixels)
    np.testing.assert_allclose(target, wanted, atol=2 * HALF_LEVEL)


@pytest.mark.parametrize("window", WINDOWS)
def test_masks_are_the_nearest_pixels(pixels, tmp_path, device, window):
    masks = [np.arange(each[..., 0].size).reshape(each.shape[:2]) % 251 for each in pixels]
    masks = [each.astype(np.uint8) for each in masks]
    source = pairs_of(pixels, masks, tmp_path)
    of_window = {} if window == "random_resized_crop" else {"crop_area": AugmentConfig.crop_area}
    augment = AugmentConfig(**{**vars(EVERY_DRAW), **of_window, "window": window})
    images = ImageConfig(image_size=(20, 16), targets="mask", ignore_class=255)
    image, mask = first_batch(source, augment, images, device=device)
    assert image.shape == (17, 20, 16, 3)
    assert mask.shape == (17, 20, 16, 1)
    assert mask.dtype == np.uint8
    wanted = expected(pixels, images, augment, targets=[each[..., None] for each in masks])[1]
    # In float32, a point just between two pixels falls to either.
    assert (mask != wanted).mean() < 1e-2


def test_masks_are_mirrored_as_images_are(pixels, tmp_path, device):
    masks = [each[..., 0] for each in pixels]
    source = pairs_of(masks, masks, tmp_path)
    augment = AugmentConfig(window="random_crop", horizontal_flip=True, vertical_flip=True)
    images = ImageConfig(image_size=(20, 16), channels=1, targets="mask")
    feed = feed_of(source, augment, images, rows=5, shuffle=True)
    for image, mask in batches(stream_of(source, images, feed, device=device), 3 * 4):
        np.testing.assert_allclose(image, mask / np.float32(255), atol=1e-6)


@pytest.mark.parametrize("of_pairs", [False, True])
def test_ranges_of_bytes_give_what_files_give(source, tmp_path, device, of_pairs):
    ranges = ImageSource(as_ranges(source.images, tmp_path / "all"), source.labels)
    if of_pairs:
        source = ImageSource(source.images, None, targets=source.images)
        ranges = ImageSource(ranges.images, None, targets=ranges.images)
    images = ImageConfig(image_size=(20, 16))
    feed = feed_of(source, EVERY_DRAW, images, rows=5, shuffle=True)
    one, other = (
        batches(stream_of(each, images, feed, device=device), 9) for each in (source, ranges)
    )
    for batch, same in zip(one, other, strict=True):
        for value, wanted in zip(batch, same, strict=True):
            np.testing.assert_array_equal(value, wanted)


def test_every_batch_has_the_same_rows(folder, device):
    files = tuple(sorted(str(each) for each in folder.glob("*/*")))
    source = ImageSource(Blobs(files), np.arange(37, dtype=np.int32))
    settings = ImageConfig(image_size=(12, 10), channels=1)
    feed = feed_of(source, AugmentConfig(), settings, rows=8, shuffle=True)
    stream = stream_of(source, settings, feed, device=device)
    for number in range(11):  # two epochs of five: the last has 37 - 4 * 8 of its own
        image, label = next(stream)
        assert image.shape == (8, 12, 10, 1)
        assert label.shape == (8,)
        np.testing.assert_array_equal(label, feed.rows(number).ids)
    assert image.dtype == tf.float32
    assert label.dtype == tf.int64


def test_batches_of_the_cpu_are_copied_to_the_replica(source):
    # A second CPU device stands for the GPU.
    images, other = ImageConfig(image_size=(20, 16)), Device("/cpu:1", 0)
    feed = feed_of(source, EVERY_DRAW, images, rows=5, shuffle=True)
    copied = stream_of(source, images, feed, device=other, decode_on_gpu=False)
    for same in batches(stream_of(source, images, feed), 9):
        image, label = next(copied)
        assert image.device.endswith("CPU:1")
        assert label.device.endswith("CPU:1")
        np.testing.assert_array_equal(image, same[0])
        np.testing.assert_array_equal(label, same[1])


@pytest.mark.parametrize("decode_on_gpu", [True, False])
@pytest.mark.gpu
def test_batches_are_on_the_gpu(source, decode_on_gpu):
    images, gpu = ImageConfig(image_size=(20, 16)), Device("/gpu:0", 0)
    feed = feed_of(source, EVERY_DRAW, images, rows=5, shuffle=True)
    stream = stream_of(source, images, feed, device=gpu, decode_on_gpu=decode_on_gpu)
    reference = stream_of(source, images, feed)
    for _ in range(9):
        image, label = next(stream)
        assert image.device.endswith("GPU:0")
        wanted, label_wanted = next(reference)
        np.testing.assert_allclose(image, wanted, atol=4 / 255)
        np.testing.assert_array_equal(label, label_wanted)


def test_a_stream_that_starts_in_the_middle_goes_on_alike(source, device):
    images = ImageConfig(image_size=(20, 16))
    whole, late = (
        stream_of(
            source,
            images,
            feed_of(source, EVERY_DRAW, images, rows=5, shuffle=True, first=first),
            device=device,
        )
        for first in (0, 6)
    )
    for one, other in zip(batches(whole, 10)[6:], batches(late, 4), strict=True):
        for value, wanted in zip(one, other, strict=True):
            np.testing.assert_array_equal(value, wanted)


def test_two_replicas_make_the_batch_of_one(source, device):
    images = ImageConfig(image_size=(20, 16))
    one, *two = (
        stream_of(
            source,
            images,
            Feed(Plan(17, 6, replicas, 3, True), EVERY_DRAW, images.image_size, index),
            device=device,
        )
        for replicas, index in ((1, 0), (2, 0), (2, 1))
    )
    for _ in range(2):
        whole, parts = next(one), zip(*(next(each) for each in two), strict=True)
        for wanted, part in zip(whole, parts, strict=True):
            np.testing.assert_array_equal(tf.concat(part, 0), wanted)


@pytest.fixture
def built(monkeypatch):
    """The pipelines that streams are made of from now on."""
    built = []

    def noted(pipeline, *args, **settings):
        built.append(pipeline)
        return Handoff(pipeline, *args, **settings)

    monkeypatch.setattr(dali_loader, "Handoff", noted)
    return built


DECODED_AND_FINISHED = ["decoders__ImageSlice", "Resize", "CropMirrorNormalize"]


@pytest.mark.parametrize(
    ("augment", "of_pairs", "expected"),
    [
        (preset("imagenet"), False, DECODED_AND_FINISHED),
        (preset("imagenet_color"), False, [*DECODED_AND_FINISHED, "ColorTwist"]),
        (preset("imagenet"), True, 2 * DECODED_AND_FINISHED),
        (AugmentConfig(), False, ["decoders__Image", *DECODED_AND_FINISHED[1:]]),
    ],
)
def test_no_operator_reckons(source, built, augment, of_pairs, expected):
    # Each costs 0.2 to 0.5 ms a batch, however small: a hundred once made a window.
    if of_pairs:
        source = ImageSource(source.images, None, targets=source.images)
    first_batch(source, augment, ImageConfig(image_size=(20, 16)))
    names = [getattr(each._op, "schema_name", None) for each in built[0]._ops]  # inputs have none
    assert sorted(each for each in names if each) == sorted(expected)


def test_settings_reach_the_pipeline(source, device, built):
    dali = DaliConfig(
        prefetch_batches=3,
        hw_decoder_load=0.5,
        device_memory_padding=2**20,
        host_memory_padding=2**20,
        preallocate_width_hint=100,
        preallocate_height_hint=100,
        bytes_per_sample_hint=100 * 100 * 3,
    )
    image, _ = first_batch(
        source, AugmentConfig(), ImageConfig(image_size=(20, 16)), device=device, dali=dali
    )
    assert np.isfinite(image).all()
    assert built[0].prefetch_queue_depth == 3
    assert built[0].num_threads == 2
    assert built[0].max_batch_size == 17


ROOM = {
    "device_memory_padding": 2**25,
    "host_memory_padding": 2**25,
    "preallocate_width_hint": 2400,
    "preallocate_height_hint": 1632,
}


@pytest.mark.parametrize(
    ("given", "expected"), [(DaliConfig(), ROOM), (DaliConfig(**dict.fromkeys(ROOM)), {})]
)
def test_the_decoder_has_room_for_a_large_image_at_the_start(given, expected):
    # Else a rare one makes a thread or the hardware take memory, and all GPUs wait for that one.
    arguments = dali_loader._decoder(given, Device("/gpu:0", 0))
    assert {name: each for name, each in arguments.items() if name in ROOM} == expected


@pytest.fixture
def copy(source, tmp_path):
    """The images again, to be spoiled."""
    files = [shutil.copy(file, tmp_path) for file in source.images.files]
    return ImageSource(Blobs(tuple(files)), source.labels)


def spoiled(kind, file):
    data = file.read_bytes()
    if kind == "missing":
        file.unlink()
    else:
        cut = {"truncated": len(data) // 2, "header": 20, "empty": 0}
        file.write_bytes(b"text" if kind == "text" else data[: cut[kind]])


def read_all(source, device, window="stretch"):
    augment, images = AugmentConfig(window=window), ImageConfig(image_size=(20, 16))
    return batches(
        stream_of(source, images, feed_of(source, augment, images, rows=5), device=device), 4
    )


@pytest.mark.parametrize("window", ["stretch", "random_resized_crop"])  # without and by sizes
@pytest.mark.parametrize("kind", ["truncated", "header", "empty", "text", "missing"])
@pytest.mark.parametrize("index", [1, 16])  # in the first batch, and in the last
def test_a_bad_file_is_named(copy, device, kind, index, window):
    spoiled(kind, pathlib.Path(copy.images.files[index]))
    with pytest.raises(UnreadableError) as caught:
        read_all(copy, device, window)
    assert caught.value.ids == (index,)
    assert re.match(rf"1 of .* first {copy.images.files[index]} \(", str(caught.value))


def test_a_bad_file_is_named_where_batches_are_copied(copy):
    spoiled("truncated", pathlib.Path(copy.images.files[16]))
    images = ImageConfig(image_size=(20, 16))
    feed = feed_of(copy, AugmentConfig(), images, rows=2)
    stream = stream_of(copy, images, feed, device=Device("/cpu:1", 0), decode_on_gpu=False)
    with pytest.raises(UnreadableError) as caught:
        batches(stream, 9)
    assert caught.value.ids == (16,)


@pytest.mark.parametrize("num_written", [0, 20])
def test_a_full_tmpdir_is_said_at_once_and_on_the_way(source, tmp_path, monkeypatch, num_written):
    source = ImageSource(as_ranges(source.images, tmp_path / "all"), source.labels)
    images, left = ImageConfig(image_size=(20, 16)), [num_written]
    write_bytes = pathlib.Path.write_bytes

    def full(path, data):
        if left[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= 1
        return write_bytes(path, data)

    monkeypatch.setattr(pathlib.Path, "write_bytes", full)
    with pytest.raises(UserError, match=r"^DALI reads .* \(No space left on device\); set TMPDIR"):
        batches(stream_of(source, images, feed_of(source, AugmentConfig(), images, rows=2)), 40)


def test_several_bad_files_are_told_at_once(copy, device):
    for index in (6, 8):
        spoiled("truncated", pathlib.Path(copy.images.files[index]))
    with pytest.raises(UnreadableError, match=r"^2 of .* first .*06\.png") as caught:
        read_all(copy, device)
    assert caught.value.ids == (6, 8)


def test_a_bad_range_of_bytes_is_named(copy, tmp_path, device):
    ranges = as_ranges(copy.images, tmp_path / "all")
    (tmp_path / "all").write_bytes((tmp_path / "all").read_bytes()[:-100])
    with pytest.raises(UnreadableError, match=r"all\[bytes \d+\+\d+\]") as caught:
        read_all(ImageSource(ranges, copy.labels), device)
    assert caught.value.ids == (16,)


@pytest.mark.parametrize("window", ["stretch", "random_resized_crop"])
def test_what_only_dali_cannot_decode_is_named(copy, device, window):
    PIL.Image.open(copy.images.files[9]).save(copy.images.files[9], "GIF")
    with pytest.raises(UnreadableError, match=r"DALI cannot decode 1 of .*/09\.png \(nv") as caught:
        read_all(copy, device, window)
    assert caught.value.ids == (9,)


@pytest.mark.parametrize("kind", ["truncated", "text"])
def test_a_bad_target_is_named(copy, source, device, kind):
    spoiled(kind, pathlib.Path(copy.images.files[9]))
    pairs = ImageSource(source.images, None, targets=copy.images)
    with pytest.raises(UnreadableError, match=copy.images.files[9]) as caught:
        read_all(pairs, device)
    assert caught.value.ids == (9,)


@pytest.mark.parametrize(
    ("window", "grown"), [*((each, (0, 1)) for each in WINDOWS), ("stretch", (-1, 0))]
)
def test_a_pair_of_two_sizes_is_refused(pixels, tmp_path, device, window, grown):
    height, width = pixels[9].shape[0] + grown[0], pixels[9].shape[1] + grown[1]
    other = np.zeros((height, width, 3), np.uint8)
    source = pairs_of(pixels, [*pixels[:9], other, *pixels[10:]], tmp_path)
    names = rf"inputs/09.png has \d+x\d+ pixels .*but its .*targets/09.png has {height}x{width}"
    with pytest.raises(UserError, match=names):
        read_all(source, device, window)


@pytest.mark.parametrize("window", ["center_crop", "random_crop"])
@pytest.mark.parametrize("size", [(19, 30), (30, 15)])
def test_an_image_smaller_than_its_crop_is_refused(copy, device, window, size):
    file = copy.images.files[9]
    PIL.Image.new("RGB", size[::-1]).save(file)
    wanted = rf"{file} has {size[0]}x{size[1]} pixels .* less than the 20x16 pixels that window="
    with pytest.raises(UserError, match=wanted):
        read_all(copy, device, window)


@pytest.mark.parametrize("of_ranges", [False, True])
def test_a_stream_that_is_dropped_leaves_nothing(
    source, tmp_path, device, of_ranges, quick_collector
):
    if of_ranges:
        source = ImageSource(as_ranges(source.images, tmp_path / "all"), source.labels)
    images = ImageConfig(image_size=(20, 16))
    threads = None
    for _ in range(3):
        stream = stream_of(source, images, feed_of(source, EVERY_DRAW, images), device=device)
        next(stream)
        dropped = [weakref.ref(stream), weakref.ref(stream._batches._batches)]
        del stream
        gc.collect()
        ends = time.monotonic() + 60  # its threads end it
        while any(each() for each in dropped) and time.monotonic() < ends:
            time.sleep(0.01)
        assert [each() for each in dropped] == [None] * len(dropped)
        threads = threads or psutil.Process().num_threads()
    # Fewer, where those of an earlier test end meanwhile; a pool's threads end after it.
    ends = time.monotonic() + 60
    while psutil.Process().num_threads() > threads and time.monotonic() < ends:
        time.sleep(0.01)
    assert psutil.Process().num_threads() <= threads
