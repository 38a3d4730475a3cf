"""Max pooling for a step that XLA compiles: its gradient quick, and the same bits every time.

Takes Keras's `MaxPooling2D.call`; gives a function that stands for it at class level while a step
is traced. tfaccel/seam.py puts it there.

    MaxPooling2D.call = indexed(MaxPooling2D.call)
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

# Pixels of a window, each of which is an operation: beyond 5 x 5 nobody has measured it.
MOST_PIXELS = 25
# Integers for a float's bits, and wider ones, which hold its rank among floats and, in their lowest
# byte, a pixel's number.
INTEGERS = {
    tf.float16: (tf.int16, tf.int32),
    tf.bfloat16: (tf.int16, tf.int32),
    tf.float32: (tf.int32, tf.int64),
}
BYTE = 8  # bits
LOW_BYTE = 2**BYTE - 1  # its mask
NOWHERE = LOW_BYTE  # a number that no window's pixel has


def indexed(call: Callable) -> Callable:
    """Returns what can stand for Keras's `MaxPooling2D.call`: it keeps which pixel was the largest.

    XLA's own gradient, SelectAndScatter, finds that pixel again, and is refused where kernels must
    be deterministic. Here each pixel sums over the windows that it is the largest of. Values and
    gradients are Keras's, of equal pixels the first one has all of the gradient; but NaN always
    comes through, and -0.0 comes out as 0.0.

    To `call` go other types than float16, bfloat16 and float32; channels first; unknown height,
    width or channels; and windows of more than 25 pixels, or of more than 255 with their sides
    rounded up to whole strides.

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
        has_numbers = rows.span * columns.span <= NOWHERE
        is_known = inputs.dtype in INTEGERS and is_small and has_numbers
        if not is_known or min(rows.num, columns.num) < 1:
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

    @property
    def span(self) -> int:
        """The window's length, rounded up to whole strides."""
        return -(-self.window // self.stride) * self.stride

    def pixels(self, offset: int) -> slice:
        """Returns the padded pixels that are the windows' pixel number `offset`."""
        return slice(offset, offset + (self.num - 1) * self.stride + 1, self.stride)

    @property
    def overlap(self) -> int:
        """How many windows a pixel may be in."""
        return self.span // self.stride

    @property
    def num_strides(self) -> int:
        """How many strides the padded pixels take, the last one maybe in part."""
        return -(-(self.before + self.size + self.after) // self.stride)

    def around(self) -> list[int]:
        """Returns how many empty windows to put before and after, for `windows` to slice."""
        return [self.overlap - 1, self.num_strides - self.num]

    def windows(self, back: int) -> slice:
        """Returns each stride's own of the windows so padded, or the one so many before it."""
        first = self.overlap - 1 - back
        return slice(first, first + self.num_strides)


def _axis(size: int, window: int, stride: int, *, same: bool) -> _Axis:
    """Returns TensorFlow's windows; where they need padding, the first side has the lesser half."""
    if not same:
        return _Axis(size, window, stride, 0, 0, (size - window) // stride + 1)
    num = -(-size // stride)
    padding = max(0, (num - 1) * stride + window - size)
    return _Axis(size, window, stride, padding // 2, padding - padding // 2, num)


def _pooled(inputs: tf.Tensor, rows: _Axis, columns: _Axis) -> tf.Tensor:
    """Returns the windows' largest values.

    A value's rank and its pixel's number are one integer: one chain of maxima. With value and index
    apart, XLA made six kernels, each of which read all inputs: 0.2 ms each of ResNet-50's, batch
    256 (H200, 2026-11-22).
    """
    dtype = inputs.dtype
    _, wide = INTEGERS[dtype]

    @tf.custom_gradient
    def pooled(inputs):
        byte = tf.constant(BYTE, wide)
        ranks = tf.bitwise.left_shift(_ranks(inputs), byte)
        pixels = _pixels(ranks, rows, columns, outside=wide.min)  # below every rank
        # Of equal ones the first.
        keys = [each + (LOW_BYTE - number) for number, each in pixels.items()]
        largest = functools.reduce(tf.maximum, keys)
        index = tf.cast(LOW_BYTE - (largest & LOW_BYTE), tf.uint8)

        @tf.custom_gradient  # with one of its own, for penalties: integers would pass none on
        def gradient(of_outputs):
            of_pixels = _of_pixels(of_outputs, index, rows, columns)
            return of_pixels, functools.partial(
                _of_windows, index=index, rows=rows, columns=columns
            )

        return _values(tf.bitwise.right_shift(largest, byte), dtype), gradient

    return pooled(inputs)


def _pixels(values: tf.Tensor, rows: _Axis, columns: _Axis, *, outside) -> dict[int, tf.Tensor]:
    """Returns the pixels of all windows, by number: [batch, rows.num, columns.num, channels]."""
    around = [[0, 0], [rows.before, rows.after], [columns.before, columns.after], [0, 0]]
    padded = tf.pad(values, around, constant_values=outside)
    return {
        _number(row, column, columns): padded[:, rows.pixels(row), columns.pixels(column)]
        for row, column in itertools.product(range(rows.window), range(columns.window))
    }


def _number(row: int, column: int, columns: _Axis) -> int:
    """Returns the number of a window's pixel, which grows evenly along rows and columns."""
    return row * columns.span + column


def _ranks(values: tf.Tensor) -> tf.Tensor:
    """Returns integers in the values' order: both zeros are 0; NaN is above all, to be seen."""
    narrow, wide = INTEGERS[values.dtype]
    bits = tf.cast(tf.bitcast(values, narrow), wide)
    ranks = tf.where(bits < 0, narrow.min - bits, bits)
    return tf.where(values != values, tf.constant(narrow.max, wide), ranks)


def _values(ranks: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns the values that have these ranks."""
    narrow, _ = INTEGERS[dtype]
    bits = tf.where(ranks < 0, narrow.min - ranks, ranks)
    return tf.bitcast(tf.cast(bits, narrow), dtype)


def _of_pixels(of_outputs: tf.Tensor, index: tf.Tensor, rows: _Axis, columns: _Axis) -> tf.Tensor:
    """Returns each pixel's gradient: the sum over the windows whose largest it is.

    Args:
      of_outputs: the gradient of the outputs, [batch, rows.num, columns.num, channels].
      index: which pixel of each window is the largest, of the same shape, uint8.
      rows: the windows along height.
      columns: along width.
    """
    narrow, wide = INTEGERS[of_outputs.dtype]
    byte = tf.constant(BYTE, wide)
    # Gradient and index as one integer, so that windows are padded and read once.
    bits = tf.cast(tf.bitcast(of_outputs, narrow), wide)
    both = tf.bitwise.left_shift(bits, byte) + tf.cast(index, wide)
    around = [[0, 0], rows.around(), columns.around(), [0, 0]]
    both = tf.pad(both, around, constant_values=NOWHERE)
    # A pixel at i * stride + r is number r of window i, number r + stride of window i - 1, and so
    # on. So with the axes [batch, i, r, j, c, channels] a window meets all its pixels of one stride
    # by being broadcast along r and c.
    numbers = [
        [_number(row, column, columns) for column in range(columns.stride)]
        for row in range(rows.stride)
    ]
    numbers = tf.constant(numbers, wide)[:, None, :, None]
    parts = []
    for back, across in itertools.product(range(rows.overlap), range(columns.overlap)):
        own = both[:, rows.windows(back), None, columns.windows(across), None]
        first = _number(back * rows.stride, across * columns.stride, columns)
        is_largest = (own & LOW_BYTE) - first == numbers
        bits = tf.cast(tf.bitwise.right_shift(own, byte), narrow)
        gradient = tf.bitcast(bits, of_outputs.dtype)
        parts.append(tf.where(is_largest, gradient, tf.zeros_like(gradient)))
    total = tf.add_n(parts)
    shape = total.shape
    padded = tf.reshape(total, [-1, shape[1] * shape[2], shape[3] * shape[4], shape[5]])
    kept = (slice(each.before, each.before + each.size) for each in (rows, columns))
    return padded[:, *kept]


def _of_windows(
    of_pixels: tf.Tensor, *, index: tf.Tensor, rows: _Axis, columns: _Axis
) -> tf.Tensor:
    """Returns of each window what its largest pixel has: the gradient of `_of_pixels`."""
    pixels = _pixels(of_pixels, rows, columns, outside=0)
    return tf.add_n(
        [tf.where(index == number, each, tf.zeros_like(each)) for number, each in pixels.items()]
    )
