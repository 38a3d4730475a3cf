"""Decides whether a variant is faster beyond the spread, and whether its losses agree.

is_faster([110, 112], [100, 102], noise=0.01)    # True
apart(losses, reference) <= tolerance_of(apart(losses_of_another_seed, reference))

The tolerance for losses is measured. The plain variant is trained twice, with the config's seed and
with the next seed, which changes the weights, the order and the augmentation. The losses of another
variant may differ from the plain variant's by twice that distance. The reason: each seed is one
random draw, and a variant can be another draw, because dropout draws other numbers under XLA and in
another dtype.

The noise in speed is measured with the same two processes. They take turns, so the difference
between their speeds is the difference from one process to another. A gain must be larger.
"""

import itertools
import math
import statistics
from collections.abc import Sequence

WINDOWS = 5
LEAST_SCALE = 0.25
SEEDS = 2
# The least tolerance, for two reasons: bfloat16 has 8 bits, so neighbouring numbers differ by 0.4%,
# and the losses of two seeds may be close to each other by chance.
FLOOR = 0.01


def is_faster(rates: Sequence[float], others: Sequence[float], *, noise: float) -> bool:
    """Checks whether the middle half of the rates is above that of the others, by enough.

    The middle halves must not overlap, so a single disturbed stretch decides nothing. With five
    stretches each, in turn, and without `noise`, two equally fast variants pass this test by chance
    in 1 of 10 cases. The comparison therefore measures the best against the first again at the end.

    Args:
      rates: images per second of each stretch.
      others: images per second of each stretch of the variant to compare with.
      noise: the least relative gain that counts, for example 0.01 for 1%.
    """
    return quartiles(rates)[0] > quartiles(others)[2] and times(rates, others) > 1 + noise


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns the three quartiles; the middle half lies between the first and the third."""
    if len(values) == 1:
        return (values[0],) * 3
    return tuple(statistics.quantiles(values, n=4, method="inclusive"))


def times(rates: Sequence[float], others: Sequence[float]) -> float:
    """Returns the median of the rates, divided by the median of the others."""
    return statistics.median(rates) / statistics.median(others)


def noise_of(rates: Sequence[float], again: Sequence[float]) -> float:
    """Returns the relative difference between two measurements of the same variant."""
    return abs(times(again, rates) - 1)


def apart(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Returns the largest relative distance between two loss curves.

    Both curves are cut into five parts, and the means of the parts are compared, because the losses
    of single steps may jump. The distance is relative to the reference's mean, but to at least a
    quarter of the reference's largest mean, because ratios of small losses are noisy.

    Args:
      losses: the loss of each step.
      reference: the reference's loss of each step. The longer curve is cut to the shorter.

    Returns:
      The distance, for example 0.01 for 1%; infinity if a loss is infinite or NaN, or if a curve is
      empty.
    """
    length = min(len(losses), len(reference))
    if not length or not all(map(math.isfinite, (*losses, *reference))):
        return math.inf
    return max(map(abs, distances(losses[:length], reference[:length])))


def distances(losses: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Returns the relative distance of each part, with its sign, for curves of equal length.

    `apart` explains the parts and the distance.
    """
    wanted = means(reference, WINDOWS)
    least = LEAST_SCALE * max(map(abs, wanted)) or 1.0
    pairs = zip(means(losses, WINDOWS), wanted, strict=True)
    return [(each - other) / max(abs(other), least) for each, other in pairs]


def means(losses: Sequence[float], most: int) -> list[float]:
    """Returns the means of at most `most` consecutive parts of about equal length."""
    count = min(most, len(losses))
    bounds = [round(each * len(losses) / count) for each in range(count + 1)] if count else []
    return [statistics.fmean(losses[first:last]) for first, last in itertools.pairwise(bounds)]


def tolerance_of(seeds_apart: float) -> float:
    """Returns the largest distance at which losses agree, given that between two seeds."""
    return max(FLOOR, SEEDS * seeds_apart) if math.isfinite(seeds_apart) else FLOOR
