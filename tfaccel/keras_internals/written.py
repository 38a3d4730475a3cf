"""Tells XLA which values to write to memory, where its own choice moves more bytes.

XLA chooses which values it writes. What is cheap it may compute anew for each reader instead. Batch
norm and ReLU are cheap, and their gradients read the inputs of the batch norm anyway.

    nn.relu = relu_of(known)            # while a step for XLA is traced
    x = written_if_of_norm(x)           # before a matrix product
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfaccel.keras_internals.xla_gradients import optimization_barrier


def written(values: tf.Tensor) -> tf.Tensor:
    """Returns the values, which XLA writes before it computes what reads them."""
    return optimization_barrier(values)[0]


def written_together(*values: tf.Tensor) -> tuple[tf.Tensor, ...]:
    """Returns several tensors as `written` does; XLA does not know that they are the same.

    So it computes what is made of the result apart from what is made of the tensors themselves.
    """
    return tuple(optimization_barrier(*values))


def relu_of(known: Mapping[object, Callable[[], tf.Tensor]]) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns a replacement of Keras's `relu` of its TensorFlow backend.

    Args:
      known: functions that return the ReLU of a tensor, by the tensor's `ref()`.
    """

    def relu(x):
        rectify = known.get(x.ref()) if tf.is_tensor(x) else None
        return tf.nn.relu(x) if rectify is None else rectify()

    return relu


@tf.custom_gradient
def _with_sum_written(values: tf.Tensor):
    return tf.identity(values), sum_written


def sum_written(values: tf.Tensor) -> tf.Tensor:
    """Returns the values, which XLA writes if they are a sum of several gradients.

    XLA alone would compute the sum in each kernel that reads it. In a U-Net of 32 x 256 x 256 that
    was 0.5 of 24.9 GB a step (tools/gpu_program.py).
    """
    return written(values) if _made_by(values) == "AddN" else values


# A kernel that reads a concatenation which was not written reads at most this many arrays. With
# this limit a DenseNet-121 of 128 x 224 pixels took 28.96 ms a step on an H200, before 31.49 ms.
MOST_ARRAYS = 8


class Concatenation(NamedTuple):
    """The tensors that were concatenated, and along which axis, counted from 0.

    `num_arrays` is the number of arrays in memory that a reader of the outputs has to read.
    """

    parts: list[tf.Tensor]
    axis: int
    num_arrays: int


def concatenated(concatenate: Callable, known: dict) -> Callable:
    """Returns a replacement of `keras.src.backend.numpy.concatenate`.

    XLA writes the sum of the gradients of the outputs' readers. In a DenseNet each layer adds its
    outputs to those of all layers before it. XLA alone would compute the gradients of all later
    layers once more for each layer: in a DenseNet-121 of 128 x 224 x 224 the kernels beside
    products moved 55.5 GB a step, and now 43.5 (tools/gpu_program.py).

    XLA also writes the outputs if they have more than `MOST_ARRAYS` arrays. Otherwise each kernel
    after a concatenation of concatenations would read all arrays of all of them. This makes kernels
    slow to run and to compile, though fewer bytes are moved.

    Args:
      concatenate: Keras's own `(xs, axis=0)`.
      known: gets a `Concatenation` for `outputs.ref()` of each call in a traced function.
    """

    @functools.wraps(concatenate)
    def call(xs, axis=0):
        outputs = concatenate(xs, axis=axis)
        has_gradient = isinstance(outputs, tf.Tensor) and outputs.dtype.is_floating
        if not has_gradient:
            return outputs
        num_arrays = sum(_num_arrays(each, known) for each in xs)
        if num_arrays > MOST_ARRAYS:
            outputs, num_arrays = written(outputs), 1
        outputs = _with_sum_written(outputs)
        are_parts = all(_is_like(each, outputs, axis) for each in xs)
        if are_parts and tf.is_symbolic_tensor(outputs):
            place = axis % len(outputs.shape)
            known[outputs.ref()] = Concatenation(list(xs), place, num_arrays)
        return outputs

    return call


def _num_arrays(part, known: dict) -> int:
    """Returns how many arrays a reader of a part of a concatenation has to read."""
    is_known = isinstance(part, tf.Tensor) and part.ref() in known
    return known[part.ref()].num_arrays if is_known else 1


def _is_like(part, whole: tf.Tensor, axis: int) -> bool:
    """Returns whether a part of a concatenation went into it as it is, with a known size."""
    is_alike = isinstance(part, tf.Tensor) and part.dtype == whole.dtype
    return is_alike and part.shape.rank is not None and part.shape[axis] is not None


def written_if_of_norm(inputs: tf.Tensor) -> tf.Tensor:
    """Returns the inputs of a matrix product, which XLA writes if they are a ReLU of a norm.

    XLA alone would compute the ReLU in the kernel of the product, and write the outputs of the norm
    before it. The gradient of the ReLU would read these, too. But it can compute them from the
    inputs of the norm, which it reads anyway. Reading them cost a U-Net of 32 x 256 x 256 0.5 of
    24.7 GB a step, and a ResNet-50 0.6 of 59.7 GB (tools/gpu_program.py). After a sum of two
    branches, XLA's own choice is better.
    """
    return written(inputs) if _is_of_norm(inputs) else inputs


def _is_of_norm(values: tf.Tensor) -> bool:
    """Returns whether the values are a ReLU of what was computed in float32, as norms are."""
    of_relu = _behind_identities(values)
    if _made_by(of_relu) not in ("Relu", "Maximum"):
        return False
    return _made_by(_behind_identities(of_relu.op.inputs[0])) == "Cast"


def _behind_identities(values):
    """Returns the tensor that a tensor is equal to, because only identities are between them."""
    while _made_by(values) in ("Identity", "IdentityN"):
        values = values.op.inputs[values.value_index]
    return values


def _made_by(values) -> str | None:
    """Returns the type of the operation that made a tensor; None if it is not of a graph."""
    op = getattr(values, "op", None)
    return None if op is None else op.type


def changed_after(variables: Sequence[tf.Variable], code: tf.Tensor) -> tf.Tensor:
    """Returns a code of a check of variables, and lets nothing change them before it is known.

    XLA of TensorFlow 2.21 otherwise copies each small weight in each turn of a loop: it does not
    see that the check reads a weight before the next turn changes it. In a ViT-B/16 that was 109
    copies, each with a pause before the next kernel. The order itself costs nothing.
    """
    if not variables:
        return code
    *values, code = optimization_barrier(*variables, code)
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
    return code
