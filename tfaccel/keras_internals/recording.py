"""Records what the part of a step on one replica would change: gradients and assigned variables.

Takes a model within `as_replica`; gives a Recording, from which tfaccel/step/ sums over replicas.

    with as_replica(model, replica), recorded(model, replica) as recording:
        model.train_step(batch)
    gradients, changes = recording.take_gradients(), recording.assigned()
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf
from keras.src.optimizers.base_optimizer import BaseOptimizer

from tfaccel.common.errors import UserError
from tfaccel.keras_internals.model_view import (
    every_optimizer,
    has_steps_of_keras,
    optimizers_of,
    variables_of,
)
from tfaccel.keras_internals.moved import Variable as TensorFlowVariable
from tfaccel.keras_internals.patching import patched, with_entry
from tfaccel.keras_internals.reductions import losses_reduced_by
from tfaccel.keras_internals.replica import Replica
from tfaccel.keras_internals.row_operations import is_noticing, noticing

log = logging.getLogger("tfaccel")


class JoinsRowsError(Exception):
    """A step needs values of all replicas where it computes them, and not only at its end."""


class Recording:
    """The gradients and assignments of a traced `train_step`.

    Attributes:
      trained: The Keras variables that the gradients belong to.
    """

    def __init__(self):
        """Starts with no gradient and no assignment."""
        self.trained = []
        self._gradients = None
        self._before = {}
        self._kept = {}
        self._is_paused = False

    def gradients(self, grads, variables) -> None:
        """Keeps the gradients that `optimizer.apply` is called with.

        Raises:
          JoinsRowsError: The step has applied gradients before.
        """
        if self._gradients is not None:
            raise JoinsRowsError("the step applies gradients twice")
        pairs = list(zip(grads, variables, strict=True))
        without = [variable.path for grad, variable in pairs if grad is None]
        if without:
            log.warning("step: no gradient reaches %s", ", ".join(without))
        self.trained = [variable for grad, variable in pairs if grad is not None]
        self._gradients = [grad for grad, _ in pairs if grad is not None]

    def take_gradients(self) -> list[tf.Tensor]:
        """Returns the gradients of `trained`, dense, and forgets them."""
        grads, self._gradients = self._gradients or [], None
        return [tf.convert_to_tensor(each) for each in grads]

    def before(self, variable) -> None:
        """Keeps the value that a variable has before its first assignment."""
        if not self._is_paused and id(variable) not in self._before:
            self._before[id(variable)] = (variable, tf.identity(variable._value))

    def keep(self, variable) -> None:
        """Keeps the value that a variable has before it gets one that is equal on all replicas."""
        if not self._is_paused and id(variable) not in self._before | self._kept:
            self._kept[id(variable)] = (variable, tf.identity(variable._value))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within the context, assignments are not recorded: all replicas make the same ones."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def assigned(self) -> list[tuple]:
        """Returns (Keras variable, value before) of each assigned variable, in order."""
        return list(self._before.values())

    def kept(self) -> list[tuple]:
        """Returns the same for the variables that got equal values on all replicas."""
        return [each for key, each in self._kept.items() if key not in self._before]


@contextlib.contextmanager
def recorded(
    model,
    replica: Replica,
    *,
    apply: Callable | None = None,
    is_own: Callable | None = None,
    turn: Callable[[], bool] | None = None,
    joins: bool = False,
    recording: Recording | None = None,
):
    """Within `as_replica`, keeps gradients instead of applying them, and records assignments.

    Each replica draws its own random numbers; replica 0 draws those of a single device. Another
    optimizer than the model's raises an error, because it would update this replica with the
    replica's own gradients only.

    Args:
      model: The model of the traced step.
      replica: The replica that the step is traced for.
      apply: A function of an optimizer, gradients and variables. It is called wherever the step
        applies gradients. None if the step applies gradients once, with the compiled optimizer.
      is_own: A function of a value that the user's code gives a variable: whether it may differ
        between the replicas. None if every value may.
      turn: Called before a value that all parts of the batch have is assigned: whether this part
        assigns it. None if there is one part.
      recording: The Recording to add to; None for a new one.
      joins: Whether the step's values are joined over the replicas where the step computes them.

    Yields:
      The Recording.

    Raises:
      UserError: The step uses another optimizer, or assigns a variable that is not the model's.
      JoinsRowsError: The step applies gradients twice, and `apply` is None; or a loss is no mean
        over rows, and `joins` is false.
    """
    recording = Recording() if recording is None else recording
    optimizers = [each for each in (model.optimizer,) if each is not None]
    if apply is not None:
        optimizers = every_optimizer(model)

    def apply_at_once(optimizer, grads, trainable_variables=None):
        variables = trainable_variables or optimizer._trainable_variables
        pairs = [each for each in zip(grads, variables, strict=True) if each[0] is not None]
        with recording.paused(), noticing(on=False):
            own = optimizer.__dict__.pop("apply")  # so that `apply` reaches Keras's own
            try:
                apply(optimizer, [grad for grad, _ in pairs], [each for _, each in pairs])
            finally:
                optimizer.__dict__["apply"] = own

    def keep(grads, trainable_variables=None):
        if trainable_variables is None:
            trainable_variables = model.trainable_variables
        recording.gradients(grads, trainable_variables)

    def refuse(optimizer, *_args, **_kwargs):
        if has_steps_of_keras(model):
            raise UserError(
                f"the step uses the optimizer {optimizer.name}, which the model is not compiled "
                "with; use it in a train_step of your own, so that its updates and its state are "
                "those of all replicas"
            )
        raise UserError(
            f"train_step uses the optimizer {optimizer.name}, which is no attribute of the model; "
            "make it one, such as self.my_optimizer = ..., so that its updates and its state are "
            "those of all replicas"
        )

    def apply_if_known(direct):
        def apply_(optimizer, *args, **kwargs):
            own = direct if id(optimizer) in may_apply else refuse
            return own(optimizer, *args, **kwargs)

        return apply_

    def note_and_assign(variable, value):
        if replica.num_replicas > 1 and not is_models(variable):
            raise UserError(
                f"the step changes the variable {variable.path}, which is not the model's, so all "
                "replicas would share it; make it in a layer, in the scope (for random numbers: "
                "self.seed_generator = keras.random.SeedGenerator())"
            )
        with _as_default(graph):  # the step may assign in a tf.cond, which has its own graph
            if is_own is not None and is_noticing() and not is_own(value):
                if turn is not None and not turn():
                    return None
                # In Python the parts have the same value, but perhaps not the replicas.
                note = recording.before if tf.executing_eagerly() else recording.keep
                note(variable)
            else:
                recording.before(variable)
        return direct_assign(variable, value)

    def own_seed(generator, ordered=True):
        seed = next_seed(generator, ordered)
        return seed + tf.constant([1_000_003 * replica.index, 0], seed.dtype)

    def is_models(variable) -> bool:
        if id(variable) not in own_variables:  # the step may have made it
            own_variables.update(id(each) for each in variables_of(model))
        return id(variable) in own_variables

    graph = tf.compat.v1.get_default_graph()
    own_variables = {id(each) for each in variables_of(model)}
    may_apply = {id(each) for own in optimizers for each in optimizers_of(own)} if apply else set()
    direct_assign = TensorFlowVariable._direct_assign
    next_seed = keras.random.SeedGenerator.next
    with contextlib.ExitStack() as patches:
        for kind in (BaseOptimizer, keras.optimizers.LossScaleOptimizer):
            patches.enter_context(patched(kind, "apply", apply_if_known(kind.apply)))
        patches.enter_context(patched(TensorFlowVariable, "_direct_assign", note_and_assign))
        patches.enter_context(patched(keras.random.SeedGenerator, "next", own_seed))
        if not joins:
            patches.enter_context(losses_reduced_by(_reduced_in_parts))
        for each in optimizers:  # Keras does not track entries of __dict__
            own = functools.partial(apply_at_once, each) if apply else keep
            patches.enter_context(with_entry(each.__dict__, "apply", own))
        yield recording


def _as_default(graph) -> contextlib.AbstractContextManager:
    """Returns a context in which operations are added to a graph; nothing changes outside one."""
    return contextlib.nullcontext() if tf.executing_eagerly() else graph.as_default()


@contextlib.contextmanager
def noted(variables: list) -> Iterator[Recording]:
    """Within `as_replica`, keeps the values that these variables have before they are assigned.

    Yields:
      The Recording, without gradients.
    """
    recording, wanted = Recording(), {id(each) for each in variables}
    direct_assign = TensorFlowVariable._direct_assign
    graph = tf.compat.v1.get_default_graph()

    def note_and_assign(variable, value):
        if id(variable) in wanted:
            with _as_default(graph):  # a layer may assign in a tf.cond, which has its own graph
                recording.before(variable)
        return direct_assign(variable, value)

    with patched(TensorFlowVariable, "_direct_assign", note_and_assign):
        yield recording


def _reduced_in_parts(reduce_weighted_values: Callable) -> Callable:
    """Returns Keras's reduction of a loss, which raises JoinsRowsError if it is no mean over rows.

    Keras divides a loss without a mask by the number of rows, so the means of parts can be summed.
    """

    @functools.wraps(reduce_weighted_values)
    def reduce(values, sample_weight=None, mask=None, reduction="sum_over_batch_size", **settings):
        is_mean = mask is None and reduction in ("sum_over_batch_size", "mean")
        if not is_mean and len(values.shape) > 0:
            raise JoinsRowsError("a loss is no mean over rows")
        with noticing(on=False):
            return reduce_weighted_values(values, sample_weight, mask, reduction, **settings)

    return reduce
