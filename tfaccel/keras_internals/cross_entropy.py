"""The cross-entropy of labels and logits, for steps that XLA compiles.

For XLA, TensorFlow multiplies by one-hot labels and sums over the classes. With the mean over a
batch this becomes one sum over rows and classes, whose order XLA chooses. In a decoder it summed
over the rows first, in the kernel that writes the gradient. Here each label's logit is gathered.

A loss needs the largest logit of its row, and then the sum of exp(logits - largest), which are two
reads of the logits. On a GPU, one read computes both for rows of many classes.
"""

import functools
from collections.abc import Callable

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from tfaccel.keras_internals.gelu import widened
from tfaccel.keras_internals.layouts import in_order
from tfaccel.keras_internals.padded_product import with_padding
from tfaccel.keras_internals.row_operations import noticing

# From this number of classes on, a GPU reads the logits once, in a kernel of its own. With fewer,
# such as the 21 of a U-Net, XLA joins the two reads with the operations around them.
_MANY_CLASSES = 4096
# A thread of the GPU computes a row of few classes, such as a pixel of a U-Net. So neighbours in
# memory are to be of neighbouring rows. Then the products of the last layer have rows that start at
# multiples of 16 bytes, too, which cuBLAS needs for its quick kernels.
_FEW_CLASSES, _MANY_ROWS = 64, 65_536


def gathered(plain: Callable, *, on_gpu: bool = False) -> Callable:
    """Returns a replacement of `tf.nn.sparse_softmax_cross_entropy_with_logits`.

    It gathers each label's logit, and has a gradient of one pass. It computes in float32 at least.
    If a label is no class, its loss and its row of the gradient are NaN, as in XLA's form of
    TensorFlow's operation.

    Args:
      plain: TensorFlow's function, which computes what does not fit, and raises its errors.
      on_gpu: whether XLA compiles the function for a GPU.
    """

    @functools.wraps(plain)
    def cross_entropy(labels, logits, name=None) -> tf.Tensor:
        labels, logits = tf.convert_to_tensor(labels), tf.convert_to_tensor(logits)
        if not _fit(labels, logits):
            return plain(labels=labels, logits=logits, name=name)
        with noticing(on=False), tf.name_scope(name or "sparse_cross_entropy"):
            whole = with_padding(logits)
            rows = tf.reshape(whole, [-1, whole.shape[-1]])
            if on_gpu and logits.shape[-1] <= _FEW_CLASSES and (rows.shape[0] or 0) >= _MANY_ROWS:
                rows = in_order(rows, [1, 0])
            one_read = on_gpu and logits.shape[-1] >= _MANY_CLASSES
            sums = _in_one_read if one_read else _sums
            of_rows = _of_rows(sums, logits.shape[-1], logits.dtype)
            loss = of_rows(rows, tf.reshape(labels, [-1]))
            return tf.ensure_shape(tf.reshape(loss, tf.shape(labels)), labels.shape)

    return cross_entropy


def _fit(labels: tf.Tensor, logits: tf.Tensor) -> bool:
    """Returns whether the shapes and dtypes are right, and the number of classes is known."""
    if labels.dtype not in (tf.int32, tf.int64) or not logits.dtype.is_floating:
        return False
    if labels.shape.rank is None or logits.shape.rank is None or logits.shape.rank < 1:
        return False
    return bool(logits.shape[-1]) and labels.shape.is_compatible_with(logits.shape[:-1])


def _of_rows(sums: Callable, classes: int, dtype: tf.DType) -> Callable:
    """Returns a function of logits [rows, classes or more] and labels [rows]: the losses [rows].

    Columns beyond the classes are padding, whose gradient is 0. With it, each row starts at a
    multiple of 16 bytes, and a thread reads several logits at once.

    Args:
      sums: computes what `_sums` does.
      classes: how many there are.
      dtype: of the losses.
    """

    def shown(logits):
        """Returns the logits, of which no sum over the classes counts the padding."""
        wide = widened(logits)
        if logits.shape[-1] == classes:
            return wide
        is_class = tf.range(logits.shape[-1]) < classes
        return tf.where(is_class, wide, wide.dtype.min)

    @tf.custom_gradient
    def of_rows(logits, labels):
        is_class = (labels >= 0) & (labels < classes)
        index = tf.cast(tf.where(is_class, labels, 0), tf.int32)
        nan = tf.constant(float("nan"), widened(logits).dtype)

        def backward(gradient):
            wide = shown(logits)
            top, log_sum = sums(wide)  # again, for a gradient of this gradient; XLA has it once
            scale = tf.where(is_class, widened(gradient), nan)
            of_class = tf.one_hot(index, logits.shape[-1], dtype=wide.dtype)
            of_logits = (tf.exp(wide - top - log_sum) - of_class) * scale[:, tf.newaxis]
            return tf.cast(of_logits, logits.dtype), None

        top, log_sum = sums(shown(logits))
        chosen = widened(tf.gather(logits, index, batch_dims=1))
        loss = tf.where(is_class, (log_sum - (chosen[:, tf.newaxis] - top))[:, 0], nan)
        return tf.cast(loss, dtype), backward

    return of_rows


def _sums(wide: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns each row's largest logit, and log(sum(exp(logits - largest))); both [rows, 1].

    The largest has no gradient, because what is computed of both does not depend on it.
    """
    top = tf.stop_gradient(tf.reduce_max(wide, axis=-1, keepdims=True))
    return top, tf.math.log(tf.reduce_sum(tf.exp(wide - top), axis=-1, keepdims=True))


@tf.custom_gradient
def _in_one_read(wide):
    """Returns what `_sums` does. Only XLA can compute it."""

    def backward(_, gradient):
        top, log_sum = _in_one_read(wide)
        return tf.exp(wide - top - log_sum) * gradient

    scalars = [tf.TensorSpec([], wide.dtype)] * 4
    joined = tf.function(_joined, autograph=False).get_concrete_function(*scalars)
    lowest = tf.constant(wide.dtype.min, wide.dtype)
    # The difference of two infinite logits would be NaN. A mask makes some that are -infinity.
    given = [tf.maximum(wide, lowest), tf.ones_like(wide)]
    top, total = xla.variadic_reduce(given, [lowest, tf.zeros_like(lowest)], [1], joined)
    total = tf.where(tf.abs(top) < wide.dtype.max, total, float("nan"))  # as in `_sums`
    return (top[:, tf.newaxis], tf.math.log(total)[:, tf.newaxis]), backward


def _joined(top, total, other_top, other_total):
    """Joins two parts of a row: the largest logit, and the sum of exp(logits - largest)."""
    factor = tf.exp(-tf.abs(top - other_top))  # of the part whose largest is smaller
    is_first = top >= other_top
    sums = tf.where(is_first, total + other_total * factor, total * factor + other_total)
    return tf.maximum(top, other_top), sums
