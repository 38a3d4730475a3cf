"""The command passes on what was asked, and its mistakes are sentences."""

import importlib.util
import json
import pathlib
import sys
import types

import pytest

from tfaccel.cli import main
from tfaccel.common.errors import UserError

DIGITS = f"--config={pathlib.Path(__file__).parents[2]}/configs/digits.py:smoke"
KNOWN = importlib.util.find_spec


@pytest.fixture
def searched(monkeypatch, tmp_path):
    """What the command asks for, in place of a search. Optuna need not be installed."""
    seen = {}

    def search(base, space, **how):
        seen.update(base=base, space=space, **how)
        return {"value": 0.5}

    run = types.SimpleNamespace(search=search)
    space = types.SimpleNamespace(read=lambda path: f"what {path.name} says")
    for name, each in (("run", run), ("space", space)):
        monkeypatch.setitem(sys.modules, f"tfaccel.diagnostics.search.{name}", each)
        monkeypatch.setattr(f"tfaccel.diagnostics.search.{name}", each, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "optuna" or KNOWN(name))
    monkeypatch.chdir(tmp_path)
    return seen


def test_the_search_gets_what_was_asked(searched, capsys, tmp_path):
    asked = ["--space=a.py", "--trials=7", "--jobs=2", "--workdir=b", "--config.train.epochs=5"]
    assert main.main(["search", DIGITS, *asked]) == 0
    assert json.loads(capsys.readouterr().out) == {"value": 0.5}
    assert searched["base"].train.epochs == 5
    del searched["base"]
    assert searched == {
        "space": "what a.py says",
        "workdir": tmp_path / "b",
        "trials": 7,
        "jobs": 2,
    }


def test_by_default_a_search_has_a_folder_of_its_own(searched):
    assert main.main(["search", DIGITS, "--space=a.py"]) == 0
    assert searched["workdir"].name.startswith("search-digits-2")
    assert (searched["trials"], searched["jobs"]) == (20, None)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ([], r"no space; give a Python file with suggest\(trial, config\): --space=space.py"),
        (["--space=a.py", "--trials=0"], "trials=0"),
        (["--space=a.py", "--config.train.optimizer=adm"], "no optimizer 'adm'; did you mean"),
        (["--space=a.py", "--config.log.trackers=mlfow"], "no tracker 'mlfow'; did you mean"),
    ],
)
def test_a_mistake_is_a_sentence(searched, asked, words):
    with pytest.raises(UserError, match=words):
        main.main(["search", DIGITS, *asked])
    assert not searched


def test_without_optuna_the_extra_is_named(searched, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"optuna is not installed.*'tfaccel\[optuna\]'"):
        main.main(["search", DIGITS, "--space=a.py"])
