"""Draws the images of an epoch by class, so that rare classes come more often.

An epoch has as many rows as there are images, so its steps are the same as without sampling. Each
class has a share of them. Its images come in shuffled passes: each image of the class once, then
each once more in another order. An epoch continues the passes where the epoch before it stopped. So
no image of a class comes again before all others of the class have come, and the images of frequent
classes all come in their turn. All of this depends on the labels, the seed and the epoch alone.

    sampling = ClassSampling("balanced", labels)
    sampling.counts(epoch=3)            # [classes] int64, equal or differing by one
    sampling.order(seed=0, epoch=3)     # [num_examples] int64, the images in the epoch's order

Needs no TensorFlow.
"""

import math
from collections.abc import Sequence

import numpy as np

from tfaccel.common.redact import shown

MOST_SHOWN, SHOWN_AT_ENDS = 8, 3  # classes in one line of the log
# SplitMix64 of Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195: its step and its mixing.
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIXING = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_KIND = 8  # the kind of these draws, beside those in draws.py


class ClassSampling:
    """How many images of each class an epoch has, and which.

    Attributes:
      how: "balanced" for equal shares, or "square_root" for shares proportional to the square root
        of the number of images (Mahajan et al. 2018, arXiv:1805.00932; as a rule for classes, Kang
        et al. 2020, arXiv:1910.09217).
      classes: [classes] int64, the labels that occur, in order.
      num_images: [classes] int64, the images of each of them in the data.
    """

    def __init__(self, how: str, labels: np.ndarray):
        """Takes the rule and the label of each example, [num_examples] of whole numbers."""
        self.how = how
        self.classes, self.num_images = np.unique(labels, return_counts=True)
        self._by_class = np.argsort(labels, kind="stable")
        self._first = np.cumsum(self.num_images) - self.num_images  # of a class, in _by_class
        # The shares are whole numbers, so that they are exactly the same on all machines.
        weights = [
            1 if how == "balanced" else math.isqrt(n << 32) for n in self.num_images.tolist()
        ]
        self._weights, self._total = np.array(weights, np.int64), sum(weights)
        # The golden ratio spreads the epochs' turns evenly. Without a common divisor, each turn
        # comes once in `_total` epochs.
        turn = round(self._total * (math.sqrt(5) - 1) / 2) or 1
        while math.gcd(turn, self._total) > 1:
            turn += 1
        self._turn = turn
        self._reached = 0, np.zeros(len(weights), np.int64)  # see `_drawn_before`

    def __len__(self):
        """Returns the number of examples, and of rows in an epoch."""
        return len(self._by_class)

    def __repr__(self):
        """Returns the rule, which checkpoints hold and workers compare beside the labels."""
        return self.how

    def members(self) -> list[np.ndarray]:
        """Returns each class's images, in the order of the data: [images of the class] int64."""
        return np.split(self._by_class, self._first[1:])

    def counts(self, epoch: int) -> np.ndarray:
        """Returns the rows of each class in an epoch: [classes] int64; their sum is `len(self)`.

        A class's exact share is mostly no whole number, so that an epoch has one row more than the
        whole part of the share, or none. Over the epochs the mean is the exact share. (This is
        systematic sampling: the turn of the epoch moves the places at which a row is added.)
        """
        whole, rest = np.divmod(len(self) * self._weights, self._total)
        places = np.cumsum(rest) + epoch * self._turn % self._total
        return whole + np.diff(places // self._total, prepend=0)

    def order(self, *, seed: int, epoch: int) -> np.ndarray:
        """Returns the images of an epoch, in its order: [num_examples] int64.

        For 1.2 million images in 1,000 classes, of 160 to 160,000 images each, it takes 0.4 to 0.6
        s and 91 MiB on one CPU core (2026-11-30).
        """
        rows, before = self.counts(epoch), self._drawn_before(epoch)
        first_pass = before // self.num_images
        num_passes = -(-(before + rows) // self.num_images) - first_pass
        num_passes = np.where(rows > 0, num_passes, 0)
        # A block is one pass of one class. Blocks are in the order of the classes and passes.
        class_of = np.repeat(np.arange(len(rows)), num_passes)
        passes = first_pass[class_of] + _within(num_passes)
        sizes = self.num_images[class_of]
        block_of = np.repeat(np.arange(len(class_of)), sizes)
        images = self._by_class[np.repeat(self._first[class_of], sizes) + _within(sizes)]
        images = images[_shuffled(images, passes, block_of, seed)]
        # Each class's rows: what is left of its first pass, the whole passes, and a part.
        drawn = num_passes * self.num_images
        start = np.cumsum(drawn) - drawn + before - first_pass * self.num_images
        chosen = images[np.repeat(start, rows) + _within(rows)]
        return chosen[np.random.default_rng([seed, epoch]).permutation(len(chosen))]

    def in_words(self, class_names: Sequence[str]) -> str:
        """Returns the images of each class in the data, and in an epoch of rows, by frequency."""
        order = np.argsort(-self.num_images, kind="stable").tolist()
        left = len(order) - 2 * SHOWN_AT_ENDS
        rows = self.counts(0)
        said = [
            f"{shown(class_names[self.classes[each]], keep='')}: {self.num_images[each]:,} -> "
            f"{rows[each]:,}"
            for each in order
        ]
        if len(order) > MOST_SHOWN:
            said[SHOWN_AT_ENDS:-SHOWN_AT_ENDS] = [f"{left:,} classes between"]
        times = rows[order[-1]] / self.num_images[order[-1]]
        return f"{', '.join(said)}; an image of the rarest class comes {times:.3g} times an epoch"

    def _drawn_before(self, epoch: int) -> np.ndarray:
        """Returns the rows of each class in all earlier epochs, [classes] int64."""
        reached, rows = self._reached  # one value, because several threads may call it
        if reached > epoch:
            reached, rows = 0, np.zeros_like(rows)
        for each in range(reached, epoch):
            rows = rows + self.counts(each)
        self._reached = epoch, rows
        return rows


def _within(sizes: np.ndarray) -> np.ndarray:
    """Returns 0, 1, ... for each of several groups with the given sizes: [sum of sizes] int64."""
    return np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)


def _shuffled(
    images: np.ndarray, passes: np.ndarray, block_of: np.ndarray, seed: int
) -> np.ndarray:
    """Returns indices that shuffle the images within each block: [rows] int64.

    An image's place in its pass is that of a random number, which depends on the seed, the pass and
    the image alone. So an epoch knows the order of a pass that an earlier epoch began.

    Args:
      images: [rows] int64.
      passes: [blocks] int64, the number of each block's pass.
      block_of: [rows] int64, the block of each row, in order.
      seed: the seed.
    """
    (start,) = np.random.SeedSequence([seed, _KIND]).generate_state(1, np.uint64)
    of_pass = _mixed(start + passes.astype(np.uint64) * _STEP)
    keys = _mixed(of_pass[block_of] + images.astype(np.uint64) * _STEP)
    # The number of the block in the highest bits makes one sort of all blocks' sorts.
    bits = np.uint64(len(passes).bit_length())
    keys = (block_of.astype(np.uint64) << (np.uint64(64) - bits)) | (keys >> bits)
    return np.argsort(keys, kind="stable")


def _mixed(numbers: np.ndarray) -> np.ndarray:
    for shift, factor in _MIXING:
        numbers = (numbers ^ (numbers >> np.uint64(shift))) * np.uint64(factor)
    return numbers ^ (numbers >> np.uint64(31))
