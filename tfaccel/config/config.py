"""An experiment as plain values, with every check of those values.

`parse` takes the `ml_collections.ConfigDict` that a file in `configs/` returns, with the changes of
the command line, and returns a frozen `Config`. It does not need TensorFlow, so you learn of a
mistake at once.

    config = default_config()          # in a config file: every field has its default
    config.data.root = "/data/mnist_png"
    config = parse(config)             # in the command: checked and frozen
"""

import dataclasses
import types
from collections.abc import Sequence

import ml_collections
from ml_collections import config_dict

from tfaccel.common import meant
from tfaccel.common.errors import UserError, did_you_mean
from tfaccel.config.images import AugmentConfig, DaliConfig, DataConfig
from tfaccel.config.log import LogConfig
from tfaccel.config.runtime import RuntimeConfig
from tfaccel.config.training import CheckpointConfig, ModelConfig, StepConfig, TrainConfig
from tfaccel.config.vit import VitConfig, check_vit, is_vit
from tfaccel.config.weights_pixels import with_pixels


@dataclasses.dataclass(frozen=True)
class Config:
    """One experiment."""

    runtime: RuntimeConfig = dataclasses.field(default_factory=RuntimeConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    train_images: AugmentConfig = dataclasses.field(default_factory=AugmentConfig)
    test_images: AugmentConfig = dataclasses.field(default_factory=AugmentConfig)
    dali: DaliConfig = dataclasses.field(default_factory=DaliConfig)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    vit: VitConfig = dataclasses.field(default_factory=VitConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    step: StepConfig = dataclasses.field(default_factory=StepConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    log: LogConfig = dataclasses.field(default_factory=LogConfig)

    def __post_init__(self):
        """Checks what concerns several sections."""
        check_vit(self.model.name, self.vit, image_size=self.data.image_size)
        for epoch, _ in self.model.thaws:
            if epoch >= self.train.epochs:
                raise UserError(
                    f"model.thaw_epochs has epoch {epoch}, but train.epochs={self.train.epochs}, "
                    "so that nothing would be trained after it; train longer, or thaw earlier"
                )
        if self.model.thaws and self.step.nonfinite == "rollback":
            raise UserError(
                "model.thaw_epochs with step.nonfinite='rollback', which could not go back over a "
                "thaw; use nonfinite='stop' or 'skip'"
            )
        if self.data.sampling != "uniform" and self.train.class_weights != "none":
            raise UserError(
                f"data.sampling={self.data.sampling!r} with train.class_weights="
                f"{self.train.class_weights!r}: both make rare classes count more, so that they "
                "would count too much; remove one of the two"
            )


def all_fields() -> list[str]:
    """Returns the name of every field with its section, such as "train.epochs"."""
    return [
        f"{section.name}.{each.name}"
        for section in dataclasses.fields(Config)
        for each in dataclasses.fields(section.default_factory)
    ]


def default_config() -> ml_collections.ConfigDict:
    """Returns a config with every field at its default, from which a config file starts."""
    config = ml_collections.ConfigDict(dataclasses.asdict(Config()))
    # ml_collections takes a field's type from its default. A field of several types gets the type
    # `object`, which accepts text and numbers: `int` would not accept None.
    for section in dataclasses.fields(Config):
        for field in dataclasses.fields(section.default_factory):
            if isinstance(field.type, types.UnionType):
                kind = str if field.type == str | None else object
                reference = config_dict.FieldReference(field.default, field_type=kind)
                config[section.name][field.name] = reference
    return config


def deciding(config: Config) -> dict[str, object]:
    """Returns the settings that a resumed run must share with the run that it continues, by name.

    The data are compared in another place, by what was found in the files. The number of replicas
    and all settings that change only speed may differ. The number of epochs may differ unless the
    learning rate depends on it. The layers that compute in float32 may differ, because a change
    there may repair the run. Optimizer states are converted if their dtype differs.
    """
    free = {
        "runtime": {"gpu_ids", "memory", "compile_cache", "peer_timeout_s", "allow_public_network"},
        "model": {"weights", "weights_order", "new_layers"},
        "step": {"audit_steps", "nonfinite", "max_rollbacks", "shard_states", "state_dtype"},
        "train": {"steps_per_execution", "export"},
    }
    if config.train.decay in ("constant", "step"):
        free["train"].add("epochs")
    sections = ["runtime", "model", "train", "step"]
    if is_vit(config.model.name):
        sections.insert(2, "vit")
    if config.runtime.precision != "float16":  # where it decides the dtype of the weights
        free["model"].add("float32_layers")
    facts = {
        f"{section}.{name}": list(value) if isinstance(value, tuple) else value
        for section in sections
        for name, value in dataclasses.asdict(getattr(config, section)).items()
        if name not in free.get(section, ())
    }
    if facts["train.loss"] == "auto":  # checkpoints of earlier versions have this default
        facts["train.loss"] = "cross_entropy"
    return facts


def is_smoke(size: str) -> bool:
    """Returns whether the argument after the colon of --config=FILE:smoke asks for a smoke test.

    Raises:
      UserError: `size` is neither empty nor "smoke".
    """
    if size not in ("", "smoke"):
        raise UserError(f"there is no size '{size}'; did you mean ':smoke'?")
    return size == "smoke"


def sized(size: str, sizes: Sequence[str]) -> tuple[str, bool]:
    """Returns the size after the colon of --config=FILE:SIZE, and whether it is a smoke test.

    For a config file with several sizes: "" asks for the first of them, "small" for that size,
    "smoke" and "small_smoke" for a smoke test of each.

    Raises:
      UserError: there is no such size.
    """
    known = {each: (each, False) for each in sizes}
    known |= {"smoke": (sizes[0], True), **{f"{each}_smoke": (each, True) for each in sizes}}
    if size and size not in known:
        raise UserError(f"there is no size '{size}'{did_you_mean(size, known)}")
    return known[size or sizes[0]]


def check_is_config(returned: object) -> None:
    """Raises UserError unless `returned` is what a config file's get_config() should return."""
    if not isinstance(returned, ml_collections.ConfigDict):
        raise UserError(f"get_config() returned {returned!r}; expected default_config(), changed")


def parse(config: ml_collections.ConfigDict) -> Config:
    """Returns the checked, frozen experiment.

    Raises:
      UserError: a section or field does not exist, or a value is wrong.
    """
    check_is_config(config)
    sections = {field.name: field.default_factory for field in dataclasses.fields(Config)}
    for each in config:
        if each not in sections:
            raise UserError(f"config has no field '{each}'{meant.field(each, all_fields())}")
    values = with_pixels({name: _values(name, kind, config) for name, kind in sections.items()})
    return Config(**{name: kind(**values[name]) for name, kind in sections.items()})


def _values(name: str, kind: type, config: ml_collections.ConfigDict) -> dict:
    values = config.get(name, {})
    if not isinstance(values, ml_collections.ConfigDict | dict):
        raise UserError(f"config.{name}={values!r}; expected a group of fields")
    fields = [field.name for field in dataclasses.fields(kind)]
    for each in values:
        if each not in fields:
            hint = meant.field(each, all_fields(), fields, section=name)
            raise UserError(f"config.{name} has no field '{each}'{hint}")
    return dict(values)
