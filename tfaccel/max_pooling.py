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
NOWHERE = 255  # no window has such a pixel


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

    def windows_back(self) -> range:
        """Returns how many windows before its own a pixel may be in, for any pixel."""
        return range(-(-self.window // self.stride))

    def pixels_of(self, back: int) -> range:
        """Returns the numbers, in the window so many before, of the pixels of one stride."""
        return range(back * self.stride, (back + 1) * self.stride)

    def moved(self, back: int) -> list[int]:
        """Returns how much is put before and after the windows, to be so many later."""
        length = -(-(self.before + self.size + self.after) // self.stride)
        return [back, length - self.num - back]

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
            return _of_pixels(of_outputs, index, rows, columns)

        return largest, gradient

    return pooled(inputs)


def _first_real(are_real: list[np.ndarray]) -> list[np.ndarray]:
    """Returns of each pixel where it is the window's first that is no padding.

    There it is taken whatever its value, which may be the padding's, -inf: [rows, columns, 1] bool.
    """
    seen = np.logical_or.accumulate(are_real)
    before = [np.zeros_like(seen[0]), *seen[:-1]]
    return [(now & ~then)[..., np.newaxis] for now, then in zip(are_real, before, strict=True)]


def _of_pixels(of_outputs: tf.Tensor, index: tf.Tensor, rows: _Axis, columns: _Axis) -> tf.Tensor:
    """Returns each pixel's gradient: the sum over the windows whose largest it is.

    Args:
      of_outputs: the gradient of the outputs, [batch, rows.num, columns.num, channels].
      index: which pixel of each window is the largest, of the same shape, uint8.
      rows: the windows along height.
      columns: along width.
    """
    # A pixel at i * stride + r is number r of window i, number r + stride of window i - 1, and so
    # on. So with the axes [batch, i, r, j, c, channels] a window meets all its pixels of one stride
    # by being broadcast along r and c.
    parts = []
    for back, across in itertools.product(rows.windows_back(), columns.windows_back()):
        moved = [[0, 0], rows.moved(back), columns.moved(across), [0, 0]]
        own = tf.pad(index, moved, constant_values=tf.constant(NOWHERE, tf.uint8))
        numbers = [
            [_number(rows, columns, r, c) for c in columns.pixels_of(across)]
            for r in rows.pixels_of(back)
        ]
        is_largest = own[:, :, None, :, None] == tf.constant(numbers, tf.uint8)[:, None, :, None]
        gradient = tf.pad(of_outputs, moved)[:, :, None, :, None]
        parts.append(tf.where(is_largest, gradient, tf.zeros_like(gradient)))
    total = tf.add_n(parts)
    shape = total.shape
    padded = tf.reshape(total, [-1, shape[1] * shape[2], shape[3] * shape[4], shape[5]])
    kept = (slice(each.before, each.before + each.size) for each in (rows, columns))
    return padded[:, *kept]


def _number(rows: _Axis, columns: _Axis, row: int, column: int) -> int:
    """Returns the number of a window's pixel; NOWHERE for what lies beyond it."""
    is_inside = row < rows.window and column < columns.window
    return row * columns.window + column if is_inside else NOWHERE
