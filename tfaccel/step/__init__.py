"""Compiled training, test and predict steps on any number of replicas."""

from tfaccel.step.compile import compile_model, parameters_of_compile

__all__ = ["compile_model", "parameters_of_compile"]
