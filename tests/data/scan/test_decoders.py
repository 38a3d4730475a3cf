"""What the loaders' decoders do with planted files: the reason for each kind's severity."""

import numpy as np
import planted
import pytest
import tensorflow as tf
from nvidia.dali import fn, pipeline_def, types

from tfaccel.data.scan.examine import examine, strict

GREY, RGB = 1, 3


@pipeline_def(batch_size=1, num_threads=1, prefetch_queue_depth=1)
def decoder(device, output_type):
    data = fn.external_source(name="data", ndim=1, dtype=types.UINT8)
    return fn.decoders.image(data, device=device, output_type=output_type, adjust_orientation=False)


def by_dali(data, channels=RGB, on_gpu=False):
    """Pixels [height, width, channels], or None for an error."""
    output_type = {GREY: types.GRAY, RGB: types.RGB}[channels]
    pipeline = decoder("mixed" if on_gpu else "cpu", output_type, device_id=0 if on_gpu else None)
    pipeline.feed_input("data", [np.frombuffer(data, np.uint8)])
    try:
        return np.array(pipeline.run()[0].as_cpu().at(0))
    except RuntimeError:
        return None


def by_tensorflow(data, channels=RGB):
    """Likewise."""
    try:
        return tf.io.decode_image(data, channels, expand_animations=False).numpy()
    except tf.errors.InvalidArgumentError:
        return None


def found_in(name, data):
    with strict():
        return [kind for kind, _ in examine(data, suffix="." + name.split(".")[-1])[0]]


def assert_is_the_picture(pixels):
    assert pixels is not None
    assert np.abs(pixels.astype(int) - planted.PIXELS).mean() < 8  # of JPEG; a palette has 7


@pytest.mark.parametrize("name", planted.GOOD)
def test_good_images_are_good_in_both(name):
    data = planted.GOOD[name]
    assert found_in(name, data) == []
    one, other = by_dali(data), by_tensorflow(data)
    assert np.abs(one.astype(int) - other).max() <= 8  # TensorFlow's JPEG is the fast one
    if name.split(".")[0] not in ("grey", "one_bit", "palette"):
        assert_is_the_picture(one)


@pytest.mark.parametrize("name", planted.DALIS)
def test_some_formats_are_dalis_alone(name):
    data = planted.DALIS[name]
    assert found_in(name, data) == found_in("", data) == []
    assert found_in("x.jpg", data) == ["wrong_extension", "unsupported"]
    assert_is_the_picture(by_dali(data))
    assert by_tensorflow(data) is None


FATAL = [
    name
    for name in planted.FAULTY
    if planted.kind_of(name) in ("empty", "not_an_image", "truncated", "unsupported", "animated")
]


@pytest.mark.parametrize("name", FATAL)
def test_one_of_them_refuses_what_is_called_fatal(name):
    data = planted.FAULTY[name]
    # Without its end TensorFlow reads some JPEGs with restart markers and not others, DALI all. Of
    # a BMP's palette it takes the indices for grey levels. Of some animated PNGs, not of this one,
    # DALI gives another picture than the first.
    if name not in ("truncated-restarts.jpg", "unsupported-palette.bmp", "animated.png"):
        assert by_dali(data) is None or by_tensorflow(data) is None


def test_indices_of_a_bmps_palette_are_levels_to_tensorflow():
    data = planted.FAULTY["unsupported-palette.bmp"]
    assert_is_the_picture(by_dali(data))
    assert np.abs(by_tensorflow(data).astype(int) - planted.PIXELS).mean() > 8


def test_cmyk_is_rgb_to_both_but_not_grey():
    data = planted.FAULTY["cmyk.jpg"]
    assert_is_the_picture(by_dali(data))
    assert_is_the_picture(by_tensorflow(data))
    assert by_dali(data, GREY) is not None
    assert by_tensorflow(data, GREY) is None


def test_sixteen_bits_lose_the_lower_eight():
    twelve_bits = planted.png_16(planted.PIXELS.astype(np.uint16) * 16)
    for decode in (by_dali, by_tensorflow):
        np.testing.assert_array_equal(decode(planted.FAULTY["sixteen_bit.png"]), planted.PIXELS)
        assert decode(twelve_bits).max() <= 16


@pytest.mark.parametrize("name", ["animated.png", "several_frames.tif"])
def test_the_first_of_several_frames_is_used(name):
    data = planted.FAULTY[name]
    np.testing.assert_array_equal(by_dali(data), planted.PIXELS)
    if name.endswith("png"):
        np.testing.assert_array_equal(by_tensorflow(data), planted.PIXELS)


@pytest.mark.parametrize("form", ["jpg", "png", "webp", "tif"])
def test_images_are_used_as_they_are_stored(form):
    data = planted.FAULTY[f"exif_rotated.{form}"]
    assert_is_the_picture(by_dali(data))
    if form != "tif":
        assert_is_the_picture(by_tensorflow(data))


@pytest.mark.parametrize("name", ["wrong_extension.jpg", "wrong_extension.png"])
def test_decoders_go_by_content(name):
    assert_is_the_picture(by_dali(planted.FAULTY[name]))
    assert_is_the_picture(by_tensorflow(planted.FAULTY[name]))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    [each for each in planted.FAULTY if each.startswith(("exif", "wrong", "several", "cmyk.jpg"))],
)
def test_the_gpus_decoder_does_as_the_cpus(name):
    data = planted.FAULTY[name]
    difference = np.abs(by_dali(data, on_gpu=True).astype(int) - by_dali(data))
    assert difference.max() <= 8


@pytest.mark.slow
def test_little_damage_passes_unseen():
    random = np.random.default_rng(0)
    num_unseen = 0
    for turn in range(600):
        name = ("jpeg", "progressive.jpg", "rgb.png", "palette.png", "rgb.bmp", "rgb.webp")[
            turn % 6
        ]
        data, place = bytearray(planted.GOOD[name]), random.integers(len(planted.GOOD[name]))
        if turn % 4 == 0:
            data = data[:place]
        elif turn % 4 == 1:
            data[place] ^= 1 << random.integers(8)
        else:
            data[place : place + 16] = bytes(len(data[place : place + 16]))
        data = bytes(data)
        seen = "truncated" in found_in("", data) or "not_an_image" in found_in("", data)
        num_unseen += not seen and (by_dali(data) is None or by_tensorflow(data) is None)
    assert num_unseen <= 3
