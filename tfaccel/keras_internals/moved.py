"""Private names that lie elsewhere in Keras 3.16 than in Keras 3.15, for both.

The other modules import these names from here: `from tfaccel.keras_internals.moved import nn`. Once
pyproject.toml no longer allows Keras 3.15, only the names of Keras 3.16 stay.
"""

import contextlib
from collections.abc import Callable

import keras
import tensorflow as tf
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

from tfaccel.keras_internals.patching import patched

__all__ = ["Variable", "nn", "numpy", "ordered_by", "place_of_remat"]

if keras.__version__ < "3.16":  # both are of Keras 3, and have two digits
    from keras.src.backend.tensorflow import core as place_of_remat
    from keras.src.backend.tensorflow import nn, numpy
    from keras.src.backend.tensorflow.core import Variable
else:
    from keras.src.backend.tensorflow import ops as place_of_remat
    from keras.src.backend.tensorflow.ops import nn, numpy
    from keras.src.backend.tensorflow.ops.core import Variable


def ordered_by(
    order: Callable[[tf.Tensor], tf.Tensor], adapter: ArrayDataAdapter
) -> contextlib.AbstractContextManager:
    """Returns a context in which the data set of an adapter shuffles its rows by a function.

    Args:
      order: from the indices of all rows, [rows] int64, to their order, of the same shape.
      adapter: of arrays that are shuffled. Keras 3.15 calls `tf.random.shuffle` for it. Keras 3.16
        has a method, whose order depends on neither the seed nor, within one data set, the epoch.
    """
    if hasattr(adapter, "_tf_shuffle"):
        return patched(adapter, "_tf_shuffle", order)
    return patched(tf.random, "shuffle", order)
