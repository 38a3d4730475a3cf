"""What `fit`, `evaluate` and `predict` of a compiled model do beside Keras's own.

Takes a compiled model; gives it methods of the same signatures that obey a Loader's rules, watch
the replicas and the loss scale, and answer for lost workers.

    extend(model, StepConfig(), guard=watchdog.guard)
"""

import functools
import inspect
import types
from collections.abc import Callable

import keras

from tfaccel.callbacks.loss_scale import LossScale
from tfaccel.callbacks.replica_audit import ReplicaAudit
from tfaccel.config import StepConfig
from tfaccel.data.distribute import Loader, check_same_classes
from tfaccel.errors import UserError


def extend(model: keras.Model, config: StepConfig, *, guard: Callable) -> None:
    """Sets the methods on the model.

    Args:
      model: compiled for a strategy.
      config: floor of the loss scale, and steps between audits.
      guard: makes the context of every call that other workers take part in.
    """
    own = {name: types.MethodType(getattr(type(model), name), model) for name in _METHODS}
    for name, method in own.items():
        setattr(model, name, _guarded(_for_loaders(method), guard))
    model.fit = _watched(model.fit, model, config)


_METHODS = ("fit", "evaluate", "predict")


def _guarded(method: Callable, guard: Callable) -> Callable:
    @functools.wraps(method)
    def wrapper(*args, **kwargs):
        with guard():
            return method(*args, **kwargs)

    return wrapper


def _watched(fit: Callable, model, config: StepConfig) -> Callable:
    """Returns `fit` with the callbacks that the replicas and the loss scale need."""
    signature = inspect.signature(fit)
    ours = [LossScale(config.loss_scale_floor)]
    if model.distribute_strategy.num_replicas_in_sync > 1:
        ours.append(ReplicaAudit(config.audit_steps))

    @functools.wraps(fit)
    def wrapper(*args, **kwargs):
        call = signature.bind(*args, **kwargs)
        given = call.arguments.get("callbacks")
        if isinstance(given, keras.callbacks.CallbackList):
            given.callbacks[:0] = ours
            for each in ours:
                each.set_model(model)
        else:
            # Ours come first: what they write to the logs is for all others to see.
            call.arguments["callbacks"] = [*ours, *keras.tree.flatten(given or [])]
        return fit(*call.args, **call.kwargs)

    return wrapper


def _for_loaders(method: Callable) -> Callable:
    """Returns a method with its arguments obeyed, or refused, for a Loader too.

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
