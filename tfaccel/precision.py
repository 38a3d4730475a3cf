"""Layers that compute in float32 within a model of half precision.

with tfaccel.float32_region():
    x = keras.layers.Dense(10)(x)       # built here, so of the policy float32
"""

import contextlib
from collections.abc import Iterator

import keras


@contextlib.contextmanager
def float32_region() -> Iterator[None]:
    """Within the context, new layers compute in float32, unless they are given a `dtype`.

    As PyTorch's `autocast(enabled=False)`, but of layers that are made within, not of those that
    are called. May be nested; the policy before is back at its end.
    """
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("float32")
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)
