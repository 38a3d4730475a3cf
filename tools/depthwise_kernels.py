"""The source of depthwise convolutions as Triton kernels; writes their text for tfaccel.

    python -m venv /tmp/triton && /tmp/triton/bin/pip install triton==3.5.1 numpy
    /tmp/triton/bin/python tools/depthwise_kernels.py

It writes `tfaccel/step/depthwise/kernels/*.ttir`, which XLA compiles for the GPU. So tfaccel needs
no Triton package. Run it after a change of a kernel. It needs no GPU.
`tfaccel/step/depthwise/calls.py` fills sizes and numbers into the texts.
"""

import itertools
import pathlib

import triton
import triton.language as tl
from kernel_texts import template_of

FOLDER = pathlib.Path(__file__).parents[1] / "tfaccel/step/depthwise/kernels"
WINDOWS = (3, 5, 7)  # heights and widths
# Of outputs that a program computes at once. Images of 224 / 2^n pixels have multiples of 7 rows.
ROWS = (7, 14)
# Sizes that appear in no other role in a text, so that each can be found again.
SIZES = {"block_w": 128, "block_c": 256}


@triton.jit
def replaced(values, i: tl.constexpr, value):
    """Returns a tuple with another value at i. Triton has no unpacking."""
    return values[:i] + (value,) + values[i + 1 :]  # noqa: RUF005


@triton.jit
def appended(values, value):
    """Returns a tuple with one value more."""
    return values + (value,)  # noqa: RUF005


@triton.jit
def unknown(x):
    """Returns x, of which a compiler does not know that it is a constant.

    XLA of TensorFlow 2.21 never ends the compilation of a store whose mask is false everywhere.
    Such stores are those of rows below an image that has fewer than `rows`.
    """
    return tl.inline_asm_elementwise(
        "mov.u32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def depthwise_forward(
    x, kernel, output,
    in_h, in_w, out_h, out_w, channels, pad_h, pad_w, strips, w_blocks, c_blocks, k_first, k_step,
    window: tl.constexpr, rows: tl.constexpr, block_w: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    """Convolves x [images, in_h, in_w, channels] with kernel [window, window, channels].

    Each value of x is loaded once for each column of the window, and used for all its rows. The
    place of the window's value i in the kernel is k_first + i k_step: backwards for the gradient.
    """
    pid = tl.program_id(0)
    at_c = (pid % c_blocks) * block_c + tl.arange(0, block_c)
    pid = pid // c_blocks
    at_w = (pid % w_blocks) * block_w + tl.arange(0, block_w)
    pid = pid // w_blocks
    first = unknown((pid % strips) * rows)
    image = (pid // strips).to(tl.int64)
    is_c = at_c < channels
    x += image * (in_h * in_w * channels)
    output += image * (out_h * out_w * channels)
    zero = tl.zeros([block_w, block_c], tl.float32)
    totals = (zero,) * rows
    for column in range(window):
        w = at_w + column - pad_w
        inside = ((w >= 0) & (w < in_w))[:, None] & is_c[None, :]
        places = w[:, None] * channels + at_c[None, :]
        factors = ()
        for row in tl.static_range(window):
            # Each thread loads what it needs, so that threads exchange nothing.
            of_kernel = (k_first + (row * window + column) * k_step) * channels + at_c[None, :]
            of_kernel = tl.broadcast_to(of_kernel, [block_w, block_c])
            factor = tl.load(kernel + of_kernel, mask=is_c[None, :], other=0.0)
            factors = appended(factors, factor)
        for i in tl.static_range(rows + window - 1):
            h = first + i - pad_h
            is_row = (h >= 0) & (h < in_h)
            value = tl.load(x + h * (in_w * channels) + places, mask=inside & is_row, other=0.0)
            value = value.to(tl.float32)
            for row in tl.static_range(window):
                if i - row >= 0 and i - row < rows:
                    found = tl.fma(value, factors[row], totals[i - row])
                    totals = replaced(totals, i - row, found)
    inside = (at_w < out_w)[:, None] & is_c[None, :]
    places = at_w[:, None] * channels + at_c[None, :]
    for i in tl.static_range(rows):
        found = totals[i].to(output.dtype.element_ty)
        is_row = first + i < out_h
        place = output + (first + i) * (out_w * channels) + places
        tl.store(place, found, mask=inside & is_row)


@triton.jit
def depthwise_of_kernel(
    x, gradient, sums,
    in_h, in_w, out_h, out_w, channels, pad_h, pad_w, strips, w_blocks, c_blocks, turns, items,
    window: tl.constexpr, columns: tl.constexpr, rows: tl.constexpr,
    block_w: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    """Computes the kernel's gradient, in parts: sums [parts, window, window, channels].

    An item is a strip of `rows` rows and block_w columns of an image's outputs. A program sums over
    `turns` items, with each column of the window in other threads.
    """
    pid = tl.program_id(0)
    at_c = (pid % c_blocks) * block_c + tl.arange(0, block_c)
    part = pid // c_blocks
    column = tl.arange(0, columns)
    is_c = (at_c < channels)[None, None, :]
    is_c_of_x = is_c & (column < window)[:, None, None]
    at_w = tl.arange(0, block_w)
    zero = tl.zeros([columns, block_w, block_c], tl.float32)
    totals = (zero,) * window
    for turn in range(turns):
        item = part * turns + turn
        first_w = (item % w_blocks) * block_w
        strip = item // w_blocks
        first = (strip % strips) * rows
        image = (strip // strips).to(tl.int64)
        of_x = x + image * (in_h * in_w * channels)
        of_gradient = gradient + image * (out_h * out_w * channels)
        w = first_w + at_w
        places = (w[:, None] * channels + at_c[None, :])[None, :, :]
        places = tl.broadcast_to(places, [columns, block_w, block_c])
        inside = (w < out_w)[None, :, None] & is_c & (item < items)
        factors = ()
        for i in tl.static_range(rows):
            # Each thread loads what it needs, so that threads exchange nothing.
            at = of_gradient + (first + i) * (out_w * channels) + places
            factor = tl.load(at, mask=inside & (first + i < out_h), other=0.0)
            factors = appended(factors, factor.to(tl.float32))
        w = w[None, :] + column[:, None] - pad_w
        places = w[:, :, None] * channels + at_c[None, None, :]
        inside = ((w >= 0) & (w < in_w))[:, :, None] & is_c_of_x & (item < items)
        for i in tl.static_range(rows + window - 1):
            h = first + i - pad_h
            is_row = (h >= 0) & (h < in_h)
            value = tl.load(of_x + h * (in_w * channels) + places, mask=inside & is_row, other=0.0)
            value = value.to(tl.float32)
            for row in tl.static_range(window):
                if i - row >= 0 and i - row < rows:
                    found = tl.fma(value, factors[i - row], totals[row])
                    totals = replaced(totals, row, found)
    sums += part.to(tl.int64) * (window * window * channels)
    for row in tl.static_range(window):
        places = (row * window + column)[:, None] * channels + at_c[None, :]
        inside = (column < window)[:, None] & (at_c < channels)[None, :]
        tl.store(sums + places, tl.sum(totals[row], 1), mask=inside)


TYPES = {
    **dict.fromkeys(("x", "output", "gradient"), "*bf16"),
    # A program has many uses for a value of x, and few for one of the kernel, so that the
    # conversion of the kernel to float32 took a third of its instructions.
    **dict.fromkeys(("kernel", "sums"), "*fp32"),
}


def main() -> None:
    """Writes the texts."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for window, rows in itertools.product(WINDOWS, ROWS):
        own = {"window": window, "rows": rows}
        forward = template_of(depthwise_forward, TYPES, SIZES, own)
        (FOLDER / f"forward_{window}_{rows}.ttir").write_text(forward)
        own["columns"] = triton.next_power_of_2(window)
        of_kernel = template_of(depthwise_of_kernel, TYPES, SIZES, own)
        (FOLDER / f"of_kernel_{window}_{rows}.ttir").write_text(of_kernel)


if __name__ == "__main__":
    main()
