"""What a Keras model was compiled with, and the variables that its steps read or change."""

from collections.abc import Callable

import keras
import tensorflow as tf
from keras.src.optimizers.base_optimizer import BaseOptimizer

from tfaccel.keras_internals.layers import layers_of
from tfaccel.keras_internals.reductions import has_own_update
from tfaccel.keras_internals.stateful import states_of


def optimizers_of(optimizer) -> list:
    """Returns an optimizer and the optimizers that it wraps; an empty list for None."""
    if optimizer is None:
        return []
    inner = [getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "optimizers", ())]
    return [optimizer, *(found for each in inner for found in optimizers_of(each))]


def every_optimizer(model) -> list:
    """Returns the compiled optimizer and the optimizers that the model has as attributes.

    A model with its own `train_step` may use several optimizers: `self.d_optimizer`, or a list or a
    dict of them. An optimizer that another one wraps is not listed.
    """
    return list(named_optimizers(model).values())


def named_optimizers(model) -> dict[str, BaseOptimizer]:
    """Returns the optimizers of `every_optimizer` by name, such as "d_optimizer" or "all.0"."""
    found = [("optimizer", model.optimizer)] if model.optimizer is not None else []
    if not has_steps_of_keras(model):
        found += _optimizers_in(_attributes(model), "")
    known = {id(inner) for _, each in found for inner in optimizers_of(each)[1:]}  # are wrapped
    named = {}
    for name, each in found:
        if id(each) not in known:
            known.add(id(each))
            named[name] = each
    return named


def change_optimizers(model, change: Callable) -> None:
    """Replaces the optimizers that the model has as attributes, also in lists and dicts."""
    for name, value in _attributes(model).items():
        changed = _changed(value, change)
        if changed is not value:
            setattr(model, name, changed)


def _attributes(model) -> dict:
    """Returns the attributes of a model but those in which TensorFlow lists them again."""
    return {name: each for name, each in vars(model).items() if not name.startswith("_self_")}


def _changed(value, change: Callable):
    """Returns what replaces a value; the value itself if it has no optimizer to replace."""
    if isinstance(value, BaseOptimizer):
        return change(value)
    if isinstance(value, dict):
        for key, each in list(value.items()):
            if (changed := _changed(each, change)) is not each:
                value[key] = changed
    if isinstance(value, list):
        for index, each in enumerate(value):
            if (changed := _changed(each, change)) is not each:
                value[index] = changed
    if type(value) is tuple:
        changed = tuple(_changed(each, change) for each in value)
        is_same = all(new is old for new, old in zip(changed, value, strict=True))
        return value if is_same else changed
    return value


def _optimizers_in(value, name: str) -> list[tuple]:
    """Returns (name, optimizer) of those in nested lists, tuples and dicts, in order."""
    if isinstance(value, BaseOptimizer):
        return [(name, value)]
    is_dict = isinstance(value, dict)
    items = (
        value.items() if is_dict else enumerate(value if isinstance(value, list | tuple) else ())
    )
    return [
        found
        for key, each in items
        for found in _optimizers_in(each, f"{name}.{key}" if name else str(key))
    ]


def variables_of(model) -> list:
    """Returns every Keras variable that a step reads or changes, each once."""
    found = [*model.variables, *model.metrics_variables, *states_of(model)]
    for each in every_optimizer(model):
        for optimizer in optimizers_of(each):
            found += optimizer.variables
    return list({id(each): each for each in found}.values())


def ids_of_optimizers(model) -> set[int]:
    """Returns the ids of all variables of optimizers. They are the last ones of `variables_of`."""
    return {
        id(variable)
        for each in every_optimizer(model)
        for optimizer in optimizers_of(each)
        for variable in optimizer.variables
    }


def state_of(model) -> list:
    """Returns the Keras variables that must be the same on every replica between steps.

    The variables of metrics are left out, because each replica counts its own rows.
    """
    own = {id(each) for each in model.metrics_variables}
    return [each for each in variables_of(model) if id(each) not in own]


def runs_eagerly(model) -> bool:
    """Returns whether steps run as Python, operation by operation."""
    return model.run_eagerly or tf.config.functions_run_eagerly()


def has_eager_steps_of_keras(model) -> bool:
    """Returns whether Keras makes the functions of the steps, and runs them as Python.

    That is so after `model.compile(run_eagerly=True)` without `run.compile`.
    """
    return runs_eagerly(model) and not hasattr(type(model.train_function), "nonfinite")


def inputs_of(model) -> list:
    """Returns the tensors that the model declares as inputs; none for a subclassed model."""
    return list(getattr(model, "inputs", None) or ())  # Sequential raises before it is built


def outputs_of(model) -> list:
    """Returns the tensors that the model declares as outputs; none for a subclassed model."""
    return list(getattr(model, "outputs", None) or ())


def has_steps_of_keras(model) -> bool:
    """Returns whether the model uses Keras's own `train_step` and `test_step`."""
    return is_of_keras(model, "train_step") and is_of_keras(model, "test_step")


def is_of_keras(model, name: str) -> bool:
    """Returns whether a method of the model is Keras's own."""
    return getattr(getattr(model, name), "__func__", None) is getattr(keras.Model, name)


def takes_labels(model) -> bool:
    """Returns whether the loss is the cross-entropy of class indices, not of probabilities."""
    sparse = keras.losses.SparseCategoricalCrossentropy
    return model.loss == "sparse_categorical_crossentropy" or isinstance(model.loss, sparse)


def labels_for(model) -> str:
    """Returns what the model's loss takes for labels: "classes", "multilabel" or "regression".

    A binary cross-entropy takes 0 or 1 for each output, and an error takes numbers. A model whose
    loss is not known is taken for one of classes.
    """
    loss = getattr(model, "loss", None)
    name = loss if isinstance(loss, str) else type(loss).__name__
    if name in _OF_SEVERAL:
        return "multilabel"
    return "regression" if name in _OF_NUMBERS else "classes"


_OF_SEVERAL = (
    *("BinaryCrossentropy", "BinaryFocalCrossentropy"),
    *("binary_crossentropy", "binary_focal_crossentropy"),
)
_OF_NUMBERS = (
    *("MeanSquaredError", "MeanAbsoluteError", "Huber", "LogCosh", "MeanSquaredLogarithmicError"),
    *("MeanAbsolutePercentageError", "mse", "mae", "mean_squared_error", "mean_absolute_error"),
    *("huber", "log_cosh"),
)


def losses_of(model) -> list:
    """Returns the losses that the model was compiled with."""
    return tf.nest.flatten(model._compile_loss._user_loss) if model._compile_loss else []


def loss_weights_of(model):
    """Returns the loss weights that the model was compiled with, unchanged; or None."""
    return model._compile_loss._user_loss_weights if model._compile_loss else None


def loss_means_of(model) -> list:
    """Returns the metrics that average the total loss and the loss of each output."""
    outputs = model._compile_loss.metrics if model._compile_loss else []
    return [model._loss_tracker, *outputs]


def metrics_of(model) -> list:
    """Returns the metrics that the model was compiled with: objects, functions or names."""
    metrics = model._compile_metrics
    user = (metrics._user_metrics, metrics._user_weighted_metrics) if metrics else ()
    return tf.nest.flatten(user)


def every_metric(model) -> list:
    """Returns the metrics of a model, each once: objects, functions and names.

    A metric within a metric that has an `update_state` of its own is a part of it.
    """
    found, waiting = {}, [*model.metrics, *metrics_of(model)]
    while waiting:
        each = waiting.pop(0)
        found[id(each)] = each
        if isinstance(each, keras.metrics.Metric) and not has_own_update(each):
            waiting += getattr(each, "metrics", each._metrics)
    return list(found.values())


def own_metrics_of(model) -> list:
    """Returns the metrics that have an `update_state` of their own, each once."""
    metrics = [each for each in every_metric(model) if isinstance(each, keras.metrics.Metric)]
    return [each for each in metrics if has_own_update(each)]


def metrics_that_update(model) -> list:
    """Returns the metrics that a step may update, those within other metrics included."""
    compiled = model._compile_metrics
    inner = compiled.metrics if compiled is not None and compiled.built else []
    found = [*model.metrics, *inner, *metrics_of(model)]
    return [each for each in found if isinstance(each, keras.metrics.Metric)]


def is_synchronized(model) -> bool:
    """Returns whether any batch normalization uses the statistics of all replicas."""
    return any(
        isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized
        for layer in layers_of(model)
    )
