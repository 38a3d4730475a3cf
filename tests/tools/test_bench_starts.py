"""The rows C of tools/bench.py, which measure how long training takes to start."""

import json
import pathlib
import subprocess
import sys
import time

import fake_arms
import numpy as np
import pytest
from fake_arms import LIMIT_S
from loaded_tool import TOOLS, loaded

FIRST, FULL = "seconds_to_first_step", "seconds_to_full_speed"


@pytest.fixture(scope="module")
def bench():
    with loaded("bench") as module:
        yield module


@pytest.fixture
def fake(tmp_path, bench):
    return fake_arms.starter(bench, tmp_path)


def marks(first, *rates):
    """Returns what an arm notes: 100 steps at each of these rates, the first one at `first`."""
    found = [(1, first)]
    for rate in rates:
        for _ in range(10):
            step, at = found[-1]
            found.append((step + 10, at + 10 / rate))
    return found


def test_figures_of_a_start(bench):
    from bench_arms.starts import figures

    slow_then_fast = marks(20.0, *[5] * 4, *[10] * 8)
    found = figures(slow_then_fast)
    assert found[FIRST] == 20
    assert found[FULL] == pytest.approx(20 + 400 / 5)
    assert found["seconds_to_step_1000"] == pytest.approx(20 + 400 / 5 + 600 / 10)
    assert found["steps_per_second"] == pytest.approx(10)
    assert found["marks"] == [list(each) for each in slow_then_fast]

    steady = figures(marks(20.0, 10))
    assert (steady[FULL], steady["seconds_to_step_1000"]) == (20, None)


def test_one_quick_mark_is_not_full_speed(bench):
    from bench_arms.starts import figures

    found = marks(0.0, *[5] * 3, *[10] * 3)
    _, at = found[10]  # 10 steps at once, because the ones before were late
    found[9] = (found[9][0], at - 0.1)
    assert figures(found)[FULL] == pytest.approx(60)


def test_each_arm_starts_with_empty_caches_and_ours_once_more(bench, fake):
    from bench_arms.starts import CACHES

    folders = []

    def start(name, settings, environment):
        (folder,) = {environment[each] for each in CACHES}
        folders.append((name, folder, list(pathlib.Path(folder).iterdir())))
        pathlib.Path(folder, "compiled").touch()
        settings = settings | {"marks": marks(4.0 if name == "a, warm" else 7.0, 10)}
        return fake(name, settings, environment)

    row = fake_arms.row(bench, {"a": {}}, {"b": {}, "c": {}}, measure=FIRST)
    *_, found = bench.measure_row(row, start, repeats=2, limit=bench.TimeLimit(LIMIT_S))
    assert [name for name, *_ in folders] == ["a", "a, warm", "b", "c"] * 2
    assert len({folder for _, folder, _ in folders}) == 6
    assert [bool(before) for *_, before in folders] == [False, True, False, False] * 2
    assert (found["ours"], found["best rival"], found["ratio"]) == ("a", "b", 1)  # not the warm one
    assert found["is_met"]
    assert [each[FIRST] for each in found["arms"]["a, warm"]["starts"]] == [4.0, 4.0]
    assert bench.without_figures(row, found) == []
    assert list(bench.arm_lines(found))[:2] == [
        "  ours a: first step after 7.0 s; 1,000 steps after nan s; "
        "full speed after 7.0 s (10.0 steps/s)",
        "  ours a, warm: first step after 4.0 s; 1,000 steps after nan s; "
        "full speed after 4.0 s (10.0 steps/s)",
    ]


def test_a_rival_that_fails_is_named(bench, fake):
    settings = {"marks": marks(7.0, 10)}
    row = fake_arms.row(
        bench, {"a": settings}, {"b": settings, "c": {"dies": "at once"}}, measure=FIRST
    )
    (found,) = bench.measure_row(row, fake, repeats=1, limit=bench.TimeLimit(LIMIT_S))
    assert found["ratio"] == 1
    assert bench.without_figures(row, found) == ["c"]
    assert list(bench.arm_lines(found))[-1] == "  rival c: arm 'c' ended with exit code 1"


def test_the_rows_are_of_networks(bench):
    rows = [each for each in bench.make_rows(batch=256) if each.name.startswith("C")]
    assert [each.name for each in rows] == [f"C{number}" for number in range(1, 10)]
    for row in rows:
        each = [*row.ours.values(), *row.rivals.values()]
        assert len({(arm["network"], arm["batch"], arm["first_steps"]) for arm in each}) == 1
        for arm in each:
            assert arm.keys() - bench.OF_DRIVER <= bench.listed_settings(arm["program"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "side"),
    [("C4", "ours"), ("C4", "rivals"), ("C7", "rivals"), ("C8", "ours")],
)
def test_arms_of_keras_note_their_first_steps(bench, tmp_path, name, side):
    (row,) = bench.chosen([name], bench.make_rows(batch=256, tiny=True))
    arms = [each for each in getattr(row, side).values() if "torch" not in each["program"]]
    (settings,) = arms
    settings = settings | {"started": time.time()} | ({"xla": True} if side == "ours" else {})
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    (tmp_path / "end").touch()
    program = TOOLS / "bench_arms" / settings["program"]
    environment = fake_arms.os.environ | {"PYTHONPATH": f"{TOOLS}:{TOOLS.parent}"}
    subprocess.run([sys.executable, program, tmp_path], env=environment, check=True)
    found = json.loads((tmp_path / "ready.json").read_text())["marks"]
    steps, seconds = np.transpose(found)
    assert steps[-1] >= settings["first_steps"]
    assert (np.diff(steps) >= settings["steps_of_mark"]).all()
    assert (np.diff(seconds) > 0).all()
    assert 1 < seconds[0] < 200
