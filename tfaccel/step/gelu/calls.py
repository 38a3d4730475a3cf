"""The StableHLO text of a bias and GELU, by Triton kernels that XLA compiles for the GPU.

XLA's kernels have so many instructions for `erf` or `tanh` that an H200 waits for them, and not for
its memory. The kernels here have half as many. The kernel of the gradient also sums it over the
rows, in the same pass. Their texts lie in `kernels/`, and `tools/gelu_kernels.py` writes them.

Shapes: x and the output [rows, columns]; bias [columns]; all of one dtype.
"""

import dataclasses
import functools
import math
import pathlib

import numpy as np
import tensorflow as tf

from tfaccel.step import triton_calls

MULTIPLE_OF_COLUMNS = 8  # so that a thread reads 16 bytes at a time

_KERNELS = pathlib.Path(__file__).parent / "kernels"
_LIMIT, _DEGREE = 4.5, 6  # of the polynomial
# The values that a program computes at once, and its warps. With half of both, the backward kernel
# is 6 to 28% quicker and the forward one not (H200, 2026-11-28; README.md has the times).
_SIZES = {"forward": (2048, 4), "backward": (1024, 2)}
_ROWS_OF_SUM = 64  # at most, of a program of the gradient: the sums are then 1% of its bytes
# A program of the gradient has fewer rows if there would be fewer programs than this. Then the last
# programs do not leave much of the GPU without work.
_PROGRAMS = 4096


@dataclasses.dataclass(frozen=True)
class Gelu:
    """A GELU of x + bias.

    Attributes:
      rows: of x.
      columns: of x; a multiple of MULTIPLE_OF_COLUMNS.
      dtype: tf.float16 or tf.bfloat16.
      approximate: whether it is the form with tanh.
    """

    rows: int
    columns: int
    dtype: tf.DType
    approximate: bool

    @property
    def block_columns(self) -> int:
        """How many columns a program computes."""
        columns = 64
        while columns < 256 and self.columns % (2 * columns) == 0:
            columns *= 2
        return columns

    @property
    def column_blocks(self) -> int:
        """How many programs compute a row."""
        return -(-self.columns // self.block_columns)

    @property
    def turns(self) -> int:
        """How many blocks of rows a program of the gradient computes, one after another."""
        turns = _ROWS_OF_SUM // self.block_rows("backward")
        while turns > 1 and self.programs("backward", turns) < _PROGRAMS:
            turns //= 2
        return turns

    @property
    def sums(self) -> tuple[int, int]:
        """The shape [row blocks, columns] of the gradient's sums."""
        return self.programs("backward", self.turns) // self.column_blocks, self.columns

    def block_rows(self, name: str) -> int:
        """Returns how many rows a program of the kernel computes at once."""
        elements, _ = _SIZES[name]
        return elements // self.block_columns

    def programs(self, name: str, turns: int) -> int:
        """Returns how many programs the kernel has, if each computes `turns` blocks of rows."""
        return -(-self.rows // (self.block_rows(name) * turns)) * self.column_blocks


def forward(of: Gelu) -> str:
    """Returns the module of (x, bias), which returns gelu(x + bias)."""
    x, bias = _arrays(of)
    return _module(of, "forward", [x, bias], [x], turns=1)


def backward(of: Gelu) -> str:
    """Returns the module of (x, bias, gradient), where `gradient` is the output's.

    It returns (the gradient of x, its sums [row blocks, columns] float32 over parts of the rows).
    """
    x, bias = _arrays(of)
    sums = triton_calls.tensor(of.sums, "f32")
    return _module(of, "backward", [x, bias, x], [x, sums], turns=of.turns)


def kernel(name: str, of: Gelu, *, turns: int) -> str:
    """Returns the text of a kernel, whose arguments are arrays alone."""
    constants = [of.rows, of.columns, of.column_blocks, turns]
    constants += factors(approximate=of.approximate)
    sizes = {"block_r": of.block_rows(name), "block_c": of.block_columns}
    text = triton_calls.text_of(_KERNELS, f"{name}_{'tanh' if of.approximate else 'erf'}")
    return triton_calls.filled(text, sizes=sizes, constants=constants, dtype=of.dtype)


@functools.cache
def factors(*, approximate: bool) -> list[float]:
    """Returns the factors of 1, x^2, x^4 and so on of the kernels' polynomial p.

    The kernels compute gelu(x) / x as 1 / (1 + 2^(x p(x^2))). In the form with tanh this is exact,
    because (1 + tanh(z)) / 2 is 1 / (1 + exp(-2 z)). In the form with erf, p has the right values
    at Chebyshev's points of 0 <= x^2 <= 4.5^2. Then gelu(x) / x has a relative error below 1e-4
    there, and an absolute error below 1e-7 elsewhere.
    """
    if approximate:
        first = -2 * math.sqrt(2 / math.pi) * math.log2(math.e)
        # The factor of x^3 is that of Hendrycks and Gimpel (2016).
        return [first, first * 0.044715, *[0.0] * (_DEGREE - 1)]

    def wanted(square: np.ndarray) -> np.ndarray:
        return np.array([_exponent(x) / x for x in np.sqrt(square)])

    series = np.polynomial.Chebyshev.interpolate(wanted, _DEGREE, domain=[0, _LIMIT**2])
    return series.convert(kind=np.polynomial.Polynomial).coef.tolist()


def _exponent(x: float) -> float:
    """Returns e, for which 1 / (1 + 2^e) is the normal distribution's share below x."""
    above, below = (math.erfc(each * math.sqrt(0.5)) for each in (x, -x))
    return math.log2(above / below)


def _arrays(of: Gelu) -> tuple[str, str]:
    return (
        triton_calls.tensor((of.rows, of.columns), of.dtype),
        triton_calls.tensor((of.columns,), of.dtype),
    )


def _module(of: Gelu, name: str, given: list[str], results: list[str], *, turns: int) -> str:
    _, warps = _SIZES[name]
    return triton_calls.module(
        kernel(name, of, turns=turns),
        given,
        results,
        programs=of.programs(name, turns),
        warps=warps,
        stages=1,
    )
