"""Labels beyond a model's outputs, as a step finds them.

Takes a step; gives one whose logs tell which label is no output's number. With XLA, and on a GPU,
the loss of such a label is NaN without a word; without XLA a CPU's operation refuses it.

    step = watched(model.train_step, are_probabilities=False)
    logs = named(step(batch), trains=False)
    beyond(int(logs[finite.LOG]))    # "the label 255 is beyond the model's 3 outputs"
"""

import functools
import re
from collections.abc import Callable

import keras
import tensorflow as tf

from tfaccel.keras_internals.patching import patched
from tfaccel.step import finite

# In a step's logs until `named`: [is one, classes, distance, distance squared] float32, where the
# distance is the label less the classes. All are 0 where there is none. Means over replicas and
# parts of a batch still tell the label, where all found the same.
LOG = "unknown_label"
LABELS = 2**60  # of a code in `finite.LOG`; above it, classes and label, or 0 in its place
_PER_CLASS, _ZERO = 2**34, 2**32  # in a code: a place is _ZERO + the label
_TOLERANCE = 1e-5  # of float32's rounding, relative to a square
# Of TensorFlow's operation for a CPU.
REFUSED = re.compile(
    r"Received a label value of (-?\d+) which is outside the valid range of \[0, (\d+)\)"
)


def watched(step: Callable, *, are_probabilities: bool) -> Callable:
    """Returns the step, whose logs tell of a label that is beyond the outputs.

    Args:
      step: of a batch.
      are_probabilities: whether labels were made probabilities, of which unknown ones are NaN.
    """

    def watching(batch) -> dict:
        found = []
        # Keras's losses and metrics come here too, whatever they are given.
        cross_entropy = tf.nn.sparse_softmax_cross_entropy_with_logits
        noted = functools.partial(_noted, cross_entropy, found)
        with patched(tf.nn, "sparse_softmax_cross_entropy_with_logits", noted):
            logs = step(batch)
        if are_probabilities:
            _, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
            found += [
                _found(tf.math.is_nan(each), None, each.shape[-1])
                for each in tf.nest.flatten(y)
                if each is not None and each.dtype.is_floating
            ]
        # One that is called in a function or a loop of the step's own keeps it to itself.
        graph = tf.compat.v1.get_default_graph()
        first = tf.zeros(4)
        for each in found:
            if each.graph is graph:
                first = tf.where(first[0] > 0, first, each)
        return logs | {LOG: first}

    return watching


def _noted(cross_entropy: Callable, found: list, labels, logits, name=None) -> tf.Tensor:
    classes = tf.convert_to_tensor(logits).shape[-1]
    if classes is not None:
        numbers = tf.convert_to_tensor(labels)
        unknown = (numbers < 0) | (numbers >= tf.cast(classes, numbers.dtype))
        found.append(_found(unknown, numbers, classes))
    return cross_entropy(labels=labels, logits=logits, name=name)


def _found(unknown: tf.Tensor, numbers: tf.Tensor | None, classes: int) -> tf.Tensor:
    """Returns what LOG says.

    Args:
      unknown: bool, which labels are beyond the outputs.
      numbers: all labels; None where they are not known.
      classes: outputs.
    """
    is_one = tf.cast(tf.reduce_any(unknown), tf.float32)
    if numbers is None:
        # No label of a number is less than 0 by so much.
        return is_one * tf.constant([1.0, classes, 0.0, 1.0])
    least = tf.constant(numbers.dtype.min, numbers.dtype)
    label = tf.reduce_max(tf.where(unknown, numbers, least))
    distance = tf.where(is_one > 0, tf.cast(label, tf.float32) - classes, 0.0)
    return is_one * tf.stack([1.0, float(classes), distance, distance**2])


def named(logs: dict, *, trains: bool) -> dict:
    """Returns the logs, in whose code a label beyond the outputs stands before what came of it.

    Args:
      logs: of a step that is `watched`.
      trains: whether the step is one of training, where the label counts only if something that is
        not finite came of it, or a loss scale overflowed.
    """
    logs = dict(logs)
    is_one, classes, distance, square = tf.unstack(logs.pop(LOG))
    share = tf.where(is_one > 0, is_one, 1.0)
    classes, distance, square = classes / share, distance / share, square / share
    same = tf.abs(square - distance**2) <= _TOLERANCE * (1 + square)
    classes = tf.cast(tf.round(classes), tf.int64)
    label = tf.cast(tf.round(distance), tf.int64) + classes
    code = LABELS + classes * _PER_CLASS + tf.where(same, label + _ZERO, 0)
    before, counts = tf.constant(finite.FINE, tf.int64), is_one > 0
    if trains:
        before = logs[finite.LOG]
        faulty = tf.not_equal(before, finite.FINE) & tf.not_equal(before, finite.WEIGHTS)
        counts &= faulty | (tf.cast(logs.get("skipped_steps", 0), tf.int64) > 0)
    return logs | {finite.LOG: tf.where(counts, code, before)}


def beyond(code: int, *, where: str = "") -> str:
    """Returns the sentence of a code of at least LABELS.

    Args:
      code: of `finite.LOG`.
      where: what stands behind the fault, as " at step 2".
    """
    classes, place = divmod(code - LABELS, _PER_CLASS)
    return sentence(place - _ZERO if place else None, classes, where=where)


def sentence(label: int | None, classes: int, *, where: str = "") -> str:
    """Returns what is wrong with a label, and the cure.

    Args:
      label: that is none of 0 to classes - 1; None where it is not known which.
      classes: the model's outputs.
      where: as for `beyond`.
    """
    which = "a label" if label is None else f"the label {label}"
    marks = "such a label" if label is None else str(label)
    return (
        f"{which} is beyond the model's {classes} outputs{where}; give labels from 0 to "
        f"{classes - 1}, or give its last layer more outputs; where {marks} marks what is not to "
        "count, give it the label 0 and the sample_weight 0"
    )
