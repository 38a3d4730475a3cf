"""A stream whose batches Python begins, tf.data goes on with, and the replica's device finishes.

Takes what to do at each of the three places; gives the endless iterator that every loader is.

    stream = HostStream(begin, finish, placement=placement)
    image, label = next(stream)
"""

import traceback
import types
import weakref
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import tensorflow as tf

from tfaccel.data.endings import ender, is_collecting
from tfaccel.data.placement import Placement, untuned

PREFETCH_BATCHES = 2  # made ahead of the step
CPU = "/cpu:0"  # where tf.data runs, whichever logical device the replica has


class HostStream(Iterator):
    """An endless iterator over one replica's batches, which are made ahead on the CPU.

    Yields what `finish` returns, on the replica's device.
    """

    def __init__(
        self,
        begin: Callable[[int], dict[str, np.ndarray]],
        finish: Callable | None,
        *,
        placement: Placement,
        num_rows_varies: bool = False,
        each_row: Callable | None = None,
        resident: Mapping[str, tf.Tensor] = types.MappingProxyType({}),
    ):
        """Makes the first batch in Python, for its shapes, and starts the threads.

        Args:
          begin: returns the arrays, by name, of batch number 0, 1, 2, ...: of fixed shapes and
            dtypes, with a row for each example; dtype object for bytes. Called in several threads.
            It must not hold the stream, which would then never be freed.
          finish: turns the tensors of those arrays, by name, into a batch; None to leave them as
            they are. TensorFlow keeps it for good: it must not hold what should be freed.
          placement: the replica's device, and how many threads.
          num_rows_varies: whether batches differ in their first axis.
          each_row: turns the tensors of one row into other tensors, in parallel; None to leave
            batches as they begin. Kept for good as well.
          resident: what is on the replica's GPU already; `finish` is given it with each batch.

        Raises:
          Whatever `begin` raises at its first batch.
        """
        self._device, self._resident, self._finish = placement.device, resident, None
        finish = finish and tf.function(finish, autograph=False)
        like = begin(0)
        with tf.device(CPU):
            dataset = _numbered(weakref.ref(begin), like, num_rows_varies)
            if each_row is not None:
                rows = len(next(iter(like.values())))
                each_row = tf.function(each_row, autograph=False)
                dataset = dataset.unbatch()
                dataset = dataset.map(each_row, num_parallel_calls=placement.num_threads)
                dataset = dataset.batch(rows, drop_remainder=True)
            if self._device.cuda_ordinal is None:
                dataset = dataset.map(finish) if finish else dataset
                dataset = dataset.prefetch(PREFETCH_BATCHES)
            dataset = untuned(dataset.with_options(_threads(placement.num_threads)))
        if self._device.cuda_ordinal is not None:
            # As bytes, a quarter of what float32 would be; the step's own kernels run meanwhile.
            to_device = tf.data.experimental.prefetch_to_device(self._device.name, PREFETCH_BATCHES)
            dataset, self._finish = untuned(dataset.apply(to_device)), finish
        # TensorFlow keeps the functions of a data set for good: they hold no reference to `begin`,
        # or the images would be kept with it. It goes after the iterator, whose threads call it:
        # a list drops its last one first.
        self._held = [begin, iter(dataset)]
        # Before Python ends, at the latest: then no thread may call `begin` any more.
        weakref.finalize(self, _end, self._held, ender())

    def __next__(self):
        """Returns the next batch."""
        try:
            batch = next(self._held[-1])
        except BaseException as error:
            # Python keeps what it ends with, whose frames hold the iterator, until it is too late.
            traceback.clear_frames(error.__traceback__)
            raise
        with tf.device(self._device.name):
            if self._device.cuda_ordinal is None:
                return tf.nest.map_structure(tf.identity, batch)  # to the logical device
            return self._finish({**batch, **self._resident}) if self._finish else batch


def _end(held: list, end_later: Callable) -> None:
    """Ends a stream's iterator: in another thread where it is collected, and else at once.

    It waits for `begin`, which may be in this very thread, or may want a lock that it holds.
    """
    if is_collecting():
        end_later(held.clear)
    else:
        held.clear()


def _numbered(
    begin: weakref.ref, like: dict[str, np.ndarray], num_rows_varies: bool
) -> tf.data.Dataset:
    """Returns the data set of begin(0), begin(1), ..., whose arrays are `like` the first ones."""
    dtypes = [tf.string if each.dtype == object else each.dtype for each in like.values()]
    shapes = [each.shape for each in like.values()]
    if num_rows_varies:
        shapes = [(None, *each[1:]) for each in shapes]

    def arrays(number):
        return tuple(begin()(number).values())

    def one(number):
        batch = tf.numpy_function(arrays, [number], dtypes)
        named = zip(like, batch, shapes, strict=True)
        return {name: tf.ensure_shape(each, shape) for name, each, shape in named}

    # Not from_generator, which complains when Python ends before it.
    return tf.data.Dataset.counter().map(one, num_parallel_calls=2)


def _threads(num_threads: int) -> tf.data.Options:
    options = tf.data.Options()
    options.threading.private_threadpool_size = num_threads
    return options
