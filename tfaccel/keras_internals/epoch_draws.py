"""Lets a `tf.data.Dataset` draw new random numbers in each pass over its data.

Takes a data set whose operations draw from the global seed, such as those of `tf.image` in a `map`;
gives one pass after another. If a seed is set, and `tfaccel.setup` always sets one, the operations
of a new iterator draw the same numbers as those of the last one (only `shuffle` does not). Every
epoch would have the same augmentation (TensorFlow 2.21). Within one iterator they draw new numbers,
so one iterator gives all passes.

    stream = Stream(dataset, num_batches=None, strategy=strategy)
    for batch in stream.one_pass():
        ...
"""

import itertools
from collections.abc import Callable, Iterator

import tensorflow as tf

from tfaccel.keras_internals.datasets import operations_of
from tfaccel.keras_internals.rank_order import in_rank_order

# TensorFlow's random operations whose names do not begin with Random.
_DRAW = {"Multinomial", "TruncatedNormal", "ParameterizedTruncatedNormal"}
_DRAW |= {"SampleDistortedBoundingBox", "SampleDistortedBoundingBoxV2"}


def draws(dataset: tf.data.Dataset) -> bool:
    """Returns whether an operation of the data set draws random numbers."""
    return any(each.startswith("Random") or each in _DRAW for each in operations_of(dataset))


def calls_python(dataset: tf.data.Dataset) -> bool:
    """Returns whether the data set calls Python, which is not possible while the process ends."""
    return any("PyFunc" in each for each in operations_of(dataset))


class Stream:
    """Gives all passes over a data set from one iterator.

    After a pass that is not read to its end, the next pass has a new iterator.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        *,
        num_batches: int | None,
        strategy: tf.distribute.Strategy,
        options: tf.distribute.InputOptions | None = None,
    ):
        """Reads nothing yet.

        Args:
          dataset: of batches; finite.
          num_batches: of a pass; None if that is not known beforehand.
          strategy: its replicas get the batches.
          options: say where the batches lie; None for the replicas' devices.
        """
        self._num_batches, self._strategy = num_batches, strategy
        if num_batches is None:
            dataset = dataset.enumerate().map(_with_number)
        dataset = in_rank_order(dataset.repeat(), strategy)
        self._repeated = strategy.experimental_distribute_dataset(dataset, options)
        self._pass = None

    @property
    def element_spec(self):
        """The spec of a batch."""
        spec = self._repeated.element_spec
        return spec if self._num_batches is not None else spec[0]

    def one_pass(self, has_unread: Callable[[], bool] = lambda: False) -> Iterator:
        """Yields the batches of the next pass.

        Args:
          has_unread: tells when the pass after this one begins whether its reader, which may read
            ahead, has dropped batches of this one.
        """
        last = self._pass
        batches, first = (iter(self._repeated), None) if last is None or last.is_cut() else last.end
        # A pass that is cut may still be read by a thread, so that each has a state of its own.
        self._pass = own = _Pass(has_unread)
        if self._num_batches is not None:
            for left, batch in zip(reversed(range(self._num_batches)), batches, strict=False):
                if not left:
                    own.end = batches, None  # set before the yield: the last batch ends the pass
                yield batch
        else:
            yield from self._until_next_pass(own, batches, first)

    def _until_next_pass(self, own: "_Pass", batches: Iterator, first) -> Iterator:
        ahead = [] if first is None else [first]
        first = None
        for index, (batch, numbers) in enumerate(itertools.chain(ahead, batches)):
            number = self._strategy.experimental_local_results(numbers)[0].numpy()
            if index > 0 and len(number) and number[0] == 0:
                first = batch, numbers  # the first batch of the next pass
                break
            yield batch
        own.end = batches, first


class _Pass:
    """The state of a pass.

    Attributes:
      end: the iterator, and the first batch of the next pass if it was read; None before the end.
    """

    def __init__(self, has_unread: Callable[[], bool]):
        self._has_unread, self.end = has_unread, None

    def is_cut(self) -> bool:
        """Returns whether the pass was not read to its end."""
        return self.end is None or self._has_unread()


def _with_number(number: tf.Tensor, *batch):
    """Returns a batch, and its number in the pass for each row, because rows go to replicas."""
    batch = batch if len(batch) > 1 else batch[0]
    rows = tf.shape(tf.nest.flatten(batch)[0])[0]
    return batch, tf.fill([rows], number)
