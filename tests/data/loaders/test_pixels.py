import dataclasses

import numpy as np
import pytest
import reference
import tensorflow as tf

from tfaccel.config import AugmentConfig, ImageConfig
from tfaccel.config.presets import preset
from tfaccel.data.draws import draw
from tfaccel.data.loaders import pixels
from tfaccel.data.loaders.windows import nearest_index

# In grey levels of 255. Float32, but for what is between the two axes of a resize: float16.
CLOSE = 0.07
# Plain bilinear shrinking to more than half, against the antialiased reference, in smooth images.
SMOOTH = 3.0

IMAGES = ImageConfig(image_size=(8, 6), mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))


def some_pixels(height, width, channels=3, rows=4, *, smooth=False):
    random = np.random.default_rng(0)
    if not smooth:
        return random.integers(0, 256, (rows, height, width, channels), dtype=np.uint8)
    y, x, phase = np.arange(height)[:, None, None], np.arange(width)[:, None], random.random((3,))
    waves = [np.sin(y / 20 + x / 15 + row + 6 * phase[:channels]) for row in range(rows)]
    return (127 + 120 * np.array(waves)).astype(np.uint8)


def drawn(augment, images, rows=4):
    where = {"seed": 1, "epoch": 0, "step": 0, "positions": np.arange(rows)}
    return draw(augment, image_size=images.image_size, **where)


def both(source, augment, images, draws=None, *, target=None):
    """What pixels.examples gives, and what the reference gives, without mean and std."""
    draws = drawn(augment, images, len(source)) if draws is None else draws
    labels = np.arange(len(source), dtype=np.int64)
    found = pixels.examples(
        tf.constant(source),
        tf.constant(labels if target is None else target),
        {kind: tf.constant(each) for kind, each in draws.items()},
        images=images,
        augment=augment,
        dtype="float32",
    )
    expected = [
        reference.example(
            source[row],
            images,
            augment,
            {kind: each[row] for kind, each in draws.items()},
            None if target is None else target[row],
        )
        for row in range(len(source))
    ]
    if target is None:
        np.testing.assert_array_equal(found[1], labels)
        return levels(found[0], images), levels(np.array(expected), images)
    return [
        (levels(each, images), levels(np.array(wanted), images)) if each.dtype.is_floating
        else (each.numpy(), np.array(wanted))
        for each, wanted in zip(found, zip(*expected, strict=True), strict=True)
    ]  # fmt: skip


def levels(image, images):
    return (np.array(image) * images.std + images.mean) * 255


@pytest.mark.parametrize(
    ("size", "augment"),
    [
        ((8, 6), AugmentConfig()),
        pytest.param((20, 30), AugmentConfig(), marks=pytest.mark.slow),  # shrunk, to another shape
        ((5, 4), AugmentConfig()),  # enlarged
        ((5, 30), AugmentConfig()),
        ((20, 11), preset("imagenet_eval")),
        pytest.param(
            (9, 21),
            AugmentConfig(window="resized_center_crop", center_fraction=1.0),
            marks=pytest.mark.slow,
        ),
        ((9, 7), AugmentConfig(window="center_crop")),
        ((20, 11), AugmentConfig(window="random_crop")),
        ((8, 6), AugmentConfig(window="random_crop")),
        ((7, 5), AugmentConfig(window="random_resized_crop")),  # enlarged only
        ((40, 31), AugmentConfig(window="random_resized_crop", crop_area=(0.01, 1.0))),  # averaged
        ((200, 9), AugmentConfig(window="random_resized_crop", crop_area=(0.8, 1.0))),  # none fits
        pytest.param(
            (9, 200),
            AugmentConfig(window="random_resized_crop", crop_area=(0.8, 1.0)),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_windows(size, augment):
    found, expected = both(some_pixels(*size), augment, IMAGES)
    if augment.window == "random_resized_crop" and min(size[0] / 8, size[1] / 6) < 2:
        found, expected = both(some_pixels(*size, smooth=True), augment, IMAGES)
        np.testing.assert_allclose(found, expected, atol=SMOOTH)
    else:
        np.testing.assert_allclose(found, expected, atol=CLOSE)


def test_plain_bilinear_windows_are_those_of_tensorflow():
    augment, source = AugmentConfig(window="random_resized_crop"), some_pixels(15, 11)
    draws = drawn(augment, IMAGES)
    found, _ = both(source, augment, IMAGES, draws)
    for row in range(len(source)):
        top, left, height, width = reference.window(
            (15, 11), IMAGES.image_size, augment, {"window": draws["window"][row]}
        )
        crop = source[row, top : top + height, left : left + width]
        np.testing.assert_allclose(
            found[row], tf.image.resize(crop, IMAGES.image_size), atol=CLOSE, err_msg=row
        )


def test_random_windows_are_the_references_to_the_pixel():
    augment, images = AugmentConfig(window="random_resized_crop"), ImageConfig(image_size=(1, 1))
    draws = drawn(augment, images, rows=200)["window"]
    for size in ((375, 500), (31, 17), (3, 400)):
        found = np.hstack(pixels.window(size, (1, 1), augment, tf.constant(draws)))
        expected = [reference.window(size, (1, 1), augment, {"window": each}) for each in draws]
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("channels", "augment"),
    [
        (1, preset("mnist")),
        (3, AugmentConfig(rotation_degrees=180.0, shift_pixels=3, horizontal_flip=True)),
        (3, AugmentConfig(shift_pixels=2, vertical_flip=True)),
        (3, AugmentConfig(horizontal_flip=True, vertical_flip=True)),
    ],
)
def test_warps_and_mirrors(augment, channels):
    images = ImageConfig(image_size=(8, 6), channels=channels)
    found, expected = both(some_pixels(8, 6, channels, rows=8), augment, images)
    np.testing.assert_allclose(found, expected, atol=CLOSE)


@pytest.mark.parametrize(
    ("channels", "changes"),
    [
        (1, {"brightness": 0.9, "contrast": 0.9}),
        (3, {"brightness": 0.9}),
        (3, {"contrast": 0.9}),
        (3, {"saturation": 1.0}),
        (3, {"hue_degrees": 180.0}),
        (3, {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue_degrees": 40.0}),
    ],
)
def test_colors(channels, changes):
    images = ImageConfig(image_size=(8, 6), channels=channels)
    found, expected = both(some_pixels(8, 6, channels, rows=8), AugmentConfig(**changes), images)
    np.testing.assert_allclose(found, expected, atol=CLOSE)


EVERYTHING = preset(
    "imagenet_color", vertical_flip=True, rotation_degrees=30.0, shift_pixels=2, hue_degrees=20.0
)
ENLARGED = {"crop_area": (0.01, 0.1)}  # exactly bilinear


@pytest.mark.parametrize(
    ("targets", "augment"),
    [
        ("image", dataclasses.replace(EVERYTHING, **ENLARGED)),
        ("mask", dataclasses.replace(EVERYTHING, **ENLARGED)),
        ("image", preset("restoration")),
        ("mask", preset("imagenet", **ENLARGED)),
        pytest.param("mask", preset("restoration"), marks=pytest.mark.slow),
        pytest.param("image", preset("imagenet", **ENLARGED), marks=pytest.mark.slow),
    ],
)
def test_pairs_share_all_draws_but_color(targets, augment):
    ignored = {"ignore_class": 255} if targets == "mask" else {}
    images = dataclasses.replace(IMAGES, targets=targets, **ignored)
    source = some_pixels(20, 16)
    target = some_pixels(20, 16, 1 if targets == "mask" else 3) // 2
    for found, expected in both(source, augment, images, target=target):
        assert found.dtype == (np.uint8 if found.shape[-1] == 1 else np.float64)
        np.testing.assert_allclose(found, expected, atol=CLOSE)


@pytest.mark.parametrize("size", [(3, 5), (20, 31), (28, 28), (640, 481)])
def test_nearest_index(size):
    for new in (1, 7, 28):
        for length in size:
            expected = ((np.arange(new) + 0.5) * length / new).astype(int)
            np.testing.assert_array_equal(nearest_index(length, new), expected)


@pytest.mark.parametrize("device", ["/cpu:0", pytest.param("/gpu:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("float16", marks=pytest.mark.slow)])
def test_xla_gives_the_same(device, dtype):
    source = some_pixels(40, 32)
    draws = {kind: tf.constant(each) for kind, each in drawn(EVERYTHING, IMAGES).items()}
    labels = tf.zeros([4], tf.int64)

    def run(dtype):
        settings = {"images": IMAGES, "augment": EVERYTHING, "dtype": dtype}
        return pixels.examples(tf.constant(source), labels, draws, **settings)[0]

    expected, _ = both(source, EVERYTHING, IMAGES)
    with tf.device(device):
        found = tf.function(run, jit_compile=True, autograph=False)(dtype)
    assert found.dtype == dtype
    assert f"device:{device[1:].upper()}" in found.device
    tolerance = CLOSE if dtype == "float32" else 0.3
    np.testing.assert_allclose(levels(found, IMAGES), expected, atol=tolerance)
