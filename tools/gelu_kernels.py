"""The source of a bias and GELU as Triton kernels; writes their text for tfaccel.

    python -m venv /tmp/triton && /tmp/triton/bin/pip install triton==3.5.1 numpy
    /tmp/triton/bin/python tools/gelu_kernels.py

It writes `tfaccel/step/gelu/kernels/*.ttir`, which XLA compiles for the GPU. So tfaccel needs no
Triton package. Run it after a change of a kernel. It needs no GPU.
`tfaccel/step/gelu/calls.py` fills sizes and the factors of the polynomial into the texts.
"""

import pathlib

import triton
import triton.language as tl
from kernel_texts import template_of

FOLDER = pathlib.Path(__file__).parents[1] / "tfaccel/step/gelu/kernels"
# Sizes that appear in no other role in a text, so that each can be found again.
SIZES = {"block_r": 512, "block_c": 1024}
FACTORS = [f"f{i}" for i in range(7)]  # of 1, x^2, x^4 and so on
PER_ROOT = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 pi)
HALF_LOG2_E = tl.constexpr(0.7213475204444817)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def inverse(x):
    """Returns 1 / x by the GPU's own instruction, whose relative error is below 2^-22."""
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def power_of_2(x):
    """Returns 2^x by the GPU's own instruction. Triton's `exp2` takes more instructions."""
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def share_below(x, square, f0, f1, f2, f3, f4, f5, f6, is_tanh: tl.constexpr):
    """Returns gelu(x) / x as 1 / (1 + 2^(x p(x^2))), with a polynomial p of factors f0, f1, ..."""
    if is_tanh:
        y = tl.fma(square, f1, f0)
    else:
        y = tl.fma(square, f6, f5)
        y = tl.fma(y, square, f4)
        y = tl.fma(y, square, f3)
        y = tl.fma(y, square, f2)
        y = tl.fma(y, square, f1)
        y = tl.fma(y, square, f0)
    return inverse(1.0 + power_of_2(x * y))


@triton.jit
def slope_of(x, f0, f1, f2, f3, f4, f5, f6, is_tanh: tl.constexpr):
    """Returns gelu'(x)."""
    square = x * x
    share = share_below(x, square, f0, f1, f2, f3, f4, f5, f6, is_tanh)
    if is_tanh:
        # The share is a logistic function of -ln(2) x p(x^2). So its slope is share (1 - share)
        # times that one's.
        of_exponent = tl.fma(square, -3.0 * LN_2 * f1, -LN_2 * f0)
        # At large x it is infinite and share (1 - share) is 0, whose product would be NaN.
        of_exponent = tl.minimum(of_exponent, 1e30)
        return tl.fma(share * (1.0 - share) * x, of_exponent, share)
    density = power_of_2(square * -HALF_LOG2_E)
    return tl.fma(x * PER_ROOT, density, share)


@triton.jit
def gelu_forward(
    x, bias, output,
    rows, columns, column_blocks, turns, f0, f1, f2, f3, f4, f5, f6,
    is_tanh: tl.constexpr, block_r: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    """Computes gelu(x + bias) of x [rows, columns] and bias [columns]."""
    pid = tl.program_id(0)
    at_c = (pid % column_blocks) * block_c + tl.arange(0, block_c)
    start = (pid // column_blocks) * (turns * block_r)
    is_c = at_c < columns
    b = tl.load(bias + at_c, mask=is_c, other=0.0).to(tl.float32)
    first = start.to(tl.int64) * columns
    at_r = tl.arange(0, block_r)
    for turn in range(turns):
        r = turn * block_r + at_r
        inside = (start + r < rows)[:, None] & is_c[None, :]
        places = r[:, None] * columns + at_c[None, :]
        value = tl.load(x + first + places, mask=inside, other=0.0).to(tl.float32) + b[None, :]
        share = share_below(value, value * value, f0, f1, f2, f3, f4, f5, f6, is_tanh)
        found = (value * share).to(output.dtype.element_ty)
        tl.store(output + first + places, found, mask=inside)


@triton.jit
def gelu_backward(
    x, bias, gradient, of_x, sums,
    rows, columns, column_blocks, turns, f0, f1, f2, f3, f4, f5, f6,
    is_tanh: tl.constexpr, block_r: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    """Computes the gradient of x [rows, columns], and its sums [row blocks, columns] over rows."""
    pid = tl.program_id(0)
    at_c = (pid % column_blocks) * block_c + tl.arange(0, block_c)
    row_block = pid // column_blocks
    start = row_block * (turns * block_r)
    is_c = at_c < columns
    b = tl.load(bias + at_c, mask=is_c, other=0.0).to(tl.float32)
    first = start.to(tl.int64) * columns
    at_r = tl.arange(0, block_r)
    inside = (start + at_r < rows)[:, None] & is_c[None, :]
    places = at_r[:, None] * columns + at_c[None, :]
    next_x = tl.load(x + first + places, mask=inside, other=0.0)
    next_g = tl.load(gradient + first + places, mask=inside, other=0.0)
    total = tl.zeros([block_r, block_c], tl.float32)
    for turn in range(turns):
        value = next_x.to(tl.float32) + b[None, :]
        g = next_g.to(tl.float32)
        # The next block is on its way while this one is computed.
        r = (turn + 1) * block_r + at_r
        inside = ((start + r < rows) & (turn + 1 < turns))[:, None] & is_c[None, :]
        places = r[:, None] * columns + at_c[None, :]
        next_x = tl.load(x + first + places, mask=inside, other=0.0)
        next_g = tl.load(gradient + first + places, mask=inside, other=0.0)
        found = g * slope_of(value, f0, f1, f2, f3, f4, f5, f6, is_tanh)
        r = turn * block_r + at_r
        inside = (start + r < rows)[:, None] & is_c[None, :]
        places = r[:, None] * columns + at_c[None, :]
        tl.store(of_x + first + places, found.to(of_x.dtype.element_ty), mask=inside)
        total += found
    place = row_block.to(tl.int64) * columns + at_c
    tl.store(sums + place, tl.sum(total, 0), mask=is_c)


TYPES = {
    **dict.fromkeys(("x", "bias", "output", "gradient", "of_x"), "*bf16"), "sums": "*fp32",
    **dict.fromkeys(FACTORS, "fp32"),
}  # fmt: skip
KERNELS = {"forward": gelu_forward, "backward": gelu_backward}


def main() -> None:
    """Writes the texts."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, kernel in KERNELS.items():
        for kind in ("erf", "tanh"):
            text = template_of(kernel, TYPES, SIZES, {"is_tanh": kind == "tanh"})
            (FOLDER / f"{name}_{kind}.ttir").write_text(text)


if __name__ == "__main__":
    main()
