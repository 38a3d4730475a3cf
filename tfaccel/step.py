"""One training, test and predict step, compiled, on any number of replicas.

Takes a Keras model and what `model.compile` takes; gives the model compiled, with its step
functions set. `fit`, `evaluate` and `predict` stay Keras's own.

    compile_model(model, strategy, StepConfig(), xla=True, optimizer="adamw", loss=...)

On one replica the model's own `train_step` is one function: forward, backward, loss scaling,
clipping and update. On several, the order is what makes N replicas equal one device:

  1. each replica, one XLA function: forward and backward on its rows; each gradient is that of the
     mean over the rows, of the scaled loss, and is multiplied by the number of rows;
  2. between the replicas, outside XLA (its CPU and GPU compilers know no TensorFlow collective):
     gradients, moving statistics, metrics and the rows are summed, packed in one buffer per dtype;
  3. each replica, one XLA function, on the same sums and so with the same result: division by the
     rows of all, finite check, unscaling, clipping, update or skip, change of the loss scale.

Gradients of an Embedding, which are slices, are made dense before the sum. (Where a batch has an id
twice, stock Keras's Adam squares each slice; the square of their sum is what a dense layer gets.)

A finite check or a clip before the sum would be of a part of the gradient: stock Keras's are
(weights become -inf where only replica 1 overflows; 30 and -10 clipped to 1 make 0 instead of 1).
"""

import dataclasses
import functools
import inspect
import itertools
import logging
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from tfaccel import batch_norm, seam
from tfaccel.config import StepConfig
from tfaccel.errors import UserError, did_you_mean
from tfaccel.seam import Replica

log = logging.getLogger("tfaccel")

# A gradient times its replica's rows, in this unit of rows, stays of the gradient's own size (so
# that float16 can hold it); a power of two, so that the unit costs no precision.
ROWS_UNIT = 256.0


def compile_model(
    model: keras.Model,
    strategy: tf.distribute.Strategy,
    config: StepConfig,
    *,
    xla: bool,
    **compile_args,
) -> None:
    """Compiles `model` for `strategy`.

    Args:
      model: built in `strategy.scope()`.
      strategy: a MirroredStrategy or MultiWorkerMirroredStrategy.
      config: what a step does beside Keras's.
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
    num_replicas = strategy.num_replicas_in_sync
    with strategy.scope():
        optimizer = keras.optimizers.get(compile_args.pop("optimizer", "rmsprop"))
        scaled = compile_args.pop("auto_scale_loss", True)
        optimizer = _scale_loss(optimizer, model, config) if scaled else optimizer
        _adopt(optimizer, strategy)
        model.compile(optimizer, **compile_args, auto_scale_loss=False, jit_compile=False)
    if config.sync_batchnorm:
        layers = batch_norm.convert(model)
        log.info("batch norm: %d layers take their statistics over all replicas", len(layers))
    if num_replicas > 1:
        _refuse_what_would_be_wrong(model, config, num_replicas)
    if config.zero_weight_is_padding:
        _refuse_what_counts_padding(model)
    model._maybe_symbolic_build = seam.build_from_specs(model)
    if compile_args.get("run_eagerly"):
        log.info("step: stock Keras, without XLA, because run_eagerly asks for it")
    else:
        _set_functions(model, strategy, config, xla=xla)


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


# What the model is compiled with.


def _scale_loss(optimizer, model, config: StepConfig):
    """Returns the optimizer with the loss scaling that float16 gradients need, and says which."""
    if model.dtype_policy.name != "mixed_float16":
        if config.loss_scale != "dynamic":
            log.warning(
                "loss scale: not used, because the model's dtype policy is %s; it is for "
                "mixed_float16",
                model.dtype_policy.name,
            )
        return optimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        log.info("loss scale: that of the LossScaleOptimizer that was given")
        return optimizer
    if config.loss_scale == "dynamic" and optimizer.loss_scale_factor is None:
        log.info(
            "loss scale: dynamic, from %g, doubled after %d good steps",
            config.loss_scale_initial,
            config.loss_scale_growth_steps,
        )
        return keras.optimizers.LossScaleOptimizer(
            optimizer,
            initial_scale=config.loss_scale_initial,
            dynamic_growth_steps=config.loss_scale_growth_steps,
        )
    if config.loss_scale != "dynamic":
        optimizer.loss_scale_factor = config.loss_scale
    log.info("loss scale: always %g; no step is skipped", optimizer.loss_scale_factor)
    return optimizer


def _adopt(optimizer, strategy) -> None:
    """Makes an optimizer that was made outside the strategy's scope belong to it.

    `run.compile(model, optimizer=keras.optimizers.AdamW())` makes it outside. Its first variables,
    the iteration and the learning rate, are made again in the scope, so that it stays the object
    that the caller holds, with all that was set on it.
    """
    optimizers = seam.optimizers_of(optimizer)
    if all(each._distribution_strategy is strategy for each in optimizers):
        return
    for each in optimizers:
        if each.built:
            raise UserError(
                f"the optimizer {each.name} already has the state of another model; make a new one"
            )
    for variable in optimizer.variables:
        seam.adopt(variable, strategy)
    for each in optimizers:
        each._distribution_strategy = strategy


def _adopt_metrics(model, strategy) -> None:
    """Makes metrics belong to the strategy that were made outside its scope.

    `run.compile(model, metrics=[keras.metrics.AUC()])` makes one outside.
    """
    for variable in model.metrics_variables:
        if not seam.is_distributed(variable):
            seam.adopt(variable, strategy)


def _refuse_what_would_be_wrong(model, config: StepConfig, num_replicas: int) -> None:
    """Raises for what cannot give on several replicas what one device gives."""
    if model.run_eagerly:
        raise UserError(
            f"run_eagerly with {num_replicas} replicas; to run a step's Python, use one replica "
            "(gpu_ids=[0])"
        )
    if config.accumulation_steps > 1 and _is_synchronized(model):
        raise UserError(
            f"accumulation_steps={config.accumulation_steps} with synchronized batch norm: its "
            "statistics would be of a part of the rows after all; use one of the two"
        )
    for loss in _losses(model):
        reduction = getattr(loss, "reduction", "sum_over_batch_size")
        if reduction not in ("sum_over_batch_size", "mean"):
            raise UserError(
                f"the loss {loss.name} has reduction={reduction!r}; with {num_replicas} replicas "
                "use reduction='sum_over_batch_size', so that rows of all replicas weigh alike"
            )
    outside = [each for each in model.variables if not seam.is_distributed(each)]
    if outside:
        raise UserError(
            f"the variable {outside[0].path} was created outside the scope; build every layer in "
            "`with run.scope():`"
        )


def _refuse_what_counts_padding(model) -> None:
    """Raises for what cannot leave out padding rows."""
    if model.run_eagerly:
        raise UserError("run_eagerly is stock Keras's step: use it without zero_weight_is_padding")
    for loss in _losses(model):
        if getattr(loss, "reduction", "mean") in (None, "none"):
            raise UserError(
                f"the loss {loss.name} has reduction=None; with zero_weight_is_padding use "
                "'sum_over_batch_size'"
            )
    metrics = model._compile_metrics
    user = (metrics._user_metrics, metrics._user_weighted_metrics) if metrics else ()
    for metric in tf.nest.flatten(user):
        if isinstance(metric, keras.metrics.Metric) and not _takes_weights(metric.update_state):
            raise UserError(
                f"update_state of the metric {metric.name} has no parameter sample_weight; with "
                "zero_weight_is_padding it needs one, to leave out padding"
            )


def _takes_weights(update_state: Callable) -> bool:
    parameters = inspect.signature(update_state).parameters.values()
    return any(each.name == "sample_weight" or each.kind == each.VAR_KEYWORD for each in parameters)


def _is_synchronized(model) -> bool:
    return any(
        isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized
        for layer in model._flatten_layers()
    )


def _losses(model) -> list:
    return tf.nest.flatten(model._compile_loss._user_loss) if model._compile_loss else []


# The functions that Keras calls.


def _set_functions(model, strategy, config: StepConfig, *, xla: bool) -> None:
    """Sets the functions that `fit`, `evaluate` and `predict` call for each execution.

    Keras makes its own only where these are not set, and unsets them in `compile`.
    """
    replicas = seam.local_replicas(strategy)
    several = strategy.num_replicas_in_sync > 1
    synchronized = several and _is_synchronized(model)
    if synchronized and xla:
        log.info("step: training without XLA, because synchronized batch norm sums inside it")
    make = functools.partial(_Step, model, strategy, config)
    train = make(model.train_step, replicas, xla=xla and not synchronized, trains=True)
    test = make(model.test_step, replicas, xla=xla, trains=False)
    predict = _Predict(model, strategy, replicas, xla=xla)
    log.info(
        "step: %s, %s XLA%s",
        f"split around the sum over {strategy.num_replicas_in_sync} replicas"
        if several
        else "one function",
        "with" if xla else "without",
        f", in {config.accumulation_steps} parts" if config.accumulation_steps > 1 else "",
    )

    def run_steps(step: Callable, iterator: Iterator):
        logs = None
        skipped = 0
        for batch in itertools.islice(iterator, model.steps_per_execution):
            logs = step(batch)
            skipped += logs.get("skipped_steps", 0)
        if logs is None:
            raise StopIteration
        return logs | {"skipped_steps": skipped} if "skipped_steps" in logs else logs

    model.train_function = functools.partial(run_steps, train)
    model.test_function = functools.partial(run_steps, test)
    model.predict_function = predict


class _Step:
    """A training or test step over this process's replicas, as a function of a batch."""

    def __init__(self, model, strategy, config, step, replicas, *, xla: bool, trains: bool):
        self._model, self._strategy, self._replicas = model, strategy, replicas
        parts = config.accumulation_steps if trains else 1
        if config.zero_weight_is_padding:
            step = functools.partial(_without_padding, model, step)
        weigh = functools.partial(_weight, padding=config.zero_weight_is_padding)
        pass_ = functools.partial(_totals, model, step, weigh=weigh, parts=parts, xla=xla)
        if strategy.num_replicas_in_sync > 1:
            wire = "float16" if config.float16_allreduce else None
            halves = [_Halves(model, pass_, each, wire, xla=xla) for each in replicas]
            self._run = tf.function(functools.partial(_split_step, halves))
        elif parts > 1:
            self._run = tf.function(
                functools.partial(_accumulating_step, model, pass_, replicas[0]), jit_compile=xla
            )
        else:
            self._run = tf.function(
                functools.partial(_whole_step, model, step, replicas[0], xla=xla, trains=trains),
                jit_compile=xla,
            )

    def __call__(self, batch) -> dict:
        _adopt_metrics(self._model, self._strategy)
        batches = seam.local_batches(self._strategy, batch, len(self._replicas))
        return self._run(batches if self._strategy.num_replicas_in_sync > 1 else batches[0])


def _whole_step(model, step, replica: Replica, batch, *, xla: bool, trains: bool) -> dict:
    """One replica, nothing to sum: the model's own step, as it is."""
    with seam.as_replica(model, replica), seam.batch_norm_path(fused=not xla, all_reduce=None):
        return _with_scale_logs(model, lambda: step(batch), trains=trains)


def _without_padding(model, step, batch) -> dict:
    """Runs `step` on a batch of which loss and metrics count the real rows."""
    real = _real_rows(batch)
    if real is None:
        return step(batch)
    with seam.without_padding(model, real):
        return step(batch)


def _accumulating_step(model, pass_, replica: Replica, batch) -> dict:
    """One replica, its batch in parts: their sum, then one update."""
    with seam.as_replica(model, replica):
        totals = pass_(replica, batch)
        return _update(model, totals)


def _split_step(halves: list["_Halves"], batches: list) -> dict:
    """Several replicas: each one's pass, the sum over all, each one's update."""
    logs = []
    for half, batch in zip(halves, batches, strict=True):
        with tf.device(half.replica.device):
            buffers = half.forward_backward(batch)
            summed = [half.replica.all_reduce(each) for each in buffers]
            logs.append(half.update(summed))
    return logs[0]  # all are alike


class _Halves:
    """One replica's two functions: up to the sum over replicas, and after it."""

    def __init__(self, model, pass_, replica: Replica, gradients_as: str | None, *, xla: bool):
        self.replica = replica
        self._layout = None  # known once the first half is traced

        def forward_backward(batch):
            with seam.as_replica(model, replica):
                totals = pass_(replica, batch)
            self._layout = _Layout(totals, gradients_as=gradients_as)
            return self._layout.pack(totals)

        def update(buffers):
            with seam.as_replica(model, replica):
                return _update(model, self._layout.unpack(buffers))

        # Without XLA both are traced into the caller's graph, where batch norm's own sums may be.
        compiled = tf.function(jit_compile=True) if xla else lambda function: function
        self.forward_backward, self.update = compiled(forward_backward), compiled(update)


# A replica's pass over its rows.


@dataclasses.dataclass
class _Totals:
    """What a replica adds to the sums over all replicas.

    Attributes:
      rows: in units of ROWS_UNIT, float32.
      gradients: each of the mean over the rows, times `rows`.
      changes: of variables that are not trained, as batch norm's statistics: times `rows`. Of whole
        numbers, as random seeds, replica 0's alone.
      logs: what the step returned, times `rows`.
      metrics: the metrics' variables.
      gradients_of: the Keras variables of `gradients`.
      changes_of: the Keras variables of `changes`.
    """

    rows: tf.Tensor
    gradients: list[tf.Tensor]
    changes: list[tf.Tensor]
    logs: dict[str, tf.Tensor]
    metrics: list[tf.Tensor]
    gradients_of: list
    changes_of: list

    def tensors(self) -> list:
        """Returns what is summed over replicas, as one nest."""
        return [self.rows, self.gradients, self.changes, self.logs, self.metrics]

    def with_tensors(self, tensors: list) -> "_Totals":
        """Returns totals of the same variables with other values."""
        names = ("rows", "gradients", "changes", "logs", "metrics")
        return dataclasses.replace(self, **dict(zip(names, tensors, strict=True)))


def _totals(
    model, step, replica: Replica, batch, *, weigh: Callable, parts: int, xla: bool
) -> _Totals:
    """Runs `step` on this replica's rows, in `parts`; leaves all but the metrics as it was."""
    rows, weight = _num_rows(batch), weigh(batch)
    if rows == 0:
        # A partial batch that ends before this replica: a row of zeros stands in, weighing nothing.
        batch = tf.nest.map_structure(_one_zero_row, batch)
    metrics_before = [tf.identity(each._value) for each in model.metrics_variables]
    all_reduce = functools.partial(replica.all_reduce_in_forward, weight=weight)
    with (
        seam.recorded(model, replica) as recording,
        seam.batch_norm_path(
            fused=not xla, all_reduce=all_reduce if replica.num_replicas > 1 else None
        ),
    ):
        run_part = functools.partial(_part, step, recording, weigh)
        gradients, logs = (_compiled_parts if xla else _traced_parts)(run_part, batch, parts)

    own = {id(each) for each in model.metrics_variables}
    assigned = [each for each in recording.assigned() if id(each[0]) not in own]
    changes = [_change(variable, before, weight, replica) for variable, before in assigned]
    for variable, before in assigned:
        variable.assign(before)
    if rows == 0:
        for variable, before in zip(model.metrics_variables, metrics_before, strict=True):
            variable.assign(before)
        gradients, logs = tf.nest.map_structure(tf.zeros_like, (gradients, logs))
    return _Totals(
        rows=tf.convert_to_tensor(weight, tf.float32),
        gradients=gradients,
        changes=changes,
        logs=logs,
        metrics=[tf.identity(each._value) for each in model.metrics_variables],
        gradients_of=recording.trained,
        changes_of=[variable for variable, _ in assigned],
    )


def _part(step, recording: seam.Recording, weigh: Callable, batch):
    """Returns the gradients and logs of some rows, times their number."""
    logs = step(batch)
    weight = weigh(batch)
    gradients = [_times(each, weight) for each in recording.take_gradients()]
    return gradients, {
        name: _times(tf.cast(each, tf.float32), weight) for name, each in logs.items()
    }


def _traced_parts(run_part: Callable, batch, parts: int):
    """Sums `run_part` over the parts of a batch, each after the one before: one fits in memory."""
    edges = [_num_rows(batch) * index // parts for index in range(parts + 1)]
    sums = None
    for start, stop in itertools.pairwise(edges):
        if start == stop:
            continue
        rows = _rows(batch, start, stop - start)
        if sums is None:
            sums = run_part(rows)
        else:
            with tf.control_dependencies(tf.nest.flatten(sums)):
                rows = tf.nest.map_structure(_identity, rows)
            sums = tf.nest.map_structure(tf.add, sums, run_part(rows))
    return sums


def _compiled_parts(run_part: Callable, batch, parts: int):
    """The same as a loop, which XLA compiles once for all equal parts and runs one by one."""
    size = _num_rows(batch) // parts
    if parts == 1 or size == 0:
        return run_part(batch)

    def body(index, sums):
        part = run_part(_rows(batch, index * size, size))
        return index + 1, tf.nest.map_structure(tf.add, sums, part)

    first = run_part(_rows(batch, 0, size))
    _, sums = tf.while_loop(lambda index, _: index < parts, body, [tf.constant(1), first])
    if size * parts < _num_rows(batch):
        rest = run_part(_rows(batch, size * parts, _num_rows(batch) - size * parts))
        sums = tf.nest.map_structure(tf.add, sums, rest)
    return sums


def _rows(batch, start, size: int):
    """Returns `size` rows of every tensor; XLA needs their number, not their start, beforehand."""

    def cut(each):
        if each is None:
            return None
        rest = each.shape.rank - 1
        return tf.slice(each, [start, *[0] * rest], [size, *[-1] * rest])

    return tf.nest.map_structure(cut, batch)


def _change(variable, before: tf.Tensor, weight, replica: Replica) -> tf.Tensor:
    """Returns what this replica adds to the change of a variable that is not trained."""
    change = variable._value - before
    if before.dtype.is_floating:
        return _times(change, weight)
    return change if replica.index == 0 else tf.zeros_like(before)


def _times(value: tf.Tensor, weight: float | tf.Tensor) -> tf.Tensor:
    """Returns the value times the weight of its rows: 0 where none counts, even of NaN."""
    if isinstance(weight, tf.Tensor):
        product = value * tf.cast(weight, value.dtype)
        return tf.where(weight > 0, product, tf.zeros_like(value))
    return value * tf.cast(weight, value.dtype) if weight > 0 else tf.zeros_like(value)


def _weight(batch, *, padding: bool) -> float | tf.Tensor:
    """Returns the number of rows, in ROWS_UNIT; a tensor where some may be `padding`."""
    real = _real_rows(batch) if padding else None
    if real is None:
        return _num_rows(batch) / ROWS_UNIT
    return tf.reduce_sum(tf.cast(real, tf.float32)) / ROWS_UNIT


def _real_rows(batch) -> tf.Tensor | None:
    """Returns which rows are not padding, [rows] bool; None for a batch without sample weights."""
    _, _, weights = keras.utils.unpack_x_y_sample_weight(batch)
    real = [
        tf.reduce_any(tf.not_equal(each, 0), axis=list(range(1, each.shape.rank)))
        for each in tf.nest.flatten(weights)
        if each is not None
    ]
    return functools.reduce(tf.logical_or, real) if real else None


def _num_rows(batch) -> int:
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    rows = next(each for each in tf.nest.flatten(x) if each is not None).shape[0]
    if rows is None:
        raise UserError(
            "the number of rows of a batch is not known when the step is traced (a ragged tensor?);"
            " with several replicas or accumulation every batch needs one: use a dense tensor"
        )
    return rows


def _identity(each):
    return None if each is None else tf.identity(each)


def _one_zero_row(each):
    return None if each is None else tf.zeros((1, *each.shape[1:]), each.dtype)


# What follows the sums.


def _update(model, totals: _Totals) -> dict:
    """Applies the sums over all replicas to this one's variables, and returns the step's logs."""
    # Where all rows are padding, there are none, and the sums are 0: no NaN shall come of them.
    rows = tf.maximum(totals.rows, 1 / ROWS_UNIT)
    for variable, change in zip(totals.changes_of, totals.changes, strict=True):
        if change.dtype.is_floating:
            change /= tf.cast(rows, change.dtype)
        variable.assign(variable._value + change)

    def apply():
        if totals.gradients:
            model.optimizer.apply(
                [each / tf.cast(rows, each.dtype) for each in totals.gradients],
                totals.gradients_of,
            )
        with seam.metrics_as(model, totals.metrics):
            results = model.get_metrics_result()
        # A log that no metric is of is the step's own value: its mean over rows.
        return {name: results.get(name, value / rows) for name, value in totals.logs.items()}

    return _with_scale_logs(model, apply, trains=bool(totals.gradients))


def _with_scale_logs(model, update: Callable[[], dict], *, trains: bool) -> dict:
    """Returns the logs of `update` with the loss scale, and whether the update was skipped."""
    optimizer = model.optimizer
    if not trains or not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return update()
    counter = optimizer.inner_optimizer._iterations
    before = tf.identity(counter._value)
    logs = update()
    skipped = 1 - (tf.identity(counter._value) - before)
    return logs | {
        "loss_scale": tf.identity(optimizer.dynamic_scale._value),
        "skipped_steps": tf.cast(skipped, tf.int32),
    }


class _Layout:
    """How totals lie in a few vectors, one per dtype, so that few collectives carry them."""

    def __init__(self, totals: _Totals, *, gradients_as: str | None):
        """Lays out totals like these.

        Args:
          totals: of any replica: all have the same variables.
          gradients_as: dtype in which gradients travel; None for their own.
        """
        specs = tf.nest.map_structure(
            lambda each: tf.TensorSpec(each.shape, each.dtype), totals.tensors()
        )
        self._totals = totals.with_tensors(specs)  # no tensors: they belong to another graph
        gradients = {id(each) for each in self._totals.gradients}
        self._specs = tf.nest.flatten(specs)
        self._dtypes = [
            _travels_as(each.dtype, gradients_as if id(each) in gradients else None)
            for each in self._specs
        ]
        self._vectors = sorted(set(self._dtypes), key=str)

    def pack(self, totals: _Totals) -> list[tf.Tensor]:
        """Returns one vector per dtype."""
        flat = [
            tf.reshape(tf.cast(each, dtype), [-1])
            for each, dtype in zip(tf.nest.flatten(totals.tensors()), self._dtypes, strict=True)
        ]
        return [
            tf.concat([flat[index] for index in self._members(dtype)], axis=0)
            for dtype in self._vectors
        ]

    def unpack(self, vectors: list[tf.Tensor]) -> _Totals:
        """Returns the totals that lie in the vectors."""
        flat = [None] * len(self._specs)
        for dtype, vector in zip(self._vectors, vectors, strict=True):
            members = self._members(dtype)
            sizes = [self._specs[index].shape.num_elements() for index in members]
            for index, part in zip(members, tf.split(vector, sizes), strict=True):
                spec = self._specs[index]
                flat[index] = tf.cast(tf.reshape(part, spec.shape), spec.dtype)
        return self._totals.with_tensors(tf.nest.pack_sequence_as(self._totals.tensors(), flat))

    def _members(self, dtype) -> list[int]:
        return [index for index, each in enumerate(self._dtypes) if each == dtype]


def _travels_as(dtype: tf.DType, wanted: str | None) -> tf.DType:
    if wanted:
        return tf.as_dtype(wanted)
    # Collectives take no bool or small integer; float64 holds whole numbers up to 2**53.
    return dtype if dtype.is_floating else tf.float64


# Prediction.


class _Predict:
    """Prediction over all replicas, as a function of a list of batches; rows keep their order."""

    def __init__(self, model, strategy, replicas: list[Replica], *, xla: bool):
        self._model, self._strategy, self._replicas = model, strategy, replicas
        several_workers = strategy.num_replicas_in_sync > len(replicas)

        def predict(replica: Replica, batch):
            with (
                seam.as_replica(model, replica),
                seam.batch_norm_path(fused=not xla, all_reduce=None),
            ):
                return model.predict_step(batch)

        compiled = [
            tf.function(functools.partial(predict, each), jit_compile=xla) for each in replicas
        ]

        @tf.function
        def run(batches):
            outputs = []
            for replica, function, batch in zip(replicas, compiled, batches, strict=True):
                with tf.device(replica.device):
                    rows = _rows_of(function, batch)
                    if several_workers:
                        rows = tf.nest.map_structure(replica.all_gather, rows)
                    outputs.append(rows)
            return outputs[:1] if several_workers else outputs

        self._run = run

    def __call__(self, batches: list):
        outputs = []
        for batch in batches:
            parts = seam.local_batches(self._strategy, batch, len(self._replicas))
            if not self._model.built:
                _build(self._model, parts[0])
            outputs += self._run(parts)
        return tf.nest.map_structure(lambda *each: tf.concat(each, axis=0), *outputs)


def _rows_of(function: Callable, batch):
    """Returns the function's outputs on a batch that may have no rows."""
    if _num_rows(batch) > 0:
        return function(batch)
    outputs = function(tf.nest.map_structure(_one_zero_row, batch))
    return tf.nest.map_structure(lambda each: each[:0], outputs)


def _build(model, batch) -> None:
    """Creates the variables in the strategy's scope, as Keras does before `fit` and `evaluate`."""
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    with model.distribute_strategy.scope():
        model(keras.tree.map_structure(lambda each: keras.KerasTensor(each.shape, each.dtype), x))
