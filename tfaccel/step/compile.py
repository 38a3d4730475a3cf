"""Compiles a model for its strategy, or raises an error that says why not.

`compile_model` calls the model's `compile` and sets the step functions. `fit`, `evaluate` and
`predict` stay Keras's own.

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
    change_optimizers,
    every_optimizer,
    has_steps_of_keras,
    optimizers_of,
    outputs_of,
)
from tfaccel.keras_internals.one_replica import without_strategy
from tfaccel.keras_internals.optimizers import belongs_to, give_to, weights_of
from tfaccel.keras_internals.patching import patched
from tfaccel.keras_internals.sharded_states import check_elementwise, shard, unshard
from tfaccel.keras_internals.symbolic_build import (
    adopt_made_outside,
    build_from_specs,
    dtypes_of_outputs,
)
from tfaccel.keras_internals.variables import adopt
from tfaccel.runtime import xla_flags
from tfaccel.step import metrics, mixing, padding
from tfaccel.step.functions import set_functions
from tfaccel.step.states.choose import set_states

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
    flash_attention: bool = True,
    begin_without_xla: bool = False,
    **compile_args,
) -> None:
    """Compiles `model` for `strategy`.

    Args:
      model: built in `strategy.scope()`.
      strategy: a MirroredStrategy or MultiWorkerMirroredStrategy.
      config: what a step does in addition to Keras's step.
      *args: passed to the model's `compile`, which may be the model's own.
      xla: whether steps are compiled with XLA.
      flash_attention: whether cuDNN's flash kernels compute attentions, where XLA and GPUs can.
      begin_without_xla: whether training begins while XLA still compiles the step.
      **compile_args: also passed to `compile`. `jit_compile` is refused.

    Raises:
      UserError: `compile` of the model does not accept these arguments or does not call Keras's
        `compile`; the model was built in no scope or in another one; the optimizer has the state of
        another model; or the model or loss does not suit several replicas or this config.
    """
    if "jit_compile" in compile_args:
        raise UserError("jit_compile is set by tfaccel; use tfaccel.setup(xla=True or False)")
    with without_strategy():  # else a model built in no scope has the strategy of this call's scope
        built_for = model.distribute_strategy
    if built_for is not strategy:
        raise UserError(
            "the model was built in no scope or in another run's scope; build or load it in this "
            "run's `with run.scope():`"
        )
    _check_layers(model, strategy, xla=xla)
    adopt_made_outside(model, metrics=False)
    num_replicas = strategy.num_replicas_in_sync
    with strategy.scope():
        for each in keras.tree.flatten((args, compile_args)):
            if isinstance(each, keras.optimizers.Optimizer):
                _adopt(each, strategy)  # before, because the model's own `compile` may build it
        adds_scales = _compile(model, args, compile_args, config)
        for each in every_optimizer(model):
            _adopt(each, strategy)
        _give_scales(model, config if adds_scales else None)
        set_states(model, config.state_dtype)
    _shard_states(model, strategy, config)
    batch_norm.convert_back(model)
    if config.sync_batchnorm and num_replicas > 1:
        layers = batch_norm.convert(model)
        log.info("batch norm: %d layers use the statistics of all replicas", len(layers))
    if num_replicas > 1:
        metrics.gathers(model)  # raises for a metric with an unknown rule
    if config.zero_weight_is_padding:
        padding.check(model)
    change = lambda batch: batch  # noqa: E731
    if config.mixes_labels:
        mixing.check(model, config)
        change = mixing.specs_as_probabilities(model)
    build_from_specs(model, change=change)
    if xla and not _is_on_cpu(strategy):
        norm = keras.layers.BatchNormalization
        has_batch_norm = any(isinstance(each, norm) for each in layers_of(model))
        xla_flags.choose_products(has_batch_norm=has_batch_norm)
    set_functions(
        model,
        strategy,
        config,
        xla=xla,
        flash_attention=flash_attention,
        begin_without_xla=begin_without_xla,
    )


def _is_on_cpu(strategy: tf.distribute.Strategy) -> bool:
    return all("CPU" in each.upper() for each in strategy.extended.worker_devices)


def _check_layers(model, strategy, *, xla: bool) -> None:
    """Raises for layers that this CPU cannot run; warns of half-precision weights and outputs."""
    for layer in layers_of(model) if _is_on_cpu(strategy) and not xla else ():
        if isinstance(layer, CHANNELS_LAST_ON_CPU) and layer.data_format == "channels_first":
            raise UserError(
                f"the layer {layer.name} has data_format='channels_first', but TensorFlow cannot "
                "compute its gradient on a CPU without XLA; use channels_last, which is also "
                "faster on GPUs"
            )
    halves = [each.path for each in model.trainable_variables if each.dtype in HALVES]
    wanted = model.dtype_policy.name in HALVES  # the user chose half precision for all layers
    if halves and not wanted:
        log.warning(
            "step: %s and %d more keep their weights in half precision, which loses small updates; "
            "give their layers the policy mixed_float16 instead",
            halves[0],
            len(halves) - 1,
        )
    if wanted or not any(each.dtype in HALVES for each in outputs_of(model)):
        return
    rounded = [each for each in dtypes_of_outputs(model) if each in HALVES]
    if rounded:
        log.warning(
            "step: an output of model %s is %s, so the loss is computed from rounded values, or "
            "from infinity above float16's range; give the output layer dtype='float32', or let "
            "Activation('linear', dtype='float32') follow a ReversibleEmbedding",
            model.name,
            rounded[0],
        )


# The arguments of `compile`.


def parameters_of_compile(model: keras.Model) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of the model's `compile`, which it may override, by name."""
    return inspect.signature(model.compile).parameters


def _compile(model, args: tuple, compile_args: dict, config: StepConfig) -> bool:
    """Calls the model's `compile`, in the strategy's scope.

    The model's own `compile` may take any arguments and need not pass them on. So this sets the
    optimizer, loss scale and XLA where Keras's `compile` is entered.

    Returns:
      Whether optimizers may get a loss scale: `auto_scale_loss`.
    """
    signature = inspect.signature(model.compile)
    takes_all = any(each.kind == each.VAR_KEYWORD for each in signature.parameters.values())
    # None asks for nothing, so it is dropped if `compile` does not know the argument.
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
    adds_scales = compile_args.get("auto_scale_loss", True)

    def compile_(compiled, *args, **kwargs):
        nonlocal adds_scales
        call = inspect.signature(keras_own).bind(compiled, *args, **kwargs)
        if compiled is model:
            given = call.arguments
            adds_scales = adds_scales and given.get("auto_scale_loss", True)
            # If the model has its own optimizers, Keras's default optimizer does not train it.
            is_used = "optimizer" in given or has_steps_of_keras(model)
            optimizer = keras.optimizers.get(given.get("optimizer", "rmsprop"))
            if is_used and adds_scales:
                optimizer = _scale_loss(optimizer, model, config)
            given |= {"optimizer": optimizer, "auto_scale_loss": False, "jit_compile": False}
        return keras_own(*call.args, **call.kwargs)

    model.compiled = False
    with patched(keras.Model, "compile", compile_):
        model.compile(*args, **compile_args)
    if not model.compiled:
        raise UserError(
            f"compile of {type(model).__name__} does not call super().compile(), without which "
            "Keras does not train a model; call super().compile() in it"
        )
    if not adds_scales and needs_loss_scale(model):
        log.info("loss scale: none is added, because of auto_scale_loss=False")
        if config.loss_scale != "dynamic":
            log.warning(
                "loss scale: loss_scale=%s is not used, because of auto_scale_loss=False",
                in_figures(config.loss_scale),
            )
    return adds_scales


def _scale_loss(optimizer, model, config: StepConfig):
    """Returns the optimizer with the loss scaling that float16 gradients need, and logs it."""
    if optimizer is None:
        return None
    if not needs_loss_scale(model):
        if config.loss_scale != "dynamic":
            log.warning(
                "loss scale: not used, because the dtype policy of the model's layers is %s; a "
                "loss scale is for mixed_float16",
                policy_of(model),
            )
        return optimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        log.info("loss scale: from the LossScaleOptimizer that you passed")
        return optimizer
    if config.loss_scale == "dynamic" and optimizer.loss_scale_factor is None:
        log.info(
            "loss scale: dynamic, from %s, doubled after %d good steps",
            in_figures(config.loss_scale_initial),
            config.loss_scale_growth_steps,
        )
        scaled = keras.optimizers.LossScaleOptimizer(
            optimizer,
            initial_scale=config.loss_scale_initial,
            dynamic_growth_steps=config.loss_scale_growth_steps,
        )
        if optimizer.built:  # by the user, so that its variables exist before the first step
            scaled.build(weights_of(optimizer))
        return scaled
    if config.loss_scale != "dynamic":
        optimizer.loss_scale_factor = config.loss_scale
    log.info("loss scale: fixed at %s; no step is skipped", in_figures(optimizer.loss_scale_factor))
    return optimizer


def _give_scales(model, config: StepConfig | None) -> None:
    """Gives a loss scale to the optimizers that the model's own step applies, if float16 needs it.

    tfaccel/step/loss_scale.py scales with it if the step does not. The compiled optimizer has a
    scale already, and one that is compiled and is an attribute, too, is replaced by its wrapper.
    With `config=None` no optimizer gets a scale that you did not give it.
    """
    if not needs_loss_scale(model):
        return
    compiled = model.optimizer
    inner = getattr(compiled, "inner_optimizer", None)

    def scaled(optimizer):
        if optimizer is compiled or optimizer.loss_scale_factor is not None:
            return optimizer
        if optimizer is inner:
            return compiled
        return optimizer if config is None else _scale_loss(optimizer, model, config)

    if not has_steps_of_keras(model):
        change_optimizers(model, scaled)


def _shard_states(model, strategy, config: StepConfig) -> None:
    """Shards the states of the model's optimizers over the replicas, or makes them whole again."""
    num_replicas, optimizers = strategy.num_replicas_in_sync, every_optimizer(model)
    if not config.shard_states or num_replicas == 1:
        for each in optimizers:
            unshard(each, strategy)
        if config.shard_states:
            summary("step: shard_states changes nothing, because there is one replica")
        return
    for each in optimizers:
        check_elementwise(each)
    for each in optimizers:
        shard(each, strategy)
        log.info("step: each replica keeps 1/%d of the states of %s", num_replicas, each.name)


def _adopt(optimizer, strategy) -> None:
    """Moves an optimizer that was made outside the strategy's scope into it.

    `run.compile(model, optimizer=keras.optimizers.AdamW())` makes it outside. Its first variables,
    the iteration and the learning rate, are made again in the scope. The optimizer stays the object
    that the caller holds, with its settings.
    """
    optimizers = optimizers_of(optimizer)  # empty for a model that is only tested
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
