#!/usr/bin/env bash
# TensorFlow: a relu, sqrt, exp or is_finite delays the start of an XLA step many times as long as an addition does.
#
# Version: tensorflow-cpu 2.21.0, Python 3.11 to 3.13.
#
# Behaviour: before XLA compiles a function, TensorFlow converts its operations to XLA's one by one. Most operations
# take less than 1 ms. A few take about 5 ms, because TensorFlow sets up an MLIR pass pipeline for each of them. Among
# these are Relu, ReluGrad, Rsqrt, Sqrt, Exp, Tanh, Sigmoid, Abs and IsFinite. maximum(x, 0) is quick, and so is a
# comparison of x - x with itself. The comparison is False for the same values as is_finite. So 600 checks for NaN
# delay a step by 3 s more than 600 comparisons do. This is also so if the compiled program comes from a cache.
#
# Output seen (milliseconds for each operation, 200 in a function, on two cores; the times vary):
#   Relu 4.8, maximum(x, 0) 0.2, IsFinite 4.9, x - x == x - x 0.1
#
# The script exits with 1 if an operation does not take at least 3 times as long as the other with the same result.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet tensorflow-cpu==2.21.0

TF_CPP_MIN_LOG_LEVEL=3 "$work/env/bin/python" - <<'PY'
import sys
import time

import tensorflow as tf

NUMBER = 200


def of_difference(values):
    difference = values - values
    return difference == difference


def milliseconds(operation):
    """Returns the time in which TensorFlow converts one of the operations, without tracing."""

    @tf.function(jit_compile=True, autograph=False)
    def function(values):
        return [operation(each) for each in tf.unstack(values)]

    values = tf.zeros((NUMBER, 8))
    make = function.experimental_get_compiler_ir(values)  # traces the function
    begin = time.perf_counter()
    make(stage="hlo")
    return (time.perf_counter() - begin) * 1000 / NUMBER


milliseconds(tf.identity)  # starts XLA
found = {
    "Relu": milliseconds(tf.nn.relu),
    "maximum(x, 0)": milliseconds(lambda values: tf.maximum(values, 0)),
    "IsFinite": milliseconds(tf.math.is_finite),
    "x - x == x - x": milliseconds(of_difference),
}
print(", ".join(f"{name} {each:.1f}" for name, each in found.items()))
relu, maximum, is_finite, difference = found.values()
sys.exit(0 if relu > 3 * maximum and is_finite > 3 * difference else 1)
PY
