"""Some images of the evaluation pipeline, with their files.

`take_samples` takes a loader's data. It runs the loader's own pipeline on these images alone.

    samples = take_samples(loader.data, run.runtime, 256)
"""

import dataclasses
import io
from collections.abc import Sequence

import numpy as np
import PIL.Image

from tfaccel.common.errors import UserError
from tfaccel.data.images import ImageData
from tfaccel.data.placement import Placement
from tfaccel.data.shards import Plan
from tfaccel.data.source import Blobs, ImageSource, spread
from tfaccel.data.sources.pillow import UNREADABLE, cause, decoded
from tfaccel.export.preprocessing import PNG_SIGNATURE, how_read
from tfaccel.runtime.devices import Runtime

JPEG_SIGNATURE = b"\xff\xd8\xff"


@dataclasses.dataclass(frozen=True)
class Samples:
    """Some images of an evaluation.

    Attributes:
      names: the name of each image, for messages.
      encoded: the file of each image; a PNG of the same pixels if it is neither JPEG nor PNG. Empty
        if an export cannot decode the files: see `Preprocessing.takes_files`.
      inputs: [num, height, width, channels], the model's inputs from the pipeline.
      source: a source of these image files; None if there are only arrays.
      labels: the class of each image, [num]; several labels of it, [num, labels]; or None.
    """

    names: list[str]
    encoded: list[bytes]
    inputs: np.ndarray
    source: ImageSource | None
    labels: np.ndarray | None = None

    def __len__(self):
        """Returns the number of images."""
        return len(self.names)

    def first(self, num: int) -> "Samples":
        """Returns the first `num` images."""
        source = self.source and self.source.taken(np.arange(min(num, len(self))))
        return Samples(self.names[:num], self.encoded[:num], self.inputs[:num], source)


def take_samples(
    data: ImageData, runtime: Runtime, most: int, *, also: Sequence[int] = ()
) -> Samples:
    """Returns images spread over the data, with the model's inputs from the data's pipeline.

    Args:
      data: a loader's data, without random changes.
      runtime: devices, threads and seed.
      most: the largest number of images.
      also: indices of further images, which are appended.

    Raises:
      UserError: an image cannot be read.
    """
    ids = spread(len(data.source), most)
    ids = np.concatenate([ids, np.setdiff1d(np.array(also, int), ids)])
    # `found` still has files that vanished while they were decoded.
    found = data.found if len(data.found) == len(data.source) else data.source
    found, source = found.taken(ids), data.source.taken(ids)
    is_encoded = isinstance(found, ImageSource)
    if is_encoded:
        names = [found.images.name(index) for index in range(len(ids))]
    else:
        names = [f"image {index}" for index in ids]
    encoded = []
    if not how_read(data)["takes_files"]:
        pass  # an export takes their pixels
    elif is_encoded:
        encoded = [_as_jpeg_or_png(found.images, index) for index in range(len(ids))]
    else:
        encoded = [_png(PIL.Image.fromarray(_plain(each))) for each in found.images]
    inputs = _inputs(dataclasses.replace(data, source=source), runtime)
    return Samples(names, encoded, inputs, found if is_encoded else None, source.labels)


def _inputs(data: ImageData, runtime: Runtime) -> np.ndarray:
    """Returns the output of the data's own pipeline on one replica, for all images."""
    rows = data.plan.rows_per_replica  # fits in memory, as in training
    plan = Plan(num_examples=len(data.source), global_batch_size=rows, num_replicas=1)
    data = dataclasses.replace(data, plan=plan)
    placement = Placement(runtime.devices[0], runtime.loader_threads, runtime.seed)
    stream = data.stream(placement, data.feed(0))
    batches = [next(stream)[0].numpy() for _ in range(data.plan.num_steps)]
    return np.concatenate(batches)[: len(data.source)]


def _as_jpeg_or_png(blobs: Blobs, index: int) -> bytes:
    try:
        data = blobs.read(index)
        if data.startswith((JPEG_SIGNATURE, PNG_SIGNATURE)):
            return data
        with PIL.Image.open(io.BytesIO(data)) as image:
            return _png(decoded(image, "L" if image.mode in ("1", "L", "LA") else "RGB"))
    except UserError:
        raise  # of a source that says itself what is wrong with its item
    except UNREADABLE as error:
        raise UserError(
            f"{blobs.name(index)} cannot be read ({cause(error)}); replace it or move it away"
        ) from error


def _png(image: PIL.Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _plain(array: np.ndarray) -> np.ndarray:
    """Returns [height, width, channels] for Pillow, which wants grey levels without a last axis."""
    return array[..., 0] if array.shape[-1] == 1 else array
