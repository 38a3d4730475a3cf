"""What Keras gives to callbacks, and how some of them compare a metric with its best value."""

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Sequence

import keras
from keras.src.callbacks.monitor_callback import MonitorCallback
from keras.src.utils import is_default
from keras.src.utils.python_utils import pythonify_logs


def sees_batches(callback: keras.callbacks.Callback) -> bool:
    """Returns whether a callback does something at the end of a batch."""
    hooks = callback.on_batch_end, callback.on_train_batch_end
    return not all(is_default(each) for each in hooks)


def python_logs(logs: dict) -> dict:
    """Returns logs as callbacks get them: Python numbers, and the logs of inner dicts beside."""
    return pythonify_logs(logs)


def in_order(model: keras.Model, logs: dict) -> list:
    """Returns the values of logs as `train_on_batch` lists them: the loss first."""
    return model._flatten_metrics_in_order(logs)


def let_logs_be_results(model: keras.Model, are_results: bool) -> None:
    """Tells Keras whether a step returns the results of all metrics.

    Args:
      model: compiled.
      are_results: If true, Keras takes the logs of an epoch as they are. If false, Keras computes
        the results of the metrics once more, if the logs have their names. A loss that the step
        computes and returns by itself stays that of the last step: Keras's mean of losses has not
        seen it, and would give 0.
    """
    keras_own = types.MethodType(type(model)._get_metrics_result_or_logs, model)

    def results(logs):
        found, tracker = keras_own(logs), model._loss_tracker
        of_loss = [each for each in model.metrics if each.name == tracker.name]
        if found is logs or of_loss != [tracker] or float(tracker.count):
            return found
        return found | {tracker.name: logs[tracker.name]}

    model._get_metrics_result_or_logs = (lambda logs: logs) if are_results else results


@contextlib.contextmanager
def before_epoch_logs(model: keras.Model, call: Callable[[dict], None]) -> Iterator[None]:
    """Within the context, Keras calls `call` with the last logs before it makes an epoch's logs.

    Keras does so at the end of the steps of a `fit` or an `evaluate`, so before a validation.
    """
    results = model._get_metrics_result_or_logs
    own = vars(model)  # past Keras's tracking of attributes
    before = own.get("_get_metrics_result_or_logs")

    def called_before(logs):
        call(logs)
        return results(logs)

    own["_get_metrics_result_or_logs"] = called_before
    try:
        yield
    finally:
        del own["_get_metrics_result_or_logs"]
        if before is not None:
            own["_get_metrics_result_or_logs"] = before


def monitors_in(callbacks: Sequence[keras.callbacks.Callback]) -> list[MonitorCallback]:
    """Returns the callbacks that compare a metric with its best value."""
    return [each for each in callbacks if isinstance(each, MonitorCallback)]


@contextlib.contextmanager
def compared_by(callback: MonitorCallback, compare: Callable) -> Iterator[None]:
    """Within the context, another function says whether a value is better than the best one.

    Args:
      callback: one of `monitors_in`.
      compare: a function of (Keras's own function, value, best value).
    """
    own = vars(callback).get("_is_improvement")  # of a `fit` that this one is within
    callback._is_improvement = functools.partial(compare, callback._is_improvement)
    try:
        yield
    finally:
        del callback._is_improvement
        if own is not None:
            callback._is_improvement = own
