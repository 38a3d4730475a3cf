"""An experiment as plain values: every field, its default, its check; and presets of fields."""

from tfaccel.config.config import (
    Config,
    all_fields,
    check_is_config,
    deciding,
    default_config,
    is_smoke,
    parse,
    sized,
)
from tfaccel.config.export import (
    CHECKPOINTS,
    COMPUTES_IN,
    LITERT,
    PIXEL_DTYPES,
    WEIGHTS,
    ExportConfig,
)
from tfaccel.config.images import (
    CROPS,
    LAST_BATCHES,
    LOADERS,
    PIXEL_SCALES,
    SOURCE_ARGUMENTS,
    AugmentConfig,
    DaliConfig,
    DataConfig,
    ImageConfig,
)
from tfaccel.config.log import TRACKERS, LogConfig
from tfaccel.config.runtime import RuntimeConfig
from tfaccel.config.training import CheckpointConfig, ModelConfig, StepConfig, TrainConfig
from tfaccel.config.vit import VitConfig

__all__ = [
    "CHECKPOINTS",
    "COMPUTES_IN",
    "CROPS",
    "LAST_BATCHES",
    "LITERT",
    "LOADERS",
    "PIXEL_DTYPES",
    "PIXEL_SCALES",
    "SOURCE_ARGUMENTS",
    "TRACKERS",
    "WEIGHTS",
    "AugmentConfig",
    "CheckpointConfig",
    "Config",
    "DaliConfig",
    "DataConfig",
    "ExportConfig",
    "ImageConfig",
    "LogConfig",
    "ModelConfig",
    "RuntimeConfig",
    "StepConfig",
    "TrainConfig",
    "VitConfig",
    "all_fields",
    "check_is_config",
    "deciding",
    "default_config",
    "is_smoke",
    "parse",
    "sized",
]
