"""The StableHLO text of attention with dropout, by Triton kernels that XLA compiles for the GPU.

The texts lie in `kernels/`, and `tools/attention_kernels.py` writes them. Each function below
returns a module whose `main` has the arguments and results that the function lists.

Shapes: query [B, T, N, H]; key and value [B, S, K, H], where N is a multiple of K; bias [B or 1,
S] float32, which is added to the scores times log2(e); keys [B, N, 2, T] uint32, two random numbers
for each row, from which a kernel makes those that decide which scores are dropped; sums [B, N, T]
float32, the logarithm to base 2 of the sum of each softmax.
"""

import dataclasses
import math
import pathlib

import tensorflow as tf

from tfaccel.step import triton_calls

_KERNELS = pathlib.Path(__file__).parent / "kernels"


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How a kernel divides its work.

    Attributes:
      query: the rows of the query that are computed at once: a power of 2, 16 or more.
      key: the rows of the key that are computed at once, likewise.
      warps: the groups of 32 threads of a program of the GPU.
      stages: how many blocks are loaded ahead of being used, plus one.
    """

    query: int
    key: int
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True)
class Attention:
    """An attention with dropout.

    Attributes:
      query: the shape [B, T, N, H].
      key: the shape [B, S, K, H] of key and value.
      dtype: tf.float16 or tf.bfloat16, of query, key, value and output.
      scale: what the products of query and key are multiplied by.
      rate: the share of the scores that is dropped, from 0 to below 1, in steps of 1 / 65,536.
      is_causal: whether row t of the query sees the rows 0 to t of the key only.
      bias: the shape [B or 1, S] of what is added to the scores.
    """

    query: tuple[int, int, int, int]
    key: tuple[int, int, int, int]
    dtype: tf.DType
    scale: float
    rate: float
    is_causal: bool
    bias: tuple[int, int]

    @property
    def sums(self) -> tuple[int, int, int]:
        """The shape [B, N, T] of the sums."""
        batch, rows, heads, _ = self.query
        return batch, heads, rows

    @property
    def keys(self) -> tuple[int, int, int, int]:
        """The shape [B, N, 2, T] of the keys."""
        batch, rows, heads, _ = self.query
        return batch, heads, 2, rows

    @property
    def gradient_of_key(self) -> tuple[int, int, int, int]:
        """The shape [B, S, N, H] of what `of_key` returns."""
        batch, rows, _, size = self.key
        return batch, rows, self.query[2], size

    @property
    def drop_below(self) -> int:
        """The number of 16 bits below which a score's random one drops it."""
        return round(self.rate * 2**16)

    @property
    def kept(self) -> float:
        """The share of the scores that is kept: 1 - rate, in steps of 1 / 65,536."""
        return 1 - self.drop_below / 2**16


def forward(of: Attention, blocks: Blocks | None = None) -> str:
    """Returns the module of (query, key, value, bias, keys).

    It returns (output [B, T, N, H], sums [B, N, T]).
    """
    results = [_tensor(of, of.query), _tensor(of, of.sums, "f32")]
    return _module(of, "forward", _inputs(of), results, blocks)


def of_query(of: Attention, blocks: Blocks | None = None) -> str:
    """Returns the module of (query, key, value, bias, keys, output, sums, gradient).

    `gradient` is the output's, [B, T, N, H]. It returns (the query's gradient, the sums [B, N, T]
    of output x gradient, which `of_key` needs).
    """
    sums, rows = _tensor(of, of.sums, "f32"), _tensor(of, of.query)
    given = [*_inputs(of), rows, sums, rows]
    return _module(of, "of_query", given, [rows, sums], blocks)


def of_key(of: Attention, blocks: Blocks | None = None) -> str:
    """Returns the module of (query, key, value, bias, keys, sums, gradient, products).

    `products` are the second result of `of_query`. It returns the gradients [B, S, N, H] of (key,
    value) by each head of the query.
    """
    sums = _tensor(of, of.sums, "f32")
    given = [*_inputs(of), sums, _tensor(of, of.query), sums]
    return _module(of, "of_key", given, [_tensor(of, of.gradient_of_key)] * 2, blocks)


def _inputs(of: Attention) -> list[str]:
    key = _tensor(of, of.key)
    return [
        _tensor(of, of.query),
        key,
        key,
        _tensor(of, of.bias, "f32"),
        _tensor(of, of.keys, "ui32"),
    ]


def _tensor(of: Attention, shape: tuple[int, ...], dtype: str | None = None) -> str:
    return triton_calls.tensor(shape, dtype or of.dtype)


def blocks_of(name: str, of: Attention) -> Blocks:
    """Returns how a kernel divides its work, so that its numbers fit into the registers."""
    query, key = {"forward": (128, 64), "of_query": (128, 64), "of_key": (64, 128)}[name]
    if of.query[-1] > 64:
        key = min(key, 64)
    query = min(query, _power_of_2(of.query[1]))
    key = min(key, _power_of_2(of.key[1]))
    is_large = query * key > 64 * 64 or of.query[-1] > 64
    return Blocks(query, key, warps=8 if is_large else 4, stages=2)


def _power_of_2(number: int) -> int:
    return max(16, 1 << (number - 1).bit_length())


def kernel(name: str, of: Attention, blocks: Blocks) -> str:
    """Returns the text of a kernel, whose arguments are arrays alone."""
    _, rows, heads, size = of.query
    key_rows, key_heads = of.key[1:3]
    number_of_blocks = _number_of_blocks(name, of, blocks)
    constants = [
        rows,
        key_rows,
        heads,
        heads // key_heads,
        size,
        0 if of.bias[0] == 1 else key_rows,  # from one example's bias to the next one's
        number_of_blocks,
        int(of.is_causal),
        of.drop_below,
        of.scale * math.log2(math.e),
        1 / of.kept,
    ]
    sizes = {
        "block_q": blocks.query,
        "block_k": blocks.key,
        "block_h": _power_of_2(size),
    }
    return triton_calls.filled(
        triton_calls.text_of(_KERNELS, name), sizes=sizes, constants=constants, dtype=of.dtype
    )


def _number_of_blocks(name: str, of: Attention, blocks: Blocks) -> int:
    if name == "of_key":
        return -(-of.key[1] // blocks.key)
    return -(-of.query[1] // blocks.query)


def _module(of, name: str, given: list[str], results: list[str], blocks: Blocks | None) -> str:
    blocks = blocks or blocks_of(name, of)
    batch, _, heads, _ = of.query
    return triton_calls.module(
        kernel(name, of, blocks),
        given,
        results,
        programs=_number_of_blocks(name, of, blocks) * batch * heads,
        warps=blocks.warps,
        stages=blocks.stages,
    )
