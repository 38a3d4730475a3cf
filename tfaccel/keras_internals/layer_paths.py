"""Replaces methods of some Keras layers by quicker ones of tfaccel while a step is traced."""

import contextlib
import functools
from collections.abc import Callable

import keras
import tensorflow as tf
from keras.src import backend
from keras.src.backend.common.variables import AutocastScope
from keras.src.ops import nn as operations
from tensorflow.python.ops import gen_math_ops

from tfaccel.keras_internals import (
    batch_norm,
    convolution,
    dropout,
    einsum_dense,
    layer_norm,
    max_pooling,
    padded_product,
    product_bias,
    product_sums,
)
from tfaccel.keras_internals import gelu as gelu_in_xla
from tfaccel.keras_internals.attention import attention_by
from tfaccel.keras_internals.cross_entropy import gathered
from tfaccel.keras_internals.depthwise import of_conv, of_separable
from tfaccel.keras_internals.joined_kernels import joined_casts
from tfaccel.keras_internals.moved import nn, numpy
from tfaccel.keras_internals.patching import patched
from tfaccel.keras_internals.shared_operations import integers_shared
from tfaccel.keras_internals.written import concatenated, relu_of


@contextlib.contextmanager
def layer_paths(
    *,
    xla: bool,
    all_reduce: Callable | None,
    attention: Callable | None = None,
    gelu: Callable | None = None,
    depthwise: Callable | None = None,
    norm_kernels: Callable | None = None,
    on_gpu: bool = False,
):
    """Within the context, some Keras layers use tfaccel's quicker methods.

    Args:
      xla: Whether XLA compiles the traced function.
      attention: What computes attentions if XLA compiles the function; None: Keras.
      gelu: What computes GELUs if XLA compiles the function (step/gelu/choose.py); None: XLA.
      depthwise: What computes depthwise convolutions if XLA compiles the function
        (step/depthwise/choose.py); None: XLA.
      norm_kernels: What computes layer normalizations if XLA compiles the function
        (step/layer_norm/choose.py); None: XLA.
      on_gpu: Whether the traced function runs on a GPU.
      all_reduce: A function that sums over replicas, for synchronized layers; None on one replica.
    """
    norm, conv = keras.layers.BatchNormalization, keras.layers.Conv2D
    pooling, biases = keras.layers.MaxPooling2D, convolution.CancelledBiases(xla=xla)
    with contextlib.ExitStack() as patches:

        def replace(layer, name, make):
            patches.enter_context(patched(layer, name, make(getattr(layer, name))))

        replace(norm, "call", batch_norm.unbiased)
        if xla:
            patches.enter_context(integers_shared())
            if on_gpu:
                replace(conv, "convolution_op", convolution.in_eights)
            replace(conv, "convolution_op", convolution.as_product)
            replace(keras.layers.Conv2DTranspose, "call", convolution.transposed_as_product)
            known, rectified = {}, {}  # the parts of concatenations, and ReLUs of norms
            of_norm = {"concatenations": known, "rectified": rectified, "on_gpu": on_gpu}
            replace(norm, "call", functools.partial(batch_norm.one_pass, **of_norm))
            replace(pooling, "call", max_pooling.indexed)
            replace(keras.layers.EinsumDense, "call", einsum_dense.as_product)
            patches.enter_context(patched(nn, "gelu", gelu or gelu_in_xla.gelu))
            if gelu is not None or norm_kernels is not None:
                replace(tf.nn, "bias_add", product_bias.added)
            # Keras's sparse losses and metrics all call this function.
            cross_entropy = functools.partial(gathered, on_gpu=on_gpu)
            replace(tf.nn, "sparse_softmax_cross_entropy_with_logits", cross_entropy)
            patches.enter_context(patched(nn, "relu", relu_of(rectified)))
            replace(numpy, "concatenate", functools.partial(concatenated, known=known))
            one_pass = functools.partial(layer_norm.one_pass, own=norm_kernels)
            replace(operations, "_layer_normalization", one_pass)
            if on_gpu:
                replace(AutocastScope, "maybe_cast", joined_casts)
                replace(backend.random, "dropout", dropout.hashed)
                replace(numpy, "matmul", padded_product.in_eights)
                replace(numpy, "add", product_sums.as_matrices)
                replace(tf.Tensor, "__add__", product_sums.as_matrices)
                replace(tf.GradientTape, "_push_tape", product_sums.forgetting)
                replace(tf.GradientTape, "watch", product_sums.forgetting)
                replace(
                    tf.autodiff.ForwardAccumulator, "_push_accumulator", product_sums.forgetting
                )
                replace(gen_math_ops, "add_n", product_sums.one_into_the_other)
                replace(keras.layers.LayerNormalization, "call", layer_norm.ordered)
                replace(keras.layers.RMSNormalization, "call", layer_norm.ordered)
            if depthwise is not None:
                of_axis = functools.partial(of_conv, convolved=depthwise)
                replace(nn, "conv", functools.partial(of_axis, axis=2))
                replace(nn, "depthwise_conv", functools.partial(of_axis, axis=3))
                replace(nn, "separable_conv", functools.partial(of_separable, convolved=depthwise))
            if attention is not None:
                patches.enter_context(attention_by(attention))
        else:
            replace(norm, "call", batch_norm.fused)
        replace(conv, "call", biases.added)
        replace(norm, "call", biases.cancelled)
        if all_reduce is not None:
            synchronized = functools.partial(batch_norm.synchronized, all_reduce=all_reduce)
            replace(norm, "_moments", synchronized)
        yield
