"""The functions that `fit`, `evaluate` and `predict` call for each execution.

Takes a compiled model; sets them on it. Keras makes its own only where these are not set.

    set_functions(model, strategy, StepConfig(), xla=True)

On one replica the model's own `train_step` is one function: forward, backward, loss scaling,
clipping and update. On several, the order is what makes N replicas equal one device:

  1. each replica, one XLA function: forward and backward on its rows; each gradient is that of the
     mean over the rows, of the scaled loss, and is multiplied by the number of rows;
  2. between the replicas: gradients, moving statistics, metrics and the rows are summed, packed in
     one buffer per dtype;
  3. each replica, one XLA function, on the same sums and so with the same result: division by the
     rows of all, finite check, unscaling, clipping, update or skip, change of the loss scale.

On the GPUs of one process the three are one XLA function, which has a collective of its own: the
GPU goes from one to the next by itself. On the CPU XLA has none; and of several processes only
TensorFlow's collectives can be broken off, by those whose peer has died. Nor does the host wait
then until a step is done. The replicas' functions meet in that sum alone and need none of
TensorFlow's order of side effects, by which what one GPU returns comes after all have ended: a step
took 49 ms for 43 (40 dense layers of 4,096, batch 4,096, two H100s, 2026-11-26).

What is not finite is applied on no number of replicas (tfaccel/step/finite.py says what);
`model.train_function.nonfinite` has what was found.

Gradients of an Embedding, which are slices, are made dense before the sum. (Where a batch has an id
twice, stock Keras's Adam squares each slice; the square of their sum is what a dense layer gets.)

A finite check or a clip before the sum would be of a part of the gradient: stock Keras's are
(weights become -inf where only replica 1 overflows; 30 and -10 clipped to 1 make 0 instead of 1).
"""

import contextlib
import functools
import itertools
import logging
import operator
import time
from collections.abc import Callable, Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfaccel.common.run_log import summary
from tfaccel.config import StepConfig
from tfaccel.data.deferred import Deferred
from tfaccel.keras_internals.function_names import alike, own_numbers
from tfaccel.keras_internals.layer_paths import layer_paths
from tfaccel.keras_internals.model_view import every_optimizer, is_synchronized
from tfaccel.keras_internals.one_replica import as_replica, metrics_as
from tfaccel.keras_internals.replica import Replica, local_batches, local_replicas
from tfaccel.keras_internals.traced import UNORDERED
from tfaccel.keras_internals.variables import value_of
from tfaccel.step import finite, in_xla, labels, mixing, padding
from tfaccel.step import totals as totals_lib
from tfaccel.step.recoverable import Recoverable
from tfaccel.step.totals import ROWS_UNIT, Layout, Span, Totals

log = logging.getLogger("tfaccel")


def set_functions(model, strategy, config: StepConfig, *, xla: bool) -> None:
    """Sets the functions that `fit`, `evaluate` and `predict` call for each execution.

    Keras makes its own only where these are not set, and unsets them in `compile`.
    """
    replicas = local_replicas(strategy)
    several = strategy.num_replicas_in_sync > 1
    synchronized = several and is_synchronized(model)
    if synchronized and xla:
        summary("step: training without XLA, because synchronized batch norm sums inside it")
    elif several and xla and len(every_optimizer(model)) > 1:
        summary("step: training without XLA, because each of several optimizers sums inside it")
    choose = functools.partial(in_xla.Choice, model, said=set())
    sums_within = synchronized or (several and len(every_optimizer(model)) > 1)
    choices = [choose(wanted=each) for each in (xla and not sums_within, xla, xla)]
    for each in choices:
        each.layers()
    trains, tests, predicts = choices
    make = functools.partial(_Step, model, strategy, config)
    seen = functools.partial(labels.watched, are_probabilities=config.mixes_labels)
    train = make(seen(model.train_step), replicas, choice=trains, updates_in_xla=xla, trains=True)
    test = make(seen(model.test_step), replicas, choice=tests, updates_in_xla=xla, trains=False)
    log.info(
        "step: %s, %s XLA%s",
        _in_words(replicas, xla=trains.on),
        "with" if trains.on else "without",
        f", in {config.accumulation_steps} parts" if config.accumulation_steps > 1 else "",
    )

    model.train_function = Execution(model, train)
    model.test_function = Execution(model, test)
    model.predict_function = _Predict(model, strategy, replicas, predicts)


def _in_words(replicas: list[Replica], *, xla: bool) -> str:
    """Returns, for the log, how the step is cut into functions."""
    num_replicas = replicas[0].num_replicas
    if num_replicas == 1:
        return "one function"
    if xla and replicas[0].reduces_in_xla:
        return f"one function with the sum over {num_replicas} replicas"
    return f"split around the sum over {num_replicas} replicas"


class Execution:
    """The steps of one execution, as a function of an iterator over batches.

    Attributes:
      launched: makes the logs that Keras is given, of the logs and codes of an execution that the
        device still works at; None to give it those.
      kept: takes the codes of all launches; None to keep those of the last execution alone.
    """

    launched: Callable[[dict, Sequence[tf.Tensor]], dict] | None = None
    kept: list[tf.Tensor] | None = None

    def __init__(self, model, step: "_Step"):
        """Takes what makes one step of a batch, and the model, which says how many are made."""
        self._model, self._step = model, step
        self._found = []

    @property
    def xla(self) -> bool:
        """Whether XLA compiles the steps, as far as is known: see tfaccel/step/in_xla.py."""
        return self._step.choice.on

    @property
    def without_xla(self) -> str | None:
        """Why XLA does not, where it was asked for."""
        return self._step.choice.reason

    def __call__(self, iterator: Iterator) -> dict:
        """Returns the logs of the last step, and `skipped_steps` of all.

        Raises:
          StopIteration: there is no batch.
          Exception: whatever `launched` raises.
        """
        logs = self._launch(iterator)
        return logs if self.launched is None else self.launched(logs, self._found)

    def _launch(self, iterator: Iterator) -> dict:
        found, skipped, logs = [], [], None
        for logs in self._launches(iterator):
            found.append(logs.pop(finite.LOG, None))
            skipped += [logs["skipped_steps"]] if "skipped_steps" in logs else []
        if logs is None:
            raise StopIteration
        self._found = found
        if self.kept is not None:
            self.kept += found
        if skipped:
            # Of tensors alone: to bring a number to the GPU is to wait for what it is doing.
            logs["skipped_steps"] = functools.reduce(operator.add, skipped)
        return logs

    def _launches(self, iterator: Iterator) -> Iterator[dict]:
        """Yields the logs of an execution's launches, of several steps each where that can be."""
        padded, num_steps = getattr(iterator, "pads", False), self._model.steps_per_execution
        done = 0
        while done < num_steps:
            deferred = self.take(iterator)
            if deferred is None:
                break
            done += len(deferred[0])
            logs = self._step.in_a_row(deferred, padded=padded)
            del deferred  # before the next ones are taken: they are many megabytes
            yield logs
        if not done:
            for batch in itertools.islice(iterator, num_steps):
                yield self._step(batch, padded=padded)

    def take(self, iterator: Iterator) -> list[Deferred] | None:
        """Returns each replica's batches of a launch of several of an execution's steps; or None.

        None also at the end of an epoch.
        """
        num_steps = self._model.steps_per_execution
        if num_steps == 1 or not self._step.can_be_in_a_row or not hasattr(iterator, "take"):
            return None
        # A test is not worth the compilation of what is left over at its end.
        return iterator.take(num_steps, may_wait=self.xla and self._step.trains)

    @property
    def nonfinite(self) -> np.ndarray:
        """What the last execution's steps of training found: [steps], a `Watch.code` for each.

        Reading it waits for the device, and copies one small array from it.
        """
        if not self._found:
            return np.zeros(0, np.int64)
        join = tf.concat if self._found[0].shape.rank else tf.stack  # of launches, or of steps
        return join(self._found, axis=0).numpy()


class _Step:
    """A training or test step over this process's replicas, as a function of a batch."""

    def __init__(
        self,
        model,
        strategy,
        config,
        step,
        replicas,
        *,
        choice: in_xla.Choice,
        updates_in_xla: bool,
        trains: bool,
    ):
        self._model, self._strategy, self._replicas = model, strategy, replicas
        self._several = strategy.num_replicas_in_sync > 1
        self._always_padded, self.trains = config.zero_weight_is_padding, trains
        self.choice = choice
        self._updates_in_xla = updates_in_xla and trains and self.updates_on_gpu
        self._make = functools.partial(
            _make, model, strategy, config, step, replicas, trains=trains
        )
        self._numbers = own_numbers()  # now: `fit` may come before `evaluate`, or after it
        # For padded batches and for others, one by one and in a row: most models need one alone.
        self._made = {}
        self._lengths = set()  # of launches of several steps, so far

    @property
    def updates_on_gpu(self) -> bool:
        """Whether an update by XLA is worth its compilation: on a CPU it is not."""
        return self._replicas[0].is_gpu

    @property
    def can_be_in_a_row(self) -> bool:
        """Whether several steps can be one function, as far as is known."""
        return not self._several or self._sums_in_xla

    @property
    def _sums_in_xla(self) -> bool:
        return self.choice.on and self._replicas[0].reduces_in_xla

    def __call__(self, batch, *, padded: bool) -> dict:
        batches = local_batches(self._strategy, batch, len(self._replicas))

        def run():
            step = self._function(padded, None)
            with self._saying_if_traced(step, batches[0]):
                if self._several:
                    return step([(each,) for each in batches])[0]  # all are alike
                return step(batches[0])

        return self.choice.run(run, batches, forget=self._made.clear)

    def in_a_row(self, deferred: list[Deferred], *, padded: bool) -> dict:
        """Steps on each of the replicas' batches, made or taken there, in one function of each.

        Returns:
          The logs of the last step, `skipped_steps` of all, and each one's code, [steps].
        """

        def run():
            if not self.can_be_in_a_row:
                return self._one_by_one(deferred, padded=padded)
            step = self._function(padded, deferred[0].make)  # that of all is equal
            self._say_if_shorter(len(deferred[0]))
            arguments = [(dict(each.inputs), dict(each.shared)) for each in deferred]
            return step(arguments)[0] if self._several else step(*arguments[0])

        inputs = [dict(each.inputs) for each in deferred]
        return self.choice.run(run, inputs, forget=self._made.clear)

    def _one_by_one(self, deferred: list[Deferred], *, padded: bool) -> dict:
        """Does the same where a step cannot be one function: XLA turned out to lack some of it."""
        step, codes, skipped = self._function(padded, None), [], []
        for index in range(len(deferred[0])):
            arguments = []
            for replica, each in zip(self._replicas, deferred, strict=True):
                with tf.device(replica.device):
                    arguments.append((each.at(index),))
            logs = dict(step(arguments)[0])
            codes.append(logs.pop(finite.LOG, tf.constant(finite.FINE, tf.int64)))
            skipped += [logs["skipped_steps"]] if "skipped_steps" in logs else []
        if skipped:
            logs["skipped_steps"] = functools.reduce(operator.add, skipped)
        return logs | {finite.LOG: tf.stack(codes)}

    @contextlib.contextmanager
    def _saying_if_traced(self, step: Callable, batch) -> Iterator[None]:
        """Warns where a step is made again, because a batch has other shapes than those before."""
        count = step.__wrapped__.experimental_get_tracing_count
        before, began = count(), time.perf_counter()
        yield
        if before and count() > before:
            shapes = [each.shape for each in tf.nest.flatten(batch) if hasattr(each, "shape")]
            log.warning(
                "step: made again in %.1f s, for a batch of the shapes %s: each new one costs that "
                "once; pad batches, or drop the last one of an epoch",
                time.perf_counter() - began,
                ", ".join(map(str, shapes)),
            )

    def _say_if_shorter(self, num_steps: int) -> None:
        """Says why what is left over of an epoch takes long, before it does."""
        if self._lengths and num_steps not in self._lengths:
            log.info(
                "step: compiled once more, for a launch of %d where others have %d; let "
                "steps_per_execution divide the steps of an epoch",
                num_steps,
                max(self._lengths),
            )
        self._lengths.add(num_steps)

    def _function(self, padded: bool, make_batch: Callable | None) -> Callable:
        padded = padded or self._always_padded
        if (padded, make_batch) not in self._made:
            made = self._make(
                padded=padded,
                make_batch=make_batch,
                xla=self.choice.on,
                updates_in_xla=self._updates_in_xla,
            )
            self._made[padded, make_batch] = alike(self._compile(made), self._numbers)
        return self._made[padded, make_batch]

    def _compile(self, made: Callable) -> Callable:
        xla = self.choice.on
        is_compiled = xla and not self._several
        if is_compiled:
            made = in_xla.checked(made, on_gpu=self._replicas[0].is_gpu)
        compile_ = functools.partial(
            tf.function,
            autograph=False,
            jit_compile=is_compiled,
            experimental_attributes=UNORDERED if self._sums_in_xla else None,
        )
        if xla or self._updates_in_xla:
            return Recoverable(compile_, made, self._model)
        return compile_(made)


def _make(
    model,
    strategy,
    config,
    step,
    replicas,
    *,
    padded: bool,
    make_batch,
    xla: bool,
    updates_in_xla: bool,
    trains: bool,
):
    """Returns the step as a function of every local replica's batch, or of the only one's.

    Where batches are made in it, by `make_batch`, it is one of what is deferred, for several steps.
    """
    parts = config.accumulation_steps if trains else 1
    if padded:
        step = padding.leave_out_padding(model, step)
    weigh = functools.partial(totals_lib.weight_of, padding=padded)
    pass_ = functools.partial(
        totals_lib.make_totals, model, step, weigh=weigh, parts=parts, xla=xla
    )
    if config.mixes_labels or (trains and config.cutout_pixels):
        change = mixing.mixed(model, config) if trains else mixing.as_probabilities(model)
        step, pass_ = _on_changed(change, step, pass_, replicas[0])
    if strategy.num_replicas_in_sync > 1:
        wire = "float16" if config.float16_allreduce else None
        settings = {"gradients_as": wire, "make_batch": make_batch, "trains": trains}
        settings |= {"xla": xla, "updates_in_xla": updates_in_xla}
        settings["at_once"] = trains and parts == 1 and len(every_optimizer(model)) > 1
        steps = [_ReplicaStep(model, pass_, each, **settings) for each in replicas]
        return functools.partial(_split_step, steps)
    if parts > 1:
        whole = functools.partial(
            _accumulating_step, model, pass_, replicas[0], xla=xla, updates_in_xla=updates_in_xla
        )
    else:
        whole = functools.partial(
            _whole_step,
            model,
            step,
            replicas[0],
            xla=xla,
            updates_in_xla=updates_in_xla,
            trains=trains,
        )
    return _of_deferred(whole, make_batch)


def _of_deferred(step: Callable, make_batch: Callable | None) -> Callable:
    """Returns the step as a function of what `make_batch` makes batches of, where it is given."""
    return step if make_batch is None else functools.partial(_in_a_row, step, make_batch)


def _in_a_row(step: Callable, make_batch: Callable, inputs: dict, shared: dict) -> dict:
    """Steps on batches that are made here: see `_Step.in_a_row`."""
    num_steps = next(iter(inputs.values())).shape[0]

    # Traced once, for its logs, before the loop that it is part of.
    @functools.partial(tf.function, autograph=False)
    def step_of(index):
        own = {name: each[index] for name, each in inputs.items()}
        logs = dict(step(make_batch({**own, **shared})))
        return logs, logs.pop(finite.LOG, tf.constant(finite.FINE, tf.int64))

    index = tf.constant(0)
    specs, _ = step_of.get_concrete_function(index).structured_outputs
    nothing = tf.nest.map_structure(lambda each: tf.zeros(each.shape, each.dtype), specs)
    codes = tf.TensorArray(tf.int64, num_steps, element_shape=())

    def go_on(index, codes, before):
        logs, code = step_of(index)
        if "skipped_steps" in logs:
            logs["skipped_steps"] += before["skipped_steps"]
        return index + 1, codes.write(index, code), logs

    # XLA knows the loop's length: a GPU need not ask the host whether to go on. (It may ask whether
    # to update, where XLA leaves that a branch.)
    _, codes, logs = tf.while_loop(
        lambda index, *_: index < num_steps, go_on, (index, codes, nothing)
    )
    return logs | {finite.LOG: codes.stack()}


def _on_changed(change: Callable, step: Callable, pass_: Callable, replica: Replica) -> tuple:
    """Returns both, on batches that `change` has changed: whole ones, not yet cut in parts."""
    return (
        lambda batch: step(change(replica, batch)),
        lambda each, batch, **settings: pass_(each, change(each, batch), **settings),
    )


def _whole_step(
    model, step, replica: Replica, batch, *, xla: bool, updates_in_xla: bool, trains: bool
) -> dict:
    """One replica, nothing to sum: the model's own step, as it is."""
    with as_replica(model, replica), layer_paths(xla=xla, all_reduce=None):
        if not trains:
            return labels.named(step(batch), trains=False)
        # Within what XLA compiles, it compiles the update too.
        compile_ = functools.partial(_compiled, replica) if updates_in_xla and not xla else None
        logs = finite.watched(model, step, batch, xla=xla, compile_=compile_)
        return labels.named(logs, trains=True)


def _accumulating_step(
    model, pass_, replica: Replica, batch, *, xla: bool, updates_in_xla: bool
) -> dict:
    """One replica, its batch in parts: their sum, then one update."""
    with as_replica(model, replica):
        totals = pass_(replica, batch)

        def update(tensors, metrics_before):
            summed, in_xla = totals.with_tensors(tensors), xla or updates_in_xla
            return _update(model, summed, metrics_before, trains=True, xla=in_xla)

        if updates_in_xla and not xla:
            update = _compiled(replica, update)
        return update(totals.tensors(), totals.metrics_before)


def _split_step(steps: list["_ReplicaStep"], arguments: list[tuple]) -> list[dict]:
    """Several replicas: each one's pass, the sum over all, each one's update; returns all logs.

    Of each replica, on its device: what a function does not return it need not run.
    """
    logs = []
    is_deferred = len(arguments[0]) > 1  # and of full batches
    stand_in = None if is_deferred else totals_lib.stand_in_of([own for (own,) in arguments])
    for step, own in zip(steps, arguments, strict=True):
        with tf.device(step.replica.device):
            logs.append(step(*own) if stand_in is None else step(*own, stand_in))
    return logs


class _ReplicaStep:
    """One replica's step among several: its pass, the sum over replicas, and its update."""

    def __init__(
        self,
        model,
        pass_,
        replica: Replica,
        *,
        gradients_as: str | None,
        make_batch: Callable | None,
        xla: bool,
        updates_in_xla: bool,
        trains: bool,
        at_once: bool,
    ):
        self.replica = replica
        # What is applied at once is looked at in the function that it is applied in.
        updates_in_xla = (updates_in_xla or xla) and not at_once
        layout = watch = None  # known once the pass is traced

        def forward_backward(batch, stand_in=None):
            nonlocal layout, watch
            with as_replica(model, replica):
                watch = finite.Watch(model, xla=xla) if at_once else None
                more = {"apply": watch.apply} if at_once else {}
                totals = pass_(replica, batch, stand_in=stand_in, **more)
            layout = Layout(totals, gradients_as=gradients_as)
            return layout.pack(totals), totals.metrics_before

        def update(buffers, metrics_before):
            with as_replica(model, replica):
                totals, spans = layout.unpack(buffers)
                return _update(
                    model,
                    totals,
                    metrics_before,
                    spans,
                    trains=trains,
                    xla=updates_in_xla,
                    watch=watch,
                )

        def whole(batch):
            buffers, metrics_before = forward_backward(batch)
            return update(replica.all_reduce_in_xla(buffers), metrics_before)

        def in_parts(*batch):
            buffers, metrics_before = forward_backward(*batch)
            return update([replica.all_reduce(each) for each in buffers], metrics_before)

        if xla and replica.reduces_in_xla:
            self._step = _compiled(replica, _of_deferred(whole, make_batch))
        else:
            if xla:  # else it is traced into the caller's graph, where batch norm's sums may be
                forward_backward = _compiled(replica, forward_backward)
            if updates_in_xla:
                update = _compiled(replica, update)
            self._step = in_parts

    def __call__(self, *batch) -> dict:
        """Returns the step's logs; for every replica in one `tf.function`, on its device.

        Args:
          *batch: it, or what it is deferred to; behind it, the row that stands in where it has
            none, if zeros will not do.
        """
        return self._step(*batch)


def _compiled(replica: Replica, function: Callable) -> Callable:
    checked = in_xla.checked(function, on_gpu=replica.is_gpu)
    return tf.function(checked, autograph=False, jit_compile=True)


def _update(
    model,
    totals: Totals,
    metrics_before: list[tf.Tensor],
    spans: Sequence[Span] = (),
    *,
    trains: bool,
    xla: bool,
    watch: finite.Watch | None = None,
) -> dict:
    """Applies the sums over all replicas to this one's variables, and returns the step's logs.

    Args:
      model: within `as_replica`.
      totals: the sums.
      metrics_before: this replica's own metrics before the step.
      spans: the gradients of `totals`, uncut, where they came out of vectors.
      trains: whether what is not finite is left out: in a test it is for all to see.
      xla: whether XLA compiles what is traced.
      watch: that saw gradients which were applied at once; None where none were.
    """
    # Where all rows are padding, there are none, and the sums are 0: no NaN shall come of them.
    rows = tf.maximum(totals.rows, 1 / ROWS_UNIT)
    logs = {} if watch is None else watch.scale_logs()
    watch = finite.Watch(model, xla=xla) if watch is None else watch

    def mean(gradients: tf.Tensor) -> tf.Tensor:
        return gradients / tf.cast(rows, gradients.dtype)

    if totals.gradients:
        # What is looked at is what is applied: few rows may make infinity of a large sum.
        with watch.updates([each._replace(values=mean(each.values)) for each in spans]):
            model.optimizer.apply([mean(each) for each in totals.gradients], totals.gradients_of)
        logs = watch.scale_logs()
    changes = _changed(totals, rows)
    metrics = totals.metrics
    if trains:
        watch.put_back(changes)
        spoilt = watch.spoilt(model.metrics_variables, totals.metrics_before, metrics)
        finite.put_back_where(spoilt, model.metrics_variables, metrics_before)
        pairs = zip(totals.metrics_before, metrics, strict=True)
        metrics = [tf.where(spoilt, old, new) for old, new in pairs]
        logs[finite.LOG] = watch.code()
    with metrics_as(model, metrics):
        # Within: a metric may give a variable of its own, as Keras's guide has it.
        results = tf.nest.map_structure(tf.convert_to_tensor, model.get_metrics_result())
    # A log that no metric is of is the step's own value: its mean over rows.
    own = {name: results.get(name, value / rows) for name, value in totals.logs.items()}
    return labels.named(own | logs, trains=trains)


def _changed(totals: Totals, rows: tf.Tensor) -> list[tuple]:
    """Changes the variables that are not trained; returns (variable, value before) of floats."""
    before = []
    for variable, change in zip(totals.changes_of, totals.changes, strict=True):
        value = tf.identity(value_of(variable))
        if change.dtype.is_floating:
            before.append((variable, value))
            if variable.aggregation != "sum":
                change /= tf.cast(rows, change.dtype)
        variable.assign(tf.cast(totals_lib.as_number(value) + change, value.dtype))
    return before


# Prediction.


class _Predict:
    """Prediction over all replicas, as a function of a list of batches; rows keep their order."""

    def __init__(self, model, strategy, replicas: list[Replica], choice: in_xla.Choice):
        self._model, self._strategy, self._replicas = model, strategy, replicas
        # A `predict_step` of the model's own may call its layers alone, and builds them itself.
        self._is_keras_step = type(model).predict_step is keras.Model.predict_step
        self._choice, self._numbers = choice, own_numbers()
        self._made = []  # the function, once it is needed

    def _run(self, parts: list) -> list:
        if not self._made:
            self._made.append(alike(self._make(xla=self._choice.on), self._numbers))
        return self._made[0](parts)

    def _make(self, *, xla: bool) -> Callable:
        """Returns prediction of a batch's parts, as a function."""
        model, replicas = self._model, self._replicas
        several_workers = self._strategy.num_replicas_in_sync > len(replicas)

        def predict(replica: Replica, batch):
            with (
                as_replica(model, replica),
                layer_paths(xla=xla, all_reduce=None),
            ):
                return model.predict_step(batch)

        def function_of(replica: Replica) -> Callable:
            own = functools.partial(predict, replica)
            return _compiled(replica, own) if xla else tf.function(own, autograph=False)

        functions = [function_of(each) for each in replicas]

        def run(batches):
            outputs, stand_in = [], totals_lib.stand_in_of(batches)
            for replica, function, batch in zip(replicas, functions, batches, strict=True):
                with tf.device(replica.device):
                    rows = _rows_of(function, batch, stand_in)
                    if several_workers:
                        rows = tf.nest.map_structure(replica.all_gather, rows)
                    outputs.append(rows)
            return outputs[:1] if several_workers else outputs

        compile_ = functools.partial(tf.function, autograph=False)
        return Recoverable(compile_, run, model) if xla else compile_(run)

    def __call__(self, batches: list):
        outputs = []
        for batch in batches:
            parts = local_batches(self._strategy, batch, len(self._replicas))
            if not self._model.built and self._is_keras_step:
                _build(self._model, parts[0])
            run = functools.partial(self._run, parts)
            outputs += self._choice.run(run, parts, forget=self._made.clear)
        return tf.nest.map_structure(lambda *each: tf.concat(each, axis=0), *outputs)


def _rows_of(function: Callable, batch, stand_in):
    """Returns the function's outputs on a batch that may have no rows."""
    if totals_lib.num_rows(batch) > 0:
        return function(batch)
    if stand_in is None:
        stand_in = tf.nest.map_structure(totals_lib.one_zero_row, batch)
    outputs = function(stand_in)
    return tf.nest.map_structure(lambda each: each[:0], outputs)


def _build(model, batch) -> None:
    """Creates the variables in the strategy's scope, as Keras does before `fit` and `evaluate`."""
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    with model.distribute_strategy.scope():
        model(keras.tree.map_structure(lambda each: keras.KerasTensor(each.shape, each.dtype), x))
