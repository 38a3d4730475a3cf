"""One training, test and predict step, compiled, on any number of replicas."""

from tfaccel.step.compile import compile_model

__all__ = ["compile_model"]
