import dataclasses

import numpy as np
import pytest

from tfaccel.config.presets import preset
from tfaccel.data.draws import draw, kinds

EVERYTHING = preset(
    "imagenet_color", vertical_flip=True, rotation_degrees=30.0, shift_pixels=3, hue_degrees=20.0
)


def drawn(augment, *, positions=range(6), seed=0, epoch=0, step=0, image_size=(8, 6)):
    return draw(
        augment,
        image_size=image_size,
        seed=seed,
        epoch=epoch,
        step=step,
        positions=np.array(list(positions)),
    )


def test_draws_are_a_function_of_the_place_alone():
    whole = drawn(EVERYTHING)
    assert list(whole) == ["window", "warp", "color"]
    for name, values in drawn(EVERYTHING, positions=[4, 1]).items():  # two rows of another replica
        np.testing.assert_array_equal(values, whole[name][[4, 1]])
    for change in ({"seed": 1}, {"epoch": 1}, {"step": 1}):
        for name, values in drawn(EVERYTHING, **change).items():
            assert not np.isclose(values, whole[name]).all(axis=tuple(range(1, values.ndim))).any()


def test_switching_one_kind_on_changes_no_other():
    alone = drawn(preset("imagenet"))
    colored = drawn(preset("imagenet_color"))
    np.testing.assert_array_equal(alone["window"], colored["window"])
    np.testing.assert_array_equal(alone["mirror"], colored["mirror"])


@pytest.mark.parametrize("name", ["none", "imagenet_eval", "restoration_eval"])
def test_nothing_is_drawn_where_nothing_is_random(name):
    assert kinds(preset(name)) == ()
    assert drawn(preset(name)) == {}


def test_draws_stay_within_their_ranges_and_fill_them():
    many = drawn(EVERYTHING, positions=range(20_000))
    area, ratio, place = np.split(many["window"], [10, 20], axis=1)
    for values, least, largest in (
        (area, 0.08, 1.0),
        (ratio, 3 / 4, 4 / 3),
        (place, 0.0, 1.0),
        (many["color"][:, :3], 0.6, 1.4),
        (many["color"][:, 3], -20.0, 20.0),
    ):
        spread = largest - least
        assert least - 1e-6 <= values.min() < least + 0.01 * spread
        assert largest - 0.01 * spread < values.max() <= largest + 1e-6
    np.testing.assert_allclose(np.log(ratio).mean(), 0, atol=0.01)  # uniform in its logarithm


def test_mirrors_are_drawn_apart_and_by_halves():
    both = drawn(preset("imagenet", vertical_flip=True), positions=range(10_000))["mirror"]
    np.testing.assert_allclose(both.mean(axis=0), 0.5, atol=0.03)  # 6 sigma
    np.testing.assert_allclose((both[:, 0] == both[:, 1]).mean(), 0.5, atol=0.03)
    assert not drawn(preset("imagenet"), positions=range(100))["mirror"][:, 0].any()


def test_a_warp_turns_about_the_centre_and_moves_by_whole_pixels():
    turned = drawn(preset("mnist"), positions=range(1000))["warp"]
    center = np.array([3.0, 4.0, 1.0])  # of 8 x 6 pixels: x, y
    np.testing.assert_allclose(turned @ center, np.tile(center[:2], (1000, 1)), atol=1e-5)
    degrees = np.degrees(np.arctan2(turned[:, 1, 0], turned[:, 0, 0]))
    assert -10 <= degrees.min() < -9.8
    assert 9.8 < degrees.max() <= 10

    moved = drawn(preset("none", shift_pixels=2), positions=range(1000))["warp"]
    np.testing.assert_array_equal(moved[:, :, :2], np.tile(np.eye(2), (1000, 1, 1)))
    values, counts = np.unique(moved[:, :, 2], return_counts=True)
    assert values.tolist() == [-2, -1, 0, 1, 2]
    assert counts.min() > 300  # of 400 each


def test_a_warp_holds_the_mirroring():
    augment = preset("cifar", shift_pixels=0, rotation_degrees=1e-9)
    warp = drawn(augment, positions=range(1000))["warp"]
    mirrored = warp[:, 0, 0] < 0
    assert 400 < mirrored.sum() < 600
    # x goes to width - x, y stays.
    np.testing.assert_allclose(
        warp[mirrored] @ [1.0, 2.0, 1.0], [[5.0, 2.0]] * mirrored.sum(), atol=1e-5
    )
    same = drawn(dataclasses.replace(augment, horizontal_flip=False), positions=range(1000))["warp"]
    np.testing.assert_allclose(warp[~mirrored], same[~mirrored], atol=1e-6)


LEVELS = preset(
    "imagenet",
    policy="randaugment",
    blur_probability=0.5,
    posterize_probability=0.3,
    posterize_bits=5,
    solarize_probability=0.2,
    erase_probability=0.25,
)


def test_level_operations_are_drawn_by_place_and_change_no_other_draw():
    whole = drawn(LEVELS)
    assert list(whole) == ["window", "mirror", "policy", "blur", "levels", "erase"]
    for name, values in drawn(LEVELS, positions=[4, 1]).items():
        np.testing.assert_array_equal(values, whole[name][[4, 1]])
    for name, values in drawn(preset("imagenet")).items():
        np.testing.assert_array_equal(values, whole[name])
    for change in ({"seed": 1}, {"epoch": 1}, {"step": 1}):
        other = drawn(LEVELS, positions=range(50), **change)
        for name, values in drawn(LEVELS, positions=range(50)).items():
            assert (values != other[name]).any(), name


def test_blur_posterizing_and_solarizing_have_their_probabilities():
    many = drawn(LEVELS, positions=range(10_000))
    sigma = many["blur"][:, 0]
    np.testing.assert_allclose((sigma > 0).mean(), 0.5, atol=0.03)  # 6 sigma
    assert 0.1 <= sigma[sigma > 0].min() < 0.11
    assert 1.99 < sigma.max() <= 2.0
    multiple, threshold = many["levels"].T
    assert set(multiple) == {1, 8}
    assert set(threshold) == {256, 128}
    np.testing.assert_allclose((multiple == 8).mean(), 0.3, atol=0.03)
    np.testing.assert_allclose((threshold == 128).mean(), 0.2, atol=0.03)


@pytest.mark.parametrize("size", [(40, 60), (8, 6)])
def test_rectangles_lie_in_the_image_and_have_the_area_and_ratio(size):
    many = drawn(LEVELS, positions=range(10_000), image_size=size)["erase"]
    top, left, tall, wide, seed = many.T
    erases = tall > 0
    assert ((wide > 0) == erases).all()
    np.testing.assert_allclose(erases.mean(), 0.25, atol=0.03)
    assert (many >= 0).all()
    assert (top + tall <= size[0]).all()
    assert (left + wide <= size[1]).all()
    for start, length, side in ((top, tall, size[0]), (left, wide, size[1])):
        assert start[erases].min() == 0
        assert (start + length)[erases].max() == side  # both ends are reached
    np.testing.assert_array_equal(seed, np.floor(seed))
    assert len(np.unique(seed)) > 9_900
    area, ratio = (tall * wide)[erases] / (size[0] * size[1]), tall[erases] / wide[erases]
    slack = 0.05 if size[0] == 40 else 0.6  # of whole pixels
    assert area.min() >= 0.02 * (1 - 4 * slack)
    assert area.max() <= 1 / 3 * (1 + slack)
    if size[0] == 40:
        assert ratio.min() < 0.4
        assert ratio.max() > 2.5


def test_nothing_is_erased_where_no_rectangle_fits():
    augment = preset("none", erase_probability=1.0, erase_area=(1.0, 1.0), erase_ratio=(3.0, 3.0))
    assert not drawn(augment)["erase"][:, 2:4].any()
