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
NOWHERE = 255  # no window has such a pixel


def indexed(call: Callable) -> Callable:
    """Returns what can stand for Keras's `MaxPooling2D.call`: it keeps which pixel was the largest.

    For the gradient XLA has SelectAndScatter, which finds that pixel again, and is refused where
    kernels must be deterministic. Here each pixel gathers from the windows that it may be the
    largest of. The gradient is the same: of equal pixels the first one has all of it.

    Pooled so are float16, bfloat16 and float32 [batch, height, width, channels] whose sides and
    channels are known, in windows of at most 25 pixels; everything else goes to `call`.

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
        """The window's pixels, and those after it up to a whole number of strides."""
        return -(-self.window // self.stride) * self.stride

    def pixels(self, offset: int) -> slice:
        """Returns the padded pixels that are the windows' pixel number `offset`."""
        return slice(offset, offset + (self.num - 1) * self.stride + 1, self.stride)

    @property
    def num_back(self) -> int:
        """How many windows a pixel may be in: its stride's own, and those before that."""
        return self.span // self.stride

    @property
    def num_strides(self) -> int:
        """Of the padded pixels, the last one maybe cut off."""
        return -(-(self.before + self.size + self.after) // self.stride)

    def around(self) -> list[int]:
        """Returns how many windows without pixels `windows` needs before and after the others."""
        return [self.num_back - 1, self.num_strides - self.num]

    def windows(self, back: int) -> slice:
        """Returns the window of each stride, or the one so many before it."""
        first = self.num_back - 1 - back
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

    A value's rank and its pixel's number are one integer, so that the largest of nine is eight
    operations, each with one result. With a value and an index side by side, each result was used
    twice, and XLA made six kernels of it, which read all the inputs each.
    """
    dtype = inputs.dtype
    _, wide = INTEGERS[dtype]

    @tf.custom_gradient
    def pooled(inputs):
        byte = tf.constant(BYTE, wide)
        ranks = tf.bitwise.left_shift(_ranks(inputs), byte)
        padding = [[0, 0], [rows.before, rows.after], [columns.before, columns.after], [0, 0]]
        padded = tf.pad(ranks, padding, constant_values=wide.min)  # below every rank
        offsets = itertools.product(range(rows.window), range(columns.window))
        largest = functools.reduce(
            tf.maximum,
            [
                padded[:, rows.pixels(row), columns.pixels(column)]
                + (NOWHERE - _number(row, column, columns))  # of equal ones the first
                for row, column in offsets
            ],
        )
        index = tf.cast(NOWHERE - (largest & NOWHERE), tf.uint8)

        def gradient(of_outputs):
            return _of_pixels(of_outputs, index, rows, columns)

        return _values(tf.bitwise.right_shift(largest, byte), dtype), gradient

    return pooled(inputs)


def _number(row: int, column: int, columns: _Axis) -> int:
    """Returns the number of a window's pixel, which grows evenly along rows and columns."""
    return row * columns.span + column


def _ranks(values: tf.Tensor) -> tf.Tensor:
    """Returns integers in the order of the values: 0 of both zeros; NaN, to be seen, above all."""
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
    # One integer again, to be read and padded once: here what each pixel costs is arithmetic.
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
    for back, across in itertools.product(range(rows.num_back), range(columns.num_back)):
        own = both[:, rows.windows(back), None, columns.windows(across), None]
        first = _number(back * rows.stride, across * columns.stride, columns)
        is_largest = (own & NOWHERE) - first == numbers
        bits = tf.cast(tf.bitwise.right_shift(own, byte), narrow)
        gradient = tf.bitcast(bits, of_outputs.dtype)
        parts.append(tf.where(is_largest, gradient, tf.zeros_like(gradient)))
    total = tf.add_n(parts)
    shape = total.shape
    padded = tf.reshape(total, [-1, shape[1] * shape[2], shape[3] * shape[4], shape[5]])
    kept = (slice(each.before, each.before + each.size) for each in (rows, columns))
    return padded[:, *kept]
