"""Writes sums with matrix products so that XLA copies nothing for them.

cuBLAS can add its product to a matrix, which it overwrites. XLA of TensorFlow 2.21 uses this, but
two forms of a sum cost it a pass over the memory:

- A residual of three axes, added to a product of two. XLA takes the residual as a matrix that
  nobody else reads, and lets the product overwrite it. As the gradient needs it later, XLA copies
  it before: 24 copies of 77 MB (read and written) a step of ViT-B/16 with a batch of 128. Of two
  matrices XLA sees that the residual has another reader, and adds in the kernel that follows.
- A sum of three products, such as the gradient of what queries, keys and values are made from. XLA
  adds the second product to the first one, but not this sum to the third product.

Here such sums are of matrices, and each product is added to all that comes after it. The bytes of
the kernels beside the products and calls went from 19.9 to 19.0 GB a step of ViT-B/16, and from
20.8 to 20.2 of the GPT-2-small decoder (8 x 2,048 tokens), by TensorFlow's own XLA for an H100
without Triton's products, 2026-11-28.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import tensorflow as tf
from tensorflow.python.eager import record

from tfaccel.keras_internals.product_bias import terms_behind

_DTYPES = {tf.float16, tf.bfloat16, tf.float32}
_SUM = "_tfaccel_sum"  # of a tensor that `as_matrices` returned
_SAME_PRODUCT = {"Reshape", "Identity", "IdentityN", "BiasAdd"}
_changes_of_tapes = itertools.count()
_tapes = next(_changes_of_tapes)  # changes with what is recorded for gradients


class Sum:
    """A residual plus a matrix product with a bias, which another kernel may compute, too.

    Attributes:
      x: the sum as XLA computes it.
      terms: residual, product without its bias, and bias [columns].
    """

    def __init__(self, x: tf.Tensor, terms: tuple[tf.Tensor, tf.Tensor, tf.Tensor]):
        """Takes the attributes."""
        self.x, self.terms = x, terms
        self._total, self._tapes = None, None

    @property
    def total(self) -> tf.Tensor | None:
        """The sum as a kernel has computed it; None if none has, or a tape would miss it.

        A tape that began later, or watches the sum since, has not recorded the kernel.
        """
        return self._total if self._tapes == _tapes else None

    @total.setter
    def total(self, total: tf.Tensor) -> None:
        self._total, self._tapes = total, _tapes

    @property
    def is_recorded(self) -> bool:
        """Whether a tape records what is computed from the sum now."""
        return record.should_record_backprop([self.x])


def forgetting(change: Callable) -> Callable:
    """Returns a replacement of a method that changes what tapes record: no total is used again."""

    @functools.wraps(change)
    def changed(*args, **kwargs):
        global _tapes
        _tapes = next(_changes_of_tapes)
        return change(*args, **kwargs)

    return changed


def as_matrices(add: Callable) -> Callable:
    """Returns a replacement of Keras's `add(x1, x2)` or of `tf.Tensor.__add__`.

    It adds a matrix product to a tensor of its shape as matrices [rows, columns], if the shape is
    known and has three or more axes, and the dtype is float16, bfloat16 or float32. All else uses
    `add`. The sum has the same bits. `sum_of` returns what was added.
    """

    @functools.wraps(add)
    def matrices_added(x1, x2):
        if not _are_alike([x1, x2]) or x1.shape.rank < 3:
            return add(x1, x2)
        are_products = [_is_product(each) for each in (x1, x2)]
        if not any(are_products):
            return add(x1, x2)
        x1, x2 = map(computed, (x1, x2))
        found = tf.reshape(tf.raw_ops.AddV2(x=_matrix(x1), y=_matrix(x2)), x1.shape)
        residual, product = (x1, x2) if are_products[1] else (x2, x1)
        terms = _with_bias(product)
        if terms is not None:
            setattr(found, _SUM, Sum(found, (residual, *terms)))
        return found

    return matrices_added


def sum_of(x: tf.Tensor) -> Sum | None:
    """Returns what x was added from, if all of it is of the function that is being traced."""
    found = getattr(x, _SUM, None)
    graph = tf.compat.v1.get_default_graph()
    return found if found and all(each.graph is graph for each in found.terms) else None


def keeping_sum(x: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """Returns `other`, of the same values as x, for which `sum_of` returns that of x."""
    if (found := getattr(x, _SUM, None)) is not None:
        setattr(other, _SUM, found)
    return other


def computed(x: tf.Tensor) -> tf.Tensor:
    """Returns x as a kernel has computed it, if one of the traced function has, else x."""
    found = sum_of(x)
    total = None if found is None else found.total
    return x if total is None or total.graph is not x.graph else total


def _with_bias(product: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor] | None:
    """Returns a product without its bias, and the bias; None if not each column has one."""
    columns = product.shape[-1:]
    values, bias = terms_behind(product) or (None, None)
    is_of_columns = bias is not None and values.shape[-1:] == columns == bias.shape
    return (values, bias) if is_of_columns else None


def one_into_the_other(add_n: Callable) -> Callable:
    """Returns a replacement of TensorFlow's `add_n(inputs, name=None)`, which sums gradients.

    A sum of three or more tensors, two or more of them matrix products, is one of matrices. It
    starts with the other tensors, and each product is added to the sum so far. All else uses
    `add_n`.
    """

    @functools.wraps(add_n)
    def summed(inputs, name=None):
        inputs = list(inputs)
        if len(inputs) < 3 or not _are_alike(inputs) or inputs[0].shape.rank < 2:
            return add_n(inputs, name=name)
        products = [each for each in inputs if _is_product(each)]
        if len(products) < 2:
            return add_n(inputs, name=name)
        others = [each for each in inputs if not _is_product(each)]
        *later, total = map(_matrix, products + others)
        for each in reversed(later):
            total = tf.raw_ops.AddV2(x=each, y=total)
        return tf.reshape(total, inputs[0].shape)

    return summed


def _are_alike(values: Sequence) -> bool:
    """Returns whether values are tensors of a traced function, of one known shape and dtype."""
    if not all(tf.is_symbolic_tensor(each) for each in values):
        return False
    first = values[0]
    return (
        first.dtype in _DTYPES
        and first.shape.is_fully_defined()
        and all((each.dtype, each.shape) == (first.dtype, first.shape) for each in values)
    )


def _is_product(values: tf.Tensor) -> bool:
    """Returns whether values are a matrix product in some shape, with or without a bias."""
    while (op := values.op).type in _SAME_PRODUCT or _has_bias(op):
        values = op.inputs[values.value_index]
    return op.type == "MatMul"


def _has_bias(op: tf.Operation) -> bool:
    return op.type == "AddV2" and op.inputs[1].shape.rank == 1


def _matrix(values: tf.Tensor) -> tf.Tensor:
    *rows, columns = values.shape
    return values if len(rows) == 1 else tf.reshape(values, [math.prod(rows), columns])
