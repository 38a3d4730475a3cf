"""Fetches the files of the batches that come next, while the batch before them is made.

ahead = Ahead(source, feed)
ahead(7)                  # fetches what batches 7, 8, ... need, and returns at once
"""

import math

from tfaccel.data.feed import Feed

LEAST_BATCHES, LEAST_IMAGES = 2, 512  # of one replica


class Ahead:
    """Fetches the files of one replica's next batches; does nothing for files of this host."""

    def __init__(self, source, feed: Feed):
        """Takes the ImageSource, and the feed of the replica."""
        parts = filter(None, (source.images, source.targets))
        self._parts = [each for each in parts if each.reader is not None]
        self._feed, self._next = feed, 0
        rows = feed.plan.rows_per_replica
        self._num_batches = max(LEAST_BATCHES, math.ceil(LEAST_IMAGES / rows))

    def __call__(self, number: int) -> None:
        """Begins to fetch what batch `number` and those after it need."""
        if not self._parts:
            return
        stop = int(number) + self._num_batches
        for each in range(max(self._next, int(number)), stop):
            ids = self._feed.rows(each).ids
            for part in self._parts:
                part.ahead(ids)
        self._next = max(self._next, stop)
