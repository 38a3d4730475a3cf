"""The user's file that says what to search: Optuna's usual function over a trial.

    def suggest(trial, config):
        config.train.learning_rate = trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True)

It may also define `sampler` and `pruner`, objects of Optuna.

    space = read(pathlib.Path("space.py"))
    space.config_for(trial, base)      # a checked Config
"""

import dataclasses
import pathlib
import runpy
from collections.abc import Callable

import ml_collections
import optuna

from tfaccel.common.errors import UserError
from tfaccel.config import Config, parse
from tfaccel.config.file_errors import in_file


@dataclasses.dataclass(frozen=True)
class Space:
    """What a file says.

    Attributes:
      path: the file.
      suggest: takes a trial and a config, and sets fields of the config.
      sampler: chooses the parameters.
      pruner: decides which trials end early.
    """

    path: pathlib.Path
    suggest: Callable[[optuna.Trial, ml_collections.ConfigDict], object]
    sampler: optuna.samplers.BaseSampler
    pruner: optuna.pruners.BasePruner

    def config_for(self, trial: optuna.Trial, base: ml_collections.ConfigDict) -> Config:
        """Returns the base config with what the trial suggests. The base stays as it is.

        Raises:
          UserError: the file fails, or the fields do not suit each other.
        """
        config = base.copy_and_resolve_references().lock()  # a new field is a mistake
        try:
            self.suggest(trial, config)
        except (UserError, optuna.TrialPruned):
            raise
        except Exception as error:  # any error in the user's file
            raise SpaceError(in_file(error, str(self.path))) from error
        return parse(config)


class SpaceError(UserError):
    """The user's function itself fails, so that no trial can begin."""


def read(path: pathlib.Path) -> Space:
    """Returns what the file says.

    Raises:
      UserError: the file fails, or has no function `suggest`, or another kind of sampler or pruner.
    """
    if not path.is_file():
        raise UserError(f"space {path} is no file; give a Python file with suggest(trial, config)")
    try:
        said = runpy.run_path(str(path))
    except (Exception, SystemExit) as error:  # any error in the user's file
        raise UserError(in_file(error, str(path))) from error
    if not callable(said.get("suggest")):
        raise UserError(f"{path}: there is no suggest(trial, config); add one that sets fields")
    # The sampler knows which trials run beside it, and need not suggest what they try.
    sampler = said.get("sampler", None) or optuna.samplers.TPESampler(constant_liar=True)
    pruner = said.get("pruner", None) or optuna.pruners.MedianPruner()
    for name, each, kind in (
        ("sampler", sampler, optuna.samplers.BaseSampler),
        ("pruner", pruner, optuna.pruners.BasePruner),
    ):
        if not isinstance(each, kind):
            raise UserError(
                f"{path}: {name}={each!r}; expected an object of optuna.{name}s, such as "
                f"{name} = optuna.{name}s.{type(_example(name)).__name__}()"
            )
    return Space(path, said["suggest"], sampler, pruner)


def _example(name: str):
    return optuna.samplers.TPESampler() if name == "sampler" else optuna.pruners.MedianPruner()
