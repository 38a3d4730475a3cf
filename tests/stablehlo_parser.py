"""XLA's own parser of StableHLO modules, on a machine without a GPU."""

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla


def parsed(text, arguments, results):
    """Returns the HLO of a module for GPUs, given the specs of its arguments and results."""

    def run(*given):
        return xla.call_module(
            list(given),
            version=9,
            module=text,
            Tout=[each.dtype for each in results],
            Sout=[each.shape for each in results],
            platforms=["CUDA"],
            disabled_checks=["platform"],
        )

    made = tf.function(run, jit_compile=True, autograph=False).experimental_get_compiler_ir(
        *arguments
    )
    return made(stage="hlo", platform_name="CPU")
