"""The user's file, and what is wrong with it."""

import pytest

from tfaccel.common.errors import UserError
from tfaccel.config import default_config

optuna = pytest.importorskip("optuna", reason="needs the extra optuna")

from tfaccel.diagnostics.search import space as space_lib  # noqa: E402

GOOD = """
def suggest(trial, config):
    config.train.learning_rate = trial.suggest_float("rate", 0.1, 0.2)
"""


def read(tmp_path, text):
    path = tmp_path / "space.py"
    path.write_text(text)
    return space_lib.read(path)


def trial():
    return optuna.create_study().ask()


def test_a_trial_changes_the_fields_of_a_copy(tmp_path):
    base, space = default_config(), read(tmp_path, GOOD)
    config = space.config_for(trial(), base)
    assert 0.1 <= config.train.learning_rate <= 0.2
    assert base.train.learning_rate == default_config().train.learning_rate
    assert isinstance(space.sampler, optuna.samplers.TPESampler)
    assert isinstance(space.pruner, optuna.pruners.MedianPruner)


def test_the_file_chooses_sampler_and_pruner(tmp_path):
    more = "import optuna\nsampler = optuna.samplers.RandomSampler()\n"
    space = read(tmp_path, more + "pruner = optuna.pruners.NopPruner()" + GOOD)
    assert isinstance(space.sampler, optuna.samplers.RandomSampler)
    assert isinstance(space.pruner, optuna.pruners.NopPruner)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1", r"there is no suggest\(trial, config\); add one"),
        ("import nothing_such", "space.py, line 1: ModuleNotFoundError"),
        ("sampler = 'tpe'" + GOOD, "sampler='tpe'; expected an object of optuna.samplers, such as"),
        ("pruner = 3" + GOOD, r"pruner = optuna.pruners.MedianPruner\(\)"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, text, words):
    with pytest.raises(UserError, match=words):
        read(tmp_path, text)
    with pytest.raises(UserError, match=r"space .*none.py is no file"):
        space_lib.read(tmp_path / "none.py")


def test_an_error_of_the_function_has_its_line(tmp_path):
    space = read(tmp_path, "def suggest(trial, config):\n    config.train.rate = 1\n")
    words = r"space.py, line 2: config.train has no field 'rate'; [^{}]{,200}$"
    with pytest.raises(space_lib.SpaceError, match=words):
        space.config_for(trial(), default_config())
    space = read(tmp_path, "def suggest(trial, config):\n    config.train.epochs = 0\n")
    with pytest.raises(UserError, match="epochs=0; expected") as raised:
        space.config_for(trial(), default_config())
    assert not isinstance(raised.value, space_lib.SpaceError)
