"""What `fit`, `evaluate` and `predict` of a compiled model do beside Keras's own.

Takes a compiled model. Where Keras's own `fit` and the like are entered for it, also by a `fit` of
the model's own, they obey a Loader's rules, watch the replicas and the loss scale, and answer for
lost workers. A model's own methods are given no argument that the user did not give.

    extend(model, StepConfig(), guard=watchdog.guard, cluster=cluster)
"""

import contextlib
import functools
import inspect
import logging
import re
import sys
import warnings
import weakref
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from tfaccel.common.errors import UserError
from tfaccel.config import StepConfig
from tfaccel.data.distribute import Loader, check_same_classes
from tfaccel.keras_internals.callbacks import in_order, let_logs_be_results
from tfaccel.keras_internals.epoch_order import EpochOrder, one_iterator_a_pass
from tfaccel.keras_internals.keras_methods import around_keras
from tfaccel.keras_internals.model_view import (
    has_steps_of_keras,
    inputs_of,
    outputs_of,
    runs_eagerly,
    takes_labels,
)
from tfaccel.keras_internals.one_replica import reset_metrics
from tfaccel.keras_internals.replica import local_replicas
from tfaccel.process import progress
from tfaccel.runtime.agreement import of_workers
from tfaccel.runtime.cluster import Cluster
from tfaccel.step import padding
from tfaccel.step.finite import FINE
from tfaccel.step.labels import REFUSED, beyond, sentence
from tfaccel.training.callbacks.ahead import Ahead, alone, can_be_ahead, having
from tfaccel.training.callbacks.beats import Beats
from tfaccel.training.callbacks.early_stopping import never_best
from tfaccel.training.callbacks.finite import Finite, NonFiniteError
from tfaccel.training.callbacks.first_look import FirstLook
from tfaccel.training.callbacks.keras_writers import of_this_worker
from tfaccel.training.callbacks.loss_scale import LossScale
from tfaccel.training.callbacks.replica_audit import ReplicaAudit
from tfaccel.training.memory_plan import explained
from tfaccel.training.own_scaling import misfit, unscaled
from tfaccel.training.resume import flat, from_checkpoint

log = logging.getLogger("tfaccel")

EMPTY_SPARSE = "Serialized sparse should have at least 1 serialized tensor"
NOT_IN_XLA = re.compile(r"No registered '(\w+)' OpKernel for XLA_")


def extend(
    model: keras.Model,
    config: StepConfig,
    *,
    guard: Callable,
    cluster: Cluster,
    at_start: Callable | None = None,
) -> None:
    """Puts all that around Keras's own methods, for this model.

    Args:
      model: compiled for a strategy.
      config: floor of the loss scale, and steps between audits.
      guard: makes the context of every call that other workers take part in.
      cluster: of how many workers, and which this is.
      at_start: called as `fit` begins, with the model, what `fit` reads and what it evaluates; None
        for nothing.
    """
    counting = functools.partial(_for_loaders, counts=model, mixed=config.mixes_labels)
    # Each knows what has been compiled.
    beats, by_batch = Beats(), Beats()
    quiet = functools.partial(_quiet, cluster=cluster)
    ours = {
        "fit": lambda fit: _as_call(
            _watched(
                from_checkpoint(counting(quiet(fit)), model, config),
                model,
                config,
                beats,
                cluster,
                at_start,
            )
        ),
        "evaluate": lambda evaluate: _as_call(
            _naming_labels(
                counting(_beating(quiet(one_iterator_a_pass(evaluate, model)), beats)),
                model,
                config,
            )
        ),
        "predict": lambda predict: _as_call(
            _for_loaders(
                _beating(_without_padding(quiet(one_iterator_a_pass(predict, model))), beats)
            )
        ),
        "train_on_batch": lambda train: _after(
            by_batch.on_train_batch_begin, _with_keras_logs(train, model, config)
        ),
        "test_on_batch": lambda test: _after(
            by_batch.on_test_batch_begin, _naming_labels(test, model, config)
        ),
        "predict_on_batch": functools.partial(_after, by_batch.on_predict_batch_begin),
    }
    for name, wrap in ours.items():
        _around(model, name, wrap, config, guard)
    replicas = local_replicas(model.distribute_strategy)
    several = replicas[0].num_replicas > 1
    model.reset_metrics = functools.partial(reset_metrics, model, replicas)
    # Where a step's logs are the metrics' results, Keras would work out those once more.
    are_results = not runs_eagerly(model) and (several or has_steps_of_keras(model))
    let_logs_be_results(model, are_results)


def _around(model, name: str, wrap: Callable, config: StepConfig, guard: Callable) -> None:
    """Puts `wrap` around the model's method as Keras has it, within what explains errors."""

    def wrapped(method):
        # Within the guard, or it would look for a lost worker where memory is full.
        return _guarded(explained(wrap(method), model, config), model, guard)

    around_keras(model, name, wrapped)


def _without_padding(predict: Callable) -> Callable:
    """Returns `predict`, which gives a Loader's rows less their padding."""
    signature = inspect.signature(predict)

    @functools.wraps(predict)
    def wrapper(*args, **kwargs):
        call = signature.bind(*args, **kwargs)
        loader = call.arguments["x"]
        if not isinstance(loader, Loader) or not loader.pads:
            return predict(*args, **kwargs)
        with loader.recorded_real() as real:
            outputs = predict(*args, **kwargs)
        real = np.concatenate(real)
        return keras.tree.map_structure(lambda each: each[real], outputs)

    return wrapper


def _with_keras_logs(train_on_batch: Callable, model, config: StepConfig) -> Callable:
    """Returns `train_on_batch` with Keras's own values alone: in its list the place tells which."""
    signature = inspect.signature(train_on_batch)
    finite = Finite(config.nonfinite)
    finite.set_model(model)

    @functools.wraps(train_on_batch)
    def wrapper(*args, **kwargs):
        call = signature.bind(*args, **kwargs)
        as_dict = call.arguments.get("return_dict", False)
        call.arguments["return_dict"] = True
        with alone(model):
            logs = train_on_batch(*call.args, **call.kwargs)
        finite.on_train_batch_end(0)
        logs = {name: logs[name] for name in logs if name not in ("loss_scale", "skipped_steps")}
        return logs if as_dict else in_order(model, logs)

    return wrapper


def _naming_labels(test: Callable, model, config: StepConfig) -> Callable:
    """Returns a method that tests, and names a label beyond the outputs, as `fit` does.

    Raises:
      NonFiniteError: there is one, and loss or a metric is not finite for it; a warning, where
        `nonfinite` is "skip".
    """

    @functools.wraps(test)
    def wrapper(*args, **kwargs):
        execution = model.test_function
        if not hasattr(type(execution), "kept"):
            return test(*args, **kwargs)  # stock Keras's step
        with having(execution, kept=[]):
            outcome, codes = test(*args, **kwargs), execution.kept
        results = np.hstack([np.ravel(each) for each in keras.tree.flatten(outcome)] or [[0.0]])
        if np.isfinite(results).all():
            return outcome
        codes = np.hstack([np.ravel(each) for each in codes] or [[]])
        faults = np.flatnonzero(codes != FINE)
        if len(faults):
            where = f" at step {faults[0] + 1} of the evaluation"
            what = beyond(int(codes[faults[0]]), where=where)
            if config.nonfinite != "skip":
                raise NonFiniteError(what)
            log.warning("step: %s", what)
        return outcome

    return wrapper


def _after(begins: Callable[[int], None], on_batch: Callable) -> Callable:
    """Returns a method of one batch, which begins with a beat."""

    @functools.wraps(on_batch)
    def wrapper(*args, **kwargs):
        begins(0)
        return on_batch(*args, **kwargs)

    return wrapper


def _as_call(method: Callable) -> Callable:
    """Returns a method whose end is told to the launcher: what follows is the script's own."""

    @functools.wraps(method)
    def wrapper(*args, **kwargs):
        with progress.call():
            return method(*args, **kwargs)

    return wrapper


def _guarded(method: Callable, model, guard: Callable) -> Callable:
    @functools.wraps(method)
    def wrapper(*args, **kwargs):
        with guard():
            try:
                outcome = method(*args, **kwargs)
            except tf.errors.InvalidArgumentError as error:
                if label := REFUSED.search(str(error)):
                    raise NonFiniteError(sentence(int(label[1]), int(label[2]))) from error
                if EMPTY_SPARSE in str(error):
                    raise UserError(
                        "a batch of sparse tensors has fewer rows than there are replicas, which "
                        "TensorFlow cannot cut for them; leave such a last batch out "
                        "(batch(..., drop_remainder=True)), or make the tensors dense"
                    ) from error
                if not (lacking := NOT_IN_XLA.search(str(error))):
                    raise
                raise UserError(
                    f"an operation of this model has no form for XLA ({lacking[1]}); use "
                    "tfaccel.setup(xla=False), or, where it augments images as RandomRotation "
                    "does, let the loader do that (augment=...)"
                ) from error
            except tf.errors.UnimplementedError as error:
                # With XLA that is so of max pooling's gradient (2026-11-21), where it is left to
                # Keras: in three dimensions, and in large windows.
                if "deterministic" not in error.message:
                    raise
                raise UserError(
                    "deterministic=True, but an operation of this model has no deterministic form "
                    f"here ({error.message.splitlines()[0]}); use xla=False, or leave it out"
                ) from error
            # A sum that NCCL broke off, because a worker was lost, ends like any other: what was
            # summed counts once all have answered.
            of_workers(np.zeros(1), model.distribute_strategy)
            return outcome

    return wrapper


def _quiet(method: Callable, *, cluster: Cluster) -> Callable:
    """Returns a method that says how far it is on the chief alone, unless it is told otherwise."""
    signature = inspect.signature(method)
    if cluster.num_workers == 1:
        return method
    in_lines = 1 if sys.stdout.isatty() else 2  # a bar, or a line for each epoch
    usual = in_lines if cluster.is_chief else 0

    @functools.wraps(method)
    def wrapper(*args, **kwargs):
        call = signature.bind(*args, **kwargs)
        if call.arguments.get("verbose", "auto") == "auto":
            call.arguments["verbose"] = usual
        return method(*call.args, **call.kwargs)

    return wrapper


def _watched(
    fit: Callable,
    model,
    config: StepConfig,
    beats: Beats,
    cluster: Cluster,
    at_start: Callable | None,
) -> Callable:
    """Returns `fit` with the callbacks that the replicas and the loss scale need."""
    signature = inspect.signature(fit)
    finite = Finite(config.nonfinite)
    several = model.distribute_strategy.num_replicas_in_sync > 1
    audits = [ReplicaAudit(config.audit_steps)] if several else []
    each_batch = [LossScale(config.loss_scale_floor), finite, *audits]
    looks = [FirstLook(at_start)] if at_start else []
    ours = [*each_batch, beats, *looks]

    @functools.wraps(fit)
    def wrapper(*args, **kwargs):
        call = signature.bind(*args, **kwargs)
        given, x = call.arguments.get("callbacks"), call.arguments.get("x")
        is_list = isinstance(given, keras.callbacks.CallbackList)
        theirs = [
            each
            for each in flat(given)
            if each not in ours and not isinstance(each, Ahead | EpochOrder)
        ]
        # Of each call its own: a callback may call `fit` within another.
        ahead, is_ahead = Ahead(*each_batch), can_be_ahead(model, theirs)  # alike on all workers
        theirs = of_this_worker(theirs, cluster)
        loader = x if isinstance(x, Loader) else None
        order = EpochOrder(
            model, loader=loader, steps_per_epoch=call.arguments.get("steps_per_epoch")
        )
        # Ours come first: what they write to the logs is for all others to see.
        together = [order, *((ahead,) if is_ahead else each_batch), beats, *looks, *theirs]
        if is_list:
            given.callbacks[:] = together
            given.set_model(model)
        else:
            call.arguments["callbacks"] = together
        with contextlib.ExitStack() as during:  # not after it, or they would hold the loader
            for each in (finite, beats, *audits):
                during.enter_context(having(each, loader=loader))
            for each in looks:
                reads = x, call.arguments.get("validation_data")
                during.enter_context(having(each, reads=reads))
            during.enter_context(never_best(theirs))
            if loader is None:
                during.enter_context(order.of_next_input())
            during.enter_context(ahead.of(model) if is_ahead else alone(model))
            return fit(*call.args, **call.kwargs)

    return wrapper


def _beating(method: Callable, beats: Beats) -> Callable:
    """Returns `evaluate` or `predict`, each of whose batches is a beat for the launcher."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def wrapper(*args, **kwargs):
        call = signature.bind(*args, **kwargs)
        given = call.arguments.get("callbacks")
        if not isinstance(given, keras.callbacks.CallbackList):  # of `fit`, which has them
            call.arguments["callbacks"] = [beats, *keras.tree.flatten(given or [])]
        return method(*call.args, **call.kwargs)

    return wrapper


def _for_loaders(
    method: Callable, *, counts: keras.Model | None = None, mixed: bool = False
) -> Callable:
    """Returns a method that takes class_weight for a Loader, and refuses what a Loader brings.

    Keras drops targets and weights, without a word, beside a data adapter passed ready-made.

    Args:
      method: of a model.
      counts: the model, where the method counts loss and metrics, of which padding is no part.
      mixed: whether the step makes probabilities of labels.
    """
    signature = inspect.signature(method)

    @functools.wraps(method)
    def wrapper(*args, **kwargs):
        call = signature.bind(*args, **kwargs)
        loader, test = call.arguments.get("x"), call.arguments.get("validation_data")
        for each in (loader, test):
            if isinstance(each, tf.data.Dataset):
                _check_batches(each)
        if not isinstance(loader, Loader):
            return method(*args, **kwargs)
        for name in ("y", "sample_weight", "batch_size"):
            if call.arguments.get(name) is not None:
                raise UserError(f"{name} beside a loader, which brings its own; leave it out")
        tests = [test] if isinstance(test, Loader) else []
        for each in (loader, *tests):
            each.check_workers()
            if counts:
                _check_inputs(counts, each)
                _warn_of_scale(counts, each)
                _check_outputs(counts, each, mixed=mixed)
            check_same_classes(loader.class_names, each.class_names)
        if counts:
            _check_trained_classes(counts, loader, trains="validation_data" in signature.parameters)
        if counts and any(each.pads for each in (loader, *tests)):
            padding.check(counts)
        with (
            contextlib.ExitStack() as known,
            loader.class_weights(call.arguments.pop("class_weight", None)),
            warnings.catch_warnings(),
        ):
            for each in (loader, *tests):
                known.enter_context(each.padding_left_out())
            if loader.begins_late:
                # Keras knows no epoch that begins at a later step, as after `loader.start_at`.
                warnings.filterwarnings("ignore", "Your input ran out of data")
            return method(*call.args, **call.kwargs)

    return wrapper


def _check_trained_classes(model: keras.Model, loader: Loader, *, trains: bool) -> None:
    """Notes the classes that a model is trained on.

    Raises:
      UserError: the model is not trained here, and was trained on classes of other numbers.
    """
    if trains and loader.class_names:
        _TRAINED_ON[model] = loader.class_names
    check_same_classes(_TRAINED_ON.get(model, ()), loader.class_names)


_TRAINED_ON = weakref.WeakKeyDictionary()  # the class names of the last `fit` with a loader


def _check_batches(dataset: tf.data.Dataset) -> None:
    """Raises UserError where some of an element has no rows: of a replica's part of none there."""
    specs = tf.nest.flatten(dataset.element_spec)
    shapes = [each.shape for each in specs if isinstance(each, tf.TensorSpec)]
    if any(each.rank == 0 for each in shapes):
        raise UserError(
            f"the data set gives examples, of the shapes {', '.join(map(str, shapes))}; give it in "
            "batches, as dataset.batch(rows)"
        )


def _check_inputs(model: keras.Model, loader: Loader) -> None:
    """Raises UserError where a batch has as many axes as the model takes, but of another size."""
    given = tf.nest.flatten(loader.element_spec[0])
    declared = inputs_of(model)
    if not (len(declared) == 1 and len(given) == 1):
        return
    has, takes = tuple(given[0].shape)[1:], tuple(declared[0].shape)[1:]
    if len(has) == len(takes) and any(
        None not in sizes and sizes[0] != sizes[1] for sizes in zip(has, takes, strict=True)
    ):
        raise UserError(
            f"the loader gives {has} {given[0].dtype.name}, but model {model.name} takes {takes}; "
            "make them alike: keras.Input of the one, or image_size and channels of the other"
        )


def _warn_of_scale(model: keras.Model, loader: Loader) -> None:
    """Warns once of a loader whose pixels the model would scale a second time, or never."""
    if id(model) in loader.warned_of:
        return
    loader.warned_of.add(id(model))
    wrong = misfit(model, loader.pixel_range)
    optimizer = getattr(model, "optimizer", None)
    if not wrong and (optimizer is None or not int(optimizer.iterations)):  # not yet trained here
        wrong = unscaled(model, loader.pixel_range)
    if wrong:
        log.warning("data: %s", wrong)


def _check_outputs(model: keras.Model, loader: Loader, *, mixed: bool) -> None:
    """Raises UserError where labels are above what the model gives: the loss would be NaN."""
    labels = mixed or takes_labels(model)
    declared = outputs_of(model)
    if not (labels and loader.class_names and len(declared) == 1):
        return
    num_outputs = declared[0].shape[-1]
    if num_outputs is not None and num_outputs < len(loader.class_names):
        raise UserError(
            f"model {model.name} gives {num_outputs} outputs, but the data have "
            f"{len(loader.class_names)} classes; give its last layer as many"
        )
