"""The source of attention with dropout as Triton kernels; writes their text for tfaccel.

    python -m venv /tmp/triton && /tmp/triton/bin/pip install triton==3.5.1 numpy
    /tmp/triton/bin/python tools/attention_kernels.py

It writes `tfaccel/step/attention/kernels/*.ttir`, which XLA compiles for the GPU. So tfaccel needs
no Triton package. Run it after a change of a kernel. It needs no GPU.

`tfaccel/step/attention/dropout_calls.py` fills sizes and numbers into the texts.
"""

import pathlib

import triton
import triton.language as tl
from kernel_texts import template_of

FOLDER = pathlib.Path(__file__).parents[1] / "tfaccel/step/attention/kernels"
# Sizes that appear in no other role in a text, so that each can be found again.
SIZES = {"block_q": 512, "block_k": 256, "block_h": 1024}
UNSEEN = tl.constexpr(-1e30)  # below each score, yet finite


@triton.jit
def bits_of(first, second, start, column):
    """Returns a random number of 16 bits for each pair of a row and a column.

    A row's two keys start a Weyl sequence, which is mixed as in Chris Wellons's lowbias32. Two
    columns share a number, whose halves they take. They are 8 apart, so that one thread has both.

    Args:
      first: the first keys of the rows.
      second: their second keys.
      start: the first column, a multiple of 16.
      column: the columns, from `start` on.
    """
    pair = (column >> 4) * 8 + (column & 7) + (start >> 1)
    x = first + pair.to(tl.uint32) * 0x9E3779B9
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= second
    x ^= x >> 15
    x *= 0x846CA68B
    return tl.where((column & 8) == 0, x >> 16, (x ^ (x >> 16)) & 0xFFFF)


@triton.jit
def attention_forward(
    query, key, value, bias, keys, output, sums,
    rows, key_rows, heads, sharing, size, bias_stride, num_blocks, is_causal, drop_below,
    scale, keep_scale,
    block_q: tl.constexpr, block_k: tl.constexpr, block_h: tl.constexpr,
):  # fmt: skip
    """Computes the output [B, T, N, H] and the logarithms [B, N, T] of the sums of the softmax."""
    pid = tl.program_id(0)
    block = pid % num_blocks
    pair = pid // num_blocks
    batch = pair // heads
    head = pair % heads
    key_heads = heads // sharing

    at_q = block * block_q + tl.arange(0, block_q)
    at_k = tl.arange(0, block_k)
    at_h = tl.arange(0, block_h)
    is_size = at_h < size
    is_q = at_q < rows
    inside = is_q[:, None] & is_size[None, :]
    first = (batch.to(tl.int64) * rows * heads + head) * size
    places = at_q[:, None] * (heads * size) + at_h[None, :]
    first_key = (batch.to(tl.int64) * key_rows * key_heads + head // sharing) * size
    step = key_heads * size
    bias += batch.to(tl.int64) * bias_stride

    q = tl.load(query + first + places, mask=inside, other=0.0)
    keys += pair.to(tl.int64) * 2 * rows + at_q
    row_1 = tl.load(keys, mask=is_q, other=0)
    row_2 = tl.load(keys + rows, mask=is_q, other=0)
    top = tl.full([block_q], UNSEEN, tl.float32)
    total = tl.zeros([block_q], tl.float32)
    found = tl.zeros([block_q, block_h], tl.float32)
    end = tl.where(is_causal != 0, tl.minimum(key_rows, (block + 1) * block_q), key_rows)
    for start in range(0, end, block_k):
        k_rows = start + at_k
        is_k = k_rows < key_rows
        places_k = k_rows[:, None] * step + at_h[None, :]
        inside_k = is_k[:, None] & is_size[None, :]
        k = tl.load(key + first_key + places_k, mask=inside_k, other=0.0)
        v = tl.load(value + first_key + places_k, mask=inside_k, other=0.0)
        b = tl.load(bias + k_rows, mask=is_k, other=float("-inf"))
        scores = tl.fma(tl.dot(q, tl.trans(k)), scale, b[None, :])
        sees = (at_q[:, None] >= k_rows[None, :]) | (is_causal == 0)
        scores = tl.where(sees, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        p = tl.math.exp2(scores - new_top[:, None])
        shrink = tl.math.exp2(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        bits = bits_of(row_1[:, None], row_2[:, None], start, at_k[None, :])
        p = tl.where(bits >= drop_below, p, 0.0)
        found = found * shrink[:, None]
        found = tl.dot(p.to(v.dtype), v, found)
        top = new_top
    seen = total > 0
    found = found * (keep_scale / tl.where(seen, total, 1.0))[:, None]
    tl.store(output + first + places, found.to(output.dtype.element_ty), mask=inside)
    log = tl.where(seen, top + tl.math.log2(total), float("inf"))
    tl.store(sums + pair.to(tl.int64) * rows + at_q, log, mask=is_q)


@triton.jit
def attention_of_query(
    query, key, value, bias, keys, output, sums, gradient, of_query, products,
    rows, key_rows, heads, sharing, size, bias_stride, num_blocks, is_causal, drop_below,
    scale, keep_scale,
    block_q: tl.constexpr, block_k: tl.constexpr, block_h: tl.constexpr,
):  # fmt: skip
    """Computes the query's gradient [B, T, N, H] and the sums [B, N, T] of output x gradient."""
    pid = tl.program_id(0)
    block = pid % num_blocks
    pair = pid // num_blocks
    batch = pair // heads
    head = pair % heads
    key_heads = heads // sharing

    at_q = block * block_q + tl.arange(0, block_q)
    at_k = tl.arange(0, block_k)
    at_h = tl.arange(0, block_h)
    is_size = at_h < size
    is_q = at_q < rows
    inside = is_q[:, None] & is_size[None, :]
    first = (batch.to(tl.int64) * rows * heads + head) * size
    places = at_q[:, None] * (heads * size) + at_h[None, :]
    first_key = (batch.to(tl.int64) * key_rows * key_heads + head // sharing) * size
    step = key_heads * size
    bias += batch.to(tl.int64) * bias_stride

    q = tl.load(query + first + places, mask=inside, other=0.0)
    g = tl.load(gradient + first + places, mask=inside, other=0.0)
    o = tl.load(output + first + places, mask=inside, other=0.0)
    product = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    pairs = pair.to(tl.int64) * rows + at_q
    tl.store(products + pairs, product, mask=is_q)
    log = tl.load(sums + pairs, mask=is_q, other=float("inf"))
    keys += pair.to(tl.int64) * 2 * rows + at_q
    row_1 = tl.load(keys, mask=is_q, other=0)
    row_2 = tl.load(keys + rows, mask=is_q, other=0)
    found = tl.zeros([block_q, block_h], tl.float32)
    end = tl.where(is_causal != 0, tl.minimum(key_rows, (block + 1) * block_q), key_rows)
    for start in range(0, end, block_k):
        k_rows = start + at_k
        is_k = k_rows < key_rows
        places_k = k_rows[:, None] * step + at_h[None, :]
        inside_k = is_k[:, None] & is_size[None, :]
        k = tl.load(key + first_key + places_k, mask=inside_k, other=0.0)
        v = tl.load(value + first_key + places_k, mask=inside_k, other=0.0)
        b = tl.load(bias + k_rows, mask=is_k, other=float("-inf"))
        scores = tl.fma(tl.dot(q, tl.trans(k)), scale, b[None, :])
        sees = (at_q[:, None] >= k_rows[None, :]) | (is_causal == 0)
        scores = tl.where(sees, scores, float("-inf"))
        p = tl.math.exp2(scores - log[:, None])
        of_p = tl.dot(g, tl.trans(v))
        bits = bits_of(row_1[:, None], row_2[:, None], start, at_k[None, :])
        of_p = tl.where(bits >= drop_below, of_p, 0.0)
        of_scores = p * tl.fma(of_p, keep_scale, -product[:, None])
        found = tl.dot(of_scores.to(k.dtype), k, found)
    found = found * (scale * 0.6931471805599453)
    tl.store(of_query + first + places, found.to(of_query.dtype.element_ty), mask=inside)


@triton.jit
def attention_of_key(
    query, key, value, bias, keys, sums, gradient, products, of_key, of_value,
    rows, key_rows, heads, sharing, size, bias_stride, num_blocks, is_causal, drop_below,
    scale, keep_scale,
    block_q: tl.constexpr, block_k: tl.constexpr, block_h: tl.constexpr,
):  # fmt: skip
    """Computes the gradients [B, S, N, H] of key and value, for each head of the query."""
    pid = tl.program_id(0)
    block = pid % num_blocks
    pair = pid // num_blocks
    batch = pair // heads
    head = pair % heads
    key_heads = heads // sharing

    column = tl.arange(0, block_k)
    at_k = block * block_k + column
    at_q = tl.arange(0, block_q)
    at_h = tl.arange(0, block_h)
    is_size = at_h < size
    is_k = at_k < key_rows
    inside_k = is_k[:, None] & is_size[None, :]
    first = (batch.to(tl.int64) * rows * heads + head) * size
    step = heads * size
    first_key = (batch.to(tl.int64) * key_rows * key_heads + head // sharing) * size
    places_k = at_k[:, None] * (key_heads * size) + at_h[None, :]
    pairs = pair.to(tl.int64) * rows

    k = tl.load(key + first_key + places_k, mask=inside_k, other=0.0)
    v = tl.load(value + first_key + places_k, mask=inside_k, other=0.0)
    b = tl.load(bias + batch.to(tl.int64) * bias_stride + at_k, mask=is_k, other=float("-inf"))
    keys += pair.to(tl.int64) * 2 * rows
    found_k = tl.zeros([block_k, block_h], tl.float32)
    found_v = tl.zeros([block_k, block_h], tl.float32)
    # The first block of the query whose rows see a row of this block.
    begin = tl.where(is_causal != 0, (block * block_k // block_q) * block_q, 0)
    for start in range(begin, rows, block_q):
        q_rows = start + at_q
        is_q = q_rows < rows
        places = q_rows[:, None] * step + at_h[None, :]
        inside = is_q[:, None] & is_size[None, :]
        q = tl.load(query + first + places, mask=inside, other=0.0)
        g = tl.load(gradient + first + places, mask=inside, other=0.0)
        log = tl.load(sums + pairs + q_rows, mask=is_q, other=float("inf"))
        product = tl.load(products + pairs + q_rows, mask=is_q, other=0.0)
        scores = tl.fma(tl.dot(k, tl.trans(q)), scale, b[:, None])
        sees = (q_rows[None, :] >= at_k[:, None]) | (is_causal == 0)
        scores = tl.where(sees, scores, float("-inf"))
        p = tl.math.exp2(scores - log[None, :])
        row_1 = tl.load(keys + q_rows, mask=is_q, other=0)
        row_2 = tl.load(keys + rows + q_rows, mask=is_q, other=0)
        bits = bits_of(row_1[None, :], row_2[None, :], block * block_k, column[:, None])
        keep = bits >= drop_below
        found_v = tl.dot(tl.where(keep, p, 0.0).to(g.dtype), g, found_v)
        of_p = tl.where(keep, tl.dot(v, tl.trans(g)), 0.0)
        of_scores = p * tl.fma(of_p, keep_scale, -product[None, :])
        found_k = tl.dot(of_scores.to(q.dtype), q, found_k)
    found_k = found_k * (scale * 0.6931471805599453)
    found_v = found_v * keep_scale
    # Each head of the query has its own part; XLA adds those that share a head of the key.
    first_key = (batch.to(tl.int64) * key_rows * heads + head) * size
    places_k = at_k[:, None] * (heads * size) + at_h[None, :]
    tl.store(of_key + first_key + places_k, found_k.to(of_key.dtype.element_ty), mask=inside_k)
    tl.store(of_value + first_key + places_k, found_v.to(of_value.dtype.element_ty), mask=inside_k)


ARRAYS = {
    "query", "key", "value", "output", "gradient", "of_query", "of_key", "of_value",
}  # fmt: skip
TYPES = {
    **dict.fromkeys(ARRAYS, "*bf16"), "bias": "*fp32", "sums": "*fp32", "products": "*fp32",
    "keys": "*u32", "drop_below": "u32", "scale": "fp32", "keep_scale": "fp32",
}  # fmt: skip
KERNELS = {"forward": attention_forward, "of_query": attention_of_query, "of_key": attention_of_key}


def main() -> None:
    """Writes the texts."""
    FOLDER.mkdir(exist_ok=True)
    for name, kernel in KERNELS.items():
        (FOLDER / f"{name}.ttir").write_text(template_of(kernel, TYPES, SIZES))


if __name__ == "__main__":
    main()
