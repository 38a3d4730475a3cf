"""Makes one replica's batches with NVIDIA DALI, on the replica's GPU or on the CPU.

Bytes, labels, windows and draws are inputs of the pipeline, so that no DALI reader decides on order
or random numbers. A GPU decodes only JPEG and JPEG 2000. The other formats are decoded on the CPU
and augmented on the GPU.

    stream = DaliStream(source, images, feed=feed, placement=placement, dtype="float16",
                        dali=DaliConfig(), decode_on_gpu=True)
    image, label = next(stream)

A TogetherStream takes the same arguments and gives the batches of one launch together.
"""

import collections
import functools
import itertools
from collections.abc import Iterator

import numpy as np
import tensorflow as tf
from nvidia.dali import fn, pipeline_def
from nvidia.dali import types as dali_types
from nvidia.dali.tensors import TensorListCPU

from tfaccel.config import DaliConfig, ImageConfig
from tfaccel.data.deferred import Deferred, span
from tfaccel.data.draws import LEVEL_KINDS, for_target
from tfaccel.data.feed import Feed
from tfaccel.data.loaders import dali_graph, faults, pixels
from tfaccel.data.loaders.dali_faults import refused
from tfaccel.data.loaders.dali_handoff import READ_AHEAD, Handoff
from tfaccel.data.loaders.dali_inputs import make_reader
from tfaccel.data.placement import Placement
from tfaccel.data.source import ImageSource
from tfaccel.runtime.devices import Device

DECODER_HINTS = (
    "hw_decoder_load",
    "device_memory_padding",
    "host_memory_padding",
    "preallocate_width_hint",
    "preallocate_height_hint",
    "bytes_per_sample_hint",
)
DALI_TYPES = {
    "int32": dali_types.INT32,
    "int64": dali_types.INT64,
    "float32": dali_types.FLOAT,
}


class DaliStream(Iterator):
    """An endless iterator over one replica's batches (see `loaders`), from one pipeline.

    Raises:
      UnreadableError: `next` raises it if files cannot be decoded. The stream has then ended.
      UserError: `next` raises it if an image is smaller than its crop, or a pair's sizes differ.
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
        sizes: Iterator[int] | None = None,
    ):
        """Builds and checks the pipeline.

        Args:
          source: the encoded images.
          images, feed, placement, dtype: as in `loaders`.
          dali: the decoder's settings, and the number of batches that are made ahead.
          decode_on_gpu: whether the pipeline runs on the replica's GPU. Otherwise it runs on the
            CPU, and its batches are copied to the device.
          sizes: number of batches in each `next`, as in `Handoff`; None for single batches.

        Raises:
          UserError: the first batch cannot be made, for the same reasons as in `next`.
        """
        # If the pipeline fails, the file at fault is among the last that were fed.
        fed = collections.deque(maxlen=dali.prefetch_batches + READ_AHEAD)
        self._faults_named = functools.partial(
            faults.named, source, images, feed.augment, fed=fed, refused=refused, decoder="DALI"
        )
        device = placement.device if decode_on_gpu else Device("/cpu:0", None)
        read = make_reader(source, images, feed=feed, num_threads=placement.num_threads, fed=fed)
        self._device, self._finish = placement.device, None
        with self._faults_named():
            first = read(0)
            if kinds := tuple(kind for kind in LEVEL_KINDS if kind in first):
                self._finish = _make_finish(kinds, images, feed.augment, dtype, placement.device)
            pipeline = _pipeline(
                images,
                feed.augment,
                first,
                decode=_decoder(dali, device),
                dtype=dtype,
                batch_size=feed.plan.rows_per_replica,
                num_threads=placement.num_threads,
                device_id=device.cuda_ordinal,
                prefetch_queue_depth=dali.prefetch_batches,
            )
            self._batches = Handoff(
                pipeline, read, first=first, device=placement.device, sizes=sizes
            )

    def __next__(self):
        """Returns the next batch."""
        with self._faults_named():
            batch = next(self._batches)
        if self._finish is None:
            return batch
        with tf.device(self._device.name):
            return self._finish(*batch)


def _make_finish(kinds, images, augment, dtype: str, device: Device):
    """Returns a function that makes a batch from the pipeline's outputs, with TensorFlow.

    The outputs are uint8 images, labels or uint8 targets, and the draws of `kinds`. Batches that
    are given together have one axis more.
    """
    settings = {"images": images, "augment": augment, "dtype": dtype}
    settings["on_gpu"] = device.cuda_ordinal is not None

    def finish(image, second, *drawn):
        lead = image.shape[: image.shape.rank - 3]
        flat = [tf.reshape(each, (-1, *each.shape[lead.rank :])) for each in (image, *drawn)]
        image, draws = flat[0], dict(zip(kinds, flat[1:], strict=True))
        image = pixels.of_levels(image, draws, **settings)
        image = tf.reshape(image, (*lead, *image.shape[1:]))
        if second.shape.rank == lead.rank:
            return image, second
        target = tf.reshape(second, (-1, *second.shape[lead.rank :]))
        target = pixels.of_levels(target, for_target(draws), kind=images.targets, **settings)
        return image, tf.reshape(target, second.shape)

    return tf.function(finish, autograph=False)


class TogetherStream(Iterator):
    """An endless iterator over `Deferred` batches of one replica, which DALI has finished."""

    def __init__(self, source: ImageSource, images: ImageConfig, *, feed: Feed, most: int, **how):
        """Builds and checks the pipeline.

        Args:
          source: the encoded images.
          images, feed: as in `loaders`.
          most: number of batches in a launch; an epoch's last launch may have fewer.
          **how: the other arguments of `DaliStream`.

        Raises:
          UserError: as in `DaliStream`.
        """
        sizes = (len(span(feed, number, most=most)) for number in itertools.count())
        self._stream = DaliStream(source, images, feed=feed, sizes=sizes, **how)

    def __next__(self):
        """Returns the batches of the next launch."""
        image, second = next(self._stream)
        return Deferred({"image": image, "second": second}, {}, _pair, is_made=True)


def _pair(batch: dict[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
    return batch["image"], batch["second"]


@pipeline_def
def _pipeline(images, augment, first, *, decode, dtype):
    """The pipeline for inputs like those of the `first` batch."""
    label_device = "gpu" if decode["device"] == "mixed" else "cpu"
    outputs = ("label", *LEVEL_KINDS)
    devices = {name: label_device if name in outputs else "cpu" for name in first}
    inputs = {name: _input(name, values, devices[name]) for name, values in first.items()}
    return dali_graph.batch(inputs, images, augment, decode=decode, dtype=dtype)


def _input(name: str, values: np.ndarray | TensorListCPU, device: str):
    if isinstance(values, TensorListCPU):  # the reader keeps it while it is needed
        return fn.external_source(name=name, ndim=1, dtype=dali_types.UINT8, no_copy=True)
    dtype = DALI_TYPES[values.dtype.name]
    return fn.external_source(name=name, device=device, ndim=values.ndim - 1, dtype=dtype)


def _decoder(dali: DaliConfig, device: Device) -> dict:
    """Returns the decoder's arguments, without hints that are None and so have DALI's defaults."""
    hints = {name: getattr(dali, name) for name in DECODER_HINTS}
    set_hints = {name: hint for name, hint in hints.items() if hint is not None}
    return {"device": "cpu" if device.cuda_ordinal is None else "mixed", **set_hints}
