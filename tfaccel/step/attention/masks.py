"""Finds the causal part of an attention's mask, so that cuDNN can skip what it takes out.

Keras's and KerasHub's layers give one boolean mask, in which a causal mask and the padding of a
batch are joined already. The traced operations of the mask show the parts that were joined. A part
that depends on no input of the step is computed while the step is traced.
"""

import functools
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from tfaccel.keras_internals.traced import constant_of

LARGEST_CONSTANT = 2**27  # values of a mask that are computed while a step is traced
# Operations that join two masks of 0 and 1, or of False and True.
AND = ("LogicalAnd", "BitwiseAnd", "Minimum", "Mul")
# Operations whose values are values of their first operand.
MOVES = (
    "BroadcastTo", "Cast", "ExpandDims", "Reshape", "Squeeze", "StridedSlice", "Tile", "Transpose"
)  # fmt: skip
KEPT = ("Identity", "StopGradient", "Snapshot", "PreventGradient")


def causal_and_rest(mask: tf.Tensor, *, rows: int, key_rows: int) -> tuple[bool, list[tf.Tensor]]:
    """Returns whether a mask has a causal part, and its other parts, which are joined by "and".

    Args:
      mask: [B or 1, N or 1, T or 1, S] bool, True where a row of the query sees one of the key.
      rows: T.
      key_rows: S.

    Returns:
      Whether row t of the query sees the rows 0 to t of the key only, by one of the parts; and
      the others, each [B or 1, N or 1, T or 1, S] bool. A part that takes out nothing is left out.
    """
    is_causal, rest, constant = False, [], np.ones((1, 1, 1, 1), bool)
    for part in _parts(mask):
        known = constant_of(part, at_most=LARGEST_CONSTANT)
        if known is None:
            rest.append(part)
        else:
            constant = constant & known
    if constant.all():
        return is_causal, rest
    full = np.broadcast_to(constant, (*constant.shape[:2], rows, key_rows))
    if (full == _triangle(rows, key_rows)).all():
        is_causal = True
    else:
        rest.append(tf.constant(constant))
    return is_causal, rest


@functools.lru_cache(maxsize=4)
def _triangle(rows: int, key_rows: int) -> np.ndarray:
    return np.tri(rows, key_rows, dtype=bool)


def _parts(mask: tf.Tensor, added: Sequence[Sequence[int]] = ()) -> Iterator[tf.Tensor]:
    """Yields the masks that were joined by "and", as bool and with as many axes as the whole.

    Args:
      mask: the mask, or a part of one.
      added: the axes that are added to the parts behind it; the axis added last comes first.
    """

    def whole():
        part = functools.reduce(tf.expand_dims, reversed(added), mask)
        missing = 4 - part.shape.rank
        return tf.cast(tf.reshape(part, [*[1] * missing, *part.shape]), tf.bool)

    if not tf.is_symbolic_tensor(mask):
        yield whole()
        return
    kind, inputs = mask.op.type, mask.op.inputs
    if kind in KEPT or (kind == "Cast" and _is_whole(inputs[0])):
        yield from _parts(inputs[0], added)
    elif kind in ("ExpandDims", "Reshape") and (axis := _added_axis(inputs[0], mask)) is not None:
        yield from _parts(inputs[0], (*added, axis))
    elif kind in AND and _is_and(kind, inputs):
        for each in inputs:
            yield from _parts(each, added)
    else:
        yield whole()


def _is_and(kind: str, inputs: Sequence[tf.Tensor]) -> bool:
    """Returns whether an operation of AND is not zero exactly where no operand is zero.

    The smaller of two numbers is so if neither is negative. That of a mask which the step is given,
    as KerasHub's `padding_mask`, cannot be known; by their definition masks have 0 and 1.
    """
    if kind == "Mul":
        return all(map(_is_whole, inputs))
    known = [_is_zero_or_one(each) for each in inputs]
    return any(known) and all(map(_is_whole, inputs)) if kind == "Minimum" else all(known)


def _is_whole(tensor: tf.Tensor) -> bool:
    return tensor.dtype == tf.bool or tensor.dtype.is_integer


def _added_axis(before: tf.Tensor, after: tf.Tensor) -> int | None:
    """Returns the axis of size 1 that only `after` has, counted from the end; or None."""
    if before.shape.rank is None or after.shape.rank != before.shape.rank + 1:
        return None
    small, large = list(before.shape), list(after.shape)
    for axis in range(-len(large), 0):
        without = [*large]
        if without.pop(axis) == 1 and without == small:
            return axis
    return None


def _is_zero_or_one(mask: tf.Tensor) -> bool:
    """Returns whether a tensor has no other values than 0 and 1, or False and True."""
    if mask.dtype == tf.bool:
        return True
    if not tf.is_symbolic_tensor(mask):
        return bool(np.isin(mask.numpy(), (0, 1)).all())
    kind, inputs = mask.op.type, mask.op.inputs
    if kind in MOVES or kind in KEPT:
        return _is_zero_or_one(inputs[0])
    if kind in AND:
        return all(map(_is_zero_or_one, inputs))
    known = constant_of(mask, at_most=LARGEST_CONSTANT)
    return known is not None and bool(np.isin(known, (0, 1)).all())
