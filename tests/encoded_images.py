"""Encoded images, records of them, and the epochs that a loader makes of such a source."""

import io

import numpy as np
import PIL.Image
import tensorflow as tf


def png(index):
    """A PNG file of random pixels, which are those of the index."""
    file = io.BytesIO()
    pixels = np.random.default_rng(index).integers(0, 256, (40 + index, 50, 3), dtype=np.uint8)
    PIL.Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def record(image, label, *, image_key="image/encoded", label_key="image/class/label"):
    """A serialized `tf.train.Example` of an encoded image and its class."""
    features = {
        image_key: tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
        label_key: tf.train.Feature(int64_list=tf.train.Int64List(value=[int(label)])),
    }
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def epochs_of(run, source, *, loader, first=0):
    """The images and labels of two epochs, or of the second alone, without padding rows."""
    settings = {"image_size": (32, 32), "global_batch_size": 4, "augment": "imagenet"}
    loader = run.loader(source, shuffle=True, loader=loader, **settings)
    loader.start_at(epoch=first)
    found = []
    for _ in range(2 - first):
        batches = [[each.numpy() for each in batch] for batch in loader]
        x, y, weight = (np.concatenate(each) for each in zip(*batches, strict=True))
        found.append((x[weight > 0], y[weight > 0]))
    return found
