"""The figures of numbers against loops, and what is undefined."""

import math

import numpy as np
import pytest

from tfaccel.experiment.evaluate.regression import of_numbers, relative_errors


def numbers(num=40, seed=0):
    """True numbers and answers of three targets in different units."""
    random = np.random.default_rng(seed)
    true = random.normal((5, 100, -3), (1, 40, 0.1), (num, 3)).astype(np.float32)
    said = true + random.normal(0, (0.5, 30, 0.2), (num, 3))
    return true, said.astype(np.float32)


def test_each_target_is_what_loops_give():
    true, said = numbers()
    found = of_numbers(true, said, np.ones(40, bool))
    for each in range(3):
        own, one = true[:, each].astype(float).tolist(), said[:, each].astype(float).tolist()
        mean = sum(own) / 40
        squares = sum((a - b) ** 2 for a, b in zip(own, one, strict=True))
        spread = sum((a - mean) ** 2 for a in own)
        wanted = sum(abs(a - b) for a, b in zip(own, one, strict=True)) / 40
        assert found.mae[each] == pytest.approx(wanted)
        assert found.rmse[each] == pytest.approx(math.sqrt(squares / 40))
        assert found.r2[each] == pytest.approx(1 - squares / spread)
        assert found.mean[each] == pytest.approx(mean)
        assert found.std[each] == pytest.approx(math.sqrt(spread / 40))
    assert found.r2[2] < 0  # worse than the mean of all
    assert found.mean_absolute_error == pytest.approx(found.mae.mean())
    assert found.mean_r2 == pytest.approx(found.r2.mean())


def test_an_images_error_counts_each_target_in_its_standard_deviations():
    true, said = numbers()
    found = relative_errors(true, said, of_numbers(true, said, np.ones(40, bool)).std)
    for index in range(40):
        own = [
            abs(float(true[index, each]) - float(said[index, each]))
            / np.std(true[:, each].astype(float))
            for each in range(3)
        ]
        np.testing.assert_allclose(found[index], own)


def test_a_target_with_no_spread_has_no_r2_and_spoils_no_mean():
    true, said = numbers()
    true[:, 1] = 0.1  # whose mean over 40 differs from it by rounding
    found = of_numbers(true, said, np.ones(40, bool))
    assert math.isnan(found.r2[1])
    assert found.std[1] == 0
    assert found.mean_r2 == pytest.approx((found.r2[0] + found.r2[2]) / 2)
    errors = relative_errors(true, said, found.std)
    np.testing.assert_allclose(errors[:, 1], np.abs(said[:, 1] - np.float32(0.1)), rtol=1e-5)


def test_one_image_has_errors_alone():
    found = of_numbers(np.array([[3.0, 4.0]]), np.array([[2.0, 4.5]]), np.ones(1, bool))
    np.testing.assert_allclose(found.mae, [1, 0.5])
    np.testing.assert_allclose(found.rmse, [1, 0.5])
    assert np.isnan(found.r2).all()
    assert math.isnan(found.mean_r2)
    np.testing.assert_array_equal(found.std, 0)


def test_outputs_that_are_nan_are_in_no_error():
    true, said = numbers()
    known = np.ones(40, bool)
    known[::9] = False
    said[::9, 1] = np.nan
    found, clean = of_numbers(true, said, known), of_numbers(true[known], said[known], known[known])
    for name in ("mae", "rmse", "r2"):
        np.testing.assert_array_equal(getattr(found, name), getattr(clean, name))
    np.testing.assert_allclose(found.std, true.astype(float).std(axis=0))  # of all images
    nothing = of_numbers(true, said, np.zeros(40, bool))
    assert np.isnan(nothing.mae).all()
    assert np.isnan(nothing.r2).all()
    assert math.isnan(nothing.mean_absolute_error)
