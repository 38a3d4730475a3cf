"""How the replicas of this process run one step: whole, in parts, or split around the sum.

Each function here traces the step of one batch into the function of tfaccel/step/functions.py,
which says what a step consists of.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfaccel.keras_internals import stateful
from tfaccel.keras_internals.layer_paths import layer_paths
from tfaccel.keras_internals.one_replica import as_replica, reading_as
from tfaccel.keras_internals.replica import InXla, Replica
from tfaccel.keras_internals.variables import in_order, value_of
from tfaccel.keras_internals.written import changed_after
from tfaccel.step import finite, in_xla, labels, loss_scale, sharded_update
from tfaccel.step import totals as totals_lib
from tfaccel.step.remat.choose import Remat
from tfaccel.step.totals import ROWS_UNIT, Layout, Span, Totals


def from_deferred(step: Callable, make_batch: Callable | None, *, trains: bool) -> Callable:
    """Returns the step as a function of deferred batches, if there is a `make_batch`."""
    if make_batch is None:
        return step

    # Not a `partial`: TensorFlow would pass `trains`, which is a default in its signature.
    def in_a_row(inputs, shared):
        return _in_a_row(step, make_batch, inputs, shared, trains=trains)

    return in_a_row


def _in_a_row(
    step: Callable, make_batch: Callable, inputs: dict, shared: dict, *, trains: bool
) -> dict:
    """Makes batches and runs a step on each: see `_Step.in_a_row`."""
    num_steps = next(iter(inputs.values())).shape[0]

    # This is traced before the loop that calls it, because the loop needs the shapes of its logs.
    @functools.partial(tf.function, autograph=False)
    def step_of(index):
        own = {name: each[index] for name, each in inputs.items()}
        logs = dict(step(make_batch({**own, **shared})))
        return logs, logs.pop(finite.LOG, tf.constant(finite.FINE, tf.int64))

    index = tf.constant(0)
    traced = step_of.get_concrete_function(index)
    specs, _ = traced.structured_outputs
    variables = in_order(traced.graph) if trains else ()
    small = [each for each in variables if each.trainable and finite.is_small(each)]
    nothing = tf.nest.map_structure(lambda each: tf.zeros(each.shape, each.dtype), specs)
    codes = tf.TensorArray(tf.int64, num_steps, element_shape=())

    def run_step(index, codes, before):
        logs, code = step_of(index)
        code = changed_after(small, code)
        for name in filter(loss_scale.is_skipped, logs):
            logs[name] += before[name]
        return index + 1, codes.write(index, code), logs

    # XLA knows the length of the loop, so a GPU need not ask the host whether to continue. (It may
    # ask whether to update, if XLA leaves the update a branch.)
    _, codes, logs = tf.while_loop(
        lambda index, *_: index < num_steps, run_step, (index, codes, nothing)
    )
    return logs | {finite.LOG: codes.stack()}


def on_changed(change: Callable, step: Callable, pass_: Callable, replica: Replica) -> tuple:
    """Returns `step` and `pass_` on batches that `change` has changed, before they are cut."""
    return (
        lambda batch: step(change(replica, batch)),
        lambda each, batch, **settings: pass_(each, change(each, batch), **settings),
    )


def whole_step(
    model,
    step,
    replica: Replica,
    batch,
    *,
    xla: bool,
    updates_in_xla: bool,
    trains: bool,
    remat: Remat,
) -> dict:
    """Runs the model's own step: with one replica there is nothing to sum."""
    with (
        as_replica(model, replica),
        layer_paths(xla=xla, all_reduce=None, **replica.layer_kernels),
        remat.in_step(xla=xla),
    ):
        if not trains:
            return labels.named(step(batch), trains=False)
        # If XLA compiles the whole step, it compiles the update with it.
        compile_ = functools.partial(compiled, replica) if updates_in_xla and not xla else None
        logs = finite.watched(model, step, batch, xla=xla, compile_=compile_)
        return labels.named(logs, trains=True)


def accumulating_step(
    model, pass_, replica: Replica, batch, *, xla: bool, updates_in_xla: bool, within: bool
) -> dict:
    """Runs the parts of one replica's batch, sums them, and updates once."""
    with as_replica(model, replica):
        compile_ = functools.partial(compiled, replica) if updates_in_xla and not xla else None
        watch = finite.Watch(model, xla=xla, compile_=compile_) if within else None
        totals = pass_(replica, batch, apply=None if watch is None else watch.apply)

        def update(tensors, metrics_before):
            summed, in_xla = totals.with_tensors(tensors), xla or updates_in_xla
            return _update(model, summed, metrics_before, trains=True, xla=in_xla, watch=watch)

        if compile_ is not None and watch is None:
            update = compile_(update)
        return update(totals.tensors(), totals.metrics_before)


def split_step(
    model,
    replicas: list[Replica],
    steps: list[Callable],
    arguments: list[tuple],
    *,
    tell_rows: bool,
    rows_of_all: Sequence[int] | None = None,
    run: Callable | None = None,
) -> list[dict]:
    """Runs each replica's step on its device, and returns the logs of every replica.

    All logs are returned, because TensorFlow does not run what a function need not return. `run`
    calls the replicas' functions in another way than one after the other. With `tell_rows` each
    step also gets the numbers of rows of all replicas' batches: `rows_of_all`, or those of
    `arguments` if the replicas are all of this process.
    """
    is_deferred = len(arguments[0]) > 1  # deferred batches are full
    stand_in = None if is_deferred else totals_lib.stand_in_of([own for (own,) in arguments])
    if is_deferred:
        stateful.note_equal_cut(model, num_replicas=replicas[0].num_replicas)
    else:
        counts = [totals_lib.num_rows(own) for (own,) in arguments]
        stateful.note_cut(model, counts, num_replicas=replicas[0].num_replicas)
        if tell_rows:
            arguments = [(own, tuple(rows_of_all or counts)) for (own,) in arguments]
    more = () if stand_in is None else (stand_in,)
    calls = [
        functools.partial(step, *own, *more) for step, own in zip(steps, arguments, strict=True)
    ]
    return (run or on_each)(replicas, calls)


def on_each(replicas: Sequence[Replica], calls: Sequence[Callable]) -> list:
    """Calls each replica's function on its device; the results are to be returned."""
    results = []
    for replica, call in zip(replicas, calls, strict=True):
        with tf.device(replica.device):
            results.append(call())
    return results


def replica_step(
    model,
    pass_,
    replica: Replica,
    *,
    gradients_as: str | None,
    make_batch: Callable | None,
    xla: bool,
    updates_in_xla: bool,
    trains: bool,
    within: bool,
    shards: bool,
) -> Callable:
    """Returns one replica's step among several: its pass, the sum over replicas, and its update.

    The function takes the replica's batch, deferred or not. A second argument is the row that
    stands in for a batch without rows, if zeros will not do. Every replica's function must be
    called in one `tf.function`, on its device. `shards` says whether the optimizers are sharded
    (sharded_update.py).
    """
    if shards and trains:
        made = functools.partial(_sharded_step, model, pass_, replica, gradients_as=gradients_as)
        settings = {"xla": xla, "updates_in_xla": updates_in_xla, "within": within}
        return made(make_batch=make_batch, **settings)
    # If values are joined within the step, gradients are checked where they are applied.
    compile_ = functools.partial(compiled, replica) if updates_in_xla and not xla else None
    updates_in_xla = (updates_in_xla or xla) and not within
    in_one_function = xla and replica.reduces_in_xla
    bucket_bytes = bucket_bytes_of(replica, in_xla=in_one_function)
    layout = watch = updates = None  # known once the pass is traced

    def forward_backward(batch, stand_in=None, collectives=None):
        nonlocal layout, watch, updates
        with as_replica(model, replica):
            watch = finite.Watch(model, xla=xla, compile_=compile_) if within and trains else None
            apply = None if watch is None else watch.apply
            settings = {"stand_in": stand_in, "apply": apply, "collectives": collectives}
            totals = pass_(replica, batch, **settings)
        layout = Layout(totals, gradients_as=gradients_as, bucket_bytes=bucket_bytes)
        updates = totals.updates
        return layout.pack(totals), totals.metrics_before, updates.inputs.take_sent()

    def update(buffers, metrics_before, gathered):
        with as_replica(model, replica):
            totals, spans = layout.unpack(buffers)
            settings = {"trains": trains, "xla": updates_in_xla, "watch": watch}
            return _update(model, totals, metrics_before, spans, gathered, **settings)

    def whole(batch, rows=None):
        in_order = InXla(replica)
        buffers, metrics_before, sent = forward_backward(batch, collectives=in_order)
        if rows is None:  # all batches are full
            rows = [totals_lib.num_rows(batch)] * replica.num_replicas
        all_reduce = in_order.all_reduce if within else replica.all_reduce_in_xla
        sums = all_reduce([*buffers, *updates.inputs.in_place(sent, rows)])
        return update(sums[: len(buffers)], metrics_before, sums[len(buffers) :])

    def in_parts(*batch):
        buffers, metrics_before, sent = forward_backward(*batch)
        sums = [replica.all_reduce(each) for each in buffers]
        return update(sums, metrics_before, updates.inputs.gathered(sent))

    if in_one_function:
        return compiled(replica, from_deferred(whole, make_batch, trains=trains))
    if xla:  # else it is traced into the caller's graph, where batch norm can sum over replicas
        forward_backward = compiled(replica, forward_backward)
    if updates_in_xla:
        update = compiled(replica, update)
    return in_parts


def _sharded_step(
    model,
    pass_,
    replica: Replica,
    *,
    gradients_as: str | None,
    make_batch: Callable | None,
    xla: bool,
    updates_in_xla: bool,
    within: bool,
) -> Callable:
    """Returns one replica's training step, as `replica_step` does, with sharded optimizers."""
    in_one_function = xla and replica.reduces_in_xla
    bucket_bytes = sharded_update.bucket_bytes_of(replica, in_xla=in_one_function)
    compiles = updates_in_xla or (xla and not within)
    compile_ = functools.partial(compiled, replica) if compiles and not in_one_function else None
    layout = scattered = watch = updates = None  # known once the pass is traced

    def watch_of(collectives: Replica | InXla) -> finite.Watch:
        settings = {"xla": in_one_function, "compile_": compile_, "bucket_bytes": bucket_bytes}
        return sharded_update.ShardedWatch(model, collectives, replica, **settings)

    def forward_backward(batch, stand_in=None, collectives=None):
        nonlocal layout, scattered, watch, updates
        with as_replica(model, replica):
            watch = watch_of(collectives or replica) if within else None
            apply = None if watch is None else watch.apply
            settings = {"stand_in": stand_in, "apply": apply, "collectives": collectives}
            totals = pass_(replica, batch, **settings)
        settings = {"gradients_as": gradients_as, "bucket_bytes": bucket_bytes}
        more = {"num_replicas": replica.num_replicas}
        scattered = sharded_update.ScatteredGradients(totals, **settings, **more)
        gradients, totals = totals.gradients, dataclasses.replace(totals, gradients=[])
        layout = Layout(totals, **settings)
        updates = totals.updates
        matrices = scattered.pack(gradients)
        return matrices, layout.pack(totals), totals.metrics_before, updates.inputs.take_sent()

    def update(own, sums, metrics_before, gathered, collectives: Replica | InXla):
        with as_replica(model, replica):
            totals, _ = layout.unpack(sums)
            gradients, spans = scattered.unpack(own)
            totals = dataclasses.replace(totals, gradients=gradients)
            settings = {"trains": True, "watch": watch or watch_of(collectives)}
            settings["xla"] = in_one_function
            return _update(model, totals, metrics_before, spans, gathered, **settings)

    def whole(batch, rows=None):
        in_order = InXla(replica)
        matrices, vectors, metrics_before, sent = forward_backward(batch, collectives=in_order)
        if rows is None:  # all batches are full
            rows = [totals_lib.num_rows(batch)] * replica.num_replicas
        own = [in_order.reduce_scatter(each) for each in matrices]
        sums = in_order.all_reduce([*vectors, *updates.inputs.in_place(sent, rows)])
        sums, gathered = sums[: len(vectors)], sums[len(vectors) :]
        return update(own, sums, metrics_before, gathered, in_order)

    def in_parts(*batch):
        matrices, vectors, metrics_before, sent = forward_backward(*batch)
        own = [replica.reduce_scatter(each) for each in matrices]
        sums = [replica.all_reduce(each) for each in vectors]
        return update(own, sums, metrics_before, updates.inputs.gathered(sent), replica)

    if in_one_function:
        return compiled(replica, from_deferred(whole, make_batch, trains=True))
    if xla:  # else it is traced into the caller's graph, where batch norm can sum over replicas
        forward_backward = compiled(replica, forward_backward)
    return in_parts


def bucket_bytes_of(replica: Replica, *, in_xla: bool) -> int | None:
    """Returns the most bytes of gradients that a replica sends at once; None for all of a dtype.

    Args:
      replica: the replica.
      in_xla: whether XLA sums within the step, and so cuts the vectors itself.
    """
    return totals_lib.BUCKET_BYTES if replica.is_of_workers and not in_xla else None


def compiled(replica: Replica, function: Callable) -> Callable:
    """Returns a function that XLA compiles, once its operations are known to XLA."""
    checked = in_xla.checked(function, on_gpu=replica.is_gpu)
    return tf.function(checked, autograph=False, jit_compile=True)


def _update(
    model,
    totals: Totals,
    metrics_before: list[tf.Tensor],
    spans: Sequence[Span] = (),
    gathered: Sequence[tf.Tensor] = (),
    *,
    trains: bool,
    xla: bool,
    watch: finite.Watch | None = None,
) -> dict:
    """Applies the sums over all replicas to one replica's variables, and returns the step's logs.

    Args:
      model: the model, within `as_replica`.
      totals: the sums.
      metrics_before: this replica's own metrics before the step.
      spans: the gradients of `totals`, uncut, if they were unpacked from vectors.
      gathered: the rows of all replicas that metrics get.
      trains: whether to undo changes that are not finite. A test shows them.
      xla: whether XLA compiles what is traced.
      watch: the watch that applied gradients during the pass; None if they are in `totals`.
    """
    # If all rows are padding, the sums and the number of rows are 0. Do not divide by that 0.
    rows = tf.maximum(totals.rows, 1 / ROWS_UNIT)
    logs = {} if watch is None else watch.scale_logs()
    watch = finite.Watch(model, xla=xla) if watch is None else watch

    def mean(gradients: tf.Tensor) -> tf.Tensor:
        return gradients / tf.cast(rows, gradients.dtype)

    if totals.gradients:
        # Check the means, which are applied: a large sum divided by few rows may be infinite.
        with watch.updates([each._replace(values=mean(each.values)) for each in spans]):
            model.optimizer.apply([mean(each) for each in totals.gradients], totals.gradients_of)
        logs = watch.scale_logs()
    changes = _changed(totals, rows)
    states, updates = totals.metrics, totals.updates
    states = updates.settled(totals.rows, states, totals.numbers, gathered)
    if trains:
        watch.put_back(changes + [each for each in totals.kept if each[1].dtype.is_floating])
        spoilt = watch.spoilt(model.metrics_variables, totals.metrics_before, states)
        finite.put_back_where(spoilt, model.metrics_variables, metrics_before)
        pairs = zip(totals.metrics_before, states, strict=True)
        states = [tf.where(spoilt, old, new) for old, new in pairs]
        logs[finite.LOG] = watch.code()
    with reading_as(model.metrics_variables, states):
        # In the context, because a metric may return its own variable, as in Keras's guide.
        results = tf.nest.map_structure(tf.convert_to_tensor, model.get_metrics_result())
        named = updates.results(totals.logs.keys() - results.keys())
        totals.results.update(named)
        results |= named
    # A log without a metric is a value that the step returned. Return its mean over the rows.
    own = {
        name: results[name] if name in totals.results and name in results else value / rows
        for name, value in totals.logs.items()
    }
    return labels.named(own | logs, trains=trains)


def _changed(totals: Totals, rows: tf.Tensor) -> list[tuple]:
    """Changes the untrained variables; returns (variable, value before) for the floating ones."""
    before = []
    for variable, change in zip(totals.changes_of, totals.changes, strict=True):
        value = tf.identity(value_of(variable))
        if change.dtype.is_floating:
            before.append((variable, value))
            if variable.aggregation != "sum":
                change /= tf.cast(rows, change.dtype)
        variable.assign(tf.cast(totals_lib.as_number(value) + change, value.dtype))
    return before
