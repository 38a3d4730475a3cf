"""Hands batches from a DALI pipeline to TensorFlow, without waiting for the GPU's queue.

`Handoff` takes a pipeline and a function that reads its inputs. It gives TensorFlow's own tensors
on the replica's device. DALI's DALIDataset copies a batch and then waits until the GPU has finished
all that TensorFlow has queued, so that no step is queued while another one runs. With it ResNet-50
trained on 5,150 images a second and not 7,100, and the GPU was idle for 12 to 18 ms of each 50 ms
(H200, 2026-11-22).

    batches = Handoff(pipeline, read, first=read(0), device=placement.device)
    image, label = next(batches)
    batches = Handoff(..., sizes=itertools.repeat(10))      # [10, rows, ...], for one launch

One thread takes the pipeline's batches, one reads ahead, and one gives DALI its memory back.
TensorFlow copies a batch when its turn comes in the GPU's queue. DALI's memory is held until then.
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

READ_AHEAD = 1  # batches that are read ahead, apart from those in the pipeline
COPIES_AHEAD = 2  # waiting copies, apart from as many as the pipeline holds batches
GROUPS_AHEAD = 2  # waiting copies of groups of batches


class Handoff(Iterator):
    """An endless iterator over a pipeline's batches, each a tuple of its outputs.

    Raises:
      Exception: `next` raises the exception of the pipeline or of `read`, and again in each later
        call.
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
          pipeline: a pipeline with the default, dynamic executor, which keeps outputs as long as
            they are referenced.
          read: returns the pipeline's inputs, by name, for batch number 1, 2 and so on.
          first: the inputs of batch 0, as DALI's `feed_input` takes them.
          device: the device of the batches, which may differ from the pipeline's.
          sizes: number of batches that each `next` returns together, as [batches, rows, ...]. None
            for single batches, without that axis.

        Raises:
          Exception: as in `next`.
        """
        pools = [
            concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=f"dali-{name}")
            for name in ("make", "read", "release")
        ]
        ended = []  # [True] after the end
        # No job refers to this object, so that it can be freed.
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
        """Returns the next batch, and starts to make another one."""
        batch = self._made()
        self._next = self._making.submit(next, self._batches)
        return batch

    def _made(self):
        try:
            return self._next.result()
        except Exception:
            self._end()  # now, because the error and this object refer to each other
            raise


def _end(pools, ended: list, end_later: Callable) -> None:
    """Lets the threads end after their jobs: a batch is made, and earlier ones are copied.

    Python does the same at its exit, before DALI and TensorFlow end.
    """
    ended.append(True)
    for each in pools:
        end_later(each.shutdown)


def _batches(pipeline, read, first, *, device, sizes, reading, releasing, ended) -> Iterator[tuple]:
    """Yields batches. It runs in its own thread, where it may wait."""
    wait_for_queue, copied = _make_wait(device), _copied if sizes is None else _together
    made = _outputs(pipeline, read, first, reading=reading)
    most = GROUPS_AHEAD if sizes is not None else pipeline.prefetch_queue_depth + COPIES_AHEAD
    held, releases = collections.deque(), collections.deque()
    del first  # else the bytes of its images would stay in memory
    for size in itertools.repeat(1) if sizes is None else sizes:
        outputs = []
        for _ in range(size):
            if ended:
                return
            outputs.append(next(made))
        while len(releases) >= most:
            releases.popleft().result()  # else DALI's memory would grow with the queued steps
        batch = copied(outputs, held, device)
        releases.append(releasing.submit(_release, held, wait_for_queue))
        del outputs  # only `held` may refer to DALI's memory,
        yield batch
        del batch  # and only the caller to the batch


def _outputs(pipeline, read, first, *, reading) -> Iterator[tuple]:
    """Yields the pipeline's outputs, and meanwhile makes the next ones."""
    depth, numbers = pipeline.prefetch_queue_depth, itertools.count(1)
    _feed(pipeline, first)
    del first
    for number in itertools.islice(numbers, depth - 1):
        _feed(pipeline, read(number))
    ahead = reading.submit(read, next(numbers))
    pipeline.schedule_run()  # once for each batch that is fed so far
    while True:
        outputs = [pipeline.outputs()]  # waits until they are complete on the GPU
        _feed(pipeline, ahead.result())
        ahead = reading.submit(read, next(numbers))
        pipeline.schedule_run()
        yield outputs.pop()  # so that nothing here refers to them meanwhile


def _feed(pipeline, inputs: dict[str, object]) -> None:
    for name, values in inputs.items():
        pipeline.feed_input(name, values)


def _copied(
    outputs: Sequence[tuple], held: collections.deque, device: Device
) -> tuple[tf.Tensor, ...]:
    """Queues the copies of a batch to the device, and returns them; `held` keeps the batch."""
    (batch,) = outputs
    with tf.device(device.name):
        # tf.identity would share the memory, and DeepCopy leaves int32 on the host. Snapshot reuses
        # its input's memory only if TensorFlow owns it, and this memory is DALI's.
        copies = tuple(tf.raw_ops.Snapshot(input=view_of(each, device)) for each in batch)
    held.append(batch)  # not earlier: `_release` takes all that is held as queued
    return copies


def _together(
    outputs: Sequence[tuple], held: collections.deque, device: Device
) -> tuple[tf.Tensor, ...]:
    """Does the same with several batches: each output becomes [batches, rows, ...]."""
    if len(outputs) == 1:  # a stack of one tensor would share its memory
        return tuple(each[None] for each in _copied(outputs, held, device))
    with tf.device(device.name):
        copies = tuple(
            _stacked([view_of(each, device) for each in parts])
            for parts in zip(*outputs, strict=True)
        )
    held.append(outputs)
    return copies


def _stacked(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """Does the same as tf.stack, which moves uint8 from the GPU to the host."""
    return tf.reshape(tf.concat(parts, axis=0), (len(parts), *parts[0].shape))


def _release(held: collections.deque, wait_for_queue: Callable[[], None]) -> None:
    """Frees the batches whose copies were queued before now, after the device has run the copies.

    One call mostly frees several batches, and a later call then has nothing to do. If each batch
    had its own wait, it would also wait for the steps that are queued behind it.
    """
    number = len(held)
    if number:
        wait_for_queue()
    for _ in range(number):
        held.popleft()


def _make_wait(device: Device) -> Callable[[], None]:
    """Returns a function that waits until the device has run all that TensorFlow has queued."""
    with tf.device(device.name):
        zero = tf.zeros(())
    to_host = make_to_host(zero.device)
    return lambda: to_host(zero)
