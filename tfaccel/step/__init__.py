"""One training, test and predict step, compiled, on any number of replicas."""

from tfaccel.step.compile import compile_model, make_optimizer

__all__ = ["compile_model", "make_optimizer"]
