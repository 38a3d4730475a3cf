"""The sheet is read back, pixel by pixel where each example should be."""

import math

import numpy as np
import PIL.Image
import pytest

from tfaccel.config import ImageConfig
from tfaccel.training.logs.contact_sheet import (
    CAPTION_HEIGHT,
    GAP,
    MARGIN,
    in_unit_range,
    write,
    write_batch,
)


def read(path):
    with PIL.Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image)


def test_each_example_stands_in_its_place(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (5, 32, 64, 3), dtype=np.uint8)
    path = write(tmp_path / "sheet.png", images, list("abcde"))
    sheet = read(path)
    height, width = 2 * 32, 2 * 64  # enlarged to 128, pixel by pixel
    step_y, step_x = height + CAPTION_HEIGHT + MARGIN, width + MARGIN
    assert sheet.shape == (2 * step_y + MARGIN, 3 * step_x + MARGIN, 3)
    for index, image in enumerate(images):
        top, left = MARGIN + index // 3 * step_y, MARGIN + index % 3 * step_x
        shown = sheet[top : top + height, left : left + width]
        np.testing.assert_array_equal(shown, image.repeat(2, 0).repeat(2, 1))
        caption = sheet[top + height + 1 : top + height + CAPTION_HEIGHT, left : left + width]
        assert caption.min() < 128  # something is written
    empty = sheet[MARGIN + step_y - 1 :, MARGIN + 2 * step_x - 1 :]
    assert empty.min() == 255


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_floats_and_grey(dtype, tmp_path):
    image = np.array([[0, 0.5, 1], [-3, 7, np.nan]], dtype)[None, ..., None]
    sheet = read(write(tmp_path / "sheet.png", image, ["x"]))
    factor = math.ceil(128 / 3)
    shown = sheet[MARGIN : MARGIN + 2 * factor : factor, MARGIN : MARGIN + 3 * factor : factor]
    grey = [[0, 128, 255], [0, 255, 0]]
    np.testing.assert_array_equal(shown, np.repeat(np.array(grey)[..., None], 3, axis=2))


def test_large_images_are_reduced(tmp_path):
    sheet = read(write(tmp_path / "sheet.png", np.zeros((1, 1000, 500, 3), np.uint8), ["x"]))
    assert sheet.shape == (320 + CAPTION_HEIGHT + 2 * MARGIN, 160 + 2 * MARGIN, 3)


def test_pairs_stand_side_by_side(tmp_path):
    images = np.full((2, 128, 128, 3), 10, np.uint8)
    targets = np.full((2, 128, 128, 1), 0.2, np.float32)
    sheet = read(write(tmp_path / "sheet.png", images, ["a", "b"], targets=targets))
    assert (sheet[MARGIN : MARGIN + 128, MARGIN : MARGIN + 128] == 10).all()
    right = MARGIN + 128 + GAP
    assert (sheet[MARGIN : MARGIN + 128, right : right + 128] == 51).all()


def test_answers_stand_to_the_right_of_targets(tmp_path):
    images = np.full((1, 128, 128, 3), 10, np.uint8)
    captions = [("true a", "said b")]
    sheet = read(
        write(tmp_path / "s.png", images, captions, targets=images + 20, answers=images + 50)
    )
    row = sheet[MARGIN + 64, MARGIN:]
    step = 128 + GAP
    assert (row[2 * step : 2 * step + 128] == 60).all()
    assert (row[step : step + 128] == 30).all()
    assert sheet.shape[0] == 128 + 2 * CAPTION_HEIGHT + 2 * MARGIN
    for line in range(2):
        top = MARGIN + 128 + line * CAPTION_HEIGHT + 1
        assert sheet[top : top + CAPTION_HEIGHT - 2].min() < 128  # something is written


def test_a_masks_values_have_a_colour_each(tmp_path):
    mask = np.arange(22, dtype=np.uint8).reshape(1, 2, 11, 1)
    mask[0, 1, 10] = 255
    x, settings = np.zeros((1, 2, 11, 3), np.float32), ImageConfig(targets="mask")
    path = write_batch(tmp_path / "sheet.png", x, mask, settings=settings, class_names=())
    factor = math.ceil(128 / 11)
    left = MARGIN + 11 * factor + GAP
    shown = read(path)[MARGIN : MARGIN + 2 * factor : factor, left : left + 11 * factor : factor]
    assert shown[0, 0].tolist() == [0, 0, 0]
    assert len(np.unique(shown.reshape(-1, 3), axis=0)) == 22


def test_long_captions_are_cut_and_lines_joined(tmp_path):
    images = np.zeros((2, 128, 128, 3), np.uint8)
    long = "a caption that goes on\nand on and on " * 3
    sheet = read(write(tmp_path / "sheet.png", images, [long, ""]))
    assert sheet.shape[:2] == (128 + CAPTION_HEIGHT + 2 * MARGIN, 2 * 128 + 3 * MARGIN)
    assert sheet[MARGIN + 130 :, MARGIN + 128 + 2 :].min() == 255  # it does not reach over


@pytest.mark.parametrize("num_images", [1, 2, 7, 64])
def test_a_sheet_is_wider_than_high(num_images, tmp_path):
    images = np.zeros((num_images, 28, 28, 1), np.float32)
    height, width, _ = read(write(tmp_path / "sheet.png", images, ["7"] * num_images)).shape
    assert 0.8 < width / height < 2.5


@pytest.mark.parametrize("targets", ["image", "mask"])
def test_a_loaders_batch_loses_its_normalisation(targets, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (2, 128, 128, 3), dtype=np.uint8)
    settings = ImageConfig(mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3), targets=targets)
    x = ((pixels / 255 - settings.mean) / settings.std).astype(np.float32)
    y = x[:, :, ::-1] if targets == "image" else np.zeros((2, 128, 128, 1), np.uint8)
    for labels in (np.array([1, 0]), y):
        path = tmp_path / f"{labels.ndim}.png"
        sheet = read(write_batch(path, x, labels, settings=settings, class_names=["a", "b"]))
        np.testing.assert_array_equal(
            sheet[MARGIN : MARGIN + 128, MARGIN : MARGIN + 128], pixels[0]
        )
    right = MARGIN + 128 + GAP
    shown = sheet[MARGIN : MARGIN + 128, right : right + 128]
    np.testing.assert_array_equal(shown, pixels[0, :, ::-1] if targets == "image" else 0 * shown)


def test_three_of_five_channels_are_shown_and_one_of_two(tmp_path):
    levels = np.linspace(0, 1, 8 * 8 * 5, dtype=np.float32).reshape(1, 8, 8, 5)
    for channels, like in ((5, levels[..., :3]), (4, levels[..., :3]), (2, levels[..., :1])):
        write(tmp_path / "mine.png", levels[..., :channels], ["a"])
        write(tmp_path / "like.png", like, ["a"])
        assert (tmp_path / "mine.png").read_bytes() == (tmp_path / "like.png").read_bytes()


def test_floats_are_shown_from_the_least_to_the_largest_of_their_channel():
    settings = ImageConfig(image_size=(2, 2), channels=2, pixel_dtype="float32", mean=5, std=2)
    pixels = np.array([[[-3.0, 100.0], [1.0, 300.0]], [[np.nan, np.inf], [-1.0, 200.0]]])[None]
    found = in_unit_range((pixels - 5) / 2, settings)
    np.testing.assert_allclose(found[0, 0], [[0, 0], [1, 1]], atol=1e-6)
    np.testing.assert_allclose(found[0, 1, 1], [0.5, 0.5], atol=1e-6)
