"""The random numbers of the augmentations, drawn on the host.

`draw` takes the augmentation, (seed, epoch, step) and the positions of a replica's rows in the
step's global batch. Its arrays depend on nothing else, and each loader feeds them to its own
operators. So the augmentation is the same for any number of replicas, in every loader, and after a
resume. Needs no TensorFlow.

    draw(augment, image_size=(32, 32), seed=0, epoch=3, step=2,
         positions=rows.positions)    # {"mirror": [rows, 2] int32, "color": [rows, 4] float32}
"""

import numpy as np

from tfaccel.config import AugmentConfig
from tfaccel.data import policies

ATTEMPTS = 10  # random windows that are tried until one fits, as in torchvision and DALI

# Each kind of draw has its own generator, so that turning one on does not change the others.
_KINDS = {
    "window": 0,
    "mirror": 1,
    "warp": 2,
    "color": 3,
    "policy": 4,
    "blur": 5,
    "levels": 6,
    "erase": 7,
}
# The kinds of operations on whole grey levels, in the order in which they are done.
LEVEL_KINDS = ("policy", "blur", "levels", "erase")
# The kinds that a target does not share. A policy's moves are shared: see `moves`.
OF_IMAGE_ALONE = ("color", *LEVEL_KINDS)


def kinds(augment: AugmentConfig) -> tuple[str, ...]:
    """Returns the names of the arrays that `draw` returns, in a fixed order.

    "window": [rows, 22] float32 for "random_resized_crop": ten areas (shares of the image's area),
      ten ratios (width / height), and the window's vertical and horizontal place, in 0..1. For
      "random_crop" only the place: [rows, 2].
    "mirror": [rows, 2] int32, 0 or 1: top to bottom, left to right. If there is a "warp", it
      includes the mirroring, and there is no "mirror".
    "warp": [rows, 2, 3] float32, an affine map from output to input pixels (x, y), counted from the
      corner of the image, with pixel centres at one half.
    "color": [rows, 4] float32: factors of brightness, contrast and saturation, and degrees of hue.
    "policy": [rows, operations, 8] float32: see `policies.drawn`.
    "blur": [rows, 1] float32, the standard deviation in pixels; 0 for no blur.
    "levels": [rows, 2] float32: the number of which posterizing keeps only multiples (1 keeps all
      levels), and the least level that solarizing inverts (256 inverts none).
    "erase": [rows, 5] float32: top, left, height and width of the rectangle in pixels, which has
      height 0 if nothing is erased, and the seed of its random levels, a whole number below 2^24.
    """
    warps = augment.rotation_degrees > 0 or augment.shift_pixels > 0
    mirrors = augment.horizontal_flip or augment.vertical_flip
    colors = augment.brightness, augment.contrast, augment.saturation, augment.hue_degrees
    wanted = {
        "window": augment.has_random_window,
        "mirror": mirrors and not warps,
        "warp": warps,
        "color": any(each > 0 for each in colors),
        "policy": augment.policy != "none",
        "blur": augment.blur_probability > 0,
        "levels": augment.posterize_probability > 0 or augment.solarize_probability > 0,
        "erase": augment.erase_probability > 0,
    }
    return tuple(name for name in _KINDS if wanted[name])


def draw(
    augment: AugmentConfig,
    *,
    image_size: tuple[int, int],
    seed: int,
    epoch: int,
    step: int,
    positions: np.ndarray,
) -> dict[str, np.ndarray]:
    """Returns the draws for one replica's rows of one step: an array for each of `kinds`.

    Args:
      augment: the settings of the augmentation.
      image_size: (height, width) of the batches.
      seed: the run's seed.
      epoch: the epoch, from 0.
      step: the step within the epoch, from 0.
      positions: [rows] int64, the rows' places in the step's global batch.
    """
    drawn = {}
    for kind in kinds(augment):
        random = np.random.default_rng([seed, epoch, step, _KINDS[kind]])
        # A step's rows are drawn in order, so that no row depends on the number of rows after it.
        number = policies.num_uniform(augment) if kind == "policy" else _NUM_UNIFORM[kind]
        uniform = random.random((positions.max() + 1, number))[positions]
        drawn[kind] = _DRAW[kind](augment, image_size, uniform)
    return drawn


def for_target(draws: dict) -> dict:
    """Returns the draws, by kind, that a pair's target shares with its image.

    A policy leaves its "moves", [rows, operations, 6]: the affine maps alone.
    """
    shared = {kind: each for kind, each in draws.items() if kind not in OF_IMAGE_ALONE}
    return shared | ({"moves": draws["policy"][..., :6]} if "policy" in draws else {})


def _window(augment, image_size, uniform):
    if augment.window == "random_crop":
        return uniform[:, -2:].astype(np.float32)
    # As in torchvision's RandomResizedCrop, the area and the logarithm of the ratio are uniform.
    area = _between(*augment.crop_area, uniform[:, :ATTEMPTS])
    ratio = np.exp(_between(*np.log(augment.crop_ratio), uniform[:, ATTEMPTS:-2]))
    return np.hstack([area, ratio, uniform[:, -2:]]).astype(np.float32)


def _mirror(augment, image_size, uniform):
    asked = [augment.vertical_flip, augment.horizontal_flip]
    return ((uniform < 0.5) & asked).astype(np.int32)


def _warp(augment, image_size, uniform):
    height, width = image_size
    angle = np.radians(_between(-1, 1, uniform[:, 0]) * augment.rotation_degrees)
    shift = np.floor(uniform[:, 1:3] * (2 * augment.shift_pixels + 1)) - augment.shift_pixels
    mirror = 1 - 2 * _mirror(augment, image_size, uniform[:, 3:])[:, ::-1]  # of x, of y: 1 or -1
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    linear = turn.transpose(2, 0, 1) * mirror[:, None, :]
    center = np.array([width / 2, height / 2])
    # About the centre: input = linear (output - centre) + centre + shift.
    offset = center + shift - np.einsum("rij,j->ri", linear, center)
    # Adding 0 turns -0.0 into 0.0, because a fingerprint would distinguish the two.
    return np.concatenate([linear, offset[:, :, None]], axis=2).astype(np.float32) + 0


def _color(augment, image_size, uniform):
    spread = [augment.brightness, augment.contrast, augment.saturation, augment.hue_degrees]
    return (np.array([1, 1, 1, 0]) + _between(-1, 1, uniform) * spread).astype(np.float32)


def _blur(augment, image_size, uniform):
    sigma = _between(*augment.blur_sigma, uniform[:, 1:])
    return np.where(uniform[:, :1] < augment.blur_probability, sigma, 0).astype(np.float32)


def _levels(augment, image_size, uniform):
    does = uniform < [augment.posterize_probability, augment.solarize_probability]
    multiple = 2 ** (8 - augment.posterize_bits)
    does = np.where(does, [multiple, augment.solarize_threshold], [1, 256])
    return does.astype(np.float32)


def _erase(augment, image_size, uniform):
    """Returns the first rectangle that fits, as in timm and torchvision; else none."""
    height, width = image_size
    area = _between(*augment.erase_area, uniform[:, :ATTEMPTS]) * height * width
    ratio = np.exp(_between(*np.log(augment.erase_ratio), uniform[:, ATTEMPTS : 2 * ATTEMPTS]))
    sizes = np.round(np.sqrt(np.stack([area * ratio, area / ratio], axis=-1)))
    fits = ((sizes >= 1) & (sizes < image_size)).all(axis=-1)
    size = sizes[np.arange(len(sizes)), fits.argmax(axis=1)]
    does, place, seed = uniform[:, -4], uniform[:, -3:-1], np.floor(uniform[:, -1:] * 2**24)
    does = (does < augment.erase_probability) & fits.any(axis=1)
    size = np.where(does[:, None], size, 0)
    corner = np.floor(place * (image_size - size + 1))
    return np.hstack([corner, size, seed]).astype(np.float32)


def _between(least: float, largest: float, uniform: np.ndarray) -> np.ndarray:
    return least + (largest - least) * uniform


_NUM_UNIFORM = {
    "window": 2 * ATTEMPTS + 2,
    "mirror": 2,
    "warp": 5,
    "color": 4,
    "blur": 2,
    "levels": 2,
    "erase": 2 * ATTEMPTS + 4,
}
_DRAW = {
    "window": _window,
    "mirror": _mirror,
    "warp": _warp,
    "color": _color,
    "policy": policies.drawn,
    "blur": _blur,
    "levels": _levels,
    "erase": _erase,
}
