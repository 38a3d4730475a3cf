"""Chooses the checkpoints that stay, the last and the best. The store removes the others.

to_keep({Name(100, True): 0.7, Name(200, True): None}, keep_last=1, keep_best=1, ...)
"""

import math
from collections.abc import Mapping

from tfaccel.training.checkpoint.folder import Name


def to_keep(
    scores: Mapping[Name, float | None], *, keep_last: int, keep_best: int, largest_is_best: bool
) -> set[Name]:
    """Returns the checkpoints that stay.

    Args:
      scores: of each checkpoint; None or NaN if it has no score.
      keep_last: how many of the newest stay, at least 1. An untested checkpoint is removed and does
        not count if there is a tested one of the same step.
      keep_best: how many with the best finite scores stay; of equal scores the newest.
      largest_is_best: True if the best score is the largest, False if it is the smallest.
    """
    last = sorted(
        each for each in scores if each.tested or each._replace(tested=True) not in scores
    )
    best = best_first({each: scores[each] for each in last}, largest_is_best=largest_is_best)
    return {*last[-keep_last:], *best[:keep_best]}


def largest_is_best(monitor: str) -> bool:
    """Returns whether the largest value of this log is the best. Of a loss or error it is not."""
    return not monitor.endswith(("loss", "error"))


def best_first(scores: Mapping[Name, float | None], *, largest_is_best: bool) -> list[Name]:
    """Returns the checkpoints with a finite score, the best first; of equal scores the newest."""
    finite = [name for name, each in scores.items() if each is not None and math.isfinite(each)]
    sign = -1 if largest_is_best else 1
    return sorted(sorted(finite, reverse=True), key=lambda each: sign * scores[each])
