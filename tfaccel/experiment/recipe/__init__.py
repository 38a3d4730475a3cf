"""Learning rate, optimizer and weight decay, as `config.train` says."""

from tfaccel.experiment.recipe.optimizer import make_optimizer
from tfaccel.experiment.recipe.schedule import describe, make_schedule

__all__ = ["describe", "make_optimizer", "make_schedule"]
