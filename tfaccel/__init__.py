"""tfaccel trains Keras models from image files and keeps NVIDIA GPUs busy.

    run = tfaccel.setup(gpu_ids=[0], precision="mixed_float16")
    train = run.image_folder("mnist_png/training", image_size=(28, 28), channels=1, ...)
    with run.scope(): model = ...
    run.compile(model, ...); model.fit(train); run.export(model, "exported/1")

`import tfaccel` does not import TensorFlow; the first use of `setup` does. So `tfaccel --help` runs
without TensorFlow.
"""

import contextlib
import importlib
import sys
from typing import TYPE_CHECKING

from tfaccel.common import old_paths
from tfaccel.common.errors import RunError, UserError, exit_as_the_command
from tfaccel.common.version import __version__
from tfaccel.config import (
    AugmentConfig,
    CheckpointConfig,
    DaliConfig,
    ExportConfig,
    ImageConfig,
    StepConfig,
)
from tfaccel.config.presets import preset
from tfaccel.process.progress import beat_of_loop as beat
from tfaccel.process.progress import is_launched
from tfaccel.process.start_noise import left_out

if TYPE_CHECKING:
    from tfaccel.data import sources
    from tfaccel.diagnostics import doctor
    from tfaccel.diagnostics.allreduce_error import allreduce_error
    from tfaccel.diagnostics.compare.run import compare
    from tfaccel.diagnostics.lint.lint import lint
    from tfaccel.diagnostics.profile.api import profile
    from tfaccel.diagnostics.underflow import gradient_underflow
    from tfaccel.keras_internals.float32_layers import float32_region, with_float32_layers
    from tfaccel.process.isolate import IsolatedError, run_isolated
    from tfaccel.run import Run, setup
    from tfaccel.runtime import collectives
    from tfaccel.training.callbacks.throughput import Throughput

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
    "allreduce_error",
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

old_paths.keep()
if is_launched():
    exit_as_the_command()


# Names that are imported at their first use: the module, and the attribute; None for the module.
_LATER = {
    "IsolatedError": ("tfaccel.process.isolate", "IsolatedError"),
    "Run": ("tfaccel.run", "Run"),
    "Throughput": ("tfaccel.training.callbacks.throughput", "Throughput"),
    "allreduce_error": ("tfaccel.diagnostics.allreduce_error", "allreduce_error"),
    "collectives": ("tfaccel.runtime.collectives", None),
    "compare": ("tfaccel.diagnostics.compare.run", "compare"),
    "doctor": ("tfaccel.diagnostics.doctor", None),
    "float32_region": ("tfaccel.keras_internals.float32_layers", "float32_region"),
    "gradient_underflow": ("tfaccel.diagnostics.underflow", "gradient_underflow"),
    "lint": ("tfaccel.diagnostics.lint.lint", "lint"),
    "profile": ("tfaccel.diagnostics.profile.api", "profile"),
    "run_isolated": ("tfaccel.process.isolate", "run_isolated"),
    "setup": ("tfaccel.run", "setup"),
    "sources": ("tfaccel.data.sources", None),
    "with_float32_layers": ("tfaccel.keras_internals.float32_layers", "with_float32_layers"),
}


def __getattr__(name: str):
    if name not in _LATER:
        raise AttributeError(f"module 'tfaccel' has no attribute '{name}'")
    place, attribute = _LATER[name]
    # Every module but doctor imports TensorFlow.
    starts = name != "doctor" and "tensorflow" not in sys.modules
    with left_out() if starts else contextlib.nullcontext():
        module = importlib.import_module(place)
    return getattr(module, attribute) if attribute else module
