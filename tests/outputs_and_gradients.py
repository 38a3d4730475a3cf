"""What models and functions compute, with gradients: by the layers' paths for XLA or by Keras."""

import tensorflow as tf

from tfaccel.keras_internals.layer_paths import layer_paths


def traced(model, paths, *, xla):
    """The function of a batch that returns a model's outputs and all gradients of their squares.

    Args:
      model: a model; its inputs get a gradient, too.
      paths: makes the context in which the model is called.
      xla: whether XLA compiles the function.
    """

    @tf.function(jit_compile=xla, autograph=False)
    def run(x):
        with paths(), tf.GradientTape() as tape:
            tape.watch(x)
            y = model(x, training=True)
            loss = tf.reduce_sum(tf.cast(y, "float32") ** 2)
        return y, tape.gradient(loss, [x, *(each.value for each in model.trainable_variables)])

    return run


def in_xla():
    """The context of a step for XLA on one replica."""
    return layer_paths(xla=True, all_reduce=None)


def with_gradients(function, x):
    """What a function makes of x, the gradient of its sum, and the gradient of the sum of that."""
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = function(x)
        first = inner.gradient(y, x)
    return y, first, outer.gradient(first, x)
