"""Max pooling for a step that XLA compiles: a quick gradient that is the same in every run.

Takes Keras's `MaxPooling2D.call`; gives a function that replaces it in the class while a step is
traced. tfaccel/keras_internals/layer_paths.py puts it there.

    MaxPooling2D.call = indexed(MaxPooling2D.call)
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from tfaccel.keras_internals.written import written_together

# In a window. Each pixel is an operation; nobody has measured windows beyond 5 x 5.
MOST_PIXELS = 25
# Integers for the bits of a float, and wider ones. Those hold the rank of the float and, in the
# lowest byte, the number of a pixel.
INTEGERS = {
    tf.float16: (tf.int16, tf.int32),
    tf.bfloat16: (tf.int16, tf.int32),
    tf.float32: (tf.int32, tf.int64),
}
UNSIGNED = {1: tf.uint8, 2: tf.uint16, 4: tf.uint32}  # by bytes
BYTE = 8  # bits
LOW_BYTE = 2**BYTE - 1  # its mask


def indexed(call: Callable) -> Callable:
    """Returns a replacement of Keras's `MaxPooling2D.call` that keeps which pixel was the largest.

    XLA's own gradient, SelectAndScatter, searches for that pixel again, and XLA refuses it if
    kernels must be deterministic. Here each pixel sums the gradients of the windows in which it is
    the largest. Values and gradients equal Keras's; among equal pixels the first gets the whole
    gradient. Two things differ: NaN always reaches the output, and -0.0 becomes 0.0.

    These cases use `call`: dtypes other than float16, bfloat16 and float32; channels first; unknown
    height, width or channels; windows of more than 25 pixels, or of more than 255 if their sides
    are rounded up to whole strides.

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
        has_numbers = rows.span * columns.span <= LOW_BYTE
        is_known = inputs.dtype in INTEGERS and is_small and has_numbers
        if not is_known or min(rows.num, columns.num) < 1:
            return call(self, inputs)
        return _pooled(inputs, rows, columns)

    return call_indexed


class _Axis(NamedTuple):
    """The windows along height or width: `num` of `window` pixels, each `stride` after the last."""

    size: int
    window: int
    stride: int
    before: int  # pixels of padding
    after: int
    num: int

    @property
    def span(self) -> int:
        """The length of a window, rounded up to whole strides."""
        return -(-self.window // self.stride) * self.stride

    def pixels(self, offset: int) -> slice:
        """Returns the padded pixels that are pixel number `offset` of the windows."""
        return slice(offset, offset + (self.num - 1) * self.stride + 1, self.stride)

    @property
    def overlap(self) -> int:
        """The number of windows that a pixel may be in."""
        return self.span // self.stride

    @property
    def num_strides(self) -> int:
        """The number of strides that the padded pixels take; the last may be a part."""
        return -(-(self.before + self.size + self.after) // self.stride)

    def around(self) -> list[int]:
        """Returns how many empty windows to pad before and after, for `windows` to slice."""
        return [self.overlap - 1, self.num_strides - self.num]

    def windows(self, back: int) -> slice:
        """Returns, of the padded windows, those that begin `back` strides before each stride."""
        first = self.overlap - 1 - back
        return slice(first, first + self.num_strides)


def _axis(size: int, window: int, stride: int, *, same: bool) -> _Axis:
    """Returns TensorFlow's windows. If they need padding, the first side has the smaller half."""
    if not same:
        return _Axis(size, window, stride, 0, 0, (size - window) // stride + 1)
    num = -(-size // stride)
    padding = max(0, (num - 1) * stride + window - size)
    return _Axis(size, window, stride, padding // 2, padding - padding // 2, num)


def _pooled(inputs: tf.Tensor, rows: _Axis, columns: _Axis) -> tf.Tensor:
    """Returns the largest values of the windows.

    The rank of a value and the number of its pixel are one integer, so one chain of maxima finds
    both. With separate values and indices, XLA made six kernels that each read all inputs: 0.2 ms
    each for ResNet-50's pooling, batch 256 (H200, 2026-11-22).
    """
    dtype = inputs.dtype
    narrow, wide = INTEGERS[dtype]

    @tf.custom_gradient
    def pooled(inputs):
        byte = tf.constant(BYTE, wide)
        if wide == tf.int64:
            # With padding of 64-bit integers, XLA's program for a CPU wrote out of bounds: wrong
            # values, and "corrupted size vs. prev_size" (11 x 16 x 4 by 3 x 3, strides 2;
            # TensorFlow 2.21).
            ranks = tf.cast(_ranks(inputs), narrow)
            pixels = _pixels(ranks, rows, columns, outside=narrow.min)  # below every rank
            pixels = {
                number: tf.bitwise.left_shift(tf.cast(each, wide), byte)
                for number, each in pixels.items()
            }
        else:
            ranks = tf.bitwise.left_shift(_ranks(inputs), byte)
            pixels = _pixels(ranks, rows, columns, outside=wide.min)
        # Among equal pixels the first is the largest.
        keys = [each + (LOW_BYTE - number) for number, each in pixels.items()]
        largest = functools.reduce(tf.maximum, keys)
        index = tf.cast(LOW_BYTE - (largest & LOW_BYTE), tf.uint8)

        @tf.custom_gradient  # gradient penalties need its gradient; integers would have none
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
    """Returns the number of a pixel in its window, which grows evenly along rows and columns."""
    return row * columns.span + column


def _ranks(values: tf.Tensor) -> tf.Tensor:
    """Returns integers in the order of the values: both zeros are 0, and NaN is the largest."""
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
    """Returns the gradient of each pixel: the sum over the windows in which it is the largest.

    Two channels of 16 bits travel as one integer, and the windows are padded in a separate pass.
    That saves 0.5 ms of the 1.7 ms of ResNet-50's pooling and its neighbours (a prototype; H200,
    2026-11-23).

    Args:
      of_outputs: The gradient of the outputs, [batch, rows.num, columns.num, channels].
      index: The number of the largest pixel in each window, in the same shape, uint8.
      rows: The windows along height.
      columns: The windows along width.
    """
    if rows.overlap == columns.overlap == 1:
        return _of_own_pixels(of_outputs, index, rows, columns)
    dtype, channels = of_outputs.dtype, of_outputs.shape[-1]
    together = 2 if dtype.size == 2 and channels % 2 == 0 else 1
    around = [[0, 0], rows.around(), columns.around(), [0, 0]]
    gradients, indices = written_together(
        tf.pad(_packed(of_outputs, together), around), tf.pad(_packed(index, together), around)
    )
    # A pixel at i * stride + r is number r of window i, number r + stride of window i - 1, and so
    # on.
    numbers = _first_numbers(rows, columns)
    parts = []
    for back, across in itertools.product(range(rows.overlap), range(columns.overlap)):
        window = (slice(None), rows.windows(back), None, columns.windows(across), None)
        own = numbers + _number(back * rows.stride, across * columns.stride, columns)
        gradient = _unpacked(gradients[window], dtype, together)
        largest = _unpacked(indices[window], index.dtype, together)
        parts.append(
            [
                tf.where(tf.cast(number, tf.int32) == own, each, tf.zeros_like(each))
                for each, number in zip(gradient, largest, strict=True)
            ]
        )
    total = _joined([tf.add_n(each) for each in zip(*parts, strict=True)])
    shape = total.shape
    padded = tf.reshape(total, [-1, shape[1] * shape[2], shape[3] * shape[4], shape[5]])
    pixels = tf.bitcast(_kept(padded, rows, columns), dtype)
    return tf.reshape(pixels, [-1, rows.size, columns.size, channels])


def _of_own_pixels(
    of_outputs: tf.Tensor, index: tf.Tensor, rows: _Axis, columns: _Axis
) -> tf.Tensor:
    """Returns the gradient of each pixel if no pixel is in two windows.

    Nothing is summed, so XLA computes it where the gradient is read: it writes the gradient of the
    outputs and the indices, a quarter of the pixels each. In a U-Net the four poolings with 2 x 2
    pixels wrote, and read again, 1.1 of 25.9 GB a step (32 x 256 x 256; tools/gpu_program.py).
    """
    around = [[0, 0], rows.around(), columns.around(), [0, 0]]
    gradients, largest = (
        tf.pad(each, around)[:, :, None, :, None] for each in (of_outputs, tf.cast(index, tf.int32))
    )
    own = largest == _first_numbers(rows, columns)
    pixels = tf.where(own, gradients, tf.zeros_like(gradients))
    height, width = (each.num_strides * each.stride for each in (rows, columns))
    return _kept(tf.reshape(pixels, [-1, height, width, of_outputs.shape[-1]]), rows, columns)


def _first_numbers(rows: _Axis, columns: _Axis) -> tf.Tensor:
    """Returns the numbers of the pixels of one stride, [rows.stride, 1, columns.stride, 1] int32.

    With the axes [batch, i, r, j, c, channels], broadcasting a window along r and c pairs it with
    all its pixels of one stride.
    """
    numbers = [
        [_number(row, column, columns) for column in range(columns.stride)]
        for row in range(rows.stride)
    ]
    return tf.constant(numbers, tf.int32)[:, None, :, None]


def _kept(padded: tf.Tensor, rows: _Axis, columns: _Axis) -> tf.Tensor:
    """Returns padded pixels without the padding."""
    return padded[:, *(slice(each.before, each.before + each.size) for each in (rows, columns))]


def _packed(values: tf.Tensor, together: int) -> tf.Tensor:
    """Returns `together` channels as the bits of one integer."""
    wide = UNSIGNED[values.dtype.size * together]
    if together == 1:
        return tf.bitcast(values, wide)
    *outer, channels = values.shape
    return tf.bitcast(tf.reshape(values, [-1, *outer[1:], channels // together, together]), wide)


def _unpacked(packed: tf.Tensor, dtype: tf.DType, together: int) -> list[tf.Tensor]:
    """Returns the channels of each integer, in their own dtype."""
    bits = 8 * dtype.size
    shifted = (
        tf.bitwise.right_shift(packed, packed.dtype.as_numpy_dtype(n * bits))
        for n in range(together)
    )
    return [tf.bitcast(tf.cast(each, UNSIGNED[dtype.size]), dtype) for each in shifted]


def _joined(values: list[tf.Tensor]) -> tf.Tensor:
    """Returns channels as the bits of one integer again."""
    size = values[0].dtype.size
    wide = UNSIGNED[size * len(values)]
    parts = [tf.cast(tf.bitcast(each, UNSIGNED[size]), wide) for each in values]
    shifted = [
        tf.bitwise.left_shift(each, wide.as_numpy_dtype(8 * size * number))
        for number, each in enumerate(parts)
    ]
    return functools.reduce(tf.bitwise.bitwise_or, shifted)


def _of_windows(
    of_pixels: tf.Tensor, *, index: tf.Tensor, rows: _Axis, columns: _Axis
) -> tf.Tensor:
    """Returns the value of the largest pixel of each window: the gradient of `_of_pixels`."""
    pixels = _pixels(of_pixels, rows, columns, outside=0)
    return tf.add_n(
        [tf.where(index == number, each, tf.zeros_like(each)) for number, each in pixels.items()]
    )
