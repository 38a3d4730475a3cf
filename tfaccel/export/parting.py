"""Finds the preprocessing step after which an export's pixels differ from the pipeline's.

`where_pixels_differ` takes the worst image. It makes the image's pixels with the evaluation
pipeline and with the export's functions: first only decoded, then also resized. It returns the
first step after which they differ.

    step = where_pixels_differ(source, encoded, data, preprocessing, runtime)      # "decoder"
"""

import dataclasses

import numpy as np
import tensorflow as tf

from tfaccel.config import AugmentConfig
from tfaccel.data.images import ImageData
from tfaccel.data.loaders.memory import decode_all
from tfaccel.data.placement import Placement
from tfaccel.data.shards import Plan
from tfaccel.data.source import ArraySource, ImageSource
from tfaccel.data.sources.pillow import image_size
from tfaccel.export.parity import PIXEL_LIMIT
from tfaccel.export.preprocessing import Preprocessing
from tfaccel.runtime.devices import Runtime


def where_pixels_differ(
    source: ImageSource,
    encoded: bytes,
    data: ImageData,
    preprocessing: Preprocessing,
    runtime: Runtime,
) -> str:
    """Returns "decoder", "resize" or "normalisation".

    `source` has the image alone, for the pipeline of `data`. `encoded` is the same image as a JPEG
    or PNG file, for the export's `preprocessing`.
    """
    plain = {"mean": 0.0, "std": 1.0, "global_batch_size": 1, "batch_per_replica": None}
    images = dataclasses.replace(preprocessing.images, **plain, stored_size=None)
    own_size = image_size(source.images, 0)
    stored = data.source.images.shape[1:3] if isinstance(data.source, ArraySource) else None
    steps = {
        "decoder": (own_size, AugmentConfig(), stored and own_size),
        "resize": (images.image_size, preprocessing.augment, stored),
    }
    for name, (size, augment, stored_size) in steps.items():
        made = {"images": dataclasses.replace(images, image_size=size), "augment": augment}
        stores = preprocessing.stored_size if name == "resize" else None
        of_export = dataclasses.replace(preprocessing, **made, stored_size=stores)
        ours = of_export.pixels(tf.constant([encoded])).numpy().astype(np.float32)
        ours *= 255 / images.pixel_scale
        theirs = 255 * _of_pipeline(source, stored_size, data, made, runtime)
        if np.abs(ours - theirs).mean() > PIXEL_LIMIT:
            return name
    return "normalisation"


def _of_pipeline(source, stored_size, data: ImageData, made, runtime: Runtime) -> np.ndarray:
    """Returns the image from the data's own loader, with other settings."""
    if stored_size:  # this loader stores decoded images
        how = {"channels": made["images"].channels, "targets": made["images"].targets}
        source = decode_all(source, stored_size=stored_size, num_threads=1, **how)
    plan = Plan(num_examples=1, global_batch_size=1, num_replicas=1)
    data = dataclasses.replace(data, source=source, found=source, plan=plan, **made)
    placement = Placement(runtime.devices[0], runtime.loader_threads, runtime.seed)
    return next(data.stream(placement, data.feed(0)))[0].numpy().astype(np.float32)
