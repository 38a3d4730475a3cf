"""One replica's batches through NVIDIA DALI, on the replica's GPU or on the CPU.

Takes encoded images and a Feed, which says what each batch holds; gives tensors on the replica's
device. Paths or bytes, labels and random draws are inputs of the pipeline, fed by tf.data, so that
order and chance never depend on a DALI reader. PNG is decoded on the CPU always.

    stream = DaliStream(source, images, feed=feed, placement=placement, dtype="float16",
                        dali=DaliConfig(), decode_on_gpu=True)
    image, label = next(stream)
"""

import collections
import concurrent.futures
import contextlib
import functools
import os
import weakref
from collections.abc import Callable

import numpy as np
import tensorflow as tf
from nvidia.dali import fn, pipeline_def
from nvidia.dali import types as dali_types
from nvidia.dali.plugin import tf as dali_tf

from tfaccel.config import DaliConfig, ImageConfig
from tfaccel.data import dali_graph
from tfaccel.data.dali_faults import explained
from tfaccel.data.feed import Feed
from tfaccel.data.placement import Placement
from tfaccel.data.source import Blobs, ImageSource
from tfaccel.runtime import Device

DECODER_HINTS = (
    "hw_decoder_load",
    "device_memory_padding",
    "host_memory_padding",
    "preallocate_width_hint",
    "preallocate_height_hint",
    "bytes_per_sample_hint",
)
DALI_TYPES = {
    "uint8": dali_types.UINT8,
    "int32": dali_types.INT32,
    "float32": dali_types.FLOAT,
    "object": dali_types.UINT8,  # bytes, one object for each row
}
READ_AHEAD = 1  # batches of bytes, beside those that the pipeline holds


class DaliStream:
    """An endless iterator over one replica's batches, from one pipeline.

    Yields (image, label) or, for pairs, (image, target), on the replica's device; rows is the
    plan's `rows_per_replica`, always:
      image: [rows, height, width, channels] `dtype`, (pixel / 255 - mean) / std.
      label: [rows] int32.
      target: like image; where images.targets is "mask", [rows, height, width, 1] int32, grey
        values as they are.

    Raises:
      UnreadableExamples: from `next`, when files cannot be decoded. The stream is over then.
      UserError: likewise, when an image is smaller than its crop, or a pair has two sizes.
    """

    def __init__(
        self,
        source: ImageSource,
        images: ImageConfig,
        *,
        feed: Feed,
        placement: Placement,
        dtype: str,
        dali: DaliConfig,
        decode_on_gpu: bool,
    ):
        """Builds and checks the pipeline.

        Args:
          source: the encoded images.
          images: size, channels and normalisation.
          feed: which of them each batch holds, with which draws.
          placement: the replica's device, and the pipeline's threads.
          dtype: "float16" or "float32", of the images.
          dali: the decoder's settings, and how many batches are made ahead.
          decode_on_gpu: whether the pipeline runs on the replica's GPU; else it runs on the CPU,
            and its batches are copied.

        Raises:
          UserError: the first batch cannot be made, as from `next`.
        """
        self._source, self._images, self._augment = source, images, feed.augment
        # What the pipeline was fed last holds the file at fault when it fails.
        self._fed = collections.deque(maxlen=dali.prefetch_batches + READ_AHEAD + 3)
        inputs = _inputs(source, feed, num_threads=placement.num_threads, fed=self._fed)
        device = placement.device if decode_on_gpu else Device("/cpu:0", None)
        rows = feed.plan.rows_per_replica
        settings = {
            "batch_size": rows,
            "num_threads": placement.num_threads,
            "device_id": device.cuda_ordinal,
            "prefetch_queue_depth": dali.prefetch_batches,
        }
        hints = {name: getattr(dali, name) for name in DECODER_HINTS}
        first = {name: read(0) for name, read in inputs.items()}

        def make_pipeline():
            return _pipeline(
                images,
                feed.augment,
                first,
                decode={name: hint for name, hint in hints.items() if hint is not None},
                dtype=dtype,
                on_gpu=device.cuda_ordinal is not None,
                **settings,
            )

        with self._faults_named():
            _check(make_pipeline(), first)
        shapes, dtypes = _outputs(source, images, rows, dtype)
        with tf.device(device.name):
            dataset = dali_tf.experimental.DALIDatasetWithInputs(
                pipeline=make_pipeline(),
                input_datasets={
                    name: _dataset(weakref.ref(read), first[name], device)
                    for name, read in inputs.items()
                },
                output_shapes=shapes,
                output_dtypes=dtypes,
                # The dataset's own values win over the pipeline's, silently: say them again.
                **settings,
            )
        if placement.device != device:
            # The next batch is copied while the step computes on this one.
            dataset = dataset.apply(tf.data.experimental.prefetch_to_device(placement.device.name))
        with tf.device(device.name), self._faults_named():
            self._iterator = iter(dataset)
        # After the iterator, so that it is freed before them. TensorFlow keeps its functions for
        # good: they hold no reference to these, or all paths would be kept with each stream.
        self._inputs = inputs

    def __iter__(self):
        """Returns itself."""
        return self

    def __next__(self):
        """Returns the next batch."""
        with self._faults_named():
            return next(self._iterator)

    @contextlib.contextmanager
    def _faults_named(self):
        try:
            yield
        except (RuntimeError, tf.errors.OpError) as error:
            ids = np.unique(np.concatenate(list(self._fed))).tolist()
            cause = explained(error, self._source, self._images, self._augment, ids=ids)
            if cause is error:
                raise
            raise cause from error


@pipeline_def
def _pipeline(images, augment, first, *, decode, dtype, on_gpu):
    """The pipeline whose inputs are like those of the `first` batch."""
    inputs = {
        name: fn.external_source(
            name=name,
            device="gpu" if on_gpu and name == "label" else "cpu",
            ndim=1 if _is_bytes(values) else values.ndim - 1,
            dtype=DALI_TYPES[values.dtype.name],
        )
        for name, values in first.items()
    }
    decode = {**decode, "device": "mixed" if on_gpu else "cpu"}
    return dali_graph.batch(inputs, images, augment, decode=decode, dtype=dtype)


def _check(pipeline, first: dict) -> None:
    """Runs one batch in Python, where a fault is an exception.

    Inside TensorFlow's data set, a pipeline that cannot start aborts the process.
    """
    pipeline.build()
    for name, values in first.items():
        if _is_bytes(values):
            values = [np.frombuffer(each, np.uint8) for each in values]
        pipeline.feed_input(name, values)
    pipeline.run()


def _outputs(source: ImageSource, images: ImageConfig, rows: int, dtype: str):
    """Returns the shapes and the dtypes of a batch."""
    image = (rows, *images.image_size, images.channels), tf.dtypes.as_dtype(dtype)
    second = image
    if source.targets is None:
        second = (rows,), tf.int32
    elif images.targets == "mask":
        second = (rows, *images.image_size, 1), tf.int32
    return tuple(zip(image, second, strict=True))


def _inputs(source: ImageSource, feed: Feed, *, num_threads: int, fed: collections.deque) -> dict:
    """Returns the function that makes each input of a batch from its number.

    Args:
      source: the encoded images.
      feed: what each batch holds.
      num_threads: that read ranges of bytes; whole files are read by DALI.
      fed: is given the examples of each batch.
    """
    pool = concurrent.futures.ThreadPoolExecutor(num_threads)
    draws = functools.lru_cache(maxsize=4)(feed.draws)  # all kinds at once; asked for one by one

    def noted(number):
        ids = feed.rows(number).ids
        fed.append(ids)
        return ids

    def target_ids(number):
        return feed.rows(number).ids

    inputs = dict([_encoded("image", source.images, noted, pool)])
    if source.targets is None:
        inputs["label"] = lambda number: source.labels[feed.rows(number).ids]
    else:
        inputs |= [_encoded("target", source.targets, target_ids, pool)]
    for kind in feed.draw_specs:
        inputs[kind] = lambda number, kind=kind: draws(number)[kind]
    return inputs


def _encoded(name: str, blobs: Blobs, ids_of: Callable, pool) -> tuple[str, Callable]:
    """Returns the name of an input, and the function that makes it from a batch's number."""
    if blobs.are_files:
        paths = _as_rows(blobs.files)
        return f"{name}.path", lambda number: paths[ids_of(number)]
    return f"{name}.bytes", lambda number: np.array(
        list(pool.map(blobs.read, ids_of(number).tolist())), dtype=object
    )


def _as_rows(files: tuple[str, ...]) -> np.ndarray:
    """Returns the paths as [num_examples, longest] uint8, padded with zero bytes.

    DALI hands the bytes to `open`, which stops at the first zero.
    """
    encoded = np.array([os.fsencode(file) for file in files])  # numpy pads with zero bytes
    return encoded.view(np.uint8).reshape(len(files), encoded.dtype.itemsize)


def _is_bytes(values: np.ndarray) -> bool:
    return values.dtype == object


def _dataset(read: weakref.ref, like: np.ndarray, device: Device):
    """Returns a DALI input, on the device where the plugin wants its inputs.

    Args:
      read: makes a batch of it from the number.
      like: what the first batch was.
      device: of the pipeline.
    """
    dtype = tf.string if _is_bytes(like) else tf.dtypes.as_dtype(like.dtype)
    with tf.device("/cpu:0"):
        # Not from_generator, which complains when Python ends before it.
        dataset = tf.data.Dataset.counter().map(
            lambda number: tf.ensure_shape(
                tf.numpy_function(lambda number: read()(number), [number], dtype), like.shape
            )
        )
        if _is_bytes(like):
            # One by one, for each has its own length: padded to the longest, a batch with one
            # large image would be many times its size.
            dataset = dataset.prefetch(READ_AHEAD).unbatch()
            dataset = dataset.map(lambda data: tf.io.decode_raw(data, tf.uint8))
    if device.cuda_ordinal is not None:
        with tf.device(device.name):
            dataset = dataset.apply(tf.data.experimental.copy_to_device(device.name))
    return dali_tf.experimental.Input(dataset, batch=not _is_bytes(like))
