"""tfaccel trains Keras models from image files and keeps NVIDIA GPUs busy doing it.

    run = tfaccel.setup(gpu_ids=[0], precision="mixed_float16")
    train = run.image_folder("mnist_png/training", image_size=(28, 28), channels=1, ...)
    with run.scope(): model = ...
    run.compile(model, ...); model.fit(train); run.export(model, "exported/1")

TensorFlow is imported when `setup` is first touched, not before: `tfaccel --help` needs none of it.
"""

import contextlib
import importlib
import sys
from typing import TYPE_CHECKING

from tfaccel.config import (
    AugmentConfig,
    CheckpointConfig,
    DaliConfig,
    ExportConfig,
    ImageConfig,
    StepConfig,
)
from tfaccel.errors import RunError, UserError, exit_as_the_command
from tfaccel.presets import preset
from tfaccel.progress import beat_of_loop as beat
from tfaccel.progress import is_launched
from tfaccel.start_noise import left_out

if TYPE_CHECKING:
    from tfaccel import collectives, doctor
    from tfaccel.callbacks.throughput import Throughput
    from tfaccel.comparison.run import compare
    from tfaccel.data import sources
    from tfaccel.isolate import IsolatedError, run_isolated
    from tfaccel.linter.lint import lint
    from tfaccel.precision import float32_region, with_float32_layers
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
    "RunError",
    "StepConfig",
    "Throughput",
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
    "with_float32_layers",
]

if is_launched():
    exit_as_the_command()


# What is imported when it is first used: the module, and its attribute; None for itself.
_LATER = {
    "IsolatedError": ("tfaccel.isolate", "IsolatedError"),
    "Run": ("tfaccel.run", "Run"),
    "Throughput": ("tfaccel.callbacks.throughput", "Throughput"),
    "collectives": ("tfaccel.collectives", None),
    "compare": ("tfaccel.comparison.run", "compare"),
    "doctor": ("tfaccel.doctor", None),
    "float32_region": ("tfaccel.precision", "float32_region"),
    "gradient_underflow": ("tfaccel.underflow", "gradient_underflow"),
    "lint": ("tfaccel.linter.lint", "lint"),
    "profile": ("tfaccel.profiling.api", "profile"),
    "run_isolated": ("tfaccel.isolate", "run_isolated"),
    "setup": ("tfaccel.run", "setup"),
    "sources": ("tfaccel.data.sources", None),
    "with_float32_layers": ("tfaccel.precision", "with_float32_layers"),
}


def __getattr__(name: str):
    if name not in _LATER:
        raise AttributeError(f"module 'tfaccel' has no attribute '{name}'")
    place, attribute = _LATER[name]
    # Of these, doctor alone does without TensorFlow.
    starts = name != "doctor" and "tensorflow" not in sys.modules
    with left_out() if starts else contextlib.nullcontext():
        module = importlib.import_module(place)
    return getattr(module, attribute) if attribute else module
