"""tfaccel trains Keras models from image files and keeps NVIDIA GPUs busy doing it.

    run = tfaccel.setup(gpu_ids=[0], precision="mixed_float16")
    train = run.image_folder("mnist_png/training", image_size=(28, 28), channels=1, ...)
    with run.scope(): model = ...
    run.compile(model, ...); model.fit(train); run.export(model, "exported/1")

TensorFlow is imported when `setup` is first touched, not before: `tfaccel --help` needs none of it.
"""

import importlib
from typing import TYPE_CHECKING

from tfaccel.config import (
    AugmentConfig,
    CheckpointConfig,
    DaliConfig,
    ExportConfig,
    ImageConfig,
    StepConfig,
)
from tfaccel.errors import UserError, exit_as_the_command
from tfaccel.presets import preset
from tfaccel.progress import beat_of_loop as beat
from tfaccel.progress import is_launched

if TYPE_CHECKING:
    from tfaccel import collectives, doctor
    from tfaccel.comparison.run import compare
    from tfaccel.data import sources
    from tfaccel.isolate import IsolatedError, run_isolated
    from tfaccel.linter.lint import lint
    from tfaccel.precision import float32_region
    from tfaccel.profiling.api import profile
    from tfaccel.run import Run, setup
    from tfaccel.underflow import gradient_underflow

__version__ = "0.1.0"
__all__ = [
    "AugmentConfig",
    "CheckpointConfig",
    "DaliConfig",
    "ExportConfig",
    "ImageConfig",
    "IsolatedError",
    "Run",
    "StepConfig",
    "UserError",
    "__version__",
    "beat",
    "collectives",
    "compare",
    "doctor",
    "float32_region",
    "gradient_underflow",
    "lint",
    "preset",
    "profile",
    "run_isolated",
    "setup",
    "sources",
]

if is_launched():
    exit_as_the_command()


def __getattr__(name: str):
    if name in ("Run", "setup"):
        return getattr(importlib.import_module("tfaccel.run"), name)
    if name in ("IsolatedError", "run_isolated"):
        return getattr(importlib.import_module("tfaccel.isolate"), name)
    if name == "lint":
        return importlib.import_module("tfaccel.linter.lint").lint
    if name == "profile":
        return importlib.import_module("tfaccel.profiling.api").profile
    if name == "compare":
        return importlib.import_module("tfaccel.comparison.run").compare
    if name == "doctor":
        return importlib.import_module("tfaccel.doctor")
    if name == "collectives":
        return importlib.import_module("tfaccel.collectives")
    if name == "float32_region":
        return importlib.import_module("tfaccel.precision").float32_region
    if name == "gradient_underflow":
        return importlib.import_module("tfaccel.underflow").gradient_underflow
    if name == "sources":
        return importlib.import_module("tfaccel.data.sources")
    raise AttributeError(f"module 'tfaccel' has no attribute '{name}'")
