"""An oracle of KerasTuner as the sampler of a search: it proposes, and our trials run.

Takes the class of an oracle and its settings; gives a sampler of Optuna, for the user's file:

    sampler = OracleSampler(keras_tuner.oracles.BayesianOptimizationOracle, num_initial_points=8)

KerasTuner's tuners train within their own process, and keep their trials in a folder of their own.
Here each proposal is made by a new oracle, which gets the trials from Optuna's journal. So a search
can be killed and shared by several processes, as with any other sampler. The first trial has random
values, because the oracle gets the fields from it.

The library is in the extra `keras-tuner`. It loads TensorFlow, which takes seconds.
"""

import math

import keras_tuner
import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import FrozenTrial, TrialState

from tfaccel.common.errors import UserError

# These keep more than trials from one proposal to the next: what a grid has left, and brackets.
WITH_STATE = {
    "GridSearchOracle": "sampler = optuna.samplers.GridSampler(...)",
    "HyperbandOracle": "pruner = optuna.pruners.HyperbandPruner()",
}


class OracleSampler(optuna.samplers.BaseSampler):
    """Suggests what an oracle of KerasTuner proposes, given all trials so far."""

    def __init__(
        self, oracle: type[keras_tuner.Oracle], *, seed: int | None = None, **settings: object
    ):
        """Takes an oracle.

        Args:
          oracle: its class, such as `keras_tuner.oracles.BayesianOptimizationOracle`.
          seed: of the proposals; None for another one each time.
          **settings: arguments of the class, but for objective, hyperparameters and seed.

        Raises:
          UserError: it is no oracle, or one whose state is more than its trials.
        """
        if not (isinstance(oracle, type) and issubclass(oracle, keras_tuner.Oracle)):
            raise UserError(
                f"oracle={oracle!r}; expected a class of keras_tuner.oracles, such as "
                "BayesianOptimizationOracle"
            )
        if known := [each for each in oracle.__mro__ if each.__name__ in WITH_STATE]:
            raise UserError(
                f"{oracle.__name__} keeps a state of its own, which a search cannot share; use "
                f"Optuna's: {WITH_STATE[known[0].__name__]}"
            )
        self._oracle, self._seed, self._settings = oracle, seed, settings
        self._random = optuna.samplers.RandomSampler(seed)

    def reseed_rng(self) -> None:
        """Seeds the random values anew, which Optuna asks of samplers in several processes."""
        self._random.reseed_rng()

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Returns the fields that all complete trials have, with their ranges."""
        return optuna.search_space.intersection_search_space(study.get_trials(deepcopy=False))

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, object]:
        """Returns the oracle's proposal; {} for random values if it has nothing new."""
        fields = {name: each for name, each in search_space.items() if not each.single()}
        if not fields:
            return {}
        space = keras_tuner.HyperParameters()
        for name, each in fields.items():
            _add(space, name, each)
        direction = "max" if study.direction == optuna.study.StudyDirection.MAXIMIZE else "min"
        oracle = self._oracle(
            objective=keras_tuner.Objective("value", direction),
            hyperparameters=space,
            seed=None if self._seed is None else self._seed + trial.number + 1,
            **self._settings,
        )
        for each in study.get_trials(deepcopy=False):
            if each.number != trial.number and fields.keys() <= each.params.keys():
                _tell(oracle, space, each, fields)
        proposed = oracle.populate_space(str(trial.number)).get("values") or {}
        return {
            name: _from_oracle(proposed[name], each)
            for name, each in fields.items()
            if name in proposed
        }

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> object:
        """Returns a random value, of a field that the oracle does not know yet."""
        return self._random.sample_independent(study, trial, param_name, param_distribution)


def _add(space: keras_tuner.HyperParameters, name: str, field: BaseDistribution) -> None:
    """Adds a field, with its range as KerasTuner says it."""
    match field:
        case CategoricalDistribution(choices=choices):
            # By their places, because KerasTuner takes only values of one type.
            space.Choice(name, list(range(len(choices))), ordered=False)
        case FloatDistribution(low=low, high=high, log=log, step=step):
            space.Float(name, low, high, step=step, sampling="log" if log else "linear")
        case IntDistribution(low=low, high=high, log=log, step=step):
            # A step of a logarithmic field of KerasTuner is a factor.
            how = {"sampling": "log"} if log else {"step": step}
            space.Int(name, low, high, **how)


def _tell(
    oracle: keras_tuner.Oracle,
    space: keras_tuner.HyperParameters,
    trial: FrozenTrial,
    fields: dict[str, BaseDistribution],
) -> None:
    """Gives a trial to the oracle, if it is complete or still runs."""
    status = {TrialState.COMPLETE: "COMPLETED", TrialState.RUNNING: "RUNNING"}.get(trial.state)
    if status is None or (trial.value is not None and not math.isfinite(trial.value)):
        return
    given = space.copy()
    given.values = {name: _to_oracle(trial.params[name], each) for name, each in fields.items()}
    name = str(trial.number)
    told = keras_tuner.engine.trial.Trial(hyperparameters=given, trial_id=name, status=status)
    told.score = trial.value
    oracle.trials[name] = told
    if status == "RUNNING":
        oracle.ongoing_trials[name] = told


def _to_oracle(value: object, field: BaseDistribution) -> object:
    if isinstance(field, CategoricalDistribution):
        return int(field.to_internal_repr(value))
    return value


def _from_oracle(value: object, field: BaseDistribution) -> object:
    """Returns a proposed value as Optuna has it, within the range."""
    if isinstance(field, CategoricalDistribution):
        return field.choices[int(value)]
    if isinstance(field, IntDistribution):
        value = int(value)
    return min(max(value, field.low), field.high)
