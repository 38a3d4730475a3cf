"""Finds and reports labels that are not an index of one of the model's outputs.

`watched` takes a step and returns one that adds the unknown label to the logs. Without this, the
loss of such a label is NaN with XLA and on a GPU, with no message. Without XLA on a CPU,
TensorFlow's operation raises an error.

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
from tfaccel.keras_internals.row_operations import noticing
from tfaccel.step import finite, loss_scale

# The key of an entry in a step's logs until `named` removes it. A step that compares no labels with
# outputs has no such entry. Its value is float32: [1, classes, distance, distance squared], where
# the distance is the label minus the classes. All four are 0 if every label is known. A mean over
# replicas and parts of a batch still gives the label if all of them found the same one.
LOG = "unknown_label"
# A code in `finite.LOG` of at least LABELS has the classes and the label, or 0 in the label's place
# if the label is not known.
LABELS = 2**60
_PER_CLASS, _ZERO = 2**34, 2**32  # within a code, the label's place is _ZERO + the label
_TOLERANCE = 1e-5  # for float32's rounding, relative to a square
# Below every int64. Its square is finite in float32, so `tf.debugging.enable_check_numerics` finds
# no infinity in a step without unknown labels.
_LEAST = -1e19
# The error of TensorFlow's operation for a CPU.
REFUSED = re.compile(
    r"Received a label value of (-?\d+) which is outside the valid range of \[0, (\d+)\)"
)


def watched(step: Callable, *, are_probabilities: bool) -> Callable:
    """Returns the step with LOG in its logs.

    Args:
      step: a function of a batch.
      are_probabilities: whether labels were turned into probabilities; unknown ones are NaN then.
    """

    def watching(batch) -> dict:
        found = []
        # Keras's sparse losses and metrics all call this function.
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
        # A tensor of another graph, such as a loop inside the step, cannot be returned here.
        found = [each for each in found if _is_usable_here(each)]
        return logs | ({LOG: functools.reduce(_first, found)} if found else {})

    return watching


def _is_usable_here(tensor: tf.Tensor) -> bool:
    if tf.executing_eagerly() or not tf.is_symbolic_tensor(tensor):
        return not tf.is_symbolic_tensor(tensor)
    return tensor.graph is tf.compat.v1.get_default_graph()


def _first(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    return tf.where(one[0] > 0, one, other)


def _noted(cross_entropy: Callable, found: list, labels, logits, name=None) -> tf.Tensor:
    classes = tf.convert_to_tensor(logits).shape[-1]
    if classes is not None:
        numbers = tf.convert_to_tensor(labels)
        unknown = (numbers < 0) | (numbers >= tf.constant(classes, numbers.dtype))
        with noticing(on=False):
            found.append(_found(unknown, numbers, classes))
    return cross_entropy(labels=labels, logits=logits, name=name)


def _found(unknown: tf.Tensor, numbers: tf.Tensor | None, classes: int) -> tf.Tensor:
    """Returns the value of LOG, in few operations, because Python makes each of them at the start.

    Args:
      unknown: bool, True for each label that is not an output's index.
      numbers: all labels; None if only the probabilities are known.
      classes: the number of outputs.
    """
    if numbers is None:
        # A distance of 0 with a square of 1 does not occur for a real label.
        is_one = tf.cast(tf.reduce_any(unknown), tf.float32)
        return is_one * tf.constant([1.0, classes, 0.0, 1.0])
    classes, least = tf.constant(float(classes)), tf.constant(_LEAST)
    label = tf.reduce_max(tf.where(unknown, tf.cast(numbers, tf.float32), least))
    is_one, distance = tf.cast(label > least, tf.float32), label - classes
    told = tf.stack([is_one, classes, distance, distance * distance])
    return tf.math.multiply_no_nan(told, is_one)


def named(logs: dict, *, trains: bool) -> dict:
    """Returns the logs, with an unknown label reported in `finite.LOG` ahead of its consequences.

    Args:
      logs: the logs of a step that is `watched`.
      trains: whether this is a training step. It reports the label only if the step also found an
        infinite or NaN value, or a loss scale overflowed.
    """
    fine = tf.constant(finite.FINE, tf.int64)
    if LOG not in logs:
        return logs if trains else logs | {finite.LOG: fine}
    logs = dict(logs)
    told = logs.pop(LOG)
    share = tf.unstack(told)[0]
    # From the mean to the value of the replica that found it.
    told = tf.math.divide_no_nan(told, share)
    _, _, distance, square = tf.unstack(told)
    same = square * (1 - _TOLERANCE) <= distance * distance + _TOLERANCE
    _, classes, distance, _ = tf.unstack(tf.cast(tf.round(told), tf.int64))
    place = tf.where(same, distance + classes + _ZERO, 0)
    code, counts = classes * _PER_CLASS + LABELS + place, share > 0
    if not trains:
        return logs | {finite.LOG: tf.where(counts, code, fine)}
    before = logs[finite.LOG]
    faulty = tf.not_equal(before, fine) & tf.not_equal(before, finite.WEIGHTS)
    for name in filter(loss_scale.is_skipped, logs):
        faulty |= logs[name] > 0
    return logs | {finite.LOG: tf.where(counts & faulty, code, before)}


def beyond(code: int, *, where: str = "") -> str:
    """Returns the sentence for a code of at least LABELS; `where` may be " at step 2"."""
    classes, place = divmod(code - LABELS, _PER_CLASS)
    return sentence(place - _ZERO if place else None, classes, where=where)


def sentence(label: int | None, classes: int, *, where: str = "") -> str:
    """Returns what is wrong with a label, and the fix; `label=None` if the label is not known."""
    which = "a label" if label is None else f"the label {label}"
    marks = "such a label" if label is None else str(label)
    return (
        f"{which} is beyond the model's {classes} outputs{where}; give labels from 0 to "
        f"{classes - 1}, or give the model's last layer more outputs; if {marks} marks rows or "
        "pixels to ignore, give them the label 0 and the sample_weight 0"
    )
