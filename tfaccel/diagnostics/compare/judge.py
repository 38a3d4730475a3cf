"""Whether a variant is faster beyond the spread, and whether its losses agree. Pure arithmetic.

is_faster([110, 112], [100, 102], noise=0.01)    # True
apart(losses, reference) <= tolerance_of(apart(losses_of_another_seed, reference))

How the tolerance comes about: the plain variant is trained twice, by the seed and by the next one,
which changes weights, order and augmentation. An option's losses may be twice as far from the plain
one's as that: it is one draw, as good as any other, and where dropout draws otherwise (it does
under XLA, and in another dtype) an option is such a draw, too. And as both runs take turns, the
difference between their speeds is what the same thing twice differs by, from one process to
another: a gain must be larger.
"""

import itertools
import math
import statistics
from collections.abc import Sequence

WINDOWS = 5
LEAST_SCALE = 0.25
SEEDS = 2
# Of the tolerance. bfloat16 has 8 bits, 0.4% from one number to the next, and two seeds may come
# out near each other by chance.
FLOOR = 0.01


def is_faster(rates: Sequence[float], others: Sequence[float], *, noise: float) -> bool:
    """Returns whether most of the rates are above most of the others, and by enough.

    The middle halves must not overlap: one stretch that something else disturbed decides nothing.
    Of five each, in turn, they are apart so by chance in 1 of 10 cases where both are equally fast,
    without `noise`; the best is measured against the first once more in the end.

    Args:
      rates: images per second of some stretches.
      others: likewise, of what it is compared with.
      noise: by which part the medians must differ at least.
    """
    return quartiles(rates)[0] > quartiles(others)[2] and times(rates, others) > 1 + noise


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns the first, the second and the third: the middle half is between first and third."""
    if len(values) == 1:
        return (values[0],) * 3
    return tuple(statistics.quantiles(values, n=4, method="inclusive"))


def times(rates: Sequence[float], others: Sequence[float]) -> float:
    """Returns the ratio of the medians."""
    return statistics.median(rates) / statistics.median(others)


def noise_of(rates: Sequence[float], again: Sequence[float]) -> float:
    """Returns by which part the same thing, measured twice, differs."""
    return abs(times(again, rates) - 1)


def apart(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Returns the largest distance between two curves, as a part of the reference.

    Both are cut into five parts, whose means are compared: single steps may jump. What is less than
    a quarter of the reference's largest mean counts as that: small losses have noisy ratios.

    Args:
      losses: of each step.
      reference: likewise; compared as far as both go.

    Returns:
      A part of 1; infinity where a loss is infinite or NaN, or there is none.
    """
    length = min(len(losses), len(reference))
    if not length or not all(map(math.isfinite, (*losses, *reference))):
        return math.inf
    return max(map(abs, distances(losses[:length], reference[:length])))


def distances(losses: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Returns how far each part of one curve is above the other's, both of one length: see `apart`.

    Args:
      losses: of each step.
      reference: likewise.
    """
    wanted = means(reference, WINDOWS)
    least = LEAST_SCALE * max(map(abs, wanted)) or 1.0
    pairs = zip(means(losses, WINDOWS), wanted, strict=True)
    return [(each - other) / max(abs(other), least) for each, other in pairs]


def means(losses: Sequence[float], most: int) -> list[float]:
    """Returns the means of so many parts that follow each other; of each loss, if they are less."""
    count = min(most, len(losses))
    bounds = [round(each * len(losses) / count) for each in range(count + 1)] if count else []
    return [statistics.fmean(losses[first:last]) for first, last in itertools.pairwise(bounds)]


def tolerance_of(seeds_apart: float) -> float:
    """Returns how far losses may be apart.

    Args:
      seeds_apart: how far the plain variant is from itself with another seed.
    """
    return max(FLOOR, SEEDS * seeds_apart) if math.isfinite(seeds_apart) else FLOOR
