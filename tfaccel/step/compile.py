"""A model compiled for its strategy, or refused in a sentence.

Takes a Keras model and what `model.compile` takes; gives the model compiled, with its step
functions set. `fit`, `evaluate` and `predict` stay Keras's own.

    compile_model(model, strategy, StepConfig(), xla=True, optimizer="adamw", loss=...)
"""

import inspect
import logging
from collections.abc import Mapping

import keras
import tensorflow as tf

from tfaccel.common.errors import UserError
from tfaccel.common.run_log import summary
from tfaccel.common.tables import in_figures
from tfaccel.config import StepConfig
from tfaccel.keras_internals import batch_norm
from tfaccel.keras_internals.float32_layers import HALVES, needs_loss_scale, policy_of
from tfaccel.keras_internals.layers import layers_of
from tfaccel.keras_internals.model_view import (
    every_optimizer,
    has_steps_of_keras,
    is_synchronized,
    losses_of,
    optimizers_of,
    outputs_of,
    runs_eagerly,
)
from tfaccel.keras_internals.optimizers import belongs_to, give_to
from tfaccel.keras_internals.patching import patched
from tfaccel.keras_internals.symbolic_build import build_from_specs
from tfaccel.keras_internals.variables import adopt, is_distributed
from tfaccel.step import mixing, padding
from tfaccel.step.functions import set_functions

log = logging.getLogger("tfaccel")

CHANNELS_LAST_ON_CPU = (
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv1DTranspose,
    keras.layers.Conv2DTranspose,
)


def compile_model(
    model: keras.Model,
    strategy: tf.distribute.Strategy,
    config: StepConfig,
    *args,
    xla: bool,
    **compile_args,
) -> None:
    """Compiles `model` for `strategy`.

    Args:
      model: built in `strategy.scope()`.
      strategy: a MirroredStrategy or MultiWorkerMirroredStrategy.
      config: what a step does beside Keras's.
      *args: as the model's `compile` takes them, which may be one of its own.
      xla: whether steps are compiled with XLA.
      **compile_args: likewise, less `jit_compile`.

    Raises:
      UserError: the model's `compile` does not take these, or does not call Keras's; the model
        belongs to no or another strategy, the optimizer has already trained
        another model, or several replicas would train wrongly.
    """
    if "jit_compile" in compile_args:
        raise UserError("jit_compile is set by tfaccel; use tfaccel.setup(xla=True or False)")
    if model.distribute_strategy is not strategy:
        raise UserError(
            "the model was built in no scope or another run's; build or load it in this run's "
            "`with run.scope():`"
        )
    _check_layers(model, strategy, xla=xla)
    num_replicas = strategy.num_replicas_in_sync
    with strategy.scope():
        _compile(model, args, compile_args, config)
        for each in every_optimizer(model):
            _adopt(each, strategy)
    _say_unscaled(model)
    batch_norm.convert_back(model)
    if config.sync_batchnorm and num_replicas > 1:
        layers = batch_norm.convert(model)
        log.info("batch norm: %d layers take their statistics over all replicas", len(layers))
    if num_replicas > 1 or config.accumulation_steps > 1:
        _refuse_losses(model, config, num_replicas)
    if num_replicas > 1:
        _refuse_what_would_be_wrong(model, config, num_replicas)
    if config.zero_weight_is_padding:
        padding.check(model)
    change = lambda batch: batch  # noqa: E731
    if config.mixes_labels:
        mixing.check(model, config)
        change = mixing.specs_as_probabilities(model)
    build_from_specs(model, change=change)
    if runs_eagerly(model):
        if config.accumulation_steps > 1:
            raise UserError("run_eagerly is stock Keras's step: use it with accumulation_steps=1")
        if config.mixes_labels or config.cutout_pixels:
            raise UserError(
                "run_eagerly is stock Keras's step, without label_smoothing, mixup, cutmix or "
                "cutout: leave them out, or use CategoricalCrossentropy(label_smoothing=...)"
            )
        summary("step: stock Keras, without XLA, because run_eagerly asks for it")
    else:
        set_functions(model, strategy, config, xla=xla)


def _check_layers(model, strategy, *, xla: bool) -> None:
    """Raises for layers that a CPU has no code for; warns of weights and outputs in half."""
    on_cpu = all("CPU" in each.upper() for each in strategy.extended.worker_devices)
    for layer in layers_of(model) if on_cpu and not xla else ():
        if isinstance(layer, CHANNELS_LAST_ON_CPU) and layer.data_format == "channels_first":
            raise UserError(
                f"the layer {layer.name} has data_format='channels_first', whose gradient "
                "TensorFlow has not for a CPU without XLA; use channels_last, which is quicker on "
                "GPUs too"
            )
    halves = [each.path for each in model.trainable_variables if each.dtype in HALVES]
    wanted = model.dtype_policy.name in HALVES  # by who chose the policy of all layers
    if halves and not wanted:
        log.warning(
            "step: %s and %d more keep their weights in half precision, which loses small updates; "
            "give their layers the policy mixed_float16 instead",
            halves[0],
            len(halves) - 1,
        )
    outputs = [each for each in outputs_of(model) if each.dtype in HALVES]
    if outputs and not wanted:
        log.warning(
            "step: an output of model %s is %s, so that its loss is of rounded values, or infinite "
            "where float16 ends; give its layer dtype='float32'",
            model.name,
            outputs[0].dtype,
        )


# What the model is compiled with.


def parameters_of_compile(model: keras.Model) -> Mapping[str, inspect.Parameter]:
    """Returns what the model's `compile` takes, by name: Keras's, or one of the model's own."""
    return inspect.signature(model.compile).parameters


def _compile(model, args: tuple, compile_args: dict, config: StepConfig) -> None:
    """Calls the model's `compile`, in the strategy's scope.

    What is ours is set where Keras's own is entered: a `compile` of the model's own may take
    anything, and need not pass it on.
    """
    signature = inspect.signature(model.compile)
    takes_all = any(each.kind == each.VAR_KEYWORD for each in signature.parameters.values())
    # "None" asks for nothing, so that a `compile` which knows no such argument need not have it.
    none = [
        name
        for name, value in compile_args.items()
        if value is None and not takes_all and name not in signature.parameters
    ]
    compile_args = {name: each for name, each in compile_args.items() if name not in none}
    try:
        signature.bind(*args, **compile_args)
    except TypeError as error:
        raise UserError(
            f"run.compile of model {model.name}: {error}; compile of {type(model).__name__} takes "
            f"{signature}"
        ) from error
    keras_own = keras.Model.compile

    def compile_(compiled, *args, **kwargs):
        call = inspect.signature(keras_own).bind(compiled, *args, **kwargs)
        if compiled is model:
            given = call.arguments
            # Keras's default, beside optimizers of the model's own, is not the one that trains.
            is_used = "optimizer" in given or has_steps_of_keras(model)
            optimizer = keras.optimizers.get(given.get("optimizer", "rmsprop"))
            if is_used and given.get("auto_scale_loss", True):
                optimizer = _scale_loss(optimizer, model, config)
            given |= {"optimizer": optimizer, "auto_scale_loss": False, "jit_compile": False}
        return keras_own(*call.args, **call.kwargs)

    model.compiled = False
    with patched(keras.Model, "compile", compile_):
        model.compile(*args, **compile_args)
    if not model.compiled:
        raise UserError(
            f"compile of {type(model).__name__} does not call super().compile(), without which "
            "Keras does not train a model; call it there"
        )


def _scale_loss(optimizer, model, config: StepConfig):
    """Returns the optimizer with the loss scaling that float16 gradients need, and says which."""
    if optimizer is None:
        return None
    if not needs_loss_scale(model):
        if config.loss_scale != "dynamic":
            log.warning(
                "loss scale: not used, because the dtype policy of the model's layers is %s; it is "
                "for mixed_float16",
                policy_of(model),
            )
        return optimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        log.info("loss scale: that of the LossScaleOptimizer that was given")
        return optimizer
    if config.loss_scale == "dynamic" and optimizer.loss_scale_factor is None:
        log.info(
            "loss scale: dynamic, from %s, doubled after %d good steps",
            in_figures(config.loss_scale_initial),
            config.loss_scale_growth_steps,
        )
        return keras.optimizers.LossScaleOptimizer(
            optimizer,
            initial_scale=config.loss_scale_initial,
            dynamic_growth_steps=config.loss_scale_growth_steps,
        )
    if config.loss_scale != "dynamic":
        optimizer.loss_scale_factor = config.loss_scale
    log.info("loss scale: always %s; no step is skipped", in_figures(optimizer.loss_scale_factor))
    return optimizer


def _say_unscaled(model) -> None:
    """Warns of optimizers, beside the compiled one, that a step of the model's own does not scale.

    They are the step's own affair: to scale is to change the loss, and only the step knows of which
    loss each has its gradients.
    """
    unscaled = [
        each.name
        for each in every_optimizer(model)
        if each is not model.optimizer
        and not isinstance(each, keras.optimizers.LossScaleOptimizer)
        and each.loss_scale_factor is None
    ]
    if unscaled and needs_loss_scale(model):
        log.warning(
            "loss scale: none for %s, which the model's own train_step applies: in float16 a "
            "gradient below 6e-8 becomes 0. Wrap each in keras.optimizers.LossScaleOptimizer and "
            "take the gradients of its scale_loss(loss), or train in mixed_bfloat16",
            " and ".join(unscaled),
        )


def _adopt(optimizer, strategy) -> None:
    """Makes an optimizer that was made outside the strategy's scope belong to it.

    `run.compile(model, optimizer=keras.optimizers.AdamW())` makes it outside. Its first variables,
    the iteration and the learning rate, are made again in the scope, so that it stays the object
    that the caller holds, with all that was set on it.
    """
    optimizers = optimizers_of(optimizer)  # none, for a model that is only tested
    if all(belongs_to(each, strategy) for each in optimizers):
        return
    for each in optimizers:
        if each.built:
            raise UserError(
                f"the optimizer {each.name} already has the state of another model; make a new one"
            )
    for variable in optimizer.variables:
        adopt(variable, strategy)
    for each in optimizers:
        give_to(each, strategy)


def _refuse_losses(model, config: StepConfig, num_replicas: int) -> None:
    """Raises for losses of which that of a batch is not the mean over its parts."""
    parts = f"{num_replicas} replicas and accumulation_steps={config.accumulation_steps}"
    for loss in losses_of(model):
        reduction = getattr(loss, "reduction", "sum_over_batch_size")
        if reduction not in ("sum_over_batch_size", "mean"):
            raise UserError(
                f"the loss {loss.name} has reduction={reduction!r}; with {parts} use "
                "reduction='sum_over_batch_size', so that the rows of all parts weigh alike"
            )
        overlap = isinstance(loss, keras.losses.Dice | keras.losses.Tversky)
        if overlap and {None, 0} & set(keras.tree.flatten(loss.axis)):
            raise UserError(
                f"the loss {loss.name} has axis={loss.axis}, so that it is of the whole batch "
                f"together; with {parts} give it the axes of a row, as axis=(1, 2, 3)"
            )


def _refuse_what_would_be_wrong(model, config: StepConfig, num_replicas: int) -> None:
    """Raises for what cannot give on several replicas what one device gives."""
    if runs_eagerly(model):
        raise UserError(
            f"run_eagerly with {num_replicas} replicas; to run a step's Python, use one replica "
            "(gpu_ids=[0])"
        )
    if config.accumulation_steps > 1 and is_synchronized(model):
        raise UserError(
            f"accumulation_steps={config.accumulation_steps} with synchronized batch norm: its "
            "statistics would be of a part of the rows after all; use one of the two"
        )
    outside = [each for each in model.variables if not is_distributed(each)]
    if outside:
        raise UserError(
            f"the variable {outside[0].path} was created outside the scope; build every layer in "
            "`with run.scope():`"
        )
