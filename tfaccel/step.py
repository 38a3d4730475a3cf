"""One training, test and predict step, compiled, under a strategy.

Takes a Keras model and what `model.compile` takes; gives the model compiled, with its step
functions set. `fit`, `evaluate` and `predict` stay Keras's own.

    compile_model(model, strategy, xla=True, optimizer="adamw", loss=..., metrics=["accuracy"])

On one replica there is nothing to reduce. The model's own `train_step` runs there as if there were
no strategy, on the replica's own variables, in one XLA function: forward, backward, loss scaling,
clipping and update. (Stock Keras cannot: it puts the strategy's machinery inside the XLA function,
which raises: keras issues 18666 and 21366.) On several replicas the step is stock Keras's, and what
stock Keras gets wrong there is refused: here, and partial batches by the Loader. (Partial batches
of arrays are not seen here: Keras divides their loss by the replicas, not by the rows.)

Private names relied on:
  Keras 3.15: Variable._value, Variable._initialize, Optimizer._distribution_strategy,
    Model._distribute_strategy, Model._flatten_layers.
  TensorFlow 2.21: distribute_lib._push_per_thread_mode, _pop_per_thread_mode,
    _get_default_replica_mode.
"""

import contextlib
import functools
import inspect
import itertools
import logging
import types
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf
from tensorflow.python.distribute import distribute_lib

from tfaccel.data.distribute import Loader, check_same_classes
from tfaccel.errors import UserError, did_you_mean

log = logging.getLogger("tfaccel")


def compile_model(
    model: keras.Model, strategy: tf.distribute.Strategy, *, xla: bool, **compile_args
):
    """Compiles `model` for `strategy`.

    Args:
      model: built in `strategy.scope()`.
      strategy: a MirroredStrategy.
      xla: whether steps are compiled with XLA.
      **compile_args: as for `keras.Model.compile`, less `jit_compile`.

    Raises:
      UserError: the model belongs to no or another strategy, the optimizer has already trained
        another model, or several replicas would train wrongly.
    """
    if "jit_compile" in compile_args:
        raise UserError("jit_compile is set by tfaccel; use tfaccel.setup(xla=True or False)")
    if model._distribute_strategy is not strategy:
        raise UserError(
            "the model was built in no scope or another run's; build it in this run's "
            "`with run.scope():`"
        )
    with strategy.scope():
        if isinstance(compile_args.get("optimizer"), keras.optimizers.Optimizer):
            _adopt(compile_args["optimizer"], strategy)
        model.compile(**compile_args, jit_compile=False)
    num_replicas = strategy.num_replicas_in_sync
    if num_replicas > 1:
        _refuse_what_stock_keras_gets_wrong(model, num_replicas, xla=xla)
        log.info("step: stock Keras, without XLA, because there are %d replicas", num_replicas)
    elif compile_args.get("run_eagerly"):
        log.info("step: stock Keras, without XLA, because run_eagerly asks for it")
    else:
        _set_one_replica_functions(model, xla=xla)
        log.info("step: one function, %s XLA", "with" if xla else "without")
    model.fit = _for_loaders(types.MethodType(type(model).fit, model))
    model.evaluate = _for_loaders(types.MethodType(type(model).evaluate, model))


def make_optimizer(name: str, *, learning_rate: float) -> keras.optimizers.Optimizer:
    """Returns a Keras optimizer by its name, in any case.

    Raises:
      UserError: Keras has no optimizer of that name.
    """
    known = {
        each.lower(): value
        for each, value in vars(keras.optimizers).items()
        if isinstance(value, type) and each not in ("Optimizer", "LossScaleOptimizer")
    }
    if name.lower() not in known:
        raise UserError(f"there is no optimizer '{name}'{did_you_mean(name, known)}")
    return known[name.lower()](learning_rate=learning_rate)


def _adopt(optimizer, strategy) -> None:
    """Makes an optimizer that was made outside the strategy's scope belong to it.

    `run.compile(model, optimizer=keras.optimizers.AdamW())` makes it outside. Its first variables,
    the iteration and the learning rate, are made again in the scope, so that it stays the object
    that the caller holds, with all that was set on it.
    """
    if optimizer._distribution_strategy is strategy:
        return
    if optimizer.built:
        raise UserError(
            f"the optimizer {optimizer.name} already has the state of another model; make a new one"
        )
    for variable in optimizer.variables:
        variable._initialize(keras.ops.convert_to_numpy(variable))
    for each in _optimizers(optimizer):
        each._distribution_strategy = strategy


def _optimizers(optimizer) -> list:
    """Returns the optimizer and the one it wraps, as far as there are any."""
    return [each for each in (optimizer, getattr(optimizer, "inner_optimizer", None)) if each]


def _refuse_what_stock_keras_gets_wrong(model, num_replicas: int, *, xla: bool) -> None:
    """Raises for what fails, or is silently wrong, in Keras 3.15 on several replicas."""
    optimizer = model.optimizer
    clips = ("clipnorm", "global_clipnorm", "clipvalue")
    refused = {
        "XLA": xla,
        "batch normalization without synchronized=True": any(
            isinstance(layer, keras.layers.BatchNormalization) and not layer.synchronized
            for layer in model._flatten_layers()
        ),
        "loss scaling (float16)": isinstance(optimizer, keras.optimizers.LossScaleOptimizer),
        "gradient clipping": any(getattr(optimizer, name, None) for name in clips),
        "gradient accumulation": getattr(optimizer, "gradient_accumulation_steps", None),
    }
    found = [name for name, present in refused.items() if present]
    if found:
        raise UserError(
            f"{' and '.join(found)} with {num_replicas} replicas is not supported yet; use one GPU "
            "(gpu_ids=[0]), or xla=False, precision='mixed_bfloat16' or 'float32', and no other of "
            "these"
        )


def _set_one_replica_functions(model, *, xla: bool) -> None:
    """Sets the functions that `fit`, `evaluate` and `predict` call for each execution.

    Keras makes its own only where these are not set, and unsets them in `compile`.
    """
    train_step = _one_replica_step(model, model.train_step, xla=xla)
    test_step = _one_replica_step(model, model.test_step, xla=xla)
    predict_step = _one_replica_step(model, model.predict_step, xla=xla)

    def run_steps(step: Callable, iterator: Iterator):
        logs = None
        for batch in itertools.islice(iterator, model.steps_per_execution):
            logs = step(batch)
        if logs is None:
            raise StopIteration
        return logs

    def predict_batches(batches):
        if not model.built:
            _build(model, batches[0])
        outputs = [predict_step(batch) for batch in batches]
        return tf.nest.map_structure(lambda *parts: tf.concat(parts, axis=0), *outputs)

    model.train_function = functools.partial(run_steps, train_step)
    model.test_function = functools.partial(run_steps, test_step)
    model.predict_function = predict_batches


def _build(model, batch) -> None:
    """Creates the variables in the strategy's scope, as Keras does before `fit` and `evaluate`."""
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    with model.distribute_strategy.scope():
        model(keras.tree.map_structure(lambda each: keras.KerasTensor(each.shape, each.dtype), x))


def _one_replica_step(model, step: Callable, *, xla: bool) -> Callable:
    """Returns `step` as one compiled function of a batch."""

    @tf.function(jit_compile=xla)
    def compiled(batch):
        with _without_strategy(model):
            return step(batch)

    def call(batch):
        # A generator's missing sample weights arrive as empty optionals.
        return compiled(
            tf.nest.map_structure(
                lambda each: None if isinstance(each, tf.experimental.Optional) else each, batch
            )
        )

    return call


@contextlib.contextmanager
def _without_strategy(model):
    """While a step is traced: the model as it would be without a strategy.

    Every Keras variable stands for its one replica's own `tf.Variable`, so that reads and updates
    are plain ones, and `tf.distribute` answers as if no strategy were in scope, so that Keras asks
    for no reduction.
    """
    optimizers = _optimizers(model.optimizer)
    variables = {id(each): each for each in [*model.variables, *model.metrics_variables]}
    for optimizer in optimizers:
        variables |= {id(each): each for each in optimizer.variables}
    distributed = [
        (each, each._value)
        for each in variables.values()
        if isinstance(each._value, tf.distribute.DistributedValues)
    ]
    strategies = [(each, each._distribution_strategy) for each in optimizers]
    default = distribute_lib._get_default_replica_mode()
    distribute_lib._push_per_thread_mode(default)
    try:
        for variable, value in distributed:
            (variable._value,) = value.values
        for optimizer in optimizers:
            optimizer._distribution_strategy = default.strategy
        yield
    finally:
        for variable, value in distributed:
            variable._value = value
        for optimizer, strategy in strategies:
            optimizer._distribution_strategy = strategy
        distribute_lib._pop_per_thread_mode()


def _for_loaders(method: Callable) -> Callable:
    """Returns `fit` or `evaluate` with its arguments obeyed, or refused, for a Loader too.

    Keras drops targets and weights, without a word, beside a data adapter passed ready-made.
    """
    signature = inspect.signature(method)

    @functools.wraps(method)
    def wrapper(*args, **kwargs):
        call = signature.bind(*args, **kwargs)
        loader, test = call.arguments.get("x"), call.arguments.get("validation_data")
        if not isinstance(loader, Loader):
            return method(*args, **kwargs)
        for name in ("y", "sample_weight"):
            if call.arguments.get(name) is not None:
                raise UserError(f"{name} beside a loader, which brings its own; leave it out")
        if isinstance(test, Loader):
            check_same_classes(loader, test)
        with loader.class_weights(call.arguments.pop("class_weight", None)):
            return method(*call.args, **call.kwargs)

    return wrapper
