"""The StableHLO text of layer normalization, by Triton kernels that XLA compiles for the GPU.

XLA reads the inputs twice, once for the moments and once for the outputs, and in the gradient twice
again: once for the inputs' gradient, and once for that of gamma and beta. The kernels here read
them once forwards and once backwards. Their texts lie in `kernels/`, and
`tools/layer_norm_kernels.py` writes them.

Shapes: x, the output and their gradients [rows, columns] of float16 or bfloat16; gamma and beta
[columns], the means and scales [rows], all of float32. A scale is 1 / sqrt(variance + epsilon).
If x is a residual plus a matrix product plus a bias [columns] of the dtype of x, other kernels add
them up, too. Their gradient takes that of the sum beside that of the output.
"""

import dataclasses
import pathlib

import tensorflow as tf

from tfaccel.step import triton_calls

MULTIPLE_OF_COLUMNS = 8  # so that a thread reads 16 bytes at a time
MOST_COLUMNS = 8192  # a program has all of a row in its registers

_KERNELS = pathlib.Path(__file__).parent / "kernels"
# The values that a program computes at once, unless a row has more, and those of a warp.
_SIZES = {"forward": (2048, 512), "backward": (2048, 256)}
_MOST_WARPS = 16  # a thread can then have 128 registers
# Of the gradient, at most: as many as run at once on an H100, 3 on each of its 132 processors, or 2
# of a sum. Each has as many rows as it takes, so that no processor waits for the last ones.
_PROGRAMS = {False: 396, True: 264}


@dataclasses.dataclass(frozen=True)
class LayerNorm:
    """A layer normalization.

    Attributes:
      rows: of x.
      columns: of x; a multiple of MULTIPLE_OF_COLUMNS, at most MOST_COLUMNS.
      dtype: tf.float16 or tf.bfloat16.
      epsilon: what is added to the variance.
      is_of_sum: whether the kernels compute x as a sum.
    """

    rows: int
    columns: int
    dtype: tf.DType
    epsilon: float
    is_of_sum: bool = False

    @property
    def block_columns(self) -> int:
        """How many columns a program has, some beyond the last one: a power of 2."""
        return max(8, 1 << (self.columns - 1).bit_length())

    @property
    def turns(self) -> int:
        """How many blocks of rows a program of the gradient computes, one after another."""
        return -(-self.rows // (self.block_rows("backward") * _PROGRAMS[self.is_of_sum]))

    @property
    def parts(self) -> tuple[int, int, int]:
        """The shape of the gradients of gamma, beta and, of a sum, the bias, in parts.

        It is [programs, 2 or 3, columns].
        """
        return self.programs("backward", self.turns), 3 if self.is_of_sum else 2, self.columns

    def block_rows(self, name: str) -> int:
        """Returns how many rows a program of the kernel computes at once."""
        values, _ = _SIZES[name]
        return max(1, values // self.block_columns)

    def warps(self, name: str) -> int:
        """Returns how many groups of 32 threads a program of the kernel has."""
        _, of_warp = _SIZES[name]
        return min(_MOST_WARPS, self.block_rows(name) * self.block_columns // of_warp)

    def programs(self, name: str, turns: int) -> int:
        """Returns how many programs the kernel has, if each computes `turns` blocks of rows."""
        return -(-self.rows // (self.block_rows(name) * turns))


def forward(of: LayerNorm) -> str:
    """Returns the module of (x, gamma, beta), which returns (the output, means, scales).

    Of a sum it is one of (residual, product, bias, gamma, beta), and returns x first.
    """
    x, bias, weight, moment, _ = _arrays(of)
    given, results = [x, weight, weight], [x, moment, moment]
    if of.is_of_sum:
        given, results = [x, x, bias, weight, weight], [x, *results]
    return _module(of, "forward", of.epsilon, given, results, turns=1)


def backward(of: LayerNorm) -> str:
    """Returns the module of (x, gamma, gradient, means, scales), the gradient being the output's.

    Of a sum, the gradient of x as an output follows gamma. It returns the gradient of x, and those
    of gamma, beta and, of a sum, the bias in parts, of the shape `of.parts`, each part a sum over
    some of the rows. The gradient of x is that of the residual and of the product.
    """
    x, _, weight, moment, parts = _arrays(of)
    given = [x, weight, *([x] if of.is_of_sum else []), x, moment, moment]
    return _module(of, "backward", of.turns, given, [x, parts], turns=of.turns)


def kernel(name: str, of: LayerNorm, number: float) -> str:
    """Returns the text of a kernel, whose arguments are arrays alone.

    Args:
      name: "forward" or "backward".
      of: the layer normalization.
      number: epsilon of the forward kernel, the turns of the backward one.
    """
    sizes = {"block_r": of.block_rows(name), "block_c": of.block_columns}
    constants = [of.rows, of.columns, 1 / of.columns, number]
    text = triton_calls.text_of(_KERNELS, f"{name}_of_sum" if of.is_of_sum else name)
    return triton_calls.filled(text, sizes=sizes, constants=constants, dtype=of.dtype)


def _arrays(of: LayerNorm) -> tuple[str, ...]:
    return (
        triton_calls.tensor((of.rows, of.columns), of.dtype),
        triton_calls.tensor((of.columns,), of.dtype),
        triton_calls.tensor((of.columns,), "f32"),
        triton_calls.tensor((of.rows,), "f32"),
        triton_calls.tensor(of.parts, "f32"),
    )


def _module(
    of: LayerNorm, name: str, number: float, given: list[str], results: list[str], *, turns: int
) -> str:
    return triton_calls.module(
        kernel(name, of, number),
        given,
        results,
        programs=of.programs(name, turns),
        warps=of.warps(name),
        stages=1,
    )
