"""Batches from a DALI pipeline to TensorFlow, with no wait for what the GPU still has to do.

Takes a pipeline and the function that reads what it is fed; gives tensors of TensorFlow's own on
the replica's device. Not DALIDataset, which copies a batch and waits until all that TensorFlow has
queued on the GPU is done, so that no step is queued while another runs: ResNet-50 at 5,150 images
a second instead of 7,100, the GPU idle 12 to 18 ms of each 50 ms (H200, 2026-11-22).

    batches = Handoff(pipeline, read, first=read(0), device=placement.device)
    image, label = next(batches)
    batches = Handoff(..., sizes=itertools.repeat(10))      # [10, rows, ...], for one launch

One thread takes the pipeline's batches, one reads ahead of it, one gives DALI its memory back. A
batch is copied by TensorFlow, in its turn on the GPU; what DALI holds stays until that has run.
"""

import collections
import concurrent.futures
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf
from nvidia.dali import Pipeline

from tfaccel.data.endings import ender
from tfaccel.data.loaders.dali_view import view_of
from tfaccel.process.to_host import make_to_host
from tfaccel.runtime.devices import Device

READ_AHEAD = 1  # batches, beside those that the pipeline holds
COPIES_AHEAD = 2  # beside as many as the pipeline holds: copies that wait for their turn
GROUPS_AHEAD = 2  # the same, of batches that come together


class Handoff(Iterator):
    """An endless iterator over a pipeline's batches, each a tuple of its outputs.

    Raises:
      Exception: from `next`, what the pipeline or `read` raised; and so each time after it.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        read: Callable,
        *,
        first: dict[str, object],
        device: Device,
        sizes: Iterator[int] | None = None,
    ):
        """Starts the threads and waits for the first batch.

        Args:
          pipeline: of the default, dynamic executor, whose outputs stay as long as one holds them.
          read: makes the pipeline's inputs, by name, of a batch from its number: 1, 2 and so on.
          first: them of batch 0: what DALI's `feed_input` takes.
          device: where batches are to be, whichever the pipeline's.
          sizes: how many batches each `next` gives together, one after another: outputs are
            [batches, rows, ...]. None for one, without that axis.

        Raises:
          Exception: as from `next`.
        """
        pools = [
            concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=f"dali-{name}")
            for name in ("make", "read", "release")
        ]
        ended = []  # or [True]
        # No job has a reference to this.
        self._end = weakref.finalize(self, _end, pools, ended, ender())
        self._making, reading, releasing = pools
        self._batches = _batches(
            pipeline,
            read,
            first,
            device=device,
            sizes=sizes,
            reading=reading,
            releasing=releasing,
            ended=ended,
        )
        self._next = self._making.submit(next, self._batches)
        self._made()

    def __next__(self) -> tuple[tf.Tensor, ...]:
        """Returns the next batch, and has another one made."""
        batch = self._made()
        self._next = self._making.submit(next, self._batches)
        return batch

    def _made(self):
        try:
            return self._next.result()
        except Exception:
            self._end()  # at once: the error holds this object, and this object the error
            raise


def _end(pools, ended: list, end_later: Callable) -> None:
    """Lets the threads end after their jobs: a batch is made, and those handed over are copied.

    Python itself does the same at its exit, before DALI and TensorFlow end.
    """
    ended.append(True)
    for each in pools:
        end_later(each.shutdown)


def _batches(pipeline, read, first, *, device, sizes, reading, releasing, ended) -> Iterator[tuple]:
    """Yields batches; runs in one thread, where it may wait."""
    wait_for_queue, copied = _make_wait(device), _copied if sizes is None else _together
    made = _outputs(pipeline, read, first, reading=reading)
    most = GROUPS_AHEAD if sizes is not None else pipeline.prefetch_queue_depth + COPIES_AHEAD
    held, releases = collections.deque(), collections.deque()
    del first  # or the bytes of its images would be held as long as this runs
    for size in itertools.repeat(1) if sizes is None else sizes:
        outputs = []
        for _ in range(size):
            if ended:
                return
            outputs.append(next(made))
        while len(releases) >= most:
            releases.popleft().result()  # or DALI's memory would grow with the steps queued
        batch = copied(outputs, held, device)
        releases.append(releasing.submit(_release, held, wait_for_queue))
        del outputs  # `held` alone is to hold DALI's memory,
        yield batch
        del batch  # and the caller alone its own


def _outputs(pipeline, read, first, *, reading) -> Iterator[tuple]:
    """Yields the pipeline's outputs; the next ones are made meanwhile."""
    depth, numbers = pipeline.prefetch_queue_depth, itertools.count(1)
    _feed(pipeline, first)
    del first
    for number in itertools.islice(numbers, depth - 1):
        _feed(pipeline, read(number))
    ahead = reading.submit(read, next(numbers))
    pipeline.schedule_run()  # the first time, as often as was fed
    while True:
        outputs = [pipeline.outputs()]  # waits until they are there for all to see
        _feed(pipeline, ahead.result())
        ahead = reading.submit(read, next(numbers))
        pipeline.schedule_run()
        yield outputs.pop()  # so that nothing here holds them meanwhile


def _feed(pipeline, inputs: dict[str, object]) -> None:
    for name, values in inputs.items():
        pipeline.feed_input(name, values)


def _copied(
    outputs: Sequence[tuple], held: collections.deque, device: Device
) -> tuple[tf.Tensor, ...]:
    """Queues a batch's copy to the device, and returns it. `held` then holds what is copied."""
    (batch,) = outputs
    with tf.device(device.name):
        # Not identity, which shares the memory; nor DeepCopy, whose int32 stays on the host. This
        # reuses an input of TensorFlow's own, which DALI's memory is not.
        copies = tuple(tf.raw_ops.Snapshot(input=view_of(each, device)) for each in batch)
    held.append(batch)  # not before: `_release` takes what is there for queued
    return copies


def _together(
    outputs: Sequence[tuple], held: collections.deque, device: Device
) -> tuple[tf.Tensor, ...]:
    """Does the same with several batches: each output is [batches, rows, ...]."""
    if len(outputs) == 1:  # of which a stack would share the memory
        return tuple(each[None] for each in _copied(outputs, held, device))
    with tf.device(device.name):
        copies = tuple(
            _stacked([view_of(each, device) for each in parts])
            for parts in zip(*outputs, strict=True)
        )
    held.append(outputs)
    return copies


def _stacked(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """As tf.stack, which leaves the GPU with uint8."""
    return tf.reshape(tf.concat(parts, axis=0), (len(parts), *parts[0].shape))


def _release(held: collections.deque, wait_for_queue: Callable[[], None]) -> None:
    """Gives back what was copied before now, when that has run on the device.

    More than one batch, mostly: one after another, each would wait for the steps queued behind it,
    and in the end all batches for all steps. A later call then has nothing to do.
    """
    number = len(held)
    if number:
        wait_for_queue()
    for _ in range(number):
        held.popleft()


def _make_wait(device: Device) -> Callable[[], None]:
    """Returns what waits until all that TensorFlow has queued on the device by then has run."""
    with tf.device(device.name):
        zero = tf.zeros(())
    to_host = make_to_host(zero.device)
    return lambda: to_host(zero)
