"""Labels beyond a model's outputs, as a test step finds them.

Takes a test step; gives one whose logs tell whether a label is no output's number. With XLA, and on
a GPU, the loss of such a label is NaN without a word; without XLA a CPU's operation refuses it.

    step = watched(model.test_step, are_probabilities=False)
    logs = step(batch)
    logs[finite.LOG]    # LABELS or finite.FINE, int64
"""

import functools
import re
from collections.abc import Callable

import keras
import tensorflow as tf

from tfaccel import seam
from tfaccel.step import finite

LABELS = 1  # in a test step's logs; finite.FINE where all labels are known
# Of TensorFlow's operation for a CPU.
REFUSED = re.compile(
    r"Received a label value of (-?\d+) which is outside the valid range of \[0, (\d+)\)"
)
CURE = "give labels from 0 on that are less than its outputs, or give its last layer more"


def watched(step: Callable, *, are_probabilities: bool) -> Callable:
    """Returns the test step, which tells in its logs whether a label is beyond the outputs.

    Args:
      step: of a batch.
      are_probabilities: whether labels were made probabilities, of which unknown ones are NaN.
    """

    def watching(batch) -> dict:
        found = []
        # Keras's losses and metrics come here too, whatever they are given.
        cross_entropy = tf.nn.sparse_softmax_cross_entropy_with_logits
        noted = functools.partial(_noted, cross_entropy, found)
        with seam.patched(tf.nn, "sparse_softmax_cross_entropy_with_logits", noted):
            logs = step(batch)
        if are_probabilities:
            _, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
            found += [
                tf.reduce_any(tf.math.is_nan(each))
                for each in tf.nest.flatten(y)
                if each is not None and each.dtype.is_floating
            ]
        # One that is called in a function or a loop of the step's own keeps it to itself.
        graph = tf.compat.v1.get_default_graph()
        found = [each for each in found if each.graph is graph]
        unknown = functools.reduce(tf.logical_or, found, tf.constant(False))
        return logs | {finite.LOG: tf.cast(unknown, tf.int64) * LABELS}

    return watching


def _noted(cross_entropy: Callable, found: list, labels, logits, name=None) -> tf.Tensor:
    classes = tf.convert_to_tensor(logits).shape[-1]
    if classes is not None:
        numbers = tf.convert_to_tensor(labels)
        known = (numbers >= 0) & (numbers < tf.cast(classes, numbers.dtype))
        found.append(~tf.reduce_all(known))
    return cross_entropy(labels=labels, logits=logits, name=name)
