"""Image files to batches through NVIDIA DALI, on one device.

Takes the files and which of them each batch holds; gives tensors on the replica's device.
DALI reads, decodes (JPEG on the GPU's decoder; PNG on the CPU always), resizes, augments and
normalises. Which files and in which order is decided outside: paths and labels are inputs of the
pipeline, fed by tf.data, so that order never depends on a DALI reader's sharding.

    stream = DaliStream(folder, images, device=device, dtype="float16", ...)
    image, label = next(stream)
"""

import collections
import contextlib
import dataclasses
import os
import re
from collections.abc import Callable

import numpy as np
import tensorflow as tf
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.plugin import tf as dali_tf

from tfaccel.config import ImageConfig
from tfaccel.data.image_folder import ImageFolder, undecodable
from tfaccel.errors import UserError
from tfaccel.runtime import Device

PREFETCH_BATCHES = 2  # decoded ahead of the step; DALI's own default
DTYPES = {"float16": types.FLOAT16, "float32": types.FLOAT}


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where and how one replica's pipeline runs.

    Attributes:
      device: of the replica; DALI decodes and augments there too.
      num_threads: CPU threads of the pipeline.
      seed: of the pipeline; DALI derives one for each random operator from it.
    """

    device: Device
    num_threads: int
    seed: int


@pipeline_def
def image_pipeline(images: ImageConfig, *, on_gpu: bool, dtype: str):
    """Encoded files to normalised images.

    Inputs, fed from outside:
      path: [longest] uint8 per sample: a file's path, padded with zero bytes.
      label: int32 scalar per sample.

    Returns:
      image: [height, width, channels] float16 or float32 in 0..1, and the label.
    """
    path = fn.external_source(name="path", device="cpu", ndim=1, dtype=types.UINT8, batch=True)
    label = fn.external_source(
        name="label", device="gpu" if on_gpu else "cpu", ndim=0, dtype=types.INT32, batch=True
    )
    image = fn.decoders.image(
        # Mapping small files costs more than copying them: 18,700 against 34,500 MNIST PNGs a
        # second on 2 cores (2026-11-21). A file cut short while mapped would be a SIGBUS, too.
        fn.io.file.read(path, dont_use_mmap=True),
        device="mixed" if on_gpu else "cpu",
        output_type=types.GRAY if images.channels == 1 else types.RGB,
    )
    image = fn.resize(image, size=images.image_size)
    mirror = 0
    if images.rotation_degrees > 0:
        angle = fn.random.uniform(range=(-images.rotation_degrees, images.rotation_degrees))
        image = fn.rotate(image, angle=angle, keep_size=True, fill_value=0)
    if images.horizontal_flip:
        mirror = fn.random.coin_flip()
    image = fn.crop_mirror_normalize(
        image,
        mirror=mirror,
        mean=[0.0] * images.channels,
        std=[255.0] * images.channels,
        dtype=DTYPES[dtype],
        output_layout="HWC",
    )
    return image, label


class DaliStream:
    """An endless iterator over one replica's batches, from one pipeline.

    Yields (image, label): image [batch, height, width, channels], `dtype`, in 0..1; label [batch]
    int32; both on the replica's device, with as many rows as each batch of indices has.

    Raises:
      UserError: from `next`, when a file cannot be decoded. The stream is over then.
    """

    def __init__(
        self,
        folder: ImageFolder,
        images: ImageConfig,
        *,
        placement: Placement,
        dtype: str,
        batch_size: int,
        rows_of: Callable[[int], np.ndarray],
    ):
        """Builds and checks the pipeline.

        Args:
          folder: the files that the indices count.
          images: size, channels and augmentation.
          placement: device, threads and seed.
          dtype: "float16" or "float32".
          batch_size: the most rows of a batch.
          rows_of: returns the files of batch number 0, 1, 2, ... without end: [rows] int64.
            TensorFlow keeps it for good: it must not hold what should be freed.

        Raises:
          UserError: the first batch cannot be decoded.
        """
        self._files = folder.files
        # What the pipeline was fed last holds the file at fault when it fails.
        self._fed = fed = collections.deque(maxlen=PREFETCH_BATCHES + 2)
        on_gpu = placement.device.cuda_ordinal is not None

        def make_pipeline():
            return image_pipeline(
                images,
                on_gpu=on_gpu,
                dtype=dtype,
                batch_size=batch_size,
                num_threads=placement.num_threads,
                device_id=placement.device.cuda_ordinal,
                seed=placement.seed,
                prefetch_queue_depth=PREFETCH_BATCHES,
            )

        paths, labels = _as_rows(folder.files), folder.labels
        self._check(make_pipeline(), rows_of(0), paths, labels)

        # TensorFlow keeps these two functions for good. They hold no reference to this stream, or
        # its pipeline, threads and memory would be kept with them.
        def paths_of(number):
            rows = rows_of(number)
            fed.append(rows)
            return paths[rows]

        def labels_of(number):
            return labels[rows_of(number)]

        path_spec = tf.TensorSpec([None, paths.shape[1]], tf.uint8)
        inputs = {
            "path": _input(paths_of, path_spec, placement.device),
            "label": _input(labels_of, tf.TensorSpec([None], tf.int32), placement.device),
        }
        with tf.device(placement.device.name):
            dataset = dali_tf.experimental.DALIDatasetWithInputs(
                pipeline=make_pipeline(),
                input_datasets=inputs,
                output_shapes=((None, *images.image_size, images.channels), (None,)),
                output_dtypes=(tf.dtypes.as_dtype(dtype), tf.int32),
                # The dataset's own values win over the pipeline's, silently: say them again.
                batch_size=batch_size,
                num_threads=placement.num_threads,
                device_id=placement.device.cuda_ordinal,
                prefetch_queue_depth=PREFETCH_BATCHES,
            )
            with self._faults_named():
                self._iterator = iter(dataset)

    def __iter__(self):
        """Returns itself."""
        return self

    def __next__(self):
        """Returns the next batch."""
        with self._faults_named():
            return next(self._iterator)

    def _check(self, pipeline, rows, paths, labels) -> None:
        """Runs one batch in Python, where a fault is an exception.

        Inside TensorFlow's data set, a pipeline that cannot start aborts the process.
        """
        self._fed.append(rows)
        with self._faults_named():
            pipeline.build()
            pipeline.feed_input("path", paths[rows])
            pipeline.feed_input("label", labels[rows])
            pipeline.run()

    @contextlib.contextmanager
    def _faults_named(self):
        """Turns DALI's errors into one sentence that names the file, which DALI often does not."""
        try:
            yield
        except (RuntimeError, tf.errors.OpError) as error:
            suspects = [self._files[row] for rows in self._fed for row in rows]
            bad = undecodable(suspects)
            if bad:
                raise UserError(
                    f"{len(bad)} of {len(suspects)} image files just read cannot be decoded, first "
                    f"{bad[0]}; replace or remove such files"
                ) from error
            if isinstance(error, tf.errors.ResourceExhaustedError) or "CUDA" in str(error):
                raise  # the device or its memory, not the files
            # DALI's cause stands between its own traceback and its stack trace.
            cause = re.search(r"encountered:\s*(.+)", str(error))
            raise UserError(
                f"DALI failed on one of {len(suspects)} images that Pillow can decode, first "
                f"{suspects[0]}: {cause[1] if cause else type(error).__name__}; convert them to "
                "RGB or grey PNG or JPEG"
            ) from error


def _as_rows(files: tuple[str, ...]) -> np.ndarray:
    """Returns the paths as [num_examples, longest] uint8, padded with zero bytes.

    DALI hands the bytes to `open`, which stops at the first zero.
    """
    encoded = np.array([os.fsencode(file) for file in files])  # numpy pads with zero bytes
    return encoded.view(np.uint8).reshape(len(files), encoded.dtype.itemsize)


def _input(batch_of: Callable, spec: tf.TensorSpec, device: Device):
    """Returns a DALI input of whole batches, on the device where the plugin wants its inputs."""
    with tf.device("/cpu:0"):
        # Not from_generator, which complains when Python ends before it.
        dataset = tf.data.Dataset.counter().map(
            lambda number: tf.ensure_shape(
                tf.numpy_function(batch_of, [number], spec.dtype), spec.shape
            )
        )
    if device.cuda_ordinal is not None:
        with tf.device(device.name):
            dataset = dataset.apply(tf.data.experimental.copy_to_device(device.name))
    return dali_tf.experimental.Input(dataset, batch=True)
