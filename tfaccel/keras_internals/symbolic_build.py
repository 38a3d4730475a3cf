"""Builds a model's weights and metrics from the specs of a batch, so that no batch is drawn."""

import logging
import types
import weakref
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf
from keras.src import backend

from tfaccel.keras_internals.known_outputs import knowing_outputs
from tfaccel.keras_internals.layers import layers_of
from tfaccel.keras_internals.model_view import (
    every_optimizer,
    has_steps_of_keras,
    inputs_of,
    runs_eagerly,
)
from tfaccel.keras_internals.never_run import never_run, placeholders, spec_of
from tfaccel.keras_internals.one_replica import as_replica
from tfaccel.keras_internals.patching import patched
from tfaccel.keras_internals.reductions import losses_reduced_by, weighing_by_row
from tfaccel.keras_internals.replica import local_batches, local_replicas
from tfaccel.keras_internals.stateful import any_rows
from tfaccel.keras_internals.unwound import unwound
from tfaccel.keras_internals.variables import adopt, is_distributed
from tfaccel.process import waits

log = logging.getLogger("tfaccel")

OF_ANY_SIZE = (tf.RaggedTensor, tf.SparseTensor, tf.RaggedTensorSpec, tf.SparseTensorSpec)


def build_from_specs(model, *, change: Callable) -> None:
    """Replaces the model's `_maybe_symbolic_build`, so that Keras draws no batch to build it.

    Keras draws one from an iterator that it drops afterwards. That starts a pipeline for nothing,
    and it fails with the per-replica values of several workers (keras issue 20585).

    Args:
      model: The compiled model.
      change: A function from the specs of a batch, or from a batch, to those of the batch that the
        step makes of it.
    """
    by_batch = types.MethodType(type(model)._maybe_symbolic_build, model)

    @waits.on("building the model from the shapes of a batch")
    def build(iterator=None, data_batch=None):
        adopt_made_outside(model)  # such as those of LoRA that was enabled after `compile`
        if not has_steps_of_keras(model):
            build_by_step(iterator, data_batch)
            return adopt_made_outside(model)
        specs = data_batch if iterator is None else specs_of(iterator)
        if iterator is not None and not _are_known(specs):
            specs = _first_batch(model, iterator)
        _note_inputs(model, specs)
        if any(isinstance(each, OF_ANY_SIZE) for each in tf.nest.flatten(specs)):
            # Keras would make dense symbols, which the model may not accept.
            if _unbuilt(model):
                _trace_once(model, specs)
        elif iterator is None:
            with any_rows(model, specs), losses_reduced_by(weighing_by_row):
                by_batch(data_batch=change(specs))
        else:
            build_by_call(specs)
        return adopt_made_outside(model)

    def specs_of(iterator):
        return tf.nest.map_structure(_of_one_replica, iterator._distributed_dataset.element_spec)

    def build_by_call(specs):
        look_up = knowing_outputs(model, backend.compute_output_spec)
        with (
            model.distribute_strategy.scope(),
            any_rows(model, specs),
            losses_reduced_by(weighing_by_row),
            patched(backend, "compute_output_spec", look_up),
        ):
            model._symbolic_build(data_batch=change(specs))

    def build_by_step(iterator, batch):
        # Stock Keras does so without a strategy. `call` may be missing, or take other arguments.
        specs = batch if iterator is None else specs_of(iterator)
        known = iterator is None or _are_known(specs)
        if known:
            _note_inputs(model, specs)
        if _unbuilt(model) == left:  # another trace would not make it either
            return
        if iterator is not None:
            # The batch of a generator is lost then, so it is drawn only if the specs are unknown.
            batch = specs if known else _first_batch(model, iterator)
            _note_inputs(model, batch)
        if not runs_eagerly(model):
            _trace_once(model, change(batch))
        elif not all(each.built for each in layers_of(model, include_self=False)):
            return  # a debugger would stop in the trace, so the first step makes what lacks
        metrics = model._compile_metrics
        if metrics is not None and not metrics.built and inputs_of(model):
            build_by_call(batch)  # the step ignores the metrics, but Keras asks for results
        if every_optimizer(model) == [model.optimizer] and not model.optimizer.built:
            with model.distribute_strategy.scope():  # the step has not used the optimizer
                model.optimizer.build(model.trainable_variables)
        left[:] = [] if runs_eagerly(model) else _unbuilt(model)

    left = []  # what the step does not make, such as the variables of an optimizer without use
    model._maybe_symbolic_build = build


def adopt_made_outside(model, *, metrics: bool = True) -> None:
    """Gives each replica its own of the variables that were made outside the scope.

    Without `metrics` those of metrics are left out, which the model's `compile` may still make.

    In `run.compile(model, metrics=[keras.metrics.AUC()])` the AUC is made outside; so are the
    weights of `layer.enable_lora(4)`, and of a backbone that was made before the model.
    """
    outside = [each for each in model.variables if not is_distributed(each)]
    if outside:
        log.info(
            "step: %d variables were made outside the scope, for example %s; each replica gets its "
            "own, with the same values",
            len(outside),
            outside[0].path,
        )
    of_metrics = model.metrics_variables if metrics else []
    for variable in {id(each): each for each in [*outside, *of_metrics]}.values():
        if not is_distributed(variable):
            adopt(variable, model.distribute_strategy)


def dtypes_of_outputs(model) -> list[str]:
    """Returns the dtypes of the outputs that a model declares, as its forward pass computes them.

    They may differ from the dtypes that the layers report: a ReversibleEmbedding reports bfloat16
    under mixed_bfloat16, but computes float32 (findings/keras_reversible_embedding_in_float32.sh).
    The trace takes 0.8 s for GPT-2 small on two CPU cores (2026-11-28).
    """
    inputs = getattr(model, "_functional", model).input  # a Sequential knows only a list of them
    with model.distribute_strategy.scope():
        outputs = backend.compute_output_spec(model, inputs, training=False)
    return [each.dtype for each in keras.tree.flatten(outputs)]


_TRAINED_ON = weakref.WeakKeyDictionary()  # from a model to the specs of its inputs


def trained_on(model):
    """Returns the `tf.TypeSpec`s of the last x of `fit` or `evaluate`; None before the first."""
    return _TRAINED_ON.get(model)


def _note_inputs(model, batch) -> None:
    """Notes the specs of the inputs in a batch, or in the specs of a batch."""
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    if x is not None:
        _TRAINED_ON[model] = tf.nest.map_structure(spec_of, x)


def _unbuilt(model) -> list:
    """Returns what a step of the model's own makes in its first trace, and does not exist yet."""
    compiled = (model._compile_loss, model._compile_metrics)
    made = (*layers_of(model, include_self=False), *compiled, *every_optimizer(model))
    return [each for each in made if each is not None and not each.built]


def _trace_once(model, batch) -> None:
    """Traces a step that never runs, so that all its variables exist before the first step.

    A checkpoint can then be restored. If the trace fails, the step itself fails, too, and says why.
    """
    specs = tf.nest.map_structure(spec_of, batch)
    step = model.train_step if every_optimizer(model) else model.test_step
    replica = local_replicas(model.distribute_strategy)[0]
    try:
        with (
            never_run("made_by_step"),
            as_replica(model, replica),
            any_rows(model, specs),
            unwound(),
        ):
            step(placeholders(specs))
    except Exception as error:
        log.debug("step: no trace of it before it first runs: %s", error)


def _of_one_replica(spec):
    spec = spec._value_specs[0] if hasattr(spec, "_value_specs") else spec
    return spec if hasattr(spec, "shape") else None


def _are_known(specs) -> bool:
    """Returns whether the specs of a batch have a known number of axes."""
    return all(each is None or each.shape.rank is not None for each in tf.nest.flatten(specs))


def _first_batch(model, iterator: Iterator):
    """Draws a batch for its shapes, because those of a generator are not known before."""
    for _, _, batches in iterator:
        replicas = len(model.distribute_strategy.extended.worker_devices)
        return local_batches(model.distribute_strategy, next(batches), replicas)[0]
    return None
