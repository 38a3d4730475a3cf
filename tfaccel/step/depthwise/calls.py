"""The StableHLO text of depthwise convolutions, by Triton kernels that XLA compiles for the GPU.

A depthwise convolution convolves each channel alone. README.md of this folder has the times beside
cuDNN's. The texts of the kernels lie in `kernels/`, and `tools/depthwise_kernels.py` writes them.

Shapes: x [images, in_height, in_width, channels] and the output [images, out_height, out_width,
channels], of one dtype; the kernel [window, window, channels] float32. The strides are 1.
"""

import dataclasses
import pathlib

import tensorflow as tf

from tfaccel.step import triton_calls

WINDOWS = (3, 5, 7)  # heights and widths that have a text
MULTIPLE_OF_CHANNELS = 8  # so that the values which a thread reads are aligned

_KERNELS = pathlib.Path(__file__).parent / "kernels"
_ROWS = (7, 14)  # of outputs that a program computes at once; each has a text
# The channels of a program, at most: of a convolution, and of the kernel's gradient.
_CHANNELS, _CHANNELS_OF_SUMS = 64, 32
_WIDTH = 4  # columns of a program
_VALUES = 4  # of a thread at once
# Of the kernel's gradient. More of them would share the GPU more evenly, and write more sums.
_PROGRAMS = 1024


@dataclasses.dataclass(frozen=True)
class Depthwise:
    """A depthwise convolution with strides of 1.

    Attributes:
      images: of x.
      height: of x.
      width: of x.
      channels: of x; a multiple of MULTIPLE_OF_CHANNELS.
      window: the height and width of the kernel; one of WINDOWS.
      is_same: whether zeros are added around x, so that the output is as large as x.
      dtype: tf.float16 or tf.bfloat16.
    """

    images: int
    height: int
    width: int
    channels: int
    window: int
    is_same: bool
    dtype: tf.DType

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of x."""
        return self.images, self.height, self.width, self.channels

    @property
    def output_shape(self) -> tuple[int, int, int, int]:
        """Of the output."""
        less = self.window - 1 - 2 * self.padding
        return self.images, self.height - less, self.width - less, self.channels

    @property
    def kernel_shape(self) -> tuple[int, int, int]:
        """Of the kernel."""
        return self.window, self.window, self.channels

    @property
    def padding(self) -> int:
        """The zeros on each side of x."""
        return (self.window - 1) // 2 if self.is_same else 0

    @property
    def sums(self) -> tuple[int, int, int, int]:
        """The shape [parts, window, window, channels] of the sums of the kernel's gradient."""
        grid = _Grid(self.output_shape, _CHANNELS_OF_SUMS)
        return -(-grid.items // _turns(grid)), *self.kernel_shape


@dataclasses.dataclass(frozen=True)
class _Grid:
    """How the programs share an array [images, height, width, channels]."""

    shape: tuple[int, int, int, int]
    most_channels: int

    @property
    def block_c(self) -> int:
        """The channels of a program: those that leave the fewest threads without work."""
        sizes = [self.most_channels >> i for i in range(self.most_channels.bit_length())]
        fitting = [each for each in sizes if MULTIPLE_OF_CHANNELS <= each <= self.shape[3]]
        return min(fitting[:2], key=lambda each: -self.shape[3] % each)

    @property
    def rows(self) -> int:
        """Of a program: those that leave the fewest rows without work, and then the most."""
        return min(_ROWS, key=lambda rows: (-self.shape[1] % rows, -rows))

    @property
    def strips(self) -> int:
        """Of `rows` rows, in an image."""
        return -(-self.shape[1] // self.rows)

    @property
    def w_blocks(self) -> int:
        """In a row."""
        return -(-self.shape[2] // _WIDTH)

    @property
    def c_blocks(self) -> int:
        """In a pixel."""
        return -(-self.shape[3] // self.block_c)

    @property
    def items(self) -> int:
        """The blocks of pixels."""
        return self.shape[0] * self.strips * self.w_blocks

    @property
    def counts(self) -> list[int]:
        """What every kernel is told of it."""
        return [self.strips, self.w_blocks, self.c_blocks]


def forward(of: Depthwise) -> str:
    """Returns the module of (x, kernel), which returns the output."""
    return _convolution(of, of.shape, of.output_shape, of.padding, is_backwards=False)


def of_x(of: Depthwise) -> str:
    """Returns the module of (the output's gradient, kernel), which returns the gradient of x.

    It is a convolution with the kernel's values from the last to the first.
    """
    padding = of.window - 1 - of.padding
    return _convolution(of, of.output_shape, of.shape, padding, is_backwards=True)


def of_kernel(of: Depthwise) -> str:
    """Returns the module of (x, the output's gradient), which returns the kernel's gradient.

    It returns it as sums [parts, window, window, channels] float32, each over a part of the pixels.
    """
    grid = _Grid(of.output_shape, _CHANNELS_OF_SUMS)
    turns = _turns(grid)
    constants = [*of.shape[1:3], *of.output_shape[1:3], of.channels, of.padding, of.padding]
    columns = 1 << (of.window - 1).bit_length()
    return _module(
        of,
        grid,
        f"of_kernel_{of.window}_{grid.rows}",
        constants=[*constants, *grid.counts, turns, grid.items],
        given=[triton_calls.tensor(each, of.dtype) for each in (of.shape, of.output_shape)],
        result=triton_calls.tensor(of.sums, "f32"),
        programs=of.sums[0] * grid.c_blocks,
        values=columns * _WIDTH * grid.block_c,
    )


def _convolution(of: Depthwise, given, made, padding: int, *, is_backwards: bool) -> str:
    grid = _Grid(made, _CHANNELS)
    order = [of.window**2 - 1, -1] if is_backwards else [0, 1]
    return _module(
        of,
        grid,
        f"forward_{of.window}_{grid.rows}",
        constants=[*given[1:3], *made[1:3], of.channels, padding, padding, *grid.counts, *order],
        given=[
            triton_calls.tensor(given, of.dtype),
            triton_calls.tensor(of.kernel_shape, "f32"),
        ],
        result=triton_calls.tensor(made, of.dtype),
        programs=grid.items * grid.c_blocks,
        values=_WIDTH * grid.block_c,
    )


def _turns(grid: _Grid) -> int:
    """Returns how many blocks of pixels a program of the kernel's gradient sums."""
    return max(1, grid.items * grid.c_blocks // _PROGRAMS)


def _module(of, grid, name, *, constants, given, result, programs, values) -> str:
    sizes = {"block_w": _WIDTH, "block_c": grid.block_c}
    text = triton_calls.filled(
        triton_calls.text_of(_KERNELS, name), sizes=sizes, constants=constants, dtype=of.dtype
    )
    return triton_calls.module(
        text,
        given,
        [result],
        programs=programs,
        warps=max(1, values // (32 * _VALUES)),
        stages=1,
    )
