"""A stream of batches that Python begins, tf.data continues, and the replica's device finishes.

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

PREFETCH_BATCHES = 2  # batches that are made ahead of the step
CPU = "/cpu:0"  # where tf.data runs, even if the replica has another logical device


class HostStream(Iterator):
    """An endless iterator over one replica's batches, which are made ahead on the CPU.

    It yields the results of `finish`, on the replica's device.
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
        """Makes the first batch in Python to learn its shapes, and starts the threads.

        Args:
          begin: returns the arrays of batch 0, 1, 2, ... by name, with a row for each example and
            fixed shapes and dtypes; dtype object stands for bytes. Several threads call it. It must
            not refer to the stream, which could then never be freed.
          finish: turns the tensors of these arrays, by name, into a batch; None leaves them as they
            are. TensorFlow never frees it, so it must not refer to anything that should be freed.
          placement: the replica's device, and the number of threads.
          num_rows_varies: whether the first axis of batches varies.
          each_row: turns the tensors of one row into other tensors, for several rows in parallel;
            None leaves the rows as they are. TensorFlow never frees it, either.
          resident: tensors on the replica's GPU, which `finish` receives with each batch.

        Raises:
          Exception: whatever `begin` raises for the first batch.
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
            options = tf.data.Options()
            options.threading.private_threadpool_size = placement.num_threads
            dataset = untuned(dataset.with_options(options))
        if self._device.cuda_ordinal is not None:
            # uint8 pixels are a quarter of float32's bytes. The step's kernels run meanwhile.
            to_device = tf.data.experimental.prefetch_to_device(self._device.name, PREFETCH_BATCHES)
            dataset, self._finish = untuned(dataset.apply(to_device)), finish
        # TensorFlow never frees the functions of a data set. So they have only a weak reference to
        # `begin`, which refers to the images. `begin` must live longer than the iterator, whose
        # threads call it: clearing a list drops its last item first.
        self._held = [begin, iter(dataset)]
        # The finalizer runs before Python ends; no thread may call `begin` after that.
        weakref.finalize(self, _end, self._held, ender())

    def __next__(self):
        """Returns the next batch."""
        try:
            batch = next(self._held[-1])
        except BaseException as error:
            # The frames of an uncaught error would keep the iterator alive until Python has ended.
            traceback.clear_frames(error.__traceback__)
            raise
        with tf.device(self._device.name):
            if self._device.cuda_ordinal is None:
                return tf.nest.map_structure(tf.identity, batch)  # to the logical device
            return self._finish({**batch, **self._resident}) if self._finish else batch


def _end(held: list, end_later: Callable) -> None:
    """Drops a stream's iterator at once, or in another thread if the garbage collector drops it.

    Dropping the iterator waits for `begin`. `begin` may be running in this thread, or may need a
    lock that this thread holds.
    """
    if is_collecting():
        end_later(held.clear)
    else:
        held.clear()


def _numbered(
    begin: weakref.ref, like: dict[str, np.ndarray], num_rows_varies: bool
) -> tf.data.Dataset:
    """Returns the data set of begin(0), begin(1), ..., with arrays like those of `like`."""
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

    # from_generator would print an error if Python ends first.
    return tf.data.Dataset.counter().map(one, num_parallel_calls=2)
