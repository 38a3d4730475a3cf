"""Times attention with dropout on a GPU: tfaccel's kernels, and their blocks, beside other ways.

    python tools/time_attention.py ways                # each way, forward and with its gradient
    python tools/time_attention.py blocks --limit=400  # each kernel, with several sizes of blocks

`ways` has tfaccel's kernels, the plain computation with dropout, and cuDNN without dropout.
`blocks` is for `blocks_of` in tfaccel/step/attention/dropout_calls.py. A time is that of one call
out of 20 in one XLA program, in milliseconds, the least of three runs. Exit codes: 0 done; 1 there
is no GPU; 2 a mistake in the call.
"""

import argparse
import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfaccel.keras_internals.call_module import call_module
from tfaccel.step.attention import dropout, dropout_calls, flash
from tfaccel.step.attention.dropout_calls import Attention, Blocks

CALLS = 20
RATE = 0.1
SHAPES = {  # [batch, rows, heads, size of a head], and whether causal
    "BERT-base": ((128, 128, 12, 64), False),
    "BERT-base, 512 tokens": ((32, 512, 12, 64), False),
    "ViT-B/16": ((128, 197, 12, 64), False),
    "2,048 rows, causal": ((8, 2048, 12, 64), True),
    "heads of 128": ((32, 512, 12, 128), False),
}
LARGEST_PLAIN = 1e9  # scores
BLOCKS = {  # rows of the query, rows of the key, warps, stages
    "forward": [
        *((128, 64, 4, 2), (128, 64, 4, 3), (128, 64, 8, 2), (128, 128, 8, 2), (64, 64, 4, 2)),
        *((64, 64, 4, 3), (128, 32, 4, 3), (64, 128, 4, 2)),
    ],
    "of_query": [
        *((128, 64, 4, 2), (128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (128, 32, 4, 3)),
        *((64, 128, 4, 2), (128, 128, 8, 2), (64, 32, 4, 3)),
    ],
    "of_key": [
        *((64, 128, 4, 2), (64, 128, 8, 2), (32, 128, 4, 2), (32, 128, 8, 3), (64, 64, 4, 2)),
        *((64, 64, 8, 2), (32, 64, 4, 3), (32, 64, 4, 2), (128, 64, 4, 2), (128, 128, 8, 2)),
    ],
}


def main(arguments: Sequence[str]) -> int:
    """Prints the times; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("ways", "blocks"))
    parser.add_argument("--limit", type=float, default=500, help="seconds (default: 500)")
    options = parser.parse_args(arguments)
    if not tf.config.list_physical_devices("GPU"):
        print("time_attention: error: TensorFlow sees no GPU; run it where it has one")
        return 1
    ends = time.monotonic() + options.limit
    for words, (shape, is_causal) in SHAPES.items():
        of = Attention(shape, shape, tf.bfloat16, shape[-1] ** -0.5, RATE, is_causal, (1, shape[1]))
        lines = ways(of) if options.what == "ways" else blocks(of)
        for line in lines:
            print(f"{words}, {line}", flush=True)
            if time.monotonic() > ends:
                print("the limit is reached")
                return 0
    return 0


def inputs(of: Attention) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
    """Returns query, key, value and gradient; the bias of the key's rows; and the random keys."""
    draw = np.random.default_rng(0)
    shapes = of.query, of.key, of.key, of.query
    arrays = [tf.cast(draw.normal(size=each).astype("f4"), of.dtype) for each in shapes]
    return arrays, tf.zeros(of.bias), dropout.keys_of(of, tf.constant([3, 7], tf.uint32))


def ways(of: Attention):
    """Yields a line for each way to compute the attention."""
    arrays, bias, _ = inputs(of)
    computed = {
        "tfaccel": functools.partial(drops, of, bias),
        "plain": functools.partial(plain, of, bias),
        "cuDNN without dropout": functools.partial(without_dropout, of),
    }
    for name, compute in computed.items():
        batch, rows, heads, _ = of.query
        if name == "plain" and batch * heads * rows * rows > LARGEST_PLAIN:
            continue

        def forward(q, k, v, compute=compute):
            return compute(q, k, v), k, v

        def both(q, k, v, gradient, compute=compute):
            with tf.GradientTape() as tape:
                tape.watch([q, k, v])
                output = compute(q, k, v)
            return *tape.gradient(output, [q, k, v], output_gradients=gradient), output

        times = milliseconds(forward, *arrays[:3]), milliseconds(both, *arrays)
        yield f"{name}: forward {times[0]:.3f} ms, with its gradient {times[1]:.3f} ms"


def keys(of: Attention, query: tf.Tensor) -> tf.Tensor:
    """Returns random keys that XLA does not know when it compiles, as in a step."""
    seed = tf.cast(tf.cast(query[0, 0, 0, :2], tf.float32) * 1000, tf.uint32)
    return dropout.keys_of(of, seed)


def drops(of: Attention, bias, query, key, value) -> tf.Tensor:
    """Computes the attention by tfaccel's kernels."""
    return dropout.attend(of, query, key, value, bias, keys(of, query))


def plain(of: Attention, bias, query, key, value) -> tf.Tensor:
    """Computes the attention by products, with the same scores dropped."""
    return dropout.plain(of, query, key, value, bias, keys(of, query))


def without_dropout(of: Attention, query, key, value) -> tf.Tensor:
    """Computes the attention without dropout by cuDNN."""
    return flash.flash_attention(
        query,
        key,
        value,
        plain=keras.ops.dot_product_attention,
        scale=of.scale,
        is_causal=of.is_causal,
        mask=None,
        bias=None,
    )


def blocks(of: Attention):
    """Yields a line for each kernel, with its time for each size of blocks."""
    for name, sizes in BLOCKS.items():
        found = []
        for each in sizes:
            try:
                taken = milliseconds(kernel(name, of, Blocks(*each)), inputs(of)[0][0])
            except tf.errors.OpError:  # it needs more shared memory than there is
                taken = math.inf
            found.append((taken, each))
        chosen = dropout_calls.blocks_of(name, of)
        times = "; ".join(f"{taken:.3f} {each}" for taken, each in sorted(found))
        yield f"{name} (now {dataclasses.astuple(chosen)}): {times}"


def kernel(name: str, of: Attention, sizes: Blocks) -> Callable:
    """Returns a function of the query that runs one kernel, and returns a tensor of its shape."""
    like, sums = tf.TensorSpec(of.query, of.dtype), tf.TensorSpec(of.sums, tf.float32)
    (_, key, value, gradient), bias, drawn = inputs(of)
    zeros = tf.zeros(of.sums)

    def run(query):
        given = [query, key, value, bias, drawn]
        if name == "forward":
            found = call_module(dropout_calls.forward(of, sizes), given, [like, sums])
        elif name == "of_query":
            given += [gradient, zeros, gradient]
            found = call_module(dropout_calls.of_query(of, sizes), given, [like, sums])
        else:
            given += [zeros, gradient, zeros]
            found = call_module(dropout_calls.of_key(of, sizes), given, [like, like])
        return found[:1]

    return run


def milliseconds(step: Callable, *carried: tf.Tensor) -> float:
    """Returns the time of a call of a function that takes what it returns."""

    @tf.function(jit_compile=True)
    def run(*carried):
        _, carried = tf.while_loop(
            lambda i, _: i < CALLS,
            lambda i, values: (i + 1, tuple(step(*values))),
            (tf.constant(0), carried),
        )
        return carried

    def seconds():
        began = time.perf_counter()
        run(*carried)[0][0, 0].numpy()
        return time.perf_counter() - began

    seconds()  # compiles
    return min(seconds() for _ in range(3)) / CALLS * 1e3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
