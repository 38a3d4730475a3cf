"""Draws the operations of RandAugment and TrivialAugment, and their magnitudes.

`drawn` turns uniform random numbers into one row of numbers for each operation on each image. The
loaders only carry these out (`loaders/grey_levels.py`). Needs no TensorFlow.

    uniform = random.random((rows, num_uniform(augment)))
    drawn(augment, (224, 224), uniform)      # [rows, operations, 8] float32

The operations and ranges are those of two libraries, because the papers leave some open:

- torchvision 0.20's RandAugment (Cubuk et al. 2020, arXiv:1909.13719) and TrivialAugmentWide
  (Müller and Hutter 2021, arXiv:2103.10158): 31 magnitudes from 0 to the largest.
- timm 1.0's "rand" policy with "inc1" (Wightman et al. 2021, arXiv:2110.00476): magnitudes 0 to 10.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np

from tfaccel.config import AugmentConfig

# What `grey_levels` does with an image, by its code. The argument that belongs to it follows.
CODES = (
    "identity",  # also after a move, whose affine map has moved the pixels already
    "brightness",  # factor
    "contrast",  # factor
    "saturation",  # factor
    "sharpness",  # factor
    "posterize",  # 2 to the power of the bits that are lost: levels become multiples of it
    "solarize",  # the least level that is inverted
    "solarize_add",  # what is added to levels below 128
    "invert",
    "autocontrast",
    "equalize",
)
PER_OPERATION = 5  # uniform numbers: which, whether, sign, and two for the magnitude
TIMM_PROBABILITY = 0.5  # of each operation of timm's policy
BINS = 30  # torchvision's magnitudes are 0 to 30

# An operation takes the strength of each row in 0..1, a sign of 1 or -1 and the image's (height,
# width), and returns an argument, or for moves an affine map, [rows, 6].
_Operation = Callable[[np.ndarray, np.ndarray, tuple[int, int]], np.ndarray]


def num_uniform(augment: AugmentConfig) -> int:
    """Returns how many uniform random numbers an image needs."""
    return PER_OPERATION * _num_operations(augment)


def _num_operations(augment: AugmentConfig) -> int:
    return 1 if augment.policy == "trivialaugment" else augment.policy_operations


def drawn(augment: AugmentConfig, image_size: tuple[int, int], uniform: np.ndarray) -> np.ndarray:
    """Returns [rows, operations, 8] float32: what is done to each image, one after the other.

    The eight numbers are an affine map from output to input pixels, row by row (as in the draw
    "warp"), then the index of an operation in CODES, and its argument.

    Args:
      augment: the settings; the policy is not "none".
      image_size: (height, width) of the batches.
      uniform: [rows, num_uniform(augment)] in 0..1.
    """
    per_operation = uniform.reshape(len(uniform), -1, PER_OPERATION)
    each = [
        _one(augment, image_size, per_operation[:, index])
        for index in range(_num_operations(augment))
    ]
    # Adding 0 turns -0.0 into 0.0, because a fingerprint would distinguish the two.
    return np.stack(each, axis=1).astype(np.float32) + 0


def _one(augment, image_size, uniform):
    which, whether, sign, *magnitude = uniform.T
    space = SPACES[augment.policy]
    which = np.floor(which * len(space)).astype(int)
    if augment.policy == "randaugment_timm":
        which = np.where(whether < TIMM_PROBABILITY, which, -1)
    strength, sign = _strength(augment, *magnitude), np.where(sign < 0.5, 1.0, -1.0)
    found = np.tile([1.0, 0, 0, 0, 1, 0, 0, 0], (len(uniform), 1))
    for index, (name, operation) in enumerate(space.items()):
        rows = np.flatnonzero(which == index)
        values = operation(strength[rows], sign[rows], image_size)
        if name in MOVES:
            found[rows, :6] = values
        else:
            found[rows, 6], found[rows, 7] = CODES.index(name), values
    return found


def _strength(augment, first, second):
    if augment.policy == "trivialaugment":
        return np.floor(first * (BINS + 1)) / BINS
    if augment.policy == "randaugment":
        return np.full(len(first), augment.policy_magnitude / BINS)
    # Box and Muller 1958: two uniform numbers make a normal one.
    normal = np.sqrt(-2 * np.log(1 - first)) * np.cos(2 * math.pi * second)
    magnitude = augment.policy_magnitude + augment.policy_magnitude_std * normal
    return np.clip(magnitude, 0, 10) / 10


# Moves: affine maps from output to input (x, y), counted from the image's corner. Shears keep the
# corner in its place, as in both libraries, and rotations the centre.


def _map(rows: int, **changes) -> np.ndarray:
    found = np.tile([1.0, 0, 0, 0, 1, 0], (rows, 1))
    for index, values in zip("abcdef", found.T, strict=True):
        if index in changes:
            values[:] = changes[index]
    return found


def _shear_x(most: float) -> _Operation:
    return lambda strength, sign, size: _map(len(sign), b=most * strength * sign)


def _shear_y(most: float) -> _Operation:
    return lambda strength, sign, size: _map(len(sign), d=most * strength * sign)


def _shift_x(pixels: Callable) -> _Operation:
    return lambda strength, sign, size: _map(len(sign), c=pixels(strength, size[1]) * sign)


def _shift_y(pixels: Callable) -> _Operation:
    return lambda strength, sign, size: _map(len(sign), f=pixels(strength, size[0]) * sign)


def _rotate(most: float) -> _Operation:
    def rotated(strength, sign, size):
        angle = np.radians(most * strength * sign)
        y, x = size[0] / 2, size[1] / 2
        cosine, sine = np.cos(angle), np.sin(angle)
        return np.stack(
            [
                *(cosine, -sine, x - cosine * x + sine * y),
                *(sine, cosine, y - sine * x - cosine * y),
            ],
            axis=1,
        )

    return rotated


# The other operations' arguments.


def _factor(most: float, *, least: float = 0.0) -> _Operation:
    """Returns factors 1 + most * strength, or 1 - most * strength."""
    return lambda strength, sign, size: np.maximum(least, 1 + most * strength * sign)


def _argument(function: Callable[[np.ndarray], np.ndarray]) -> _Operation:
    return lambda strength, sign, size: function(strength)


_NO_ARGUMENT = _argument(np.zeros_like)
MOVES = ("shear_x", "shear_y", "translate_x", "translate_y", "rotate")
FACTORS = ("brightness", "saturation", "contrast", "sharpness")


def _of_torchvision(*, shear, shift, degrees, factor, lost_bits) -> dict[str, _Operation]:
    return {
        "identity": _NO_ARGUMENT,
        "shear_x": _shear_x(shear),
        "shear_y": _shear_y(shear),
        "translate_x": _shift_x(shift),
        "translate_y": _shift_y(shift),
        "rotate": _rotate(degrees),
        **{name: _factor(factor) for name in FACTORS},
        "posterize": _argument(lambda strength: 2 ** np.round(lost_bits * strength)),
        "solarize": _argument(lambda strength: 255 * (1 - strength)),
        "autocontrast": _NO_ARGUMENT,
        "equalize": _NO_ARGUMENT,
    }


# The operations of each policy; each is drawn with the same probability.
SPACES: Mapping[str, Mapping[str, _Operation]] = {
    "randaugment": _of_torchvision(
        shear=0.3,
        shift=lambda strength, side: np.floor(150 / 331 * side * strength),
        degrees=30,
        factor=0.9,
        lost_bits=4,
    ),
    "trivialaugment": _of_torchvision(
        shear=0.99,
        shift=lambda strength, side: np.floor(32 * strength),
        degrees=135,
        factor=0.99,
        lost_bits=6,
    ),
    "randaugment_timm": {
        "autocontrast": _NO_ARGUMENT,
        "equalize": _NO_ARGUMENT,
        "invert": _NO_ARGUMENT,
        "rotate": _rotate(30),
        "posterize": _argument(lambda strength: 2 ** (4 + np.floor(4 * strength))),
        "solarize": _argument(lambda strength: 256 - np.floor(256 * strength)),
        "solarize_add": _argument(lambda strength: np.floor(110 * strength)),
        **{name: _factor(0.9, least=0.1) for name in FACTORS},
        "shear_x": _shear_x(0.3),
        "shear_y": _shear_y(0.3),
        "translate_x": _shift_x(lambda strength, side: 0.45 * side * strength),
        "translate_y": _shift_y(lambda strength, side: 0.45 * side * strength),
    },
}
