"""The source of layer normalization as Triton kernels; writes their text for tfaccel.

    python -m venv /tmp/triton && /tmp/triton/bin/pip install triton==3.5.1 numpy
    /tmp/triton/bin/python tools/layer_norm_kernels.py

It writes `tfaccel/step/layer_norm/kernels/*.ttir`, which XLA compiles for the GPU. So tfaccel needs
no Triton package. Run it after a change of a kernel. It needs no GPU.
`tfaccel/step/layer_norm/calls.py` fills sizes and numbers into the texts.
"""

import pathlib

import triton
import triton.language as tl
from kernel_texts import template_of

FOLDER = pathlib.Path(__file__).parents[1] / "tfaccel/step/layer_norm/kernels"
# Sizes that appear in no other role in a text, so that each can be found again.
SIZES = {"block_r": 512, "block_c": 1024}


@triton.jit
def normalize(
    value, gamma, beta, output, means, scales, start, rows, columns, per_column, epsilon,
    block_r: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    """Writes the outputs, the mean and 1 / the standard deviation of rows that are loaded."""
    at_r, at_c = tl.arange(0, block_r), tl.arange(0, block_c)
    is_r, is_c = start + at_r < rows, at_c < columns
    mean = tl.sum(value, 1) * per_column
    centered = tl.where(is_c[None, :], value - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.fma(tl.sum(centered * centered, 1), per_column, epsilon))
    g = tl.load(gamma + at_c, mask=is_c, other=0.0)
    b = tl.load(beta + at_c, mask=is_c, other=0.0)
    found = tl.fma(centered * scale[:, None], g[None, :], b[None, :])
    places = start.to(tl.int64) * columns + at_r[:, None] * columns + at_c[None, :]
    inside = is_r[:, None] & is_c[None, :]
    tl.store(output + places, found.to(output.dtype.element_ty), mask=inside)
    tl.store(means + start + at_r, mean, mask=is_r)
    tl.store(scales + start + at_r, scale, mask=is_r)


@triton.jit
def layer_norm_forward(
    x, gamma, beta, output, means, scales, rows, columns, per_column, epsilon,
    block_r: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    """Normalizes x [rows, columns]; writes the mean and 1 / the standard deviation of each row."""
    start = tl.program_id(0) * block_r
    at_r, at_c = tl.arange(0, block_r), tl.arange(0, block_c)
    inside = (start + at_r < rows)[:, None] & (at_c < columns)[None, :]
    places = start.to(tl.int64) * columns + at_r[:, None] * columns + at_c[None, :]
    value = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    normalize(
        value, gamma, beta, output, means, scales, start, rows, columns, per_column, epsilon,
        block_r, block_c,
    )  # fmt: skip


@triton.jit
def layer_norm_of_sum_forward(
    residual, product, bias, gamma, beta, total, output, means, scales,
    rows, columns, per_column, epsilon,
    block_r: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    """Writes total = residual + product + bias [columns], and normalizes it."""
    start = tl.program_id(0) * block_r
    at_r, at_c = tl.arange(0, block_r), tl.arange(0, block_c)
    is_c = at_c < columns
    inside = (start + at_r < rows)[:, None] & is_c[None, :]
    places = start.to(tl.int64) * columns + at_r[:, None] * columns + at_c[None, :]
    first = tl.load(residual + places, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(product + places, mask=inside, other=0.0).to(tl.float32)
    third = tl.load(bias + at_c, mask=is_c, other=0.0).to(tl.float32)
    rounded = (first + second + third[None, :]).to(total.dtype.element_ty)
    tl.store(total + places, rounded, mask=inside)
    normalize(
        rounded.to(tl.float32), gamma, beta, output, means, scales, start,
        rows, columns, per_column, epsilon, block_r, block_c,
    )  # fmt: skip


@triton.jit
def layer_norm_backward(
    x, gamma, gradient, means, scales, of_x, sums, rows, columns, per_column, turns,
    block_r: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of x, and of gamma and beta in parts [programs, 2, columns]."""
    gradients(
        x, gamma, gradient, gradient, means, scales, of_x, sums, rows, columns, per_column, turns,
        False, block_r, block_c,
    )  # fmt: skip


@triton.jit
def layer_norm_of_sum_backward(
    total, gamma, of_total, gradient, means, scales, of_x, sums, rows, columns, per_column, turns,
    block_r: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of the terms, and of gamma, beta and bias [programs, 3, columns].

    The gradient of the output is `gradient`, and that of the total as a second output `of_total`.
    """
    gradients(
        total, gamma, gradient, of_total, means, scales, of_x, sums,
        rows, columns, per_column, turns, True, block_r, block_c,
    )  # fmt: skip


@triton.jit
def gradients(
    x, gamma, gradient, of_total, means, scales, of_x, sums, rows, columns, per_column, turns,
    is_of_sum: tl.constexpr, block_r: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    """Computes a program's part of the gradients."""
    pid = tl.program_id(0)
    start = pid * (turns * block_r)
    at_r, at_c = tl.arange(0, block_r), tl.arange(0, block_c)
    is_c = at_c < columns
    factor = tl.load(gamma + at_c, mask=is_c, other=0.0)
    first = start.to(tl.int64) * columns
    inside = (start + at_r < rows)[:, None] & is_c[None, :]
    places = at_r[:, None] * columns + at_c[None, :]
    next_x = tl.load(x + first + places, mask=inside, other=0.0)
    next_g = tl.load(gradient + first + places, mask=inside, other=0.0)
    next_t = next_g
    if is_of_sum:
        next_t = tl.load(of_total + first + places, mask=inside, other=0.0)
    sum_g = tl.zeros([block_r, block_c], tl.float32)
    sum_b = tl.zeros([block_r, block_c], tl.float32)
    sum_t = tl.zeros([block_r, block_c], tl.float32)
    for turn in range(turns):
        value, g, t = next_x.to(tl.float32), next_g.to(tl.float32), next_t.to(tl.float32)
        # The next block is on its way while this one is computed.
        r = (turn + 1) * block_r + at_r
        inside = ((start + r < rows) & (turn + 1 < turns))[:, None] & is_c[None, :]
        places = r[:, None] * columns + at_c[None, :]
        next_x = tl.load(x + first + places, mask=inside, other=0.0)
        next_g = tl.load(gradient + first + places, mask=inside, other=0.0)
        next_t = next_g
        if is_of_sum:
            next_t = tl.load(of_total + first + places, mask=inside, other=0.0)
        r = turn * block_r + at_r
        is_r = start + r < rows
        mean = tl.load(means + start + r, mask=is_r, other=0.0)
        scale = tl.load(scales + start + r, mask=is_r, other=0.0)
        unit = tl.where(is_c[None, :], (value - mean[:, None]) * scale[:, None], 0.0)
        own = g * factor[None, :]
        of_unit = tl.sum(own * unit, 1) * per_column
        of_mean = tl.sum(own, 1) * per_column
        found = (own - of_mean[:, None] - unit * of_unit[:, None]) * scale[:, None]
        inside = is_r[:, None] & is_c[None, :]
        if is_of_sum:
            found += t
            sum_t += tl.where(inside, found, 0.0)
        places = r[:, None] * columns + at_c[None, :]
        tl.store(of_x + first + places, found.to(of_x.dtype.element_ty), mask=inside)
        sum_g += g * unit
        sum_b += g
    if is_of_sum:
        place = 3 * pid.to(tl.int64) * columns + at_c
        tl.store(sums + 2 * columns + place, tl.sum(sum_t, 0), mask=is_c)
    else:
        place = 2 * pid.to(tl.int64) * columns + at_c
    tl.store(sums + place, tl.sum(sum_g, 0), mask=is_c)
    tl.store(sums + columns + place, tl.sum(sum_b, 0), mask=is_c)


TYPES = {
    **dict.fromkeys(("x", "output", "gradient", "of_x", "residual", "product"), "*bf16"),
    **dict.fromkeys(("bias", "total", "of_total"), "*bf16"),
    **dict.fromkeys(("gamma", "beta", "means", "scales", "sums"), "*fp32"),
    **dict.fromkeys(("per_column", "epsilon"), "fp32"),
}  # fmt: skip
KERNELS = {
    "forward": layer_norm_forward,
    "backward": layer_norm_backward,
    "forward_of_sum": layer_norm_of_sum_forward,
    "backward_of_sum": layer_norm_of_sum_backward,
}


def main() -> None:
    """Writes the texts."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, kernel in KERNELS.items():
        (FOLDER / f"{name}.ttir").write_text(template_of(kernel, TYPES, SIZES))


if __name__ == "__main__":
    main()
