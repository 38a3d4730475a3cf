"""Learning rate, optimizer and weight decay, as `config.train` says."""

from tfaccel.recipe.optimizer import make_optimizer
from tfaccel.recipe.schedule import describe, make_schedule

__all__ = ["describe", "make_optimizer", "make_schedule"]
