"""Learning rate, optimizer and weight decay from `config.train`."""

from tfaccel.experiment.recipe.optimizer import make_optimizer
from tfaccel.experiment.recipe.schedule import describe, make_schedule

__all__ = ["describe", "make_optimizer", "make_schedule"]
