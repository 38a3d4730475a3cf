"""Optimizers of Keras whose states are sharded: each replica keeps one slice of each of them.

Takes an optimizer that computes each value of a weight by itself, such as Adam. Its slots, such as
momenta, are then made as slices. Within a step it updates slices of the weights in place of the
weights, and the step gathers the new weights (tfaccel/step/sharded_update.py).

    shard(optimizer, strategy)                      # before or after it is built
    with as_replica(model, replica):
        slices = slices_of(optimizer, weights)      # Keras variables, [slice] each
        with updating(optimizer, norms):
            optimizer.apply(gradients_of_slices, slices)
    optimizer.variables[2].numpy()                  # outside a step each state is whole
"""

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend

from tfaccel.common.errors import UserError
from tfaccel.keras_internals.moved import Variable as TensorFlowVariable
from tfaccel.keras_internals.patching import with_entry
from tfaccel.keras_internals.replica import local_replicas
from tfaccel.keras_internals.slices import own_slice, slice_size, whole_of
from tfaccel.keras_internals.variables import is_distributed

# Each computes a value of a weight from the same value of its gradient and of its slots.
ELEMENTWISE = {
    keras.optimizers.SGD,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.RMSprop,
    keras.optimizers.Adagrad,
    keras.optimizers.Adadelta,
    keras.optimizers.Adamax,
    keras.optimizers.Nadam,
    keras.optimizers.Ftrl,
    keras.optimizers.Lion,
}
_KEY = "tfaccel_slices"  # the entry of an optimizer's __dict__ that has its `_Slices`


class ShardedState(TensorFlowVariable):
    """A slot of an optimizer: outside a step the whole slot, within a step a replica's slice.

    Attributes:
      whole_shape: the shape of the weight.
      num_replicas: the number of replicas of all workers.
      first_index: the index of this process's first replica among them.
    """

    whole_shape: tuple[int, ...]
    num_replicas: int
    first_index: int

    @property
    def shape(self):
        """The shape of the weight; within a step [slice]."""
        return tf.TensorShape(self.whole_shape if is_distributed(self) else self._shape)

    @property
    def ndim(self):
        """The number of axes."""
        return len(self.shape)

    @property
    def value(self):
        """The values of all replicas, in the shape of the weight; within a step a `tf.Variable`.

        Raises:
          UserError: other workers have some of them.
        """
        if not is_distributed(self):
            return super().value
        self.check_is_here()
        return self._together(self._value.values)

    @property
    def is_here(self) -> bool:
        """Whether this process has the slices of all replicas."""
        return len(self._value.values) == self.num_replicas

    def check_is_here(self) -> None:
        """Raises UserError if other workers have slices of it."""
        if not self.is_here:
            raise UserError(
                f"{self.path} is sharded over the replicas of several workers "
                "(StepConfig.shard_states), so one worker cannot read it alone; use "
                "`run.checkpoints`, or, on all workers, compile the model with "
                "shard_states=False before you save it or read its optimizer"
            )

    def put(self, whole) -> None:
        """Gives each replica of this process its slice of the whole slot."""
        for each, own in self._beside(whole):
            each.assign(own)

    def is_of(self, whole) -> bool:
        """Returns whether the slices of this process are those of a whole slot."""
        return all(bool(tf.reduce_all(tf.equal(*each))) for each in self._beside(whole))

    def _beside(self, whole) -> Iterator[tuple]:
        """Yields each replica's slice, a `tf.Variable`, and the same slice of a whole slot."""
        whole = tf.convert_to_tensor(whole, self._value.dtype)
        for index, each in enumerate(self._value.values):
            cut = {"index": self.first_index + index, "num_replicas": self.num_replicas}
            yield each, own_slice(whole, size=each.shape[0], **cut)

    def gathered(self, strategy: tf.distribute.Strategy) -> tf.Tensor:
        """Returns the whole slot. With several workers, every worker must call it."""
        own = self._value.values
        if self.is_here:
            return self._together(own)
        # TensorFlow gathers neither half precision nor codes of 8 bits on the CPU.
        sent_as = tf.float32 if own[0].dtype.size <= 2 else own[0].dtype
        gather = _gather(strategy, own[0].shape[0], sent_as)
        slices = gather([tf.cast(each.read_value(), sent_as) for each in own])
        return whole_of(tf.cast(slices, own[0].dtype), self.whole_shape)

    def _together(self, components: Sequence[tf.Variable]) -> tf.Tensor:
        with tf.device(components[0].device):
            return whole_of(tf.stack([each.read_value() for each in components]), self.whole_shape)

    def _direct_assign(self, value):
        if is_distributed(self):
            self.put(value)
        else:
            super()._direct_assign(value)

    def __repr__(self):
        """Names the state without its values, which other devices have."""
        return f"<ShardedState path={self.path}, shape={self.shape}, dtype={self.dtype}>"

    # What TensorFlow's own savers ask first.

    def _serialize_to_tensors(self):
        raise UserError(
            f"tf.train.Checkpoint cannot hold {self.path}, which is sharded over the replicas "
            "(StepConfig.shard_states); use model.save or run.checkpoints"
        )

    def _export_to_saved_model_graph(self, *_args, **_settings):
        raise UserError(
            f"tf.saved_model.save cannot hold {self.path}, which is sharded over the replicas "
            "(StepConfig.shard_states); use model.export or model.save"
        )


@functools.cache
def _gather(strategy: tf.distribute.Strategy, size: int, dtype: tf.DType):
    """Returns a function from this process's slices to those of all replicas, [replicas, slice]."""
    replicas = local_replicas(strategy)

    def gather(own):
        found = []
        for replica, each in zip(replicas, own, strict=True):
            with tf.device(replica.device):
                found.append(replica.all_gather(each[tf.newaxis]))
        return found[0]

    specs = [tf.TensorSpec([size], dtype)] * len(replicas)
    # A `partial`, because TensorFlow counts the traces of all sizes by the code of a function.
    return tf.function(functools.partial(gather), autograph=False, input_signature=[specs])


def is_sharded(variable) -> bool:
    """Returns whether each replica keeps only a slice of a Keras variable."""
    return isinstance(variable, ShardedState)


def num_bytes_held(variables: Iterable[keras.Variable]) -> int:
    """Returns the bytes that a replica keeps of variables. Each variable counts once."""
    each_once = {id(each): each for each in variables}.values()
    return sum(
        math.prod(each._shape if is_sharded(each) else each.shape) * tf.as_dtype(each.dtype).size
        for each in each_once
    )


class _Slices:
    """What a sharded optimizer has more than others.

    Attributes:
      strategy: the strategy over the replicas.
      weights: the weights that the optimizer was built for.
      slices: a Keras variable for each weight, of which each replica has another slice.
      before: the optimizer's own attributes that `methods` replaces.
      is_updating: whether an update of slices is traced.
      norms: the norm of each gradient of that update, or of all of them; None if nothing clips.
    """

    def __init__(self, optimizer, strategy: tf.distribute.Strategy):
        self.strategy, self._optimizer = strategy, optimizer
        self.weights, self.slices, self._weight_keys = [], [], {}
        self.is_updating, self.norms = False, None
        replicas = local_replicas(strategy)
        self._cut = replicas[0].num_replicas
        self._first_index = replicas[0].index
        # The optimizer's own methods, which those here call.
        self._plain = {
            name: getattr(optimizer, name)
            for name in (
                "build",
                "add_variable",
                "add_variable_from_reference",
                "_var_key",
                "_use_weight_decay",
                "_clip_gradients",
                "_update_model_variables_moving_average",
                "_overwrite_model_variables_with_average_value",
            )
        }
        attributes = optimizer.__dict__
        self.before = {name: attributes[name] for name in self.methods() if name in attributes}

    def methods(self) -> dict:
        """Returns the methods that replace those of the optimizer, by name."""
        return {
            "build": self._build,
            "add_variable_from_reference": self._add_slot,
            "_var_key": self._var_key,
            "_use_weight_decay": self._use_weight_decay,
            "_clip_gradients": self._clip_gradients,
            "_update_model_variables_moving_average": self._update_averages,
            "_overwrite_model_variables_with_average_value": self._put_averages,
        }

    def of(self, weight):
        """Returns the slice of a weight, as a Keras variable."""
        return self.slices[self._optimizer._get_variable_index(weight)]

    def _build(self, variables) -> None:
        if self._optimizer.built:
            return
        for each in variables:
            if each.overwrite_with_gradient:
                raise UserError(
                    f"shard_states=True, but {each.path} is overwritten with its gradient (as "
                    "float8 layers need), which is not sharded; set shard_states=False"
                )
        self._plain["build"](variables)
        self.weights = list(variables)
        for each in variables:
            # Its values are those of the weight at the beginning of each update.
            made = backend.Variable(
                initializer="zeros",
                shape=(slice_size(each.shape, self._cut),),
                dtype=each.dtype,
                trainable=False,
                name=f"slice_of_{each.name}",
            )
            self.slices.append(made)
            plain = self._plain["_var_key"]
            self._weight_keys[plain(made)] = plain(each)

    def _add_slot(self, reference_variable, name=None, initializer="zeros"):
        add_slot = functools.partial(
            self._plain["add_variable_from_reference"],
            reference_variable,
            name=name,
            initializer=initializer,
        )
        if self._optimizer.__dict__.get(_KEY) is not self:  # `unshard` could not take this away
            return add_slot()

        def add_variable(shape, **settings):
            return self.add(shape, slice_size(shape, self._cut), **settings)

        with with_entry(self._optimizer.__dict__, "add_variable", add_variable):
            return add_slot()

    def add(self, whole_shape: Sequence[int], size: int, **settings) -> ShardedState:
        """Makes a variable of the optimizer, of which each replica keeps `size` values."""
        made = self._plain["add_variable"](shape=(size,), **settings)
        made.__class__ = ShardedState
        made.whole_shape, made.num_replicas = tuple(whole_shape), self._cut
        made.first_index = self._first_index
        return made

    def size_of(self, weight) -> int:
        """Returns the number of values in a slice of a weight."""
        return slice_size(weight.shape, self._cut)

    def _var_key(self, variable):
        """Returns the key of a weight, also for its slice: the optimizer finds its slots by it."""
        key = self._plain["_var_key"](variable)
        return self._weight_keys.get(key, key)

    def _use_weight_decay(self, variable):
        # Keras may decide by the name of a weight.
        weight = self.weights[self._optimizer._get_variable_index(variable)]
        return self._plain["_use_weight_decay"](weight.value)

    def _clip_gradients(self, grads):
        """Clips by norms of whole gradients, as Keras and TensorFlow compute it."""
        if self.norms is None:
            return self._plain["_clip_gradients"](grads)
        if clips_each(self._optimizer):
            norm = self._optimizer.clipnorm
            return [
                each * norm / tf.maximum(tf.cast(own, each.dtype), norm)
                for each, own in zip(grads, self.norms, strict=True)
            ]
        (whole,), most = self.norms, self._optimizer.global_clipnorm
        scale = most * tf.minimum(1.0 / whole, 1.0 / most) + (whole - whole)
        return [each * tf.cast(scale, each.dtype) for each in grads]

    def _update_averages(self, trainable_variables) -> None:
        own = [self.of(each) for each in trainable_variables]
        self._plain["_update_model_variables_moving_average"](own)

    def _put_averages(self, trainable_variables) -> None:
        if self.is_updating:
            own = [self.of(each) for each in trainable_variables]
            self._plain["_overwrite_model_variables_with_average_value"](own)
            return
        averages = self._optimizer._model_variables_moving_average  # of all weights
        for weight, average in zip(trainable_variables, averages, strict=True):
            if average is not None:
                weight.assign(average.gathered(self.strategy))


def clips_each(optimizer) -> bool:
    """Returns whether an optimizer clips each gradient by its own norm."""
    return bool(optimizer.clipnorm and optimizer.clipnorm > 0)


def clips_all(optimizer) -> bool:
    """Returns whether an optimizer clips all gradients by their common norm."""
    return bool(optimizer.global_clipnorm and optimizer.global_clipnorm > 0)


def inner_of(optimizer):
    """Returns the optimizer that has the slots: the one that a LossScaleOptimizer wraps."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def is_elementwise(optimizer) -> bool:
    """Returns whether an optimizer is known to compute each value of a weight by itself."""
    kind = type(inner_of(optimizer))
    return kind in ELEMENTWISE or getattr(kind, "is_elementwise", False)


def check_elementwise(optimizer) -> None:
    """Raises UserError if the states of an optimizer cannot be sharded."""
    if is_elementwise(optimizer):
        return
    name = type(inner_of(optimizer)).__name__
    known = ", ".join(sorted(each.__name__ for each in ELEMENTWISE))
    raise UserError(
        f"shard_states=True with the optimizer {name}, which may need whole weights, as LAMB, "
        f"Adafactor and Muon do; use one of {known}, or set shard_states=False (for an optimizer "
        "of your own that computes each value by itself, set is_elementwise = True in its class)"
    )


def shard(optimizer, strategy: tf.distribute.Strategy) -> None:
    """Shards the states of an optimizer over the replicas of a strategy.

    States that it has already keep their values.

    Raises:
      UserError: the optimizer may need whole weights.
    """
    check_elementwise(optimizer)
    inner = inner_of(optimizer)
    if _KEY in inner.__dict__:
        return
    values = [each.numpy() for each in inner.variables] if inner.built else None
    weights = list(inner._trainable_variables)
    slices = _Slices(inner, strategy)
    inner.__dict__[_KEY] = slices  # past Keras's tracking of attributes
    inner.__dict__.update(slices.methods())
    if values is not None:
        _build_again(inner, strategy, weights, values)


def unshard(optimizer, strategy: tf.distribute.Strategy) -> None:
    """Undoes `shard`: every replica has whole states again. Every worker must call it."""
    inner = inner_of(optimizer)
    slices = inner.__dict__.pop(_KEY, None)
    if slices is None:
        return
    values = None
    if inner.built:
        values = [
            each.gathered(strategy).numpy() if is_sharded(each) else each.numpy()
            for each in inner.variables
        ]
    for name, method in slices.methods().items():
        if inner.__dict__[name] != method:
            continue  # another one wraps it, and it does nothing any more
        del inner.__dict__[name]
        if name in slices.before:
            inner.__dict__[name] = slices.before[name]
    if values is not None:
        _build_again(inner, strategy, slices.weights, values)


def _build_again(optimizer, strategy, weights: list, values: list[np.ndarray]) -> None:
    """Makes the variables of a built optimizer again, with these values."""
    first = {id(optimizer._iterations), id(optimizer._learning_rate)}
    for each in optimizer.variables:
        if id(each) not in first:
            optimizer._untrack_variable(each)
    optimizer.built = False
    optimizer._trainable_variables_indices.clear()
    with strategy.scope():
        optimizer.build(weights)
    for variable, value in zip(optimizer.variables, values, strict=True):
        variable.assign(value)


def slices_of(optimizer, weights: Iterable) -> list:
    """Returns the slices of weights as Keras variables, for an optimizer that is sharded."""
    slices = inner_of(optimizer).__dict__[_KEY]
    return [slices.of(each) for each in weights]


def slices_in(optimizer) -> _Slices | None:
    """Returns what a sharded optimizer has more than others; None if it is not sharded."""
    return optimizer.__dict__.get(_KEY)


def every_slice(optimizer) -> list:
    """Returns the Keras variables of all slices of weights; none if it is not sharded."""
    slices = slices_in(optimizer)
    return [] if slices is None else slices.slices


def num_bytes_of_states(optimizer) -> int:
    """Returns the bytes that a replica keeps for an optimizer, slices of weights included.

    Args:
      optimizer: also a LossScaleOptimizer; None counts as nothing.
    """
    if optimizer is None:
        return 0
    return num_bytes_held([*optimizer.variables, *every_slice(inner_of(optimizer))])


@contextlib.contextmanager
def updating(optimizer, norms: Sequence[tf.Tensor] | None) -> Iterator[None]:
    """Within the context, the optimizer updates slices.

    Args:
      optimizer: it is sharded.
      norms: with `clipnorm` the norm of each whole gradient, with `global_clipnorm` that of all of
        them, a float scalar each; else None.
    """
    slices = inner_of(optimizer).__dict__[_KEY]
    slices.is_updating, slices.norms = True, norms
    try:
        yield
    finally:
        slices.is_updating, slices.norms = False, None


def values_to_clip(optimizer, gradients: Sequence[tf.Tensor], weights: Sequence) -> list[tf.Tensor]:
    """Returns the slices of the values that `clipnorm` or `global_clipnorm` will be applied to.

    Call it within `as_replica`, before the update.

    Args:
      optimizer: it is sharded.
      gradients: this replica's slices of the gradients that `optimizer.apply` will get.
      weights: of the gradients.
    """
    inner = inner_of(optimizer)
    scale = inner.loss_scale_factor if inner is optimizer else optimizer.dynamic_scale
    if scale is not None:
        gradients = [each / tf.cast(scale, each.dtype) for each in gradients]
    steps = inner.gradient_accumulation_steps
    if not steps:
        return list(gradients)
    before = [inner._accumulated_gradients[inner._get_variable_index(each)] for each in weights]
    return [(each + own) / steps for each, own in zip(gradients, before, strict=True)]
