"""An oracle of KerasTuner proposes the trials of a study."""

import pytest

from tfaccel.common.errors import UserError

optuna = pytest.importorskip("optuna", reason="needs the extra optuna")
keras_tuner = pytest.importorskip("keras_tuner", reason="needs the extra keras-tuner")

from tfaccel.diagnostics.search import space  # noqa: E402
from tfaccel.diagnostics.search.oracles import OracleSampler  # noqa: E402

BAYESIAN = keras_tuner.oracles.BayesianOptimizationOracle
RANDOM = keras_tuner.oracles.RandomSearchOracle


def suggested(trial):
    return {
        "rate": trial.suggest_float("rate", 1e-4, 1.0, log=True),
        "share": trial.suggest_float("share", 0.0, 1.0, step=0.25),
        "epochs": trial.suggest_int("epochs", 2, 10, step=2),
        "width": trial.suggest_int("width", 8, 512, log=True),
        "decay": trial.suggest_categorical("decay", [None, "cosine", 3, True]),
        "fixed": trial.suggest_float("fixed", 1.0, 1.0),
    }


@pytest.mark.parametrize("oracle", [BAYESIAN, RANDOM])
def test_what_it_proposes_is_in_the_ranges_of_the_trials(oracle):
    study = optuna.create_study(sampler=OracleSampler(oracle, seed=1))
    for number in range(4):
        trial = study.ask()
        found = suggested(trial)  # Optuna raises for a value outside of its range
        assert found["share"] in (0, 0.25, 0.5, 0.75, 1)
        assert found["epochs"] in (2, 4, 6, 8, 10)
        study.tell(trial, float(number))
    rates = {each.params["rate"] for each in study.trials}
    assert len(rates) == 4


class Noted(BAYESIAN):
    """Notes what it knows when it proposes."""

    known: dict

    def populate_space(self, trial_id):
        """Proposes as its base does."""
        Noted.known = {
            name: (each.status, each.score, each.hyperparameters.values)
            for name, each in self.trials.items()
        }
        assert [each.trial_id for each in self.ongoing_trials.values()] == ["0"]
        return super().populate_space(trial_id)


def test_it_learns_from_the_trials_and_knows_those_that_run():
    sampler = OracleSampler(Noted, seed=0, num_initial_points=4)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.ask().suggest_float("x", -4, 4)  # it never ends
    failed = study.ask()
    failed.suggest_float("x", -4, 4)
    study.tell(failed, state=optuna.trial.TrialState.FAIL)
    for _ in range(9):
        trial = study.ask()
        study.tell(trial, -((trial.suggest_float("x", -4, 4) - 1.5) ** 2))
    first, *complete = (each for each in study.trials[:-1] if each.state.name != "FAIL")
    assert Noted.known == {"0": ("RUNNING", None, first.params)} | {
        str(each.number): ("COMPLETED", each.value, each.params) for each in complete
    }
    assert study.best_value > -0.02


@pytest.mark.parametrize(
    ("oracle", "said"),
    [
        (keras_tuner.oracles.GridSearchOracle, "GridSearchOracle keeps a state .*GridSampler"),
        (keras_tuner.oracles.HyperbandOracle, "HyperbandOracle keeps a state .*HyperbandPruner"),
        (BAYESIAN(), "expected a class of keras_tuner.oracles"),
    ],
)
def test_what_cannot_be_shared_is_refused(oracle, said):
    with pytest.raises(UserError, match=said):
        OracleSampler(oracle)


def test_the_users_file_may_have_it(tmp_path):
    (tmp_path / "space.py").write_text(
        "import keras_tuner\n"
        "from tfaccel.diagnostics.search.oracles import OracleSampler\n"
        "sampler = OracleSampler(keras_tuner.oracles.BayesianOptimizationOracle)\n"
        "def suggest(trial, config): pass\n"
    )
    assert isinstance(space.read(tmp_path / "space.py").sampler, OracleSampler)
