"""A Keras model as one replica sees it, without a strategy, while a step is traced.

Takes a model that was made in the scope of a strategy, and one of its replicas.

    with as_replica(model, replica):                    # variables are those of the replica
        with recorded(model, replica) as recording:     # gradients are kept, not applied
            logs = model.train_step(batch)
"""

import contextlib
from collections.abc import Iterator, Sequence

import tensorflow as tf
from keras.src.backend.tensorflow.core import Variable as TensorFlowVariable
from tensorflow.python.distribute import distribute_lib

from tfaccel.keras_internals.model_view import every_optimizer, optimizers_of, variables_of
from tfaccel.keras_internals.patching import patched
from tfaccel.keras_internals.plain_variables import own_plain_variables
from tfaccel.keras_internals.replica import Replica
from tfaccel.keras_internals.unwound import without_caching_device
from tfaccel.keras_internals.variables import components, is_distributed


@contextlib.contextmanager
def as_replica(model, replica: Replica):
    """Within the context, the model behaves on this replica as if there were no strategy.

    Every Keras variable reads and assigns the `tf.Variable` of this replica, so XLA can compile the
    step. `tf.distribute` reports that no strategy is in scope, so Keras asks for no reduction.
    Stock Keras calls the strategy inside the XLA function, which raises an error (keras issues
    18666 and 21366).
    """
    optimizers = [each for own in every_optimizer(model) for each in optimizers_of(own)]
    distributed = [(each, each._value) for each in variables_of(model) if is_distributed(each)]
    strategies = [(each, each._distribution_strategy) for each in optimizers]
    default = distribute_lib._get_default_replica_mode()
    distribute_lib._push_per_thread_mode(default)

    def initialize(variable, value):
        # Layers that were not built, and the slots of an optimizer, are made during the trace.
        with without_caching_device(), tf.init_scope(), strategy.scope():
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
        with (
            patched(TensorFlowVariable, "_initialize", initialize),
            own_plain_variables(model, replica),
        ):
            yield
    finally:
        for variable, value in distributed:
            variable._value = value
        for optimizer, strategy in strategies:
            optimizer._distribution_strategy = strategy
        distribute_lib._pop_per_thread_mode()


@contextlib.contextmanager
def without_strategy() -> Iterator[None]:
    """Within the context, no strategy is in scope: a new `tf.Variable` is on one device."""
    distribute_lib._push_per_thread_mode(distribute_lib._get_default_replica_mode())
    try:
        yield
    finally:
        distribute_lib._pop_per_thread_mode()


def _lifted(value):
    """Returns the initial value of a variable as a value that is known outside the trace."""
    if callable(value) or not tf.is_tensor(value) or hasattr(value, "numpy"):
        return value
    known = tf.get_static_value(value)
    return value if known is None else known


def reset_metrics(model, replicas: Sequence[Replica]) -> None:
    """Resets the metrics on the replicas of this process.

    The value of a metric is the sum over its replicas. So a variable that is not reset to zero gets
    its value on the first replica only. Keras would let the strategy distribute each value, and
    would read the variable for nothing. That takes 3 ms for each variable between two epochs, in a
    profile of two H100s (2026-11-24).
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
    """Within the context, the variables of the metrics read as `values`."""
    variables = model.metrics_variables
    own = [each._value for each in variables]
    try:
        for variable, value in zip(variables, values, strict=True):
            variable._value = value
        yield
    finally:
        for variable, value in zip(variables, own, strict=True):
            variable._value = value
