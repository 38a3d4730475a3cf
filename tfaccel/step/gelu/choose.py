"""Decides which kernels compute the GELUs of a traced step, and says so."""

import contextlib
import functools
import logging
import re
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfaccel.common.run_log import summary
from tfaccel.keras_internals.gelu import gelu
from tfaccel.step import triton_calls
from tfaccel.step.capability import LEAST_CAPABILITY, least_capability
from tfaccel.step.gelu.calls import LARGEST, MULTIPLE_OF_COLUMNS
from tfaccel.step.gelu.gelu import bias_gelu, gelu_of_sum

log = logging.getLogger("tfaccel")

OF_TRITON = re.compile("triton", re.IGNORECASE)  # in XLA's errors
# XLA joins a GELU with what computes its input, unless that is one of these. Then tfaccel's kernel,
# which XLA joins with nothing, reads no more than XLA's.
PRODUCTS = {"MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "Conv2D"}
RESHAPES = {"Reshape", "Identity", "Squeeze", "ExpandDims"}


class Gelus:
    """Computes the GELUs of a model's steps: by tfaccel's kernels where they are quicker, or XLA's.

    The kernels compute the bias of a matrix product and the GELU after it.
    """

    def __init__(self):
        """Takes nothing."""
        self._is_used, self._off = False, False
        self._in_layer = False

    def turned_off_by(self, error: str) -> bool:
        """Returns whether an error is of these kernels, which are then not used again."""
        if not self._is_used or self._off or not OF_TRITON.search(error):
            return False
        self._off = True
        first = error.strip().splitlines()[0]
        summary(
            "step: GELU is computed without tfaccel's kernels, because XLA refused one: %s", first
        )
        return True

    def of_layer(self, call: Callable) -> Callable:
        """Returns a replacement of a layer's `call`, within which only the layer has its sums."""

        @functools.wraps(call)
        def in_layer(layer, *args, **kwargs):
            with self._within():
                return call(layer, *args, **kwargs)

        return in_layer

    @contextlib.contextmanager
    def _within(self):
        before, self._in_layer = self._in_layer, True
        try:
            yield
        finally:
            self._in_layer = before

    def __call__(self, x, approximate: bool = True) -> tf.Tensor:
        """Returns `keras.ops.gelu`."""
        x = tf.convert_to_tensor(x)
        parts = None if self._off else _parts(x)
        if parts is None:
            return gelu(x, approximate)
        if not self._is_used:
            self._is_used = True
            log.info("step: tfaccel's kernels compute GELU and the bias before it")
        if self._in_layer:
            return bias_gelu(*parts, approximate=approximate)
        return gelu_of_sum(x, *parts, approximate=approximate)


def _parts(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor] | None:
    """Returns the product and the bias whose sum x is; None if the kernels do not take them."""
    if x.dtype not in triton_calls.TYPES or not tf.is_symbolic_tensor(x):
        return None
    if x.op.type != "BiasAdd":
        return None
    if x.op.get_attr("data_format") != b"NHWC" or not x.shape.is_fully_defined():
        return None
    if x.shape[-1] % MULTIPLE_OF_COLUMNS or not 0 < x.shape.num_elements() <= LARGEST:
        return None
    product, bias = x.op.inputs
    of = product.op
    while of.type in RESHAPES:
        of = of.inputs[0].op
    return (product, bias) if of.type in PRODUCTS else None


def gelus_on(devices: Sequence[str], *, wanted: bool) -> Gelus | None:
    """Returns what computes the GELUs of a model's steps; None if XLA alone does.

    Args:
      devices: TensorFlow's names of the replicas' devices in this process.
      wanted: whether XLA is wanted.
    """
    capability = least_capability(devices) if wanted else None
    return None if capability is None or capability < LEAST_CAPABILITY else Gelus()
