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
from keras.src.backend.tensorflow.core import Variable as TensorFlowVariable
from keras.src.optimizers.base_optimizer import BaseOptimizer

from tfaccel.common.errors import UserError
from tfaccel.keras_internals.model_view import every_optimizer, variables_of
from tfaccel.keras_internals.patching import patched, with_entry
from tfaccel.keras_internals.reductions import losses_reduced_by, means_updated_by
from tfaccel.keras_internals.replica import Replica

log = logging.getLogger("tfaccel")


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
        self._is_paused = False

    def gradients(self, grads, variables) -> None:
        """Keeps the gradients that `optimizer.apply` is called with.

        Raises:
          UserError: The step has applied gradients before.
        """
        if self._gradients is not None:
            raise UserError(
                "train_step applies gradients twice; with several replicas or accumulation it must "
                "call self.optimizer.apply_gradients only once"
            )
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


@contextlib.contextmanager
def recorded(model, replica: Replica, *, apply: Callable | None = None):
    """Within `as_replica`, keeps gradients instead of applying them, and records assignments.

    Each replica draws its own random numbers; replica 0 draws those of a single device. Another
    optimizer than the model's raises an error, because it would update this replica with the
    replica's own gradients only.

    Args:
      model: The model of the traced step.
      replica: The replica that the step is traced for.
      apply: A function of an optimizer, gradients and variables. It is called wherever the step
        applies gradients. None if the step applies gradients once, with the compiled optimizer.

    Yields:
      The Recording.

    Raises:
      UserError: The step applies gradients twice, uses another optimizer, masks its loss, or
        assigns a variable that is not the model's.
    """
    recording = Recording()
    optimizers = [each for each in (model.optimizer,) if each is not None]
    if apply is not None:
        optimizers = every_optimizer(model)

    def apply_at_once(optimizer, grads, trainable_variables=None):
        variables = trainable_variables or optimizer._trainable_variables
        pairs = [each for each in zip(grads, variables, strict=True) if each[0] is not None]
        with recording.paused():
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
        raise UserError(
            f"train_step uses the optimizer {optimizer.name}, which is not self.optimizer; for "
            "several replicas, make it an attribute of the model before run.compile and use no "
            "accumulation; or use one replica"
        )

    def note_and_assign(variable, value):
        if replica.num_replicas > 1 and not is_own(variable):
            raise UserError(
                f"the step changes the variable {variable.path}, which is not the model's, so all "
                "replicas would share it; make it in a layer, in the scope (for random numbers: "
                "self.seed_generator = keras.random.SeedGenerator())"
            )
        recording.before(variable)
        return direct_assign(variable, value)

    def own_seed(generator, ordered=True):
        seed = next_seed(generator, ordered)
        return seed + tf.constant([1_000_003 * replica.index, 0], seed.dtype)

    def is_own(variable) -> bool:
        if id(variable) not in own_variables:  # the step may have made it
            own_variables.update(id(each) for each in variables_of(model))
        return id(variable) in own_variables

    own_variables = set()
    direct_assign = TensorFlowVariable._direct_assign
    next_seed = keras.random.SeedGenerator.next
    with contextlib.ExitStack() as patches:
        if apply is None:
            patches.enter_context(patched(BaseOptimizer, "apply", refuse))
            patches.enter_context(patched(keras.optimizers.LossScaleOptimizer, "apply", refuse))
        patches.enter_context(patched(TensorFlowVariable, "_direct_assign", note_and_assign))
        patches.enter_context(patched(keras.random.SeedGenerator, "next", own_seed))
        trust = _Trust(says=replica.local_index == 0)
        in_parts = functools.partial(_reduced_in_parts, trust=trust)
        patches.enter_context(losses_reduced_by(in_parts))
        counted = functools.partial(_counted_in_parts, trust=trust)
        patches.enter_context(means_updated_by(counted))
        for each in optimizers:  # Keras does not track entries of __dict__
            own = functools.partial(apply_at_once, each) if apply else keep
            patches.enter_context(with_entry(each.__dict__, "apply", own))
        yield recording


@contextlib.contextmanager
def noted(variables: list) -> Iterator[Recording]:
    """Within `as_replica`, keeps the values that these variables have before they are assigned.

    Yields:
      The Recording, without gradients.
    """
    recording, wanted = Recording(), {id(each) for each in variables}
    direct_assign = TensorFlowVariable._direct_assign
    graph, is_eager = tf.compat.v1.get_default_graph(), tf.executing_eagerly()

    def note_and_assign(variable, value):
        if id(variable) in wanted:
            # A layer may assign in a tf.cond, which has its own graph.
            with contextlib.nullcontext() if is_eager else graph.as_default():
                recording.before(variable)
        return direct_assign(variable, value)

    with patched(TensorFlowVariable, "_direct_assign", note_and_assign):
        yield recording


class _Trust:
    """Warns if a user's loss or metric returns one number for many rows, once for each kind."""

    def __init__(self, *, says: bool):
        self._said = set() if says else {"loss", "metric"}

    def check(self, kind: str, values) -> None:
        """Checks what a function returned for a part of a batch."""
        if len(values.shape) > 0 or kind in self._said:
            return
        self._said.add(kind)
        log.warning(
            "step: a %s returns one number for all rows of a part of the batch. That is right if "
            "the number is a mean over rows, and wrong otherwise (for example a Dice of the whole "
            "batch). Let it return one number for each row",
            kind,
        )


def _reduced_in_parts(reduce_weighted_values: Callable, trust: _Trust) -> Callable:
    """Returns Keras's reduction of a loss, which raises UserError for a masked loss.

    Keras divides a loss without a mask by the number of rows, so the means of parts can be summed.
    """

    @functools.wraps(reduce_weighted_values)
    def reduce(values, sample_weight=None, mask=None, **settings):
        if mask is not None:
            raise UserError(
                "a loss is masked (by ignore_class, mask_zero or a Masking layer). Keras divides "
                "it by the number of elements that count, which differs between parts of a batch; "
                "with several replicas or accumulation, use sample_weight instead of the mask, or "
                "use one replica"
            )
        trust.check("loss", values)
        return reduce_weighted_values(values, sample_weight, mask, **settings)

    return reduce


def _counted_in_parts(update_state: Callable, trust: _Trust) -> Callable:
    """Returns `Mean.update_state`, which also checks what functions return."""

    def update(metric, values, sample_weight=None):
        if isinstance(metric, keras.metrics.MeanMetricWrapper):
            trust.check("metric", values)
        return update_state(metric, values, sample_weight)

    return update
