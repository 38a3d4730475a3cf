"""A Keras model as one replica sees it, without a strategy, while a step is traced.

Takes a model that was made in the scope of a strategy, and one of its replicas.

    with as_replica(model, replica):                    # variables are those of the replica
        with recorded(model, replica) as recording:     # gradients are kept, not applied
            logs = model.train_step(batch)
"""

import contextlib
from collections.abc import Iterator, Sequence

import tensorflow as tf
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from tensorflow.python.distribute import distribute_lib

from tfaccel.keras_internals.layers import layers_of
from tfaccel.keras_internals.model_view import every_optimizer, optimizers_of, variables_of
from tfaccel.keras_internals.moved import Variable as TensorFlowVariable
from tfaccel.keras_internals.patching import Swap, patched, swapped
from tfaccel.keras_internals.plain_variables import own_plain_variables
from tfaccel.keras_internals.replica import Replica
from tfaccel.keras_internals.sharded_states import every_slice
from tfaccel.keras_internals.unwound import without_caching_device
from tfaccel.keras_internals.variables import components, is_distributed
from tfaccel.runtime import collectives


@contextlib.contextmanager
def as_replica(model, replica: Replica):
    """Within the context, the model behaves on this replica as if there were no strategy.

    Every Keras variable reads and assigns the `tf.Variable` of this replica, so XLA can compile the
    step. `tf.distribute` reports that no strategy is in scope, so Keras asks for no reduction.
    Stock Keras calls the strategy inside the XLA function, which raises an error (keras issues
    18666 and 21366).
    """
    variables = _OfReplica(model, replica)
    default = distribute_lib._get_default_replica_mode()
    distribute_lib._push_per_thread_mode(default)

    def initialize(variable, value):
        # Layers that were not built, and the slots of an optimizer, are made during the trace.
        with without_caching_device(), tf.init_scope(), strategy.scope():
            make_variable(variable, _lifted(value))
        variables.add(variable)

    strategy, make_variable = model.distribute_strategy, TensorFlowVariable._initialize
    is_alone = replica.num_replicas == 1
    joining = (
        collectives.within_step(collectives.OneReplica()) if is_alone else contextlib.nullcontext()
    )
    try:
        with (
            swapped(variables),
            patched(TensorFlowVariable, "_initialize", initialize),
            patched(TFOptimizer, "_all_reduce_sum_gradients", _as_they_are),
            own_plain_variables(model, replica),
            joining,
        ):
            yield
    finally:
        distribute_lib._pop_per_thread_mode()


def _as_they_are(_optimizer, grads_and_vars) -> list:
    """Returns an update's gradients and variables: a sum over one replica changes nothing.

    Keras would let `tf.distribute` sum them. That adds an IdentityN of all gradients, at which
    TensorFlow loses the order of updates (findings/tensorflow_lost_variable_order.sh).
    """
    return list(grads_and_vars)


class _OfReplica(Swap):
    """Lets each variable of a model be that of one replica, and its optimizers have no strategy."""

    def __init__(self, model, replica: Replica):
        self._model, self._replica, self._made = model, replica, []
        self._optimizers = [each for own in every_optimizer(model) for each in optimizers_of(own)]

    def put(self) -> None:
        # Listed each time, because another replica may have made a variable meanwhile.
        slices = [own for each in self._optimizers for own in every_slice(each)]
        found = {id(each): each for each in (*variables_of(self._model), *self._made, *slices)}
        self._distributed = [(each, each._value) for each in found.values() if is_distributed(each)]
        self._strategies = [(each, each._distribution_strategy) for each in self._optimizers]
        for variable, value in self._distributed:
            variable._value = value.values[self._replica.local_index]
        for optimizer in self._optimizers:
            optimizer._distribution_strategy = distribute_lib._get_default_replica_mode().strategy

    def take(self) -> None:
        for variable, value in self._distributed:
            variable._value = value
        for optimizer, strategy in self._strategies:
            optimizer._distribution_strategy = strategy

    def add(self, variable) -> None:
        """Takes a variable that was made within the context."""
        if is_distributed(variable):
            self._made.append(variable)
            self._distributed.append((variable, variable._value))
            variable._value = variable._value.values[self._replica.local_index]


def own_losses(model) -> contextlib.AbstractContextManager:
    """Within the context, `add_loss` of the model's layers adds to the losses of this lane only.

    Keras keeps them in the layers. If several lanes (tfaccel/step/lockstep.py) call the layers in
    turn, a lane would find the losses of the others, too.
    """
    return swapped(_Losses(model))


class _Losses(Swap):
    """The losses that a model's layers have collected, which are none at first."""

    def __init__(self, model):
        self._model, self._own, self._before = model, {}, {}

    def put(self) -> None:
        self._before = self._exchange(self._own)

    def take(self) -> None:
        self._own = self._exchange(self._before)

    def _exchange(self, wanted: dict) -> dict:
        """Gives each layer the losses that are wanted, by its id, and returns those it had."""
        had = {}
        for layer in layers_of(self._model):
            losses, ids = wanted.get(id(layer), ((), ()))
            if layer._losses or layer._loss_ids:
                had[id(layer)] = tuple(layer._losses), tuple(layer._loss_ids)
                layer._losses.clear()
                layer._loss_ids.clear()
            layer._losses.extend(losses)
            layer._loss_ids.update(ids)
        return had


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
def reading_as(variables: list, values: list[tf.Tensor]) -> Iterator[None]:
    """Within the context, variables read as other values."""
    with contextlib.ExitStack() as patches:
        for variable, value in zip(variables, values, strict=True):
            patches.enter_context(patched(variable, "_value", value))
        yield
