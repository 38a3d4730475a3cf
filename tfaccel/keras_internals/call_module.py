"""StableHLO as an operation of a traced function that XLA compiles."""

from collections.abc import Sequence

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

VERSION = 9  # of XlaCallModule: the first that takes the module as a text


def call_module(
    text: str,
    arguments: Sequence[tf.Tensor],
    results: Sequence[tf.TensorSpec],
    *,
    platform: str = "CUDA",
) -> list[tf.Tensor]:
    """Returns the results of a module's `main`, in a function that XLA compiles.

    Args:
      text: the module, as StableHLO's text.
      arguments: of `main`, with its shapes and dtypes.
      results: the shapes and dtypes of its results.
      platform: that XLA compiles for: "CUDA", or "CPU".
    """
    return xla.call_module(
        list(arguments),
        version=VERSION,
        module=text,
        Tout=[each.dtype for each in results],
        Sout=[each.shape for each in results],
        platforms=[platform],
        disabled_checks=[],
    )
