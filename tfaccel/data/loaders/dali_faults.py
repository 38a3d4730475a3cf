"""Finds out whether DALI can decode one image, because a pipeline does not name the file at fault.

refused(source.images, 14)    # "cats/x.gif (nvImageCodec failure: ...)"
"""

import re

import numpy as np
from nvidia.dali import fn, pipeline_def, types

from tfaccel.data.source import Blobs


def refused(blobs: Blobs, index: int) -> str | None:
    """Returns "name (cause)" if DALI cannot decode an image on the CPU, else None."""
    pipeline = _decoder()  # a new one for each image, because a pipeline ends when it fails
    pipeline.feed_input("bytes", [np.frombuffer(blobs.read(index), np.uint8)])
    try:
        pipeline.run()
    except RuntimeError as error:
        # DALI's cause is between its own traceback and its stack trace.
        cause = re.search(r"encountered:\s*(.+)", str(error))
        return f"{blobs.name(index)} ({cause[1] if cause else type(error).__name__})"
    return None


@pipeline_def(batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1)
def _decoder():
    data = fn.external_source(name="bytes", ndim=1, dtype=types.UINT8)
    return fn.decoders.image(data, output_type=types.RGB)
