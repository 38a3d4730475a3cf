"""Lets TensorFlow end the iterators of a strategy at once, at the end of each epoch.

Importing the module is enough. A strategy moves batches to a device by a data set of its own, which
has nothing to tune. Its end may wait for TensorFlow's tuner: see `tfaccel.data.placement.untuned`.

Private names relied on: TensorFlow 2.21: data.ops.multi_device_iterator_ops._create_device_dataset.
"""

import functools

from tensorflow.python.data.ops import multi_device_iterator_ops

from tfaccel.data.placement import untuned

_TENSORFLOWS_OWN = multi_device_iterator_ops._create_device_dataset


@functools.wraps(_TENSORFLOWS_OWN)
def _create_device_dataset(*args, **kwargs):
    return untuned(_TENSORFLOWS_OWN(*args, **kwargs))


multi_device_iterator_ops._create_device_dataset = _create_device_dataset
