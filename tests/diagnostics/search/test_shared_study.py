"""A study in a folder: several processes share it, and a later start goes on with it."""

import pytest

from tfaccel.common.errors import UserError

optuna = pytest.importorskip("optuna", reason="needs the extra optuna")

from optuna.trial import TrialState  # noqa: E402

from tfaccel.diagnostics.search.shared_study import MOST_STARTS, SharedStudy  # noqa: E402
from tfaccel.diagnostics.search.space import Space  # noqa: E402


def opened(folder, *, facts=None, direction="minimize"):
    sampler = optuna.samplers.RandomSampler(seed=0)
    space = Space(folder / "space.py", lambda *_: None, sampler, optuna.pruners.NopPruner())
    return SharedStudy(folder, direction=direction, space=space, facts=facts or {"metric": "loss"})


def test_two_processes_share_the_number_of_trials(tmp_path):
    one, other = opened(tmp_path), opened(tmp_path)
    held = [one.ask(at_most=3), other.ask(at_most=3), one.ask(at_most=3)]
    assert [each.folder.name for each in held] == ["00000", "00001", "00002"]
    assert one.ask(at_most=3) is None
    assert other.ask(at_most=3) is None
    other.tell(held[1], value=0.5)
    one.tell(held[0], value=0.25)
    one.tell(held[2], state=TrialState.PRUNED)
    assert other.best().value == 0.25
    assert one.counts() == {"complete": 2, "pruned": 1, "fail": 0, "running": 0}
    assert other.ask(at_most=3) is None
    assert other.ask(at_most=4).folder.name == "00003"


def test_a_trial_that_was_left_behind_is_tried_again_in_its_folder(tmp_path):
    study = opened(tmp_path)
    lost, live = study.ask(at_most=9), study.ask(at_most=9)
    value = lost.trial.suggest_float("rate", 0, 1)
    study.leave(lost)  # as the end of the process would
    later = opened(tmp_path)
    again = later.ask(at_most=2)  # the study is full but for this one
    assert again.folder == lost.folder
    assert again.trial.suggest_float("rate", 0, 1) == value
    assert later.ask(at_most=2) is None
    states = [each.state for each in later.study.get_trials()]
    assert states == [TrialState.FAIL, TrialState.RUNNING, TrialState.RUNNING]
    assert later.counts() == {"complete": 0, "pruned": 0, "fail": 0, "running": 2}
    later.tell(again, value=0.5)
    study.tell(live, value=0.75)
    assert later.folder_of(later.best()) == lost.folder


def test_a_trial_is_not_tried_forever(tmp_path):
    study, folders = opened(tmp_path), []
    while held := study.ask(at_most=1):
        folders.append(held.folder.name)
        study.leave(held)
    assert folders == ["00000"] * MOST_STARTS
    assert study.counts()["fail"] == 1
    assert study.best() is None


def test_another_search_in_the_folder_is_refused(tmp_path):
    opened(tmp_path)
    opened(tmp_path)
    for changes, words in (
        ({"facts": {"metric": "accuracy"}}, "has another search, with another metric"),
        ({"direction": "maximize"}, "with another direction; give another --workdir"),
    ):
        with pytest.raises(UserError, match=words):
            opened(tmp_path, **changes)
