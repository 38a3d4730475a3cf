"""Max pooling for a step that XLA compiles: its gradient quick, and the same bits every time.

Takes Keras's `MaxPooling2D.call`; gives a function that stands for it at class level while a step
is traced. tfaccel/seam.py puts it there.

    MaxPooling2D.call = indexed(MaxPooling2D.call)
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

# Pixels of a window, each of which is an operation: beyond 5 x 5 nobody has measured it.
MOST_PIXELS = 25


def indexed(call: Callable) -> Callable:
    """Returns what can stand for Keras's `MaxPooling2D.call`: it keeps which pixel was the largest.

    For the gradient XLA has SelectAndScatter, which finds that pixel again, and is refused where
    kernels must be deterministic. Here each pixel gathers from the windows that it may be the
    largest of. The gradient is the same: of equal pixels the first one has all of it.

    Pooled so are floats [batch, height, width, channels] whose sides and channels are known, in
    windows of at most 25 pixels; everything else goes to `call`.

    Args:
      call: Keras's own `(self, inputs)`.
    """

    @functools.wraps(call)
    def call_indexed(self, inputs):
        if self.data_format != "channels_last" or None in inputs.shape[1:]:
            return call(self, inputs)
        rows, columns = (
            _axis(*each, same=self.padding == "same")
            for each in zip(inputs.shape[1:3], self.pool_size, self.strides, strict=True)
        )
        is_small = rows.window * columns.window <= MOST_PIXELS
        if not inputs.dtype.is_floating or not is_small or min(rows.num, columns.num) < 1:
            return call(self, inputs)
        return _pooled(inputs, rows, columns)

    return call_indexed


class _Axis(NamedTuple):
    """Windows along height or width: `num` of `window` pixels, each `stride` after the last."""

    size: int
    window: int
    stride: int
    before: int  # pixels of padding
    after: int
    num: int

    def pixels(self, offset: int) -> slice:
        """Returns the padded pixels that are the windows' pixel number `offset`."""
        return slice(offset, offset + (self.num - 1) * self.stride + 1, self.stride)

    def are_real(self, offset: int) -> np.ndarray:
        """Returns which of them are no padding: [num] bool."""
        real = np.zeros(self.before + self.size + self.after, bool)
        real[self.before : self.before + self.size] = True
        return real[self.pixels(offset)]


def _axis(size: int, window: int, stride: int, *, same: bool) -> _Axis:
    """Returns TensorFlow's windows; where they need padding, the first side has the lesser half."""
    if not same:
        return _Axis(size, window, stride, 0, 0, (size - window) // stride + 1)
    num = -(-size // stride)
    padding = max(0, (num - 1) * stride + window - size)
    return _Axis(size, window, stride, padding // 2, padding - padding // 2, num)


def _pooled(inputs: tf.Tensor, rows: _Axis, columns: _Axis) -> tf.Tensor:
    offsets = list(itertools.product(range(rows.window), range(columns.window)))
    first_real = _first_real([np.outer(rows.are_real(i), columns.are_real(j)) for i, j in offsets])

    @tf.custom_gradient
    def pooled(inputs):
        padding = [[0, 0], [rows.before, rows.after], [columns.before, columns.after], [0, 0]]
        padded = tf.pad(inputs, padding, constant_values=tf.constant(-np.inf, inputs.dtype))
        pixels = [padded[:, rows.pixels(row), columns.pixels(column)] for row, column in offsets]
        largest, index = pixels[0], tf.zeros_like(pixels[0], tf.uint8)
        for number, each in enumerate(pixels[1:], start=1):
            # NaN, which is unlike itself, comes through, to be seen.
            is_larger = (each > largest) | (each != each) | first_real[number]
            largest = tf.where(is_larger, each, largest)
            index = tf.where(is_larger, tf.constant(number, tf.uint8), index)

        def gradient(of_outputs):
            parts = {
                offset: tf.where(index == number, of_outputs, tf.zeros_like(of_outputs))
                for number, offset in enumerate(offsets)
            }
            return _of_pixels(parts, rows, columns)

        return largest, gradient

    return pooled(inputs)


def _first_real(are_real: list[np.ndarray]) -> list[np.ndarray]:
    """Returns of each pixel where it is the window's first that is no padding.

    There it is taken whatever its value, which may be the padding's, -inf: [rows, columns, 1] bool.
    """
    seen = np.logical_or.accumulate(are_real)
    before = [np.zeros_like(seen[0]), *seen[:-1]]
    return [(now & ~then)[..., np.newaxis] for now, then in zip(are_real, before, strict=True)]


def _of_pixels(parts: dict[tuple, tf.Tensor], rows: _Axis, columns: _Axis) -> tf.Tensor:
    """Returns the sum over windows for each pixel of the inputs.

    Args:
      parts: by (row, column) in the window, [batch, rows.num, columns.num, channels], of the pixel
        there.
      rows: the windows along height.
      columns: along width.
    """
    # A pixel at i * stride + r is number r of window i, number r + stride of window i - 1, and so
    # on: for each r there is a plane over i.
    planes = [
        tf.stack([_plane(parts, rows, columns, row, column) for column in range(columns.stride)], 3)
        for row in range(rows.stride)
    ]
    stacked = tf.stack(planes, 2)  # [batch, i of rows, r, i of columns, r, channels]
    shape = stacked.shape
    padded = tf.reshape(stacked, [-1, shape[1] * shape[2], shape[3] * shape[4], shape[5]])
    kept = (slice(each.before, each.before + each.size) for each in (rows, columns))
    return padded[:, *kept]


def _plane(parts: dict[tuple, tf.Tensor], rows: _Axis, columns: _Axis, row: int, column: int):
    moved = [
        tf.pad(part, [[0, 0], _moved(rows, own_row), _moved(columns, own_column), [0, 0]])
        for (own_row, own_column), part in parts.items()
        if own_row % rows.stride == row and own_column % columns.stride == column
    ]
    if moved:
        return tf.add_n(moved)
    nowhere = tf.zeros_like(next(iter(parts.values())))  # windows with gaps between them
    return tf.pad(nowhere, [[0, 0], _moved(rows, row), _moved(columns, column), [0, 0]])


def _moved(axis: _Axis, offset: int) -> list[int]:
    """Returns how much is put before and after, so that windows lie where their pixel does."""
    length = -(-(axis.before + axis.size + axis.after) // axis.stride)
    before = offset // axis.stride
    return [before, max(0, length - axis.num - before)]
