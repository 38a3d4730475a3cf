"""tfaccel trains Keras models from image files and keeps NVIDIA GPUs busy doing it.

    run = tfaccel.setup(gpu_ids=[0], precision="mixed_float16")
    train = run.image_folder("mnist_png/training", image_size=(28, 28), channels=1, ...)
    with run.scope(): model = ...
    run.compile(model, ...); model.fit(train); run.export(model, "exported/1")

TensorFlow is imported when `setup` is first touched, not before: `tfaccel --help` needs none of it.
"""

from typing import TYPE_CHECKING

from tfaccel.config import StepConfig
from tfaccel.errors import UserError

if TYPE_CHECKING:
    from tfaccel.run import Run, setup

__version__ = "0.1.0"
__all__ = ["Run", "StepConfig", "UserError", "__version__", "setup"]


def __getattr__(name: str):
    if name in ("Run", "setup"):
        from tfaccel import run

        return getattr(run, name)
    raise AttributeError(f"module 'tfaccel' has no attribute '{name}'")
