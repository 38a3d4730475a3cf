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

# In a step's logs until `named`, if it compares labels with outputs: [is one, classes, distance,
# distance squared] float32, where the distance is the label less the classes. All are 0 where there
# is none. Means over replicas and parts of a batch still tell the label, where all found the same.
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
        found = [each for each in found if each.graph is graph]
        return logs | ({LOG: functools.reduce(_first, found)} if found else {})

    return watching


def _first(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    return tf.where(one[0] > 0, one, other)


def _noted(cross_entropy: Callable, found: list, labels, logits, name=None) -> tf.Tensor:
    classes = tf.convert_to_tensor(logits).shape[-1]
    if classes is not None:
        numbers = tf.convert_to_tensor(labels)
        unknown = (numbers < 0) | (numbers >= tf.constant(classes, numbers.dtype))
        found.append(_found(unknown, numbers, classes))
    return cross_entropy(labels=labels, logits=logits, name=name)


def _found(unknown: tf.Tensor, numbers: tf.Tensor | None, classes: int) -> tf.Tensor:
    """Returns what LOG says; each of its operations is felt at a start, where Python makes it.

    Args:
      unknown: bool, which labels are beyond the outputs.
      numbers: all labels; None where they are not known.
      classes: outputs.
    """
    if numbers is None:
        # No label of a number is less than 0 by so much.
        is_one = tf.cast(tf.reduce_any(unknown), tf.float32)
        return is_one * tf.constant([1.0, classes, 0.0, 1.0])
    classes, least = tf.constant(float(classes)), tf.constant(tf.float32.min)
    label = tf.reduce_max(tf.where(unknown, tf.cast(numbers, tf.float32), least))
    is_one, distance = tf.cast(label > least, tf.float32), label - classes
    told = tf.stack([is_one, classes, distance, distance * distance])
    return tf.math.multiply_no_nan(told, is_one)


def named(logs: dict, *, trains: bool) -> dict:
    """Returns the logs, in whose code a label beyond the outputs stands before what came of it.

    Args:
      logs: of a step that is `watched`.
      trains: whether the step is one of training, where the label counts only if something that is
        not finite came of it, or a loss scale overflowed.
    """
    fine = tf.constant(finite.FINE, tf.int64)
    if LOG not in logs:
        return logs if trains else logs | {finite.LOG: fine}
    logs = dict(logs)
    told = logs.pop(LOG)
    share = tf.unstack(told)[0]
    told = tf.math.divide_no_nan(told, share)  # of a mean, as the replica that found it has it
    _, _, distance, square = tf.unstack(told)
    same = square * (1 - _TOLERANCE) <= distance * distance + _TOLERANCE
    _, classes, distance, _ = tf.unstack(tf.cast(tf.round(told), tf.int64))
    place = tf.where(same, distance + classes + _ZERO, 0)
    code, counts = classes * _PER_CLASS + LABELS + place, share > 0
    if not trains:
        return logs | {finite.LOG: tf.where(counts, code, fine)}
    before = logs[finite.LOG]
    faulty = tf.not_equal(before, fine) & tf.not_equal(before, finite.WEIGHTS)
    if "skipped_steps" in logs:
        faulty |= logs["skipped_steps"] > 0
    return logs | {finite.LOG: tf.where(counts & faulty, code, before)}


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
