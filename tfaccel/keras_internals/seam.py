"""Where the step reaches into Keras and TensorFlow, past what they promise to keep.

Takes a Keras model and its strategy; gives the means to trace one replica's part of a step as if
there were no strategy, and to see what it would have changed. tfaccel/step/ makes steps of it.

    with as_replica(model, replica):                    # variables are this replica's own
        with recorded(model, replica) as recording:     # gradients are kept, not applied
            logs = model.train_step(batch)

Private names relied on, also in step/, callbacks/, methods.py and replica_checksums.py; the canary
of each, in tests/test_seam, fails by name when it changes:
  Keras 3.15: Variable._value, Variable._initialize, Variable._direct_assign, Optimizer.apply,
    Optimizer._iterations, Optimizer._distribution_strategy,
    LossScaleOptimizer.dynamic_scale and .check_finite, SeedGenerator.next,
    BatchNormalization.call and ._moments, Conv2D.call and .convolution_op, MaxPooling2D.call,
    Model._distribute_strategy, Model._flatten_layers, Model._maybe_symbolic_build,
    Model._symbolic_build, backend.compute_output_spec, Functional.call, Sequential._functional,
    models.functional.unpack_singleton,
    Model._compile_loss._user_loss and ._user_loss_weights, Model._compile_metrics._user_metrics and
    ._user_weighted_metrics, TFEpochIterator._distributed_dataset. For padding: Model._loss_tracker,
    CompileLoss.metrics, MetricsList.update_state and .metrics, losses.loss.reduce_weighted_values,
    backend.get_keras_mask. For mixing: utils.rng_utils.get_random_seed. For averages:
    Optimizer._trainable_variables and ._model_variables_moving_average. For looking ahead:
    utils.is_default, utils.python_utils.pythonify_logs, Model._get_metrics_result_or_logs,
    Model._flatten_metrics_in_order. For draws: common.global_state.get_global_attribute and
    set_global_attribute, of "global_seed_generator" and "object_name_uids".
    For the order of epochs, elsewhere:
    data_adapters.get_data_adapter, DataAdapter.get_tf_dataset, ArrayDataAdapter._shuffle and
    ._num_samples, PyDatasetAdapter.shuffle, .py_dataset and .enqueuer. For the best epoch:
    MonitorCallback._is_improvement.
  TensorFlow 2.21: distribute_lib._push_per_thread_mode, _pop_per_thread_mode,
    _get_default_replica_mode; StrategyExtended._collective_ops, _cross_device_ops,
    _id_in_cluster; CollectiveAllReduce._launchers; CollectiveReplicaLauncher._group_key and
    ._group_size; PerReplicaSpec._value_specs; values.DistributedVariable;
    Dataset._inputs and ._functions.
"""

import contextlib
import dataclasses
import functools
import logging
import os
import random
import types
import weakref
from collections.abc import Callable, Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow.core import Variable as TensorFlowVariable
from keras.src.losses import loss as keras_loss
from keras.src.models.functional import Functional, unpack_singleton
from keras.src.optimizers.base_optimizer import BaseOptimizer
from tensorflow.python.distribute import distribute_lib
from tensorflow.python.distribute.values import DistributedVariable

from tfaccel.common.errors import UserError
from tfaccel.data import shards
from tfaccel.keras_internals import batch_norm, convolution, max_pooling

log = logging.getLogger("tfaccel")

SUPPORTED_KERAS = "3.15"
OF_ANY_SIZE = (tf.RaggedTensor, tf.SparseTensor, tf.RaggedTensorSpec, tf.SparseTensorSpec)
# Modules of Keras's layers that turn words or numbers into categories, by their last name.
OF_CATEGORIES = (
    "category_encoding",
    "discretization",
    "hashed_crossing",
    "hashing",
    "index_lookup",
    "text_vectorization",
)


def check_keras(version: str) -> None:
    """Raises UserError unless the private names above were tried with this version of Keras."""
    if version.split(".")[:2] != SUPPORTED_KERAS.split("."):
        raise UserError(
            f"Keras {version} is installed, but tfaccel's distributed step works with Keras "
            f"{SUPPORTED_KERAS}.x alone; install it: pip install 'keras=={SUPPORTED_KERAS}.*'"
        )


check_keras(keras.__version__)


@dataclasses.dataclass(frozen=True)
class Replica:
    """One of this process's replicas.

    Attributes:
      local_index: among this process's replicas.
      index: among all workers' replicas, worker by worker.
      device: what TensorFlow calls it.
      num_replicas: of all workers.
      launcher: TensorFlow's, of the collectives that this replica takes part in.
      reduces_in_xla: whether `all_reduce_in_xla` is for it, and will not wait for ever.
    """

    local_index: int
    index: int
    num_replicas: int
    device: str
    launcher: object
    reduces_in_xla: bool

    @property
    def is_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return _is_gpu(self.device)

    def all_reduce(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the sum of every replica's `value`.

        Must be called for every replica in the same order, in a `tf.function`, outside XLA.
        """
        return self.launcher.all_reduce(value)

    def all_reduce_in_xla(self, values: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the sums of every replica's values, in a function that XLA compiles for a GPU.

        XLA then has its own collective, by NCCL, which the host need not wait for: 0.45 ms for 100
        MB between two H200s, where TensorFlow's has 1.5 ms more until the host sees its end
        (2026-11-22). Must be called for every replica in the same order.
        """
        return [
            tf.raw_ops.CollectiveReduceV2(
                input=each,
                group_size=self.launcher._group_size,
                group_key=self.launcher._group_key,
                instance_key=number,  # of no use to XLA
                ordering_token=[],
                merge_op="Add",
                final_op="Id",
            )
            for number, each in enumerate(values)
        ]

    def all_reduce_in_forward(self, value: tf.Tensor, *, weight: float | tf.Tensor) -> tf.Tensor:
        """Returns the sum of every replica's `value`, with the gradient of the loss over all rows.

        A replica's loss is a mean over its own rows, and its gradients are multiplied by their
        number afterwards. What reaches another replica's rows through the sum has to bring the
        number of its own rows instead.

        Args:
          value: that the forward pass sums, e.g. batch norm's statistics. That of a replica
            without rows is not counted; of padding, it is.
          weight: this replica's rows, in any unit.
        """

        @tf.custom_gradient
        def summed(each):
            def gradient(upstream):
                own = tf.cast(weight, upstream.dtype)
                # Of a replica without rows 0, or the next layer's sum would have its infinity.
                return tf.math.divide_no_nan(self.all_reduce(upstream * own), own)

            return self.all_reduce(each if has_rows else tf.zeros_like(each)), gradient

        has_rows = isinstance(weight, tf.Tensor) or weight > 0
        return summed(value)

    def all_gather(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the rows of every replica's `value`, [rows, ...], in order of the replicas."""
        return self.launcher.all_gather(value, axis=0)


def local_replicas(strategy: tf.distribute.Strategy) -> list[Replica]:
    """Returns this process's replicas of a Mirrored or MultiWorkerMirrored strategy."""
    extended = strategy.extended
    collectives = getattr(extended, "_collective_ops", None) or extended._cross_device_ops
    devices = extended.worker_devices
    first = getattr(extended, "_id_in_cluster", 0) * len(devices)
    num_replicas = strategy.num_replicas_in_sync
    reduces_in_xla = num_replicas == len(devices) > 1 and _can_wait_in_xla(devices)
    return [
        Replica(index, first + index, num_replicas, device, launcher, reduces_in_xla)
        for index, (device, launcher) in enumerate(
            zip(devices, collectives._launchers, strict=True)
        )
    ]


def _can_wait_in_xla(devices: Sequence[str]) -> bool:
    """Returns whether all may be in an XLA function at once: each takes a thread as it waits."""
    num_threads = tf.config.threading.get_inter_op_parallelism_threads() or os.cpu_count() or 1
    return all(map(_is_gpu, devices)) and num_threads > len(devices)


def _is_gpu(device: str) -> bool:
    return tf.DeviceSpec.from_string(device).device_type == "GPU"


# One replica's view of the model, while a step is traced.


def optimizers_of(optimizer) -> list:
    """Returns the optimizer and all that it wraps; nothing for none."""
    if optimizer is None:
        return []
    inner = [getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "optimizers", ())]
    return [optimizer, *(found for each in inner for found in optimizers_of(each))]


def every_optimizer(model) -> list:
    """Returns the compiled optimizer, and those of the model's attributes, without what they wrap.

    A `train_step` of the model's own may use several: `self.d_optimizer`, a list or a dict of them.
    """
    found = [model.optimizer] if model.optimizer is not None else []
    if not has_steps_of_keras(model):
        found += _optimizers_in(list(vars(model).values()))
    wrapped = {id(inner) for each in found for inner in optimizers_of(each)[1:]}
    return [each for each in {id(each): each for each in found}.values() if id(each) not in wrapped]


def _optimizers_in(value) -> list:
    """Returns the optimizers in lists, tuples and dicts, in order."""
    if isinstance(value, BaseOptimizer):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [
        found
        for each in (value if isinstance(value, list | tuple) else ())
        for found in _optimizers_in(each)
    ]


def variables_of(model) -> list:
    """Returns every Keras variable that a step reads or changes, each once."""
    found = [*model.variables, *model.metrics_variables]
    for each in every_optimizer(model):
        for optimizer in optimizers_of(each):
            found += optimizer.variables
    return list({id(each): each for each in found}.values())


def state_of(model) -> list:
    """Returns the Keras variables that must be the same on every replica between steps.

    Metrics are not among them: they count each replica's own rows.
    """
    own = {id(each) for each in model.metrics_variables}
    return [each for each in variables_of(model) if id(each) not in own]


def runs_eagerly(model) -> bool:
    """Returns whether steps run as Python, operation by operation: stock Keras's then."""
    return model.run_eagerly or tf.config.functions_run_eagerly()


def inputs_of(model) -> list:
    """Returns the tensors that the model declares as its inputs; none for a subclassed model."""
    return list(getattr(model, "inputs", None) or ())  # Sequential raises until it is built


def outputs_of(model) -> list:
    """Returns the tensors that the model declares as its outputs; none for a subclassed model."""
    return list(getattr(model, "outputs", None) or ())


def has_steps_of_keras(model) -> bool:
    """Returns whether the model trains and tests as Keras has it, by no step of its own."""
    names = ("train_step", "test_step")
    return all(
        getattr(getattr(model, each), "__func__", None) is getattr(keras.Model, each)
        for each in names
    )


def takes_labels(model) -> bool:
    """Returns whether the model's loss is the cross-entropy of labels, not of probabilities."""
    sparse = keras.losses.SparseCategoricalCrossentropy
    return model.loss == "sparse_categorical_crossentropy" or isinstance(model.loss, sparse)


def losses_of(model) -> list:
    """Returns the losses that the model was compiled with."""
    return tf.nest.flatten(model._compile_loss._user_loss) if model._compile_loss else []


def loss_weights_of(model):
    """Returns the loss weights that the model was compiled with, as they were given; or None."""
    return model._compile_loss._user_loss_weights if model._compile_loss else None


def metrics_of(model) -> list:
    """Returns the metrics that the model was compiled with: objects, functions or names."""
    metrics = model._compile_metrics
    user = (metrics._user_metrics, metrics._user_weighted_metrics) if metrics else ()
    return tf.nest.flatten(user)


def is_distributed(variable) -> bool:
    """Returns whether a Keras variable was made in a strategy's scope."""
    return isinstance(variable._value, tf.distribute.DistributedValues)


def components(variable) -> tuple:
    """Returns a Keras variable's `tf.Variable` on each of this process's replicas."""
    return variable._value.values if is_distributed(variable) else (variable._value,)


def is_synchronized(model) -> bool:
    """Returns whether any batch normalization takes its statistics over all replicas."""
    return any(
        isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized
        for layer in model._flatten_layers()
    )


def adopt(variable, strategy: tf.distribute.Strategy) -> None:
    """Makes a Keras variable again in the strategy's scope, with the value that it has."""
    value = keras.ops.convert_to_numpy(variable)
    with strategy.scope():
        variable._initialize(value)


def _number_of(kind: type) -> Callable:
    return lambda variable: kind(variable.numpy())


# Callbacks read `float(model.optimizer.learning_rate)`, which a variable has, and a strategy's not.
for _name, _kind in (("__float__", float), ("__int__", int)):
    if not hasattr(DistributedVariable, _name):
        setattr(DistributedVariable, _name, _number_of(_kind))


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


# What a replica's part of a step would change.


class Recording:
    """The gradients and assignments of a traced `train_step`.

    Attributes:
      trained: the Keras variables that there are gradients of.
    """

    def __init__(self):
        """Starts empty."""
        self.trained = []
        self._gradients = None
        self._before = {}
        self._is_paused = False

    def gradients(self, grads, variables) -> None:
        """Takes what `optimizer.apply` is called with."""
        if self._gradients is not None:
            raise UserError(
                "train_step applies gradients twice; with several replicas or accumulation it may "
                "call self.optimizer.apply_gradients once"
            )
        pairs = list(zip(grads, variables, strict=True))
        without = [variable.path for grad, variable in pairs if grad is None]
        if without:
            log.warning("step: no gradient reaches %s", ", ".join(without))
        self.trained = [variable for grad, variable in pairs if grad is not None]
        self._gradients = [grad for grad, _ in pairs if grad is not None]

    def take_gradients(self) -> list[tf.Tensor]:
        """Returns the gradients of `trained`, dense, and expects the next."""
        grads, self._gradients = self._gradients or [], None
        return [tf.convert_to_tensor(each) for each in grads]

    def before(self, variable) -> None:
        """Keeps the value that a variable has before its first assignment."""
        if not self._is_paused and id(variable) not in self._before:
            self._before[id(variable)] = (variable, tf.identity(variable._value))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within the context no assignment is noted: it is the same on every replica."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def assigned(self) -> list[tuple]:
        """Returns (Keras variable, value before) of what was assigned, in the order of it."""
        return list(self._before.values())


@contextlib.contextmanager
def recorded(model, replica: Replica, *, apply: Callable | None = None):
    """Within `as_replica`: gradients are kept instead of applied, assignments are noted.

    Each replica draws its own random numbers (replica 0 those of a single device), and an optimizer
    that is not the model's is refused: it would update this replica by its own gradients alone.

    Args:
      model: whose step is traced.
      replica: that it is traced for.
      apply: what is done at once instead, of an optimizer, gradients and variables, wherever the
        step applies gradients; None where it does so once, with the compiled optimizer.

    Yields:
      The Recording.
    """
    recording = Recording()
    optimizers = [each for each in (model.optimizer,) if each is not None]
    if apply is not None:
        optimizers = every_optimizer(model)

    def apply_at_once(optimizer, grads, trainable_variables=None):
        variables = trainable_variables or optimizer._trainable_variables
        pairs = [each for each in zip(grads, variables, strict=True) if each[0] is not None]
        with recording.paused():
            own = optimizer.__dict__.pop("apply")  # so that what applies them calls Keras's
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
            f"train_step uses the optimizer {optimizer.name}, which is not self.optimizer; on "
            "several replicas let it be an attribute of the model before run.compile, and use no "
            "accumulation with it: or use one replica"
        )

    def note_and_assign(variable, value):
        if replica.num_replicas > 1 and id(variable) not in own_variables:
            raise UserError(
                f"the step changes the variable {variable.path}, which is not the model's: all "
                "replicas would share it; let a layer made in the scope hold it (for random "
                "numbers: self.seed_generator = keras.random.SeedGenerator())"
            )
        recording.before(variable)
        return direct_assign(variable, value)

    def own_seed(generator, ordered=True):
        seed = next_seed(generator, ordered)
        return seed + tf.constant([1_000_003 * replica.index, 0], seed.dtype)

    own_variables = {id(each) for each in variables_of(model)}
    direct_assign = TensorFlowVariable._direct_assign
    next_seed = keras.random.SeedGenerator.next
    with contextlib.ExitStack() as patches:
        if apply is None:
            patches.enter_context(patched(BaseOptimizer, "apply", refuse))
            patches.enter_context(patched(keras.optimizers.LossScaleOptimizer, "apply", refuse))
        patches.enter_context(patched(TensorFlowVariable, "_direct_assign", note_and_assign))
        patches.enter_context(patched(keras.random.SeedGenerator, "next", own_seed))
        trust = _Trust(says=replica.local_index == 0)
        of_parts = _reduced_in_parts(keras_loss.reduce_weighted_values, trust)
        patches.enter_context(patched(keras_loss, "reduce_weighted_values", of_parts))
        counted = _counted_in_parts(keras.metrics.Mean.update_state, trust)
        patches.enter_context(patched(keras.metrics.Mean, "update_state", counted))
        for each in optimizers:  # past Keras's tracking of attributes
            each.__dict__["apply"] = functools.partial(apply_at_once, each) if apply else keep
            patches.callback(each.__dict__.pop, "apply")
        yield recording


@contextlib.contextmanager
def noted(variables: list) -> Iterator[Recording]:
    """Within `as_replica`: the values that these variables have before they are assigned are kept.

    Yields:
      The Recording, without gradients.
    """
    recording, wanted = Recording(), {id(each) for each in variables}
    direct_assign = TensorFlowVariable._direct_assign
    graph = tf.compat.v1.get_default_graph()

    def note_and_assign(variable, value):
        if id(variable) in wanted:
            with graph.as_default():  # a layer may assign inside a tf.cond, and that is another
                recording.before(variable)
        return direct_assign(variable, value)

    with patched(TensorFlowVariable, "_direct_assign", note_and_assign):
        yield recording


class _Trust:
    """Says, once of each kind, what a user's function makes of all the rows that it is given."""

    def __init__(self, *, says: bool):
        self._said = set() if says else {"loss", "metric"}

    def check(self, kind: str, values) -> None:
        """Takes what a function gave for a part of a batch."""
        if len(values.shape) > 0 or kind in self._said:
            return
        self._said.add(kind)
        log.warning(
            "step: a %s is one number for all the rows it is given, here those of a part of the "
            "batch: right if it is the mean of what each row gives, wrong of anything else (a Dice "
            "of the whole batch, say); let it return a number for each row",
            kind,
        )


def _reduced_in_parts(reduce_weighted_values: Callable, trust: _Trust) -> Callable:
    """Returns Keras's reduction of a loss, which divides by rows, and by nothing else."""

    @functools.wraps(reduce_weighted_values)
    def reduce(values, sample_weight=None, mask=None, **settings):
        if mask is not None:
            raise UserError(
                "a loss is masked (by ignore_class, mask_zero or a Masking layer): Keras divides "
                "it by the elements that count, which parts of a batch have unequally; with "
                "several replicas or accumulation give sample_weight instead, or use one replica"
            )
        trust.check("loss", values)
        return reduce_weighted_values(values, sample_weight, mask, **settings)

    return reduce


def _counted_in_parts(update_state: Callable, trust: _Trust) -> Callable:
    """Returns `Mean.update_state`, which looks at what functions give."""

    def update(metric, values, sample_weight=None):
        if isinstance(metric, keras.metrics.MeanMetricWrapper):
            trust.check("metric", values)
        return update_state(metric, values, sample_weight)

    return update


@contextlib.contextmanager
def layer_paths(*, xla: bool, all_reduce: Callable | None):
    """Within the context, some layers of Keras take tfaccel's paths, which are quicker.

    Args:
      xla: whether XLA compiles what is traced.
      all_reduce: sums over replicas, for synchronized layers; None on one replica.
    """
    norm, conv = keras.layers.BatchNormalization, keras.layers.Conv2D
    pooling, biases = keras.layers.MaxPooling2D, convolution.CancelledBiases()
    with contextlib.ExitStack() as patches:

        def replace(layer, name, make):
            patches.enter_context(patched(layer, name, make(getattr(layer, name))))

        replace(norm, "call", batch_norm.unbiased)
        if xla:
            replace(conv, "convolution_op", convolution.as_product)
            replace(norm, "call", batch_norm.one_pass)
            replace(pooling, "call", max_pooling.indexed)
        else:
            replace(norm, "call", batch_norm.fused)
        replace(conv, "call", biases.added)
        replace(norm, "call", biases.cancelled)
        if all_reduce is not None:
            synchronized = functools.partial(batch_norm.synchronized, all_reduce=all_reduce)
            replace(norm, "_moments", synchronized)
        yield


# Keras's own `fit`, `evaluate` and `predict`, as a model has them.

AROUND = "_tfaccel_around"  # in a model's __dict__: what its calls of Keras's own methods become


def around_keras(model, name: str, wrap: Callable) -> None:
    """Puts `wrap` around the method `name` as Keras has it, for this model alone.

    A model's own `fit` may take any arguments, and may call Keras's as often as it likes: what is
    added to a call is added where Keras's own method is entered, whose arguments are known.

    Args:
      model: of Keras.
      name: of a method of `keras.Model`: "fit", "evaluate", "predict" or one of a batch.
      wrap: from the method, bound to the model, to what stands for it.
    """
    method = types.MethodType(_KERAS_METHODS[name], model)
    vars(model).setdefault(AROUND, {})[name] = wrap(method)  # past Keras's tracking of attributes


def _with_around(name: str, keras_own: Callable) -> Callable:
    """Returns what stands for Keras's own method on `keras.Model`: it asks the model first."""

    @functools.wraps(keras_own)
    def method(model, *args, **kwargs):
        around = vars(model).get(AROUND, {}).get(name)
        if around is None:
            return keras_own(model, *args, **kwargs)
        return around(*args, **kwargs)

    return method


_ON_BATCH = ("train_on_batch", "test_on_batch", "predict_on_batch")
_KERAS_METHODS = {
    name: getattr(keras.Model, name) for name in ("fit", "evaluate", "predict", *_ON_BATCH)
}
for _name, _method in _KERAS_METHODS.items():
    setattr(keras.Model, _name, _with_around(_name, _method))


@contextlib.contextmanager
def patched(owner, name: str, value):
    """Within the context, an attribute of a class or module has another value."""
    is_own, original = name in owner.__dict__, owner.__dict__.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, original)
        else:  # of a base class
            delattr(owner, name)


# Batches.


@contextlib.contextmanager
def draws_kept() -> Iterator[None]:
    """Within the context, what is made and drawn changes no seed and no name of what comes after.

    Keras draws the seed of a layer from Python's generator, and the numbers of unnamed layers and
    of draws without a seed from two objects of the thread.
    """
    names = "global_seed_generator", "object_name_uids"
    drawn, of_numpy = random.getstate(), np.random.get_state()
    kept = {name: global_state.get_global_attribute(name) for name in names}
    global_state.set_global_attribute(names[0], None)  # what draws meanwhile makes one of its own
    if kept[names[1]] is not None:
        global_state.set_global_attribute(names[1], kept[names[1]].copy())
    try:
        yield
    finally:
        random.setstate(drawn)
        np.random.set_state(of_numpy)
        for name, each in kept.items():
            global_state.set_global_attribute(name, each)


def local_batches(strategy: tf.distribute.Strategy, batch, num_replicas: int) -> list:
    """Returns each local replica's part of what Keras's iterators give.

    A batch that is not distributed (`train_on_batch`) is cut by rows into even parts.
    """
    leaves = tf.nest.flatten(batch)
    if any(isinstance(each, tf.distribute.DistributedValues) for each in leaves):
        parts = [
            [None] * num_replicas if each is None else strategy.experimental_local_results(each)
            for each in leaves
        ]
    elif num_replicas == 1:
        parts = [(each,) for each in leaves]
    else:
        parts = [_cut(each, num_replicas) for each in leaves]
    return [
        tf.nest.map_structure(_or_none, tf.nest.pack_sequence_as(batch, each))
        for each in zip(*parts, strict=True)
    ]


def _or_none(value):
    # A generator's missing sample weights arrive as empty optionals.
    return None if isinstance(value, tf.experimental.Optional) else value


def _cut(value, num_parts: int) -> list:
    if value is None:
        return [None] * num_parts
    slices = [
        shards.part(value.shape[0], num_replicas=num_parts, replica_index=index)
        for index in range(num_parts)
    ]
    if isinstance(value, tf.SparseTensor):
        rest = list(value.shape[1:])
        return [
            tf.sparse.slice(value, [each.start] + [0] * len(rest), [each.stop - each.start, *rest])
            for each in slices
        ]
    return [value[each] for each in slices]


def build_from_specs(model, *, change: Callable) -> Callable:
    """Returns what stands for the model's `_maybe_symbolic_build`: it draws no batch.

    Keras's draws one from an iterator that it throws away, which starts a pipeline for nothing, and
    cannot take the per-replica values of several workers (keras issue 20585).

    Args:
      model: compiled.
      change: from the specs of a batch (or the batch) to those of what the step makes of it.
    """
    by_batch = types.MethodType(type(model)._maybe_symbolic_build, model)

    def build(iterator=None, data_batch=None):
        if not has_steps_of_keras(model):
            build_by_step(iterator, data_batch)
            return adopt_metrics()
        specs = data_batch if iterator is None else specs_of(iterator)
        if iterator is not None and not _are_known(specs):
            specs = _first_batch(model, iterator)
        _note_inputs(model, specs)
        if any(isinstance(each, OF_ANY_SIZE) for each in tf.nest.flatten(specs)):
            # Of these Keras makes dense symbols, which the model need not take.
            if not _is_built(model):
                _trace_once(model, specs)
        elif iterator is None:
            by_row = _weighing_by_row(keras_loss.reduce_weighted_values)
            with patched(keras_loss, "reduce_weighted_values", by_row):
                by_batch(data_batch=change(specs))
        else:
            build_by_call(specs)
        return adopt_metrics()

    def specs_of(iterator):
        return tf.nest.map_structure(_of_one_replica, iterator._distributed_dataset.element_spec)

    def build_by_call(specs):
        by_row = _weighing_by_row(keras_loss.reduce_weighted_values)
        look_up = _knowing_outputs(model, backend.compute_output_spec)
        with (
            model.distribute_strategy.scope(),
            patched(keras_loss, "reduce_weighted_values", by_row),
            patched(backend, "compute_output_spec", look_up),
        ):
            model._symbolic_build(data_batch=change(specs))

    def build_by_step(iterator, batch):
        # As stock Keras does without a strategy. `call` may be missing, or take something else.
        specs = batch if iterator is None else specs_of(iterator)
        known = iterator is None or _are_known(specs)
        if known:
            _note_inputs(model, specs)
        if _is_built(model):
            return
        if iterator is not None:
            # A generator's batch would be lost: it is drawn only where nothing else is known.
            batch = specs if known else _first_batch(model, iterator)
            _note_inputs(model, batch)
        _trace_once(model, change(batch))
        metrics = model._compile_metrics
        if metrics is not None and not metrics.built and inputs_of(model):
            build_by_call(
                batch
            )  # a step that leaves them alone: Keras still asks for their results
        if every_optimizer(model) == [model.optimizer] and not model.optimizer.built:
            with model.distribute_strategy.scope():  # that no step has used yet
                model.optimizer.build(model.trainable_variables)

    def adopt_metrics():
        # `run.compile(model, metrics=[keras.metrics.AUC()])` makes one outside the scope.
        for variable in model.metrics_variables:
            if not is_distributed(variable):
                adopt(variable, model.distribute_strategy)

    return build


_TRAINED_ON = weakref.WeakKeyDictionary()  # specs, by the model


def trained_on(model):
    """Returns the `tf.TypeSpec`s of the x that `fit` or `evaluate` gave last; None if none did."""
    return _TRAINED_ON.get(model)


def _note_inputs(model, batch) -> None:
    """Notes what the model is given: a batch, or its specs."""
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    if x is not None:
        _TRAINED_ON[model] = tf.nest.map_structure(_spec_of, x)


def _spec_of(value):
    if value is None or isinstance(value, tf.TypeSpec):
        return value
    if isinstance(value, tf.RaggedTensor | tf.SparseTensor):
        return tf.type_spec_from_value(value)
    value = value if hasattr(value, "shape") else np.asarray(value)
    return tf.TensorSpec(value.shape, value.dtype)


def _is_built(model) -> bool:
    """Returns whether all is there that a step of the model's own makes as it is first traced."""
    compiled = (model._compile_loss, model._compile_metrics)
    layers = model._flatten_layers(include_self=False)
    return (
        all(each.built for each in layers)
        and all(each is None or each.built for each in compiled)
        and all(each.built for each in every_optimizer(model))
    )


def _trace_once(model, batch) -> None:
    """Traces a step that is never run: what it makes is there before the first one.

    So a checkpoint can be put back. What fails here fails in the step itself, which says why.
    """
    specs = tf.nest.map_structure(_spec_of, batch)
    step = model.test_step if model.optimizer is None else model.train_step
    replica = local_replicas(model.distribute_strategy)[0]
    with tf.__internal__.FuncGraph("made_by_step").as_default():
        inputs = tf.nest.map_structure(_placeholder, specs)
        try:
            with as_replica(model, replica):
                step(inputs)
        except Exception as error:
            log.debug("step: it makes its variables as it runs, because of %s", error)


def _weighing_by_row(reduce_weighted_values: Callable) -> Callable:
    """Returns Keras's reduction of a loss, in which a weight per row weighs all of a row's values.

    Keras lines up weights [rows] with the last axis of values [rows, height, width]: an error, or a
    wrong loss where there are as many rows as columns.
    """

    @functools.wraps(reduce_weighted_values)
    def reduce(values, sample_weight=None, *args, **settings):
        return reduce_weighted_values(values, by_row(sample_weight, values), *args, **settings)

    return reduce


def by_row(sample_weight, values):
    """Returns weights of a loss's values: [rows] with as many axes as they have."""
    is_per_row = sample_weight is not None and len(sample_weight.shape) == 1
    return with_rank(sample_weight, values) if is_per_row else sample_weight


def with_rank(rows: tf.Tensor, like) -> tf.Tensor:
    """Returns [rows] as [rows, 1, ...], with as many axes as another tensor has."""
    return tf.reshape(rows, [-1] + [1] * (len(like.shape) - 1))


def _knowing_outputs(model, compute_output_spec: Callable) -> Callable:
    """Returns what can stand for Keras's function of a layer: of this model it may know the result.

    Keras traces the whole forward pass, and throws it away: 0.9 s of a ResNet-50, on a CPU. A graph
    of layers, for inputs as it was made for, is asked layer by layer: 0.04 s. (Not where a layer
    may tell another shape than it gives.)
    """

    @functools.wraps(compute_output_spec)
    def look_up(fn, *args, **kwargs):
        if fn is not model or type(model).call not in (Functional.call, keras.Sequential.call):
            return compute_output_spec(fn, *args, **kwargs)
        if not all(_tells_its_shape(each) for each in model._flatten_layers(include_self=False)):
            return compute_output_spec(fn, *args, **kwargs)
        graph = getattr(model, "_functional", model)  # None: a Sequential that is not built
        given, declared = keras.tree.flatten(args[0]), graph.inputs if graph else []
        shapes = [each if each is None else (None, *each.shape[1:]) for each in given]
        if shapes != [each.shape for each in declared]:
            return compute_output_spec(fn, *args, **kwargs)
        inputs = [
            keras.KerasTensor(each.shape, known.dtype)
            for each, known in zip(given, declared, strict=True)
        ]
        outputs = graph.compute_output_spec(keras.tree.pack_sequence_as(args[0], inputs))
        return unpack_singleton(outputs)  # as `call` does, which returns [y] as y

    return look_up


def _tells_its_shape(layer) -> bool:
    """Returns whether a layer gives the shape that it says it will give.

    TextVectorization(output_mode="multi_hot") says [rows, 1, words] of texts [rows, 1], and gives
    [rows, words] (Keras 3.15); what a user's own layer, or a Lambda, says need not be true either.
    """
    methods = type(layer).compute_output_shape, type(layer).compute_output_spec
    modules = [each.__module__ for each in methods]
    return not isinstance(layer, keras.layers.Lambda) and all(
        each.startswith("keras.src.") and each.rpartition(".")[2] not in OF_CATEGORIES
        for each in modules
    )


def _of_one_replica(spec):
    spec = spec._value_specs[0] if hasattr(spec, "_value_specs") else spec
    return spec if hasattr(spec, "shape") else None


def _placeholder(spec):
    if spec is None:
        return None
    if isinstance(spec, tf.RaggedTensorSpec):
        inner = spec.shape[spec.ragged_rank + 1 :]
        return tf.compat.v1.ragged.placeholder(spec.dtype, spec.ragged_rank, inner)
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.compat.v1.sparse_placeholder(spec.dtype, spec.shape)
    return tf.compat.v1.placeholder(spec.dtype, spec.shape)


def _are_known(specs) -> bool:
    """Returns whether the specs of a batch say what a model gets."""
    return all(each is None or each.shape.rank is not None for each in tf.nest.flatten(specs))


def _first_batch(model, iterator: Iterator):
    """Draws a batch, for its shapes: a generator's are not known before."""
    for _, _, batches in iterator:
        replicas = len(model.distribute_strategy.extended.worker_devices)
        return local_batches(model.distribute_strategy, next(batches), replicas)[0]
    return None
