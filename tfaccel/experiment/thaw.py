"""Trains frozen layers from a later epoch on: a run in several stages.

Takes the config; gives the stages, and changes what the model trains.

    stages = stages_of(config)              # epochs 0 to 2 frozen, 2 to 30 with all layers
    enter(stages[1], model, config)         # then compile again

A stage is one `fit`. Each begins from the checkpoint that ends the one before it, also within one
process, so a run that was killed around a thaw goes on as one that was not. The optimizer begins
anew in each stage, because Adam's moments of a weight that was frozen would be wrong. The learning
rate goes on by its schedule.
"""

import dataclasses
import fnmatch
from collections.abc import Iterator, Mapping, Sequence

import keras

from tfaccel.common.errors import UserError, did_you_mean
from tfaccel.common.run_log import summary
from tfaccel.config import Config
from tfaccel.experiment.models.frozen import frozen_by
from tfaccel.keras_internals.layers import layers_of


@dataclasses.dataclass(frozen=True)
class Stage:
    """Epochs in which the same weights are trained.

    Attributes:
      begins: the first epoch, from 0 on.
      ends: the epoch after the last one.
      first_layer: the first layer that is not frozen any more; None for all. Not of a first stage.
    """

    begins: int
    ends: int
    first_layer: str | None = None


def stages_of(config: Config) -> list[Stage]:
    """Returns the stages of a run in order: one if nothing thaws."""
    thaws = config.model.thaws
    begins = [0, *(epoch for epoch, _ in thaws)]
    layers = [None, *(layer for _, layer in thaws)]
    ends = [*begins[1:], config.train.epochs]
    return [Stage(*each) for each in zip(begins, ends, layers, strict=True)]


def stage_at(stages: Sequence[Stage], epoch: int) -> int:
    """Returns the index of the stage that trains the epoch, or of the last one after all epochs."""
    return next((index for index, each in enumerate(stages) if epoch < each.ends), len(stages) - 1)


def stage_of(config: Config, state: Mapping) -> Stage | None:
    """Returns the stage that made a checkpoint with this state; None for the first stage."""
    place = state["epoch"], state["step_in_epoch"]
    stages = stages_of(config)
    index = next((at for at, each in enumerate(stages) if place <= (each.ends, 0)), -1)
    return stages[index] if stages[index].begins else None


def check_thaws(model: keras.Model, config: Config) -> None:
    """Raises UserError unless each stage thaws layers of the model that were frozen before."""
    before = 0
    for stage in stages_of(config)[1:]:
        thawed = len(_thawed(stage, model, config))
        if thawed <= before:
            raise UserError(
                f"model.thaw_epochs={','.join(config.model.thaw_epochs)} thaws nothing more after "
                f"epoch {stage.begins}; name an earlier layer, or none for all layers"
            )
        before = thawed


def enter(stage: Stage, model: keras.Model, config: Config) -> None:
    """Makes the layers trainable that the stage trains. The model must be compiled after it."""
    thawed = {id(each) for each in _thawed(stage, model, config)}
    chosen = frozen_by(model, config.model.freeze)
    for each in chosen:
        each.trainable = True  # with all layers in it
    for each in _with_own(chosen):
        each.trainable = id(each) in thawed
    summary("model: after epoch %d, %d more layers are trained", stage.begins, len(thawed))


def _thawed(stage: Stage, model: keras.Model, config: Config) -> list[keras.layers.Layer]:
    """Returns the frozen layers with weights of their own that the stage trains."""
    frozen = _with_own(frozen_by(model, config.model.freeze))
    if stage.first_layer is None:
        return frozen
    layers = list(_in_order(model))
    names = [each.name for each in layers]
    first = next(
        (at for at, name in enumerate(names) if fnmatch.fnmatchcase(name, stage.first_layer)), None
    )
    if first is None:
        raise UserError(
            f"model.thaw_epochs: {model.name} has no layer {stage.first_layer!r}"
            f"{did_you_mean(stage.first_layer, names)}"
        )
    rest = {id(each) for each in layers[first:]}
    return [each for each in frozen if id(each) in rest]


def _in_order(model: keras.Model) -> Iterator[keras.layers.Layer]:
    """Yields the layers at every depth, from the input to the output; a model before its layers."""
    for each in model.layers:
        yield each
        if isinstance(each, keras.Model):
            yield from _in_order(each)
        else:
            yield from layers_of(each, include_self=False)


def _with_own(layers: Sequence[keras.layers.Layer]) -> list[keras.layers.Layer]:
    """Returns the layers with weights, also within these layers, that have no layers in them."""
    inner = [leaf for each in layers for leaf in layers_of(each)]
    leaves = [each for each in inner if each.weights and len(layers_of(each)) == 1]
    return list({id(each): each for each in leaves}.values())
