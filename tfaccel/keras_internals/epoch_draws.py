"""The random numbers that a `tf.data.Dataset` draws, one pass after another.

Takes a data set whose operations draw by the global seed, as those of `tf.image` in a `map` do;
gives passes that draw on. With a seed, which `tfaccel.setup` always sets, a new iterator's
operations draw what the last one's did (`shuffle` alone does not): every epoch would have the same
augmentation (TensorFlow 2.21). Within one iterator they go on, so that one gives all passes.

    stream = Stream(dataset, num_batches=None, strategy=strategy)
    for batch in stream.one_pass():
        ...
"""

import itertools
from collections.abc import Iterator

import tensorflow as tf

from tfaccel.keras_internals.datasets import operations_of

# Of TensorFlow's operations whose names do not begin with Random.
_DRAW = {"Multinomial", "TruncatedNormal", "ParameterizedTruncatedNormal"}
_DRAW |= {"SampleDistortedBoundingBox", "SampleDistortedBoundingBoxV2"}


def draws(dataset: tf.data.Dataset) -> bool:
    """Returns whether an operation of the data set draws random numbers by the seed."""
    return any(each.startswith("Random") or each in _DRAW for each in operations_of(dataset))


def calls_python(dataset: tf.data.Dataset) -> bool:
    """Returns whether the data set calls Python, which none may do as the process ends."""
    return any("PyFunc" in each for each in operations_of(dataset))


class Stream:
    """All passes over a data set, by one iterator.

    A pass that is left half way is followed by one of a new iterator.
    """

    def __init__(
        self, dataset: tf.data.Dataset, *, num_batches: int | None, strategy: tf.distribute.Strategy
    ):
        """Reads nothing yet.

        Args:
          dataset: of batches; it ends.
          num_batches: of a pass; None where that is not known beforehand.
          strategy: whose replicas take the batches.
        """
        self._num_batches, self._strategy = num_batches, strategy
        if num_batches is None:
            dataset = dataset.enumerate().map(_with_number)
        self._repeated = strategy.experimental_distribute_dataset(dataset.repeat())
        self._batches, self._first, self._is_within = None, None, False

    @property
    def element_spec(self):
        """The spec of a batch."""
        spec = self._repeated.element_spec
        return spec if self._num_batches is not None else spec[0]

    def one_pass(self) -> Iterator:
        """Yields the batches of the next pass."""
        if self._batches is None or self._is_within:
            self._batches, self._first = iter(self._repeated), None
        self._is_within = True
        if self._num_batches is not None:
            for left, batch in zip(reversed(range(self._num_batches)), self._batches, strict=False):
                self._is_within = left > 0  # nobody may ask for more than there is
                yield batch
        else:
            yield from self._until_the_next()
            self._is_within = False

    def _until_the_next(self) -> Iterator:
        ahead = [] if self._first is None else [self._first]
        self._first = None
        for index, (batch, numbers) in enumerate(itertools.chain(ahead, self._batches)):
            number = self._strategy.experimental_local_results(numbers)[0].numpy()
            if index > 0 and len(number) and number[0] == 0:
                self._first = batch, numbers  # of the next pass
                return
            yield batch


def _with_number(number: tf.Tensor, *batch):
    """Returns a batch, and its number in the pass for each of its rows: that is shared out too."""
    batch = batch if len(batch) > 1 else batch[0]
    rows = tf.shape(tf.nest.flatten(batch)[0])[0]
    return batch, tf.fill([rows], number)
