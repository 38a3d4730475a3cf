"""The cross-entropy of labels and logits, for steps that XLA compiles.

TensorFlow expands its operation for XLA into a one-hot product, summed over the classes. The mean
over a batch then becomes a sum over rows and classes, which XLA takes in the order that it likes.
In a decoder it summed over the rows first, in the kernel that writes the gradient.
"""

import functools
from collections.abc import Callable

import tensorflow as tf

from tfaccel.keras_internals.row_operations import noticing


def gathered(plain: Callable) -> Callable:
    """Returns a replacement of `tf.nn.sparse_softmax_cross_entropy_with_logits`.

    It gathers each label's logit, and has a gradient of one pass. It computes in float32 at least.
    A label that is no class has a NaN as its loss, and as its row of the gradient, as in XLA's form
    of TensorFlow's operation.

    Args:
      plain: TensorFlow's function, which gets what is not of this form, and so raises its errors.
    """

    @functools.wraps(plain)
    def cross_entropy(labels, logits, name=None) -> tf.Tensor:
        labels, logits = tf.convert_to_tensor(labels), tf.convert_to_tensor(logits)
        if not _fit(labels, logits):
            return plain(labels=labels, logits=logits, name=name)
        with noticing(on=False), tf.name_scope(name or "sparse_cross_entropy"):
            rows = tf.reshape(logits, [-1, logits.shape[-1]])
            loss = _of_rows(rows, tf.reshape(labels, [-1]))
            return tf.ensure_shape(tf.reshape(loss, tf.shape(labels)), labels.shape)

    return cross_entropy


def _fit(labels: tf.Tensor, logits: tf.Tensor) -> bool:
    """Returns whether the shapes and dtypes are right, and the number of classes is known."""
    if labels.dtype not in (tf.int32, tf.int64) or not logits.dtype.is_floating:
        return False
    if labels.shape.rank is None or logits.shape.rank is None or logits.shape.rank < 1:
        return False
    return bool(logits.shape[-1]) and labels.shape.is_compatible_with(logits.shape[:-1])


@tf.custom_gradient
def _of_rows(logits, labels):
    """Takes logits [rows, classes] and labels [rows]; returns [rows] in the logits' dtype."""
    is_class = (labels >= 0) & (labels < logits.shape[-1])
    index = tf.cast(tf.where(is_class, labels, 0), tf.int32)
    nan = tf.constant(float("nan"), _wide(logits).dtype)

    def backward(gradient):
        wide = _wide(logits)
        top, log_sum = _sums(wide)  # again, for a gradient of this gradient; XLA has it once
        scale = tf.where(is_class, _wide(gradient), nan)
        of_class = tf.one_hot(index, logits.shape[-1], dtype=wide.dtype)
        of_logits = (tf.exp(wide - top - log_sum) - of_class) * scale[:, tf.newaxis]
        return tf.cast(of_logits, logits.dtype), None

    top, log_sum = _sums(_wide(logits))
    chosen = _wide(tf.gather(logits, index, batch_dims=1))
    loss = tf.where(is_class, (log_sum - (chosen[:, tf.newaxis] - top))[:, 0], nan)
    return tf.cast(loss, logits.dtype), backward


def _sums(wide: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns each row's largest logit, and log(sum(exp(logits - largest))); both [rows, 1]."""
    top = tf.stop_gradient(tf.reduce_max(wide, axis=-1, keepdims=True))
    return top, tf.math.log(tf.reduce_sum(tf.exp(wide - top), axis=-1, keepdims=True))


def _wide(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(x, tf.float32) if x.dtype in (tf.float16, tf.bfloat16) else x
