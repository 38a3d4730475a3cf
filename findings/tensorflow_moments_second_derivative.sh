#!/usr/bin/env bash
# TensorFlow: the second derivative of tf.nn.moments' variance is wrong, and so are gradient penalties through
# Keras's batch normalization.
#
# Version: tensorflow-cpu 2.21.0, keras 3.15.1, Python 3.11 to 3.13.
#
# Behaviour: tf.nn.moments computes the variance from the distances to the mean, and takes the mean as a constant in
# their gradient. The first derivative is right, because the distances add up to 0. The second one lacks a part. Of two
# values, the variance has the second derivatives 0.5 and -0.5, and TensorFlow gives 1 and 0. Keras's
# BatchNormalization and ops.moments use it on TensorFlow. So the gradient of a gradient penalty, as of a WGAN-GP, is
# wrong for a convolution before a batch normalization: by 1.6% here, as central differences in float64 show. A
# normalization written with reduce_mean is right.
#
# Output seen:
#   tf.nn.moments: [[1.0, 0.0], [0.0, 1.0]], by reduce_mean: [[0.5, -0.5], [-0.5, 0.5]]
#   gradient of a penalty / central differences: BatchNormalization 1.0161, by reduce_mean 1.0000
#
# The script exits with 1 if any of these changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet tensorflow-cpu==2.21.0 keras==3.15.1

TF_CPP_MIN_LOG_LEVEL=3 "$work/env/bin/python" - <<'PY'
import sys

import keras
import numpy as np
import tensorflow as tf


def second_derivatives(variance):
    x = tf.constant([1.0, 3.0])
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = variance(x)
        first = inner.gradient(y, x)
    return outer.jacobian(first, x).numpy().tolist()


by_moments = second_derivatives(lambda x: tf.nn.moments(x, [0])[1])
by_means = second_derivatives(lambda x: tf.reduce_mean((x - tf.reduce_mean(x)) ** 2))
print(f"tf.nn.moments: {by_moments}, by reduce_mean: {by_means}")

rng = np.random.default_rng(0)
x = tf.constant(rng.normal(size=(8, 6, 6, 2)))
before, after = tf.Variable(rng.normal(size=(3, 3, 2, 4))), tf.constant(rng.normal(size=(4, 2)))
direction = tf.constant(rng.normal(size=before.shape))


def penalty(normalize):
    """How far the gradients for images are from the length 1: a convolution, a normalization, weights, a square."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        normalized = normalize(tf.nn.conv2d(x, before, 1, "SAME"))
        y = tf.reduce_sum((normalized @ after) ** 2)
    lengths = tf.norm(tf.reshape(tape.gradient(y, x), [len(x), -1]), axis=1)
    return tf.reduce_sum((lengths - 1) ** 2)


def of_differences(normalize):
    """The gradient of the penalty along a direction of the kernel, by the tape / by differences."""
    with tf.GradientTape() as tape:
        value = penalty(normalize)
    by_tape = tf.reduce_sum(tape.gradient(value, before) * direction)
    start, step, sides = tf.identity(before), 1e-5, []
    for sign in (1, -1):
        before.assign(start + sign * step * direction)
        sides.append(penalty(normalize))
    before.assign(start)
    return float(by_tape / ((sides[0] - sides[1]) / (2 * step)))


def by_reduce_mean(values):
    distance = values - tf.reduce_mean(values, axis=[0, 1, 2])
    return distance * tf.math.rsqrt(tf.reduce_mean(distance**2, axis=[0, 1, 2]) + 1e-3)


layer = keras.layers.BatchNormalization(dtype="float64")
batch, own = map(of_differences, (lambda values: layer(values, training=True), by_reduce_mean))
print(f"gradient of a penalty / central differences: BatchNormalization {batch:.4f}, by reduce_mean {own:.4f}")
wrong = by_moments == [[1, 0], [0, 1]] and by_means == [[0.5, -0.5], [-0.5, 0.5]]
sys.exit(0 if wrong and abs(batch - 1) > 0.01 and abs(own - 1) < 1e-4 else 1)
PY
