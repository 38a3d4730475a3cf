"""Extends Keras's `fit`, `evaluate` and `predict` of a compiled model.

Takes a compiled model. Its Keras methods then check their loaders, the replicas and the loss scale,
and report lost workers. That is also so if a model has its own `fit` that calls Keras's `fit`. The
model's own methods get only the arguments that the user gave.

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
from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf

from tfaccel.common.errors import UserError
from tfaccel.config import StepConfig
from tfaccel.data.distribute import Loader, check_same_classes
from tfaccel.keras_internals.callbacks import in_order, let_logs_be_results
from tfaccel.keras_internals.epoch_order import EpochOrder, next_input_in, one_iterator_a_pass
from tfaccel.keras_internals.keras_methods import around_keras
from tfaccel.keras_internals.model_view import (
    has_steps_of_keras,
    inputs_of,
    labels_for,
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
from tfaccel.step.loss_scale import is_log
from tfaccel.training import memory_forecast
from tfaccel.training.callbacks.ahead import Ahead, can_be_ahead, silenced, with_attributes
from tfaccel.training.callbacks.beats import Beats
from tfaccel.training.callbacks.early_stopping import never_best
from tfaccel.training.callbacks.finite import Finite, NonFiniteError
from tfaccel.training.callbacks.first_look import FirstLook
from tfaccel.training.callbacks.keras_writers import of_this_worker
from tfaccel.training.callbacks.loss_scale import LossScale
from tfaccel.training.callbacks.replica_audit import ReplicaAudit
from tfaccel.training.callbacks.trained_weights import TrainedWeights
from tfaccel.training.memory_errors import explained
from tfaccel.training.own_scaling import misfit, unscaled
from tfaccel.training.resume import flat, from_checkpoint

log = logging.getLogger("tfaccel")

EMPTY_SPARSE = "Serialized sparse should have at least 1 serialized tensor"
_TRAINS = weakref.WeakSet()  # the models of which a `fit` is running
NOT_IN_XLA = re.compile(r"No registered '(\w+)' OpKernel for XLA_")


def extend(
    model: keras.Model,
    config: StepConfig,
    *,
    guard: Callable,
    cluster: Cluster,
    at_start: Callable | None = None,
) -> None:
    """Wraps Keras's methods of this model.

    Args:
      model: compiled for a strategy.
      config: of the step; gives the floor of the loss scale, the steps between audits, and more.
      guard: makes a context for every call that involves other workers.
      cluster: tells how many workers there are, and which one this is.
      at_start: called when `fit` begins, with the model, the training data and the validation
        data; None to call nothing.
    """
    checking = functools.partial(_checking_loaders, counts=model, mixed=config.mixes_labels)
    # Two, because each notes what has been compiled.
    beats, by_batch = Beats(), Beats()
    quiet = functools.partial(_silent_off_chief, cluster=cluster)

    def fit(method):
        method = from_checkpoint(checking(quiet(method)), model, config)
        return _reporting_end(_with_callbacks(method, model, config, beats, cluster, at_start))

    def evaluate(method):
        method = _with_beats(quiet(one_iterator_a_pass(method, model)), beats)
        return _reporting_end(_naming_labels(checking(method), model, config))

    def predict(method):
        method = _without_padding(quiet(one_iterator_a_pass(method, model)))
        return _reporting_end(_checking_loaders(_with_beats(method, beats)))

    def train_on_batch(method):
        return _with_one_beat(
            by_batch.on_train_batch_begin, _with_stock_logs(method, model, config)
        )

    def test_on_batch(method):
        return _with_one_beat(by_batch.on_test_batch_begin, _naming_labels(method, model, config))

    def predict_on_batch(method):
        return _with_one_beat(by_batch.on_predict_batch_begin, method)

    for wrap in (fit, evaluate, predict, train_on_batch, test_on_batch, predict_on_batch):
        _wrap(model, wrap.__name__, wrap, config, guard)
    memory_forecast.watch(model, config)
    replicas = local_replicas(model.distribute_strategy)
    several = replicas[0].num_replicas > 1
    model.reset_metrics = functools.partial(reset_metrics, model, replicas)
    # If a step's logs are the metrics' results, Keras need not compute them again.
    are_results = several or has_steps_of_keras(model)
    let_logs_be_results(model, are_results)


def _wrap(model, name: str, wrap: Callable, config: StepConfig, guard: Callable) -> None:
    """Applies `wrap` to Keras's method of the model, and explains the errors of the result."""
    # `explained` is within the guard, which would look for a lost worker if memory is full.
    around_keras(
        model, name, lambda method: _guarded(explained(wrap(method), model, config), model, guard)
    )


def _with_arguments(method: Callable, change: Callable[[dict], None]) -> Callable:
    """Returns a method that lets `change` change its arguments, a dict by name."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def wrapper(*args, **kwargs):
        call = signature.bind(*args, **kwargs)
        change(call.arguments)
        return method(*call.args, **call.kwargs)

    return wrapper


def _without_padding(predict: Callable) -> Callable:
    """Returns `predict` without the outputs of a loader's padding rows."""
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


def _with_stock_logs(train_on_batch: Callable, model, config: StepConfig) -> Callable:
    """Returns `train_on_batch` with only Keras's own values, because its list has no names."""
    signature = inspect.signature(train_on_batch)
    finite = Finite(config.nonfinite)
    finite.set_model(model)

    @functools.wraps(train_on_batch)
    def wrapper(*args, **kwargs):
        call = signature.bind(*args, **kwargs)
        as_dict = call.arguments.get("return_dict", False)
        call.arguments["return_dict"] = True
        with silenced(model):
            logs = train_on_batch(*call.args, **call.kwargs)
        finite.on_train_batch_end(0)
        logs = {name: logs[name] for name in logs if not is_log(name)}
        return logs if as_dict else in_order(model, logs)

    return wrapper


def _naming_labels(test: Callable, model, config: StepConfig) -> Callable:
    """Returns a test method that, like `fit`, names a label beyond the model's outputs.

    Raises:
      NonFiniteError: there is such a label, and it makes the loss or a metric infinite or NaN. If
        `nonfinite` is "skip", this is a warning.
    """

    @functools.wraps(test)
    def wrapper(*args, **kwargs):
        execution = model.test_function
        if not hasattr(type(execution), "kept"):
            return test(*args, **kwargs)  # stock Keras's step
        with with_attributes(execution, kept=[]):
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


def _with_one_beat(begins: Callable[[int], None], on_batch: Callable) -> Callable:
    """Returns a method of one batch that begins with a beat for the launcher."""
    return _with_arguments(on_batch, lambda _: begins(0))


def _reporting_end(method: Callable) -> Callable:
    """Returns a method that reports its end to the launcher, because the script's code follows."""

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
                        "a batch of sparse tensors has fewer rows than there are replicas, and "
                        "TensorFlow cannot divide it among them; drop such a last batch "
                        "(batch(..., drop_remainder=True)), or make the tensors dense"
                    ) from error
                if not (lacking := NOT_IN_XLA.search(str(error))):
                    raise
                raise UserError(
                    f"XLA does not support an operation of this model ({lacking[1]}); use "
                    "tfaccel.setup(xla=False), or, if it augments images, such as RandomRotation, "
                    "let the loader do that (augment=...)"
                ) from error
            except tf.errors.UnimplementedError as error:
                # With XLA, the gradient of Keras's max pooling has no deterministic form
                # (2026-11-21). It is used in three dimensions, and for large windows.
                if "deterministic" not in error.message:
                    raise
                raise UserError(
                    "deterministic=True, but an operation of this model has no deterministic form "
                    f"here ({error.message.splitlines()[0]}); use xla=False or "
                    "deterministic=False"
                ) from error
            # When a worker is lost, NCCL breaks off its sums, and they end like complete ones. So
            # the outcome counts only after all workers have answered.
            of_workers(np.zeros(1), model.distribute_strategy)
            return outcome

    return wrapper


def _silent_off_chief(method: Callable, *, cluster: Cluster) -> Callable:
    """Returns a method that shows its progress only on the chief, unless `verbose` is given."""
    if cluster.num_workers == 1:
        return method
    on_chief = 1 if sys.stdout.isatty() else 2  # a bar, or a line for each epoch
    usual = on_chief if cluster.is_chief else 0

    def set_verbose(arguments: dict) -> None:
        if arguments.get("verbose", "auto") == "auto":
            arguments["verbose"] = usual

    return _with_arguments(method, set_verbose)


def _with_callbacks(
    fit: Callable,
    model,
    config: StepConfig,
    beats: Beats,
    cluster: Cluster,
    at_start: Callable | None,
) -> Callable:
    """Returns `fit` with tfaccel's callbacks before the user's."""
    signature = inspect.signature(fit)
    finite = Finite(config.nonfinite)
    several = model.distribute_strategy.num_replicas_in_sync > 1
    audits = [ReplicaAudit(config.audit_steps)] if several else []
    each_batch = [LossScale(config.loss_scale_floor), finite, *audits]
    looks = [FirstLook(at_start)] if at_start else []
    # An eager step reads `trainable` in each call.
    weights = [] if runs_eagerly(model) else [TrainedWeights()]
    ours = [*each_batch, beats, *looks, *weights]

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
        # Each call has its own, because a callback of `fit` may call `fit`. `can_be_ahead` must be
        # the same on all workers, so it sees the callbacks before `of_this_worker`.
        ahead, is_ahead = Ahead(*each_batch), can_be_ahead(model, theirs)
        theirs = of_this_worker(theirs, cluster)
        loader = x if isinstance(x, Loader) else None
        order = EpochOrder(
            model, loader=loader, steps_per_epoch=call.arguments.get("steps_per_epoch")
        )
        # Ours come first, so that the user's callbacks see what ours add to the logs.
        together = [
            order,
            *((ahead,) if is_ahead else each_batch),
            beats,
            *looks,
            *weights,
            *theirs,
        ]
        if is_list:
            given.callbacks[:] = together
            given.set_model(model)
        else:
            call.arguments["callbacks"] = together
        with contextlib.ExitStack() as during:  # only during `fit`, to free the loader after it
            for each in (finite, beats, *audits):
                during.enter_context(with_attributes(each, loader=loader))
            for each in looks:
                reads = x, call.arguments.get("validation_data")
                during.enter_context(with_attributes(each, reads=reads))
            during.enter_context(never_best(theirs))
            during.enter_context(_in_training(model))
            if loader is None:
                during.enter_context(next_input_in(order))
            during.enter_context(ahead.of(model) if is_ahead else silenced(model))
            return fit(*call.args, **call.kwargs)

    return wrapper


@contextlib.contextmanager
def _in_training(model: keras.Model) -> Iterator[None]:
    """Notes during the context that the model trains; a callback of `fit` may train it, too."""
    if model in _TRAINS:
        yield
        return
    _TRAINS.add(model)
    try:
        yield
    finally:
        _TRAINS.discard(model)


def check_is_not_training(model: keras.Model) -> None:
    """Raises UserError if `fit` of the model is running, which would go on with the old step."""
    if model in _TRAINS:
        raise UserError(
            f"run.compile of model {model.name} while its fit runs, for example in a callback; "
            "end this fit, call run.compile, and go on with another: model.fit(..., "
            "initial_epoch=3, epochs=6)"
        )


def _with_beats(method: Callable, beats: Beats) -> Callable:
    """Returns `evaluate` or `predict` with a beat for the launcher in each batch."""

    def add_beats(arguments: dict) -> None:
        given = arguments.get("callbacks")
        if not isinstance(given, keras.callbacks.CallbackList):  # `fit` gives one that has beats
            arguments["callbacks"] = [beats, *keras.tree.flatten(given or [])]

    return _with_arguments(method, add_beats)


def _checking_loaders(
    method: Callable, *, counts: keras.Model | None = None, mixed: bool = False
) -> Callable:
    """Returns a method that checks its data, and applies class_weight to a loader.

    It refuses arguments that a loader has itself. Keras silently ignores targets and weights if x
    is a data adapter.

    Args:
      method: of a model.
      counts: the model, if the method computes loss and metrics, which exclude padding rows.
      mixed: whether the step turns labels into probabilities.
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
                raise UserError(f"{name} together with a loader, which has its own; remove {name}")
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
                # After `loader.start_at`, the epoch is shorter than Keras expects.
                warnings.filterwarnings("ignore", "Your input ran out of data")
            return method(*call.args, **call.kwargs)

    return wrapper


def _check_trained_classes(model: keras.Model, loader: Loader, *, trains: bool) -> None:
    """Notes the classes on which a model is trained, or checks the loader's classes against them.

    Raises:
      UserError: the loader numbers its classes differently than the data of the last `fit`.
    """
    if trains and loader.class_names:
        _TRAINED_ON[model] = loader.class_names
    check_same_classes(_TRAINED_ON.get(model, ()), loader.class_names)


_TRAINED_ON = weakref.WeakKeyDictionary()  # the class names of the last `fit` with a loader


def _check_batches(dataset: tf.data.Dataset) -> None:
    """Raises UserError if the data set is not batched, because replicas share a batch's rows."""
    specs = tf.nest.flatten(dataset.element_spec)
    shapes = [each.shape for each in specs if isinstance(each, tf.TensorSpec)]
    if any(each.rank == 0 for each in shapes):
        raise UserError(
            "the data set is not batched: its elements have the shapes "
            f"{', '.join(map(str, shapes))}; call dataset.batch(batch_size)"
        )


def _check_inputs(model: keras.Model, loader: Loader) -> None:
    """Raises UserError if the loader's images and the model's input have different sizes."""
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
            "change the model's keras.Input, or the loader's image_size and channels"
        )


def _warn_of_scale(model: keras.Model, loader: Loader) -> None:
    """Warns, once for each loader, if the model scales its pixels twice, or not at all."""
    if id(model) in loader.warned_of:
        return
    loader.warned_of.add(id(model))
    wrong = misfit(model, loader.pixel_range)
    optimizer = getattr(model, "optimizer", None)
    if not wrong and (optimizer is None or not int(optimizer.iterations)):  # not trained yet
        wrong = unscaled(model, loader.pixel_range)
    if wrong:
        log.warning("data: %s", wrong)


def _check_outputs(model: keras.Model, loader: Loader, *, mixed: bool) -> None:
    """Raises UserError if the outputs do not suit the labels.

    With more classes than outputs the loss would be NaN. Keras might broadcast several labels.
    """
    labels = mixed or takes_labels(model)
    declared = outputs_of(model)
    given = tf.nest.flatten(loader.element_spec[1:2])  # images may come alone
    several = loader.class_names or labels_for(model) == "regression"
    if several and len(declared) == 1 and len(given) == 1 and len(given[0].shape) == 2:
        count, num_outputs = given[0].shape[1], declared[0].shape[-1]
        if count != num_outputs:
            raise UserError(
                f"model {model.name} gives {num_outputs} outputs, but each example of the loader "
                f"has {count} labels; give its last layer {count} outputs"
            )
        return
    if not (labels and loader.class_names and len(declared) == 1):
        return
    num_outputs = declared[0].shape[-1]
    if num_outputs is not None and num_outputs < len(loader.class_names):
        raise UserError(
            f"model {model.name} gives {num_outputs} outputs, but the data have "
            f"{len(loader.class_names)} classes; give its last layer {len(loader.class_names)} "
            "outputs"
        )
