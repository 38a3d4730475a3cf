import numpy as np
import pytest
import reference
import tensorflow as tf

from tfaccel.config import AugmentConfig
from tfaccel.data.draws import draw
from tfaccel.data.loaders import pixels
from tfaccel.data.loaders.windows import windows

# Of the shorter sides 332 and 260, 224 pixels' window is cut at a tie: 290.5 and 227.5.
SIZES = np.array(
    [(375, 500), (332, 500), (500, 260), (300, 300), (31, 17), (3, 400), (400, 3), (20, 16)]
)
RANDOM = {"window": "random_resized_crop"}


def drawn(augment, image_size, rows):
    where = {"seed": 1, "epoch": 0, "step": 0, "positions": np.arange(rows)}
    return draw(augment, image_size=image_size, **where).get("window")


@pytest.mark.parametrize(
    ("image_size", "augment"),
    [
        ((20, 16), AugmentConfig()),
        ((224, 224), AugmentConfig(window="resized_center_crop")),
        ((299, 331), AugmentConfig(window="resized_center_crop", center_fraction=0.9)),
        ((3, 2), AugmentConfig(window="center_crop")),
        ((3, 2), AugmentConfig(window="random_crop")),
        ((20, 16), AugmentConfig(**RANDOM)),
        ((20, 16), AugmentConfig(**RANDOM, crop_area=(0.01, 1.0), crop_ratio=(0.8, 1.25))),
        ((20, 16), AugmentConfig(**RANDOM, crop_area=(0.9, 1.0), crop_ratio=(1.7, 1.9))),  # never
    ],
)
def test_windows_are_the_references_to_the_pixel(image_size, augment):
    sizes = np.repeat(SIZES, 50, axis=0).astype(np.int32)
    draws = drawn(augment, image_size, len(sizes))
    corners, extents = windows(sizes, image_size, augment, draws)
    for row, size in enumerate(sizes.tolist()):
        kinds = {} if draws is None else {"window": draws[row]}
        expected = reference.window(size, image_size, augment, kinds)
        assert (*corners[row], *extents[row]) == expected
    for found in (corners, extents):  # as DALI takes them
        assert found.dtype == np.int32
        assert found.flags.c_contiguous


@pytest.mark.parametrize("window", ["random_crop", "random_resized_crop", "resized_center_crop"])
def test_windows_are_those_of_graphs_to_the_pixel(window):
    augment = AugmentConfig(window=window)
    sizes = SIZES[:4].astype(np.int32)
    draws = drawn(augment, (224, 224), len(sizes))
    found = np.hstack(windows(sizes, (224, 224), augment, draws))
    # TensorFlow's optimizer, which rearranges arithmetic, sees functions alone.
    in_graph = tf.function(pixels.window, autograph=False)
    for row, size in enumerate(tf.constant(sizes)):
        kinds = None if draws is None else tf.constant(draws[row])
        expected = np.hstack(in_graph(size, (224, 224), augment, kinds))
        np.testing.assert_array_equal(found[row], expected)


def test_a_draw_of_1_is_inside():
    draws, augment = np.ones((1, 2), np.float32), AugmentConfig(window="random_crop")
    corner, _ = windows(np.array([[30, 20]], np.int32), (20, 16), augment, draws)
    np.testing.assert_array_equal(corner, [[10, 4]])


@pytest.mark.parametrize("window", ["center_crop", "random_crop"])
def test_a_crop_larger_than_its_image_begins_outside(window):
    augment = AugmentConfig(window=window)
    sizes = np.array([(19, 30), (30, 15), (20, 16)], np.int32)
    corners, _ = windows(sizes, (20, 16), augment, drawn(augment, (20, 16), 3))
    np.testing.assert_array_equal((corners < 0).any(axis=1), [True, True, False])
