"""The operations and magnitudes of RandAugment and TrivialAugment."""

import numpy as np
import pytest

from tfaccel.config import AugmentConfig
from tfaccel.data.draws import draw
from tfaccel.data.policies import CODES, SPACES

SIZE = (40, 60)
IDENTITY = [1, 0, 0, 0, 1, 0]


def drawn(rows=4000, **settings):
    augment = AugmentConfig(**settings)
    where = {"seed": 0, "epoch": 0, "step": 0, "positions": np.arange(rows)}
    return draw(augment, image_size=SIZE, **where)["policy"]


def arguments(policy, strength, sign=1.0):
    """Each operation's argument, or its affine map, at a strength of 0..1."""
    found = {}
    for name, operation in SPACES[policy].items():
        (found[name],) = operation(np.array([strength]), np.array([sign]), SIZE)
    return found


# Written down from torchvision 0.20's RandAugment and TrivialAugmentWide, and timm 1.0's increasing
# operations, at half and at full strength.
@pytest.mark.parametrize(
    ("policy", "strength", "expected"),
    [
        (
            "randaugment",
            0.5,
            {"shear": 0.15, "shift": (9, 13), "degrees": 15, "factor": (1.45, 0.55)}
            | {"posterize": 2**2, "solarize": 127.5},
        ),
        (
            "randaugment",
            1.0,
            {"shear": 0.3, "shift": (18, 27), "degrees": 30, "factor": (1.9, 0.1)}
            | {"posterize": 2**4, "solarize": 0},
        ),
        (
            "trivialaugment",
            1.0,
            {"shear": 0.99, "shift": (32, 32), "degrees": 135, "factor": (1.99, 0.01)}
            | {"posterize": 2**6, "solarize": 0},
        ),
        (
            "randaugment_timm",
            0.7,
            {"shear": 0.21, "shift": (12.6, 18.9), "degrees": 21, "factor": (1.63, 0.37)}
            | {"posterize": 2**6, "solarize": 256 - 179, "solarize_add": 77},
        ),
        (
            "randaugment_timm",
            1.0,
            {"shear": 0.3, "shift": (18, 27), "degrees": 30, "factor": (1.9, 0.1)}
            | {"posterize": 2**8, "solarize": 0, "solarize_add": 110},
        ),
    ],
)
def test_magnitudes(policy, strength, expected):
    one, other = arguments(policy, strength), arguments(policy, strength, sign=-1.0)
    down, right = expected["shift"]
    for found, sign in ((one, 1), (other, -1)):
        moves = {
            "shear_x": [1, sign * expected["shear"], 0, 0, 1, 0],
            "shear_y": [1, 0, 0, sign * expected["shear"], 1, 0],
            "translate_x": [1, 0, sign * right, 0, 1, 0],
            "translate_y": [1, 0, 0, 0, 1, sign * down],
        }
        for name, matrix in moves.items():
            np.testing.assert_allclose(found[name], matrix, atol=1e-9, err_msg=name)
        turn = found["rotate"].reshape(2, 3)
        degrees = np.degrees(np.arctan2(turn[1, 0], turn[0, 0]))
        np.testing.assert_allclose(degrees, sign * expected["degrees"])
        np.testing.assert_allclose(turn @ [30, 20, 1], [30, 20])  # the centre stays
    for name in ("brightness", "saturation", "contrast", "sharpness"):
        np.testing.assert_allclose([one[name], other[name]], expected["factor"])
    for name in ("posterize", "solarize", "solarize_add"):
        if name in expected:
            np.testing.assert_allclose(one[name], expected[name], err_msg=name)


@pytest.mark.parametrize("policy", SPACES)
def test_each_operation_is_as_frequent(policy):
    both = drawn(policy=policy)
    assert both.shape == (4000, 1 if policy == "trivialaugment" else 2, 8)
    assert both.dtype == np.float32
    for found in both.transpose(1, 0, 2):
        counts = np.bincount(found[:, 6].astype(int), minlength=len(CODES))
        share, moves = 1 / len(SPACES[policy]), 5
        done = 0.5 if policy == "randaugment_timm" else 1.0
        colors = [name for name in SPACES[policy] if name in CODES and name != "identity"]
        for name in colors:
            np.testing.assert_allclose(counts[CODES.index(name)] / 4000, share * done, atol=0.025)
        # Moves have the code of "identity", and their own maps.
        np.testing.assert_allclose(counts[0] / 4000, 1 - done * share * len(colors), atol=0.04)
        moved = (found[:, :6] != IDENTITY).any(axis=1).mean()
        np.testing.assert_allclose(moved, moves * share * done, atol=0.04)


def test_the_operations_of_an_image_are_drawn_apart():
    first, second = drawn(policy="randaugment").transpose(1, 0, 2)[..., 6]
    np.testing.assert_allclose((first == second).mean(), 9 / 14**2 + (5 / 14) ** 2, atol=0.15)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.08
    assert drawn(policy="randaugment", policy_operations=3).shape[1] == 3


def test_magnitudes_vary_where_they_should():
    def factors(**settings):
        found = drawn(**settings).reshape(-1, 8)
        return found[found[:, 6] == CODES.index("brightness"), 7]

    fixed = factors(policy="randaugment", policy_magnitude=10.0)
    np.testing.assert_allclose(np.unique(fixed), [0.7, 1.3], rtol=1e-6)
    np.testing.assert_allclose((fixed > 1).mean(), 0.5, atol=0.15)
    uniform = np.abs(factors(policy="trivialaugment") - 1) / 0.99 * 30
    assert len(np.unique(np.round(uniform))) == 31
    np.testing.assert_allclose(uniform, np.round(uniform), atol=1e-4)
    wide = factors(policy="randaugment_timm", policy_magnitude=6.0, policy_magnitude_std=0.5)
    magnitude = np.abs(wide - 1) / 0.9 * 10
    np.testing.assert_allclose(magnitude.mean(), 6, atol=0.2)
    np.testing.assert_allclose(magnitude.std(), 0.5, atol=0.15)
    most = factors(policy="randaugment_timm", policy_magnitude=10.0, policy_magnitude_std=2.0)
    assert np.abs(most - 1).max() <= 0.9 + 1e-6  # clipped
