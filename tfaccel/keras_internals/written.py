"""Tells XLA which values of a traced step to write, where its own choice costs more bytes.

XLA computes what is cheap anew for each reader, and chooses which values it writes. Batch norm and
ReLU are cheap, and their gradients read the inputs of the batch norm anyway.

    nn.relu = relu                      # while a step is traced that XLA compiles
    x = written_if_of_norm(x)           # before a matrix product
"""

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla


@tf.custom_gradient
def written(values: tf.Tensor):
    """Returns the values, which XLA writes before it computes what reads them."""
    return xla.optimization_barrier(values)[0], lambda gradient: gradient


def relu(x) -> tf.Tensor:
    """Returns `keras.ops.relu`. If it is of a norm and has several readers, XLA writes their sum.

    XLA would sum their gradients together with the gradient of the ReLU, for which it reads the
    inputs of the norm once more. In a U-Net of 32 x 256 x 256 that were 0.5 of 24.9 GB a step
    (tools/gpu_program.py).
    """
    outputs = tf.nn.relu(x)
    return _with_sum_written(outputs) if _is_of_norm(outputs) else outputs


@tf.custom_gradient
def _with_sum_written(values: tf.Tensor):
    def gradient(of_values):
        op = getattr(of_values, "op", None)  # eager tensors have none
        is_sum = op is not None and op.type == "AddN"
        return written(of_values) if is_sum else of_values

    return tf.identity(values), gradient


def written_if_of_norm(inputs: tf.Tensor) -> tf.Tensor:
    """Returns the inputs of a matrix product, which XLA writes if they are a ReLU of a norm.

    XLA puts a ReLU into the kernel of the product, and writes the norm before it. The gradient of
    the ReLU then reads that, instead of computing it from the inputs of the norm, which it reads
    anyway. It cost a U-Net of 32 x 256 x 256 0.5 of 24.7 GB a step, and a ResNet-50 0.6 of 59.7 GB
    (tools/gpu_program.py). After a sum of two branches, XLA's way is the better.
    """
    return written(inputs) if _is_of_norm(inputs) else inputs


def _is_of_norm(values: tf.Tensor) -> bool:
    """Returns whether the values are a ReLU of what was computed in float32, as norms are."""
    op = getattr(values, "op", None)
    while op is not None and op.type in ("Identity", "IdentityN"):
        op = op.inputs[0].op
    return op is not None and op.type == "Relu" and op.inputs[0].op.type == "Cast"
