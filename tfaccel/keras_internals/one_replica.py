"""A Keras model as it is on one replica, without a strategy, while a step is traced."""

import contextlib
from collections.abc import Iterator, Sequence

import tensorflow as tf
from keras.src.backend.tensorflow.core import Variable as TensorFlowVariable
from tensorflow.python.distribute import distribute_lib

from tfaccel.keras_internals.model_view import every_optimizer, optimizers_of, variables_of
from tfaccel.keras_internals.patching import patched
from tfaccel.keras_internals.replica import Replica
from tfaccel.keras_internals.variables import components, is_distributed


@contextlib.contextmanager
def as_replica(model, replica: Replica):
    """Within the context, the model is as it would be on this replica without a strategy.

    Every Keras variable stands for the replica's own `tf.Variable`, so that reads and updates are
    plain ones that XLA can compile, and `tf.distribute` answers as if no strategy were in scope, so
    that Keras asks for no reduction. (Stock Keras puts the strategy's machinery inside the XLA
    function, which raises: keras issues 18666 and 21366.)
    """
    optimizers = [each for own in every_optimizer(model) for each in optimizers_of(own)]
    distributed = [(each, each._value) for each in variables_of(model) if is_distributed(each)]
    strategies = [(each, each._distribution_strategy) for each in optimizers]
    default = distribute_lib._get_default_replica_mode()
    distribute_lib._push_per_thread_mode(default)

    def initialize(variable, value):
        # Made while a step is traced: a layer that is not built, an optimizer's slots.
        with tf.init_scope(), strategy.scope():
            make_variable(variable, _lifted(value))
        if is_distributed(variable):
            distributed.append((variable, variable._value))
            variable._value = variable._value.values[replica.local_index]

    strategy, make_variable = model.distribute_strategy, TensorFlowVariable._initialize
    try:
        for variable, value in distributed:
            variable._value = value.values[replica.local_index]
        for optimizer in optimizers:
            optimizer._distribution_strategy = default.strategy
        with patched(TensorFlowVariable, "_initialize", initialize):
            yield
    finally:
        for variable, value in distributed:
            variable._value = value
        for optimizer, strategy in strategies:
            optimizer._distribution_strategy = strategy
        distribute_lib._pop_per_thread_mode()


@contextlib.contextmanager
def without_strategy() -> Iterator[None]:
    """Within the context, no strategy is in scope: a `tf.Variable` is one, on one device."""
    distribute_lib._push_per_thread_mode(distribute_lib._get_default_replica_mode())
    try:
        yield
    finally:
        distribute_lib._pop_per_thread_mode()


def _lifted(value):
    """Returns a variable's first value as one that is known outside the traced function."""
    if callable(value) or not tf.is_tensor(value) or hasattr(value, "numpy"):
        return value
    known = tf.get_static_value(value)
    return value if known is None else known


def reset_metrics(model, replicas: Sequence[Replica]) -> None:
    """Resets the metrics on this process's replicas, over which they are summed.

    What is not reset to zero is the first replica's alone. Keras would have the strategy share each
    value out, and read the variable for nothing: 3 ms for each between two epochs, in a profile of
    two H100s (2026-11-24).
    """
    first = replicas[0]
    with tf.device(first.device), as_replica(model, first):
        type(model).reset_metrics(model)
    for variable in filter(is_distributed, model.metrics_variables):
        for replica, own in zip(replicas, components(variable), strict=True):
            if replica.index > 0:
                with tf.device(replica.device):
                    own.assign(tf.zeros(own.shape, own.dtype))


@contextlib.contextmanager
def metrics_as(model, values: list[tf.Tensor]):
    """Within the context, the metrics' variables read as `values`."""
    variables = model.metrics_variables
    own = [each._value for each in variables]
    try:
        for variable, value in zip(variables, values, strict=True):
            variable._value = value
        yield
    finally:
        for variable, value in zip(variables, own, strict=True):
            variable._value = value
