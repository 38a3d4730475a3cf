"""The operations on whole grey levels against Pillow's and reference.py, one image at a time."""

import dataclasses

import numpy as np
import PIL.Image
import pytest
import reference
import tensorflow as tf
from PIL import ImageFilter

from tfaccel.config import AugmentConfig, ImageConfig
from tfaccel.data.draws import draw
from tfaccel.data.loaders import grey_levels, pixels
from tfaccel.data.policies import CODES, SPACES

# Pillow computes some tables in float64 and cuts them to whole levels, and cuts off what it
# interpolates, where this rounds. Each operation may therefore differ by one level.
ONE_LEVEL = 1

IMAGES = ImageConfig(image_size=(40, 30), mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
UNCHANGED = {
    "identity": (0,),
    "brightness": (1.0,),
    "posterize": (1,),
    "solarize": (256,),
    "solarize_add": (0,),
}


def photographs(rows=6, height=40, width=30, channels=3):
    """Images of smooth colours with noise, one of them of few levels, and one of a single one."""
    random = np.random.default_rng(1)
    made = []
    for row in range(rows):
        coarse = random.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        smooth = PIL.Image.fromarray(coarse).resize((width, height), PIL.Image.Resampling.BICUBIC)
        noise = random.integers(-9, 10, (height, width, 3))
        made.append(np.clip(np.asarray(smooth) * (0.4 + 0.6 * row / rows) + noise, 0, 255))
    made[-1][:] = 77
    made[-2][:, :, 0] = np.where(made[-2][:, :, 0] < 99, 30, 31)
    return np.array(made).astype(np.uint8)[..., :channels]


def varied(source, draws, augment=None, *, images=IMAGES, on_gpu=False, **how):
    draws = {kind: tf.constant(each) for kind, each in draws.items()}
    augment = augment or AugmentConfig()
    found = grey_levels.varied(
        tf.constant(source), draws, images=images, augment=augment, on_gpu=on_gpu, **how
    )
    assert found.dtype == tf.uint8
    return found.numpy()


def drawn(augment, rows, *, images=IMAGES, step=0):
    where = {"seed": 1, "epoch": 0, "step": step, "positions": np.arange(rows)}
    return draw(augment, image_size=images.image_size, **where)


def expected(source, draws, augment, images=IMAGES):
    rows = [{kind: each[row] for kind, each in draws.items()} for row in range(len(source))]
    return np.array(
        [
            reference.varied(each, row, images, augment)
            for each, row in zip(source, rows, strict=True)
        ]
    )


def one(name, argument, rows):
    """The draw of the same operation for each row."""
    row = [1, 0, 0, 0, 1, 0, CODES.index(name), argument]
    return {"policy": np.tile(np.float32(row), (rows, 1, 1))}


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("identity", [0]),
        ("brightness", [0.1, 0.7, 1.0, 1.9]),
        ("contrast", [0.1, 0.7, 1.9]),
        ("saturation", [0.1, 0.7, 1.9]),
        ("sharpness", [0.1, 0.7, 1.9]),
        ("posterize", [1, 4, 16, 256]),
        ("solarize", [0.0, 100.5, 128, 256]),
        ("solarize_add", [0, 33, 110]),
        ("invert", [0]),
        ("autocontrast", [0]),
        ("equalize", [0]),
    ],
)
def test_operations_are_those_of_pillow(name, arguments, channels):
    source = photographs(channels=channels)
    for argument in arguments:
        found = varied(source, one(name, argument, len(source)))
        wanted = np.array([reference.by_pillow(each, name, argument) for each in source])
        difference = np.abs(found.astype(int) - wanted)
        assert difference.max() <= ONE_LEVEL, argument
        assert difference.mean() < 0.02, argument
        if argument not in UNCHANGED.get(name, ()) and (name, channels) != ("saturation", 1):
            assert (found != source).mean() > 0.03, argument


def test_every_operation_has_a_code_and_a_case():
    named = {name for space in SPACES.values() for name in space}
    moves = {"shear_x", "shear_y", "translate_x", "translate_y", "rotate"}
    assert named == {*CODES, *moves}


@pytest.mark.parametrize("size", [(2, 5), (1, 1)])
def test_images_that_are_too_small_to_smooth_stay_as_they_are(size):
    source = photographs(height=size[0], width=size[1])
    np.testing.assert_array_equal(varied(source, one("sharpness", 1.9, len(source))), source)


def test_a_gpu_counts_levels_in_another_way_with_the_same_result():
    source = tf.constant(photographs())
    codes = [
        CODES.index(each) for each in ("equalize", "invert", "autocontrast", *["identity"] * 3)
    ]
    on_cpu = grey_levels._counts_on_cpu(source, tf.constant(codes, tf.float32))
    on_gpu = grey_levels._counts_on_gpu(source).numpy()
    assert on_cpu.shape == on_gpu.shape == (6, 3, 256)
    np.testing.assert_array_equal(on_cpu[::2][:2], on_gpu[::2][:2])
    assert not on_cpu[1].numpy().any()
    none = grey_levels._counts_on_cpu(source, tf.zeros(6))
    np.testing.assert_array_equal(none, np.zeros((6, 3, 256)))
    for channel in range(3):
        counts = np.bincount(source[0, ..., channel].numpy().ravel(), minlength=256)
        np.testing.assert_array_equal(on_cpu[0, channel], counts)


@pytest.mark.parametrize("space", SPACES)
def test_moves_are_those_of_pillow(space):
    source = photographs(rows=4)
    operations = {name: each for name, each in SPACES[space].items() if name not in CODES}
    for name, operation in operations.items():
        for strength, sign in ((0.3, 1.0), (1.0, -1.0)):
            size = source.shape[1:3]
            matrix = operation(np.full(4, strength), np.full(4, sign), size).astype(np.float32)
            found = varied(source, {"moves": matrix[:, None]})
            assert (found != source).mean() > 0.3, name
            for row, image in enumerate(map(PIL.Image.fromarray, source)):
                by = {"resample": PIL.Image.Resampling.BILINEAR}
                if name == "rotate":
                    most = {"trivialaugment": 135}.get(space, 30)
                    moved = image.rotate(most * strength * sign, **by)
                else:
                    affine = PIL.Image.Transform.AFFINE
                    moved = image.transform(image.size, affine, matrix[row].tolist(), **by)
                wanted = np.asarray(moved).astype(int)
                # Pillow takes the last pixel where the border is interpolated, this loader black.
                inside = (found[row] > 0) & (wanted > 0)
                eroded = inside.all(axis=-1)
                eroded[1:-1, 1:-1] &= (
                    eroded[:-2, 1:-1] & eroded[2:, 1:-1] & eroded[1:-1, :-2] & eroded[1:-1, 2:]
                )
                eroded[[0, -1]] = eroded[:, [0, -1]] = False
                assert strength == 1 or eroded.mean() > 0.2, name
                if eroded.any():
                    difference = np.abs(found[row] - wanted)[eroded]
                    assert np.percentile(difference, 99) <= ONE_LEVEL, name


POLICIES = {
    "randaugment": {},
    "randaugment_timm": {
        "policy_magnitude": 7.0,
        "policy_magnitude_std": 0.5,
        "policy_fill": "mean",
    },
    "trivialaugment": {},
}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_is_its_operations_one_after_the_other(policy):
    augment = AugmentConfig(policy=policy, **POLICIES[policy])
    source = np.concatenate([photographs()] * 8)
    draws = drawn(augment, len(source))
    assert len(np.unique(draws["policy"][..., 6])) >= 8  # or this test shows little
    found, wanted = varied(source, draws, augment), expected(source, draws, augment)
    difference = np.abs(found.astype(int) - wanted)
    if policy == "trivialaugment":  # a single operation
        assert difference.max() <= ONE_LEVEL
    # A level's difference may become more in a second operation, such as equalize.
    assert (difference > ONE_LEVEL).mean() < 0.01
    assert difference.mean() < 0.1
    assert (found != source).mean() > 0.3


def test_a_move_is_filled_with_black_or_the_mean():
    source = photographs()
    away = {"policy": np.tile(np.float32([1, 0, 99, 0, 1, 0, 0, 0]), (len(source), 1, 1))}
    for augment, level in (
        (AugmentConfig(policy="trivialaugment"), [0, 0, 0]),
        (AugmentConfig(policy="trivialaugment", policy_fill="mean"), [102, 128, 153]),
    ):
        found = varied(source, away, augment)
        np.testing.assert_array_equal(found, np.broadcast_to(level, found.shape))


@pytest.mark.parametrize("sigma", [(0.1, 2.0), (3.0, 3.0)])
def test_blur(sigma):
    augment = AugmentConfig(blur_probability=0.7, blur_sigma=sigma)
    source = np.concatenate([photographs()] * 4)
    draws = drawn(augment, len(source))
    found, wanted = varied(source, draws, augment), expected(source, draws, augment)
    assert np.abs(found.astype(int) - wanted).max() <= ONE_LEVEL
    assert (found != wanted).mean() < 0.001  # ties
    same = draws["blur"][:, 0] == 0
    assert 0 < same.sum() < 12
    np.testing.assert_array_equal(found[same], source[same])
    smooth = [
        np.asarray(PIL.Image.fromarray(each).filter(ImageFilter.GaussianBlur(float(width))))
        for each, width in zip(source, draws["blur"][:, 0], strict=True)
    ]
    difference = np.abs(found[~same] - np.array(smooth)[~same].astype(int))
    assert difference.mean() < 1  # Pillow's blur is three box blurs, near a Gaussian one
    assert difference.mean() < np.abs(found[~same] - source[~same].astype(int)).mean() / 3


def test_posterize_and_solarize():
    augment = AugmentConfig(
        posterize_probability=0.5,
        posterize_bits=3,
        solarize_probability=0.5,
        solarize_threshold=110,
    )
    source = np.concatenate([photographs()] * 4)
    draws = drawn(augment, len(source))
    assert len(np.unique(draws["levels"], axis=0)) == 4  # each alone, both and none
    found = varied(source, draws, augment)
    np.testing.assert_array_equal(found, expected(source, draws, augment))
    assert (found != source).mean() > 0.3


@pytest.mark.parametrize("fill", ["mean", "random", "black"])
@pytest.mark.parametrize("channels", [3, 1])
def test_erasing(fill, channels):
    augment = AugmentConfig(erase_probability=0.7, erase_fill=fill)
    images = ImageConfig(image_size=(40, 30), channels=channels, mean=0.4)
    source = photographs(rows=12, channels=channels)
    draws = drawn(augment, len(source))
    found = varied(source, draws, augment, images=images)
    np.testing.assert_array_equal(found, expected(source, draws, augment, images))
    share = (found != source).any(axis=-1).mean(axis=(1, 2))
    assert (share == 0).sum() in range(1, 8)
    assert ((share == 0) | (share > 0.01)).all()
    assert share.max() < 0.36


def test_random_levels_are_uniform_and_differ_by_seed_and_place():
    place = np.arange(30_000, dtype=np.uint32)[None]
    levels = grey_levels.noise(tf.constant([[7], [8]], tf.uint32), place).numpy().astype(float)
    assert abs(levels.mean() - 127.5) < 1.5  # 5 sigma
    assert abs(np.corrcoef(levels)[0, 1]) < 0.03
    assert abs(np.corrcoef(levels[0, 1:], levels[0, :-1])[0, 1]) < 0.03
    counts = np.bincount(levels[0].astype(int), minlength=256)
    assert 60 < counts.min() < counts.max() < 180  # about 117 each


EVERYTHING = AugmentConfig(
    horizontal_flip=True,
    brightness=0.2,
    policy="randaugment",
    blur_probability=0.5,
    posterize_probability=0.5,
    posterize_bits=5,
    solarize_probability=0.5,
    erase_probability=0.5,
    erase_fill="random",
)


@pytest.mark.parametrize("targets", [pytest.param("image", marks=pytest.mark.slow), "mask"])
def test_targets_share_moves_alone(targets):
    ignored = {"ignore_class": 255} if targets == "mask" else {}
    images = dataclasses.replace(IMAGES, targets=targets, **ignored)
    augment = dataclasses.replace(EVERYTHING, policy="trivialaugment")
    source = photographs(rows=24)
    target = photographs(rows=24)[::-1, ..., : 1 if targets == "mask" else 3]
    draws = drawn(augment, len(source), images=images)
    given = {kind: tf.constant(each) for kind, each in draws.items()}
    settings = {"images": images, "augment": augment, "dtype": "float32"}
    found = pixels.examples(tf.constant(source), tf.constant(target), given, **settings)
    for row in range(len(source)):
        own = {kind: each[row] for kind, each in draws.items()}
        _, wanted = reference.example(source[row], images, augment, own, target[row])
        if targets == "mask":
            # A place exactly between two pixels may round either way.
            near = []
            for x in (-1e-3, 1e-3):
                for y in (-1e-3, 1e-3):
                    moved = own | {"policy": own["policy"] + np.float32([0, 0, x, 0, 0, y, 0, 0])}
                    near.append(reference.example(source[row], images, augment, moved, target[row]))
            assert (found[1][row].numpy() == np.array([each[1] for each in near])).any(axis=0).all()
            assert (found[1][row].numpy() != wanted).mean() < 0.05
        else:
            apart = np.abs(found[1][row] - wanted) * 255 * np.array(images.std)
            assert apart.max() <= ONE_LEVEL + 0.01
    outside = (found[1] == 255).numpy().mean() if targets == "mask" else None
    assert outside is None or 0.01 < outside < 0.5


@pytest.mark.parametrize("device", ["/cpu:0", pytest.param("/gpu:0", marks=pytest.mark.gpu)])
def test_inside_another_xla_program_it_is_the_same(device):
    source = photographs()
    draws = {kind: tf.constant(each) for kind, each in drawn(EVERYTHING, len(source)).items()}
    labels = tf.zeros([len(source)], tf.int64)
    settings = {"images": IMAGES, "augment": EVERYTHING, "dtype": "float32"}

    def run(on_gpu=True):
        return pixels.examples(tf.constant(source), labels, draws, on_gpu=on_gpu, **settings)[0]

    on_cpu = run(on_gpu=False)
    with tf.device(device):
        whole = tf.function(run, jit_compile=True, autograph=False)()
    levels = np.abs(whole - on_cpu) * 255 * np.array(IMAGES.std)
    assert (levels > ONE_LEVEL + 0.01).mean() < 0.01
