"""What a step may return as its logs, and how it becomes tensors that can be summed over replicas.

    constants = {}
    step = as_tensors(model.train_step, constants, summed=True)
    logs = step(batch)          # numbers, as tensors without nesting
    logs | constants            # with what is no number, such as None

Stock Keras takes the same: variables, numbers of Python and NumPy, lists of numbers, nested dicts,
ragged and sparse tensors, None and text.
"""

import functools
from collections.abc import Callable

import tensorflow as tf

from tfaccel.common.errors import UserError


def as_tensors(step: Callable, constants: dict, *, summed: bool) -> Callable:
    """Returns the step with logs that are tensors, without nesting.

    Args:
      step: a function of a batch.
      constants: gets each log that is None or text when the step is traced. A function cannot
        return text from XLA, and neither can be summed.
      summed: whether logs are summed over replicas or over the parts of a batch.

    Raises (when it is traced):
      UserError: logs are summed, and one of them cannot be.
    """

    @functools.wraps(step)
    def converted(*arguments) -> dict:
        tensors = {}
        for name, value in flat(step(*arguments) or {}).items():
            if value is None or isinstance(value, str | bytes):
                constants[name] = value
                continue
            tensors[name] = _tensor(value)
            if summed:
                _check(name, value, tensors[name])
        return tensors

    return converted


def flat(logs: dict) -> dict:
    """Returns a step's logs without nesting. In Keras's guide, a step returns metrics in a dict."""
    found = {}
    for name, each in logs.items():
        found |= flat(each) if isinstance(each, dict) else {name: each}
    return found


def _tensor(value) -> tf.Tensor:
    if isinstance(value, tf.RaggedTensor):
        return value.to_tensor()
    if isinstance(value, tf.SparseTensor):
        return tf.sparse.to_dense(value)
    return tf.convert_to_tensor(value)


def _check(name: str, value, tensor: tf.Tensor) -> None:
    dtype, is_known = tensor.dtype, tensor.shape.is_fully_defined()
    if is_known and (dtype.is_floating or dtype.is_integer or dtype.is_bool):
        return
    kind = type(value).__name__ if not isinstance(value, tf.Tensor) else "tensor"
    raise UserError(
        f"the step returns the log {name!r}, a {kind} of {dtype.name} and shape {tensor.shape}. "
        "With several replicas or accumulation a log is a mean over their rows, so it must be "
        "numbers of a known shape; return a number, or use one replica"
    )
