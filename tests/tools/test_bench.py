import ast
import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import numpy as np
import PIL.Image
import psutil
import pytest

ROOT = pathlib.Path(__file__).parents[2]
TOOLS = ROOT / "tools"
TORCH_PYTHON = os.environ.get("TORCH_PYTHON", sys.executable)
LIMIT_S = 300  # for arms that answer, which takes them a moment; the machine may be slow

# An arm without TensorFlow, which does as its settings say, and notes its turns.
FAKE = """
import os, sys, time
from bench_arms import protocol

def begin(settings):
    if "notes" in settings:
        print("at work", flush=True)
        protocol.write(protocol.pathlib.Path(settings["notes"]), {"id": os.getpid()})
    if settings.get("dies") == "at once":
        stack = "".join(f"    @     {address:#x}  (unknown)\\n" for address in range(50))
        sys.exit(f"something about a GPU\\n{stack}")
    time.sleep(settings.get("sleeps", 0))
    values = iter(settings["values"])

    def stretch():
        with open(settings["turns"], "a") as file:
            print(settings["name"], file=file)
        if settings.get("dies") == "later":
            sys.exit(3)
        return {settings.get("measure", "images_per_second"): next(values)} | more(settings)

    ready = {"settings": settings, "environment": {"python": "3"}, "seconds_to_first_step": 7.0}
    return protocol.Arm(ready, stretch)

def more(settings):
    steps = {"step_seconds": settings["steps"]} if "steps" in settings else {}
    return steps | settings.get("more", {})

protocol.serve(begin)
"""


@pytest.fixture(scope="module")
def bench():
    sys.path.insert(0, str(TOOLS))
    try:
        spec = importlib.util.spec_from_file_location("bench", TOOLS / "bench.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(TOOLS))


@pytest.fixture
def fake(tmp_path, bench):
    """Returns what starts an arm of a program of its own, and the file of turns."""
    program = tmp_path / "fake.py"
    program.write_text(FAKE)

    class Silent(bench.ArmProcess):
        """One that says nothing, for which a second stands for five minutes."""

        def _answer(self, name, limit_s):
            return super()._answer(name, limit_s / LIMIT_S)

    def start(name, settings, environment):
        own = {"name": name, "turns": str(tmp_path / "turns")}
        return (Silent if "sleeps" in settings else bench.ArmProcess)(
            name,
            [sys.executable, str(program)],
            settings | own,
            environment=os.environ | {"PYTHONPATH": str(TOOLS)} | environment,
        )

    return start


@pytest.fixture
def a_row(bench):
    """Returns a row; by default of one arm each, which give numbers."""

    def make(ours=None, rivals=None, **fields):
        ours = ours or {"a": {"values": [3.0, 9.0, 4.0]}}
        rivals = rivals or {"b": {"values": [2.0, 2.0, 2.0]}}
        return bench.Row("S1", "a / b", 1.5, ours, rivals, **fields)

    return make


def row_of(bench, name, gpus=1):
    return next(each for each in bench.make_rows(batch=8) if (each.name, each.gpus) == (name, gpus))


def test_arms_take_turns_and_their_medians_count(bench, fake, a_row, tmp_path):
    *_, found = bench.measure_row(a_row(), fake, repeats=3, limit=bench.TimeLimit(LIMIT_S))
    assert (tmp_path / "turns").read_text().split() == ["a", "b"] * 3
    assert found["ratio"] == 2.0
    assert found["is_met"]
    assert [each["images_per_second"] for each in found["arms"]["a"]["stretches"]] == [3, 9, 4]
    assert found["environment"] == {"python": "3"}
    assert found["arms"]["a"]["settings"]["values"] == [3, 9, 4]
    assert "started" not in found["arms"]["a"]["settings"]


def test_the_best_arm_of_each_side_counts(bench, fake, a_row):
    row = a_row(
        {"a": {"values": [3.0]}, "c": {"values": [6.0]}},
        {"b": {"values": [2.0]}, "d": {"values": [5.0]}},
    )
    *_, found = bench.measure_row(row, fake, repeats=1, limit=bench.TimeLimit(LIMIT_S))
    assert (found["ours"], found["best rival"], found["ratio"]) == ("c", "d", 1.2)
    assert found["ratio to each rival"] == {"b": 3.0, "d": 1.2}
    assert not found["is_met"]


def test_an_arm_that_is_far_behind_its_side_has_one_turn(bench, fake, a_row, tmp_path):
    row = a_row(
        {
            "a": {"values": [3.0] * 3},
            "slow": {"values": [2.0] * 3},
            "steps": {"values": [1.0] * 3, "step_times": True},  # which is there for their times
        },
        {"b": {"values": [2.0] * 3}, "near": {"values": [1.9] * 3}},
    )
    *_, found = bench.measure_row(row, fake, repeats=3, limit=bench.TimeLimit(LIMIT_S))
    first, later = ["a", "slow", "steps", "b", "near"], ["a", "steps", "b", "near"]
    assert (tmp_path / "turns").read_text().split() == first + 2 * later
    slow = found["arms"]["slow"]
    assert slow["left out"] == "33% behind the best of its side, after 1 of 3 turns"
    assert slow["median"] == 2
    assert found["ratio"] == 1.5


def test_a_row_ends_where_the_best_fails_and_the_others_are_left_out(bench, fake, a_row, tmp_path):
    rivals = {"best": {"values": [3.0]}, "slow": {"values": [1.0] * 3}}  # the best has no second
    turns = bench.measure_row(a_row(None, rivals), fake, repeats=3, limit=bench.TimeLimit(LIMIT_S))
    assert next(turns)["repeats"] == 1
    with pytest.raises(bench.ArmError, match="arm 'best' ended"):
        next(turns)
    assert (tmp_path / "turns").read_text().split() == ["a", "best", "slow", "a", "best"]


def test_of_memory_less_is_better(bench, fake, a_row):
    values = {"measure": "peak_memory_mib"}
    row = a_row(
        {"a": {"values": [3.0], **values}, "c": {"values": [6.0], **values}},
        {"b": {"values": [2.0], **values}, "d": {"values": [5.0], **values}},
        measure="peak_memory_mib",
    )
    *_, found = bench.measure_row(row, fake, repeats=1, limit=bench.TimeLimit(LIMIT_S))
    assert (found["ours"], found["best rival"], found["ratio"]) == ("a", "b", 1.5)
    assert found["is_met"]


def test_step_times_become_percentiles(bench, fake, a_row):
    steps = [0.01] * 98 + [0.02] * 3
    row = a_row({"a": {"values": [3.0], "steps": steps}}, step_goal=1.5)
    *_, found = bench.measure_row(row, fake, repeats=1, limit=bench.TimeLimit(LIMIT_S))
    (stretch,) = found["arms"]["a"]["stretches"]
    assert stretch == {"images_per_second": 3.0, "step_p50_s": 0.01, "step_p99_s": 0.02}
    assert found["p99/p50"] == 2
    assert not found["is_met"]  # for that alone


def test_starts_are_cold_then_warm_by_the_same_folder(bench, fake, a_row):
    folders = []

    def start(name, settings, environment):
        folders.append((name, environment["XDG_CACHE_HOME"]))
        return fake(name, settings, environment)

    row = dataclasses.replace(a_row(measure="seconds_to_first_step"), rivals={})
    *_, found = bench.measure_row(row, start, repeats=2, limit=bench.TimeLimit(LIMIT_S))
    assert [name for name, _ in folders] == ["a, cold", "a, warm"] * 2
    assert folders[0][1] == folders[1][1] != folders[2][1] == folders[3][1]
    assert (found["ours"], found["best rival"], found["ratio"]) == ("warm", "cold", 1)
    assert found["arms"]["warm"]["starts"] == [7.0, 7.0]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"dies": "at once"}, "arm 'b' ended with exit code 1; its last lines:\n  something"),
        ({"dies": "later"}, "arm 'b' ended with exit code 3"),
        ({"sleeps": 1000}, "arm 'b' did not answer within 1 s"),
    ],
)
def test_a_dead_or_silent_arm_is_named(bench, fake, a_row, settings, sentence):
    running = []

    def start(*arguments):
        running.append(fake(*arguments))
        return running[-1]

    row = a_row(rivals={"b": {"values": [2.0], **settings}})
    with pytest.raises(bench.ArmError) as error:
        list(bench.measure_row(row, start, repeats=1, limit=bench.TimeLimit(LIMIT_S)))
    assert sentence in str(error.value)
    assert all(each.child.exit_code() is not None for each in running)


def test_a_side_goes_on_without_an_arm_that_fails(bench, fake, a_row, capsys):
    rivals = {
        "b": {"values": [2.0, 2.0]},
        "dead": {"values": [], "dies": "at once"},
        "dying": {"values": [], "dies": "later"},
    }
    first, second = bench.measure_row(
        a_row(rivals=rivals), fake, repeats=2, limit=bench.TimeLimit(LIMIT_S)
    )
    assert (first["repeats"], first["ratio"]) == (1, 1.5)
    assert (second["repeats"], second["ratio"]) == (2, 3.0)
    assert second["ratio to each rival"] == {"b": 3.0}
    assert "something about a GPU" in second["rivals"]["dead"]["failed"]
    assert "exit code 3" in second["rivals"]["dying"]["failed"]
    assert capsys.readouterr().err.count("bench: arm 'd") == 2


def test_an_arm_may_fail_in_the_last_turn_and_take_the_step_times_along(bench, fake, a_row):
    ours = {"a": {"values": [3.0]}, "waits": {"values": [], "dies": "later"}}
    (found,) = bench.measure_row(
        a_row(ours, step_goal=1.5), fake, repeats=1, limit=bench.TimeLimit(LIMIT_S)
    )
    assert (found["ratio"], found["p99/p50"], found["is_met"]) == (1.5, None, False)
    json.dumps(found, allow_nan=False)  # other readers than Python's take no Infinity


def test_an_arm_that_failed_is_not_the_best(bench, fake, a_row):
    ours = {"a": {"values": [3.0] * 2}, "dies": {"values": [3.1]}}  # has no second
    *_, found = bench.measure_row(a_row(ours), fake, repeats=2, limit=bench.TimeLimit(LIMIT_S))
    assert (found["ours"], found["ratio"]) == ("a", 1.5)
    assert found["arms"]["dies"]["median"] == 3.1
    assert "exit code 1" in found["arms"]["dies"]["failed"]


def test_an_arm_that_is_silent_is_ended_at_once(bench, fake, a_row):
    running = {}

    def start(name, *arguments):
        if name == "next":
            assert running["silent"].child.exit_code() is not None
        running[name] = fake(name, *arguments)
        return running[name]

    row = a_row(rivals={"silent": {"sleeps": 1000}, "next": {"values": [1.0]}})
    (found,) = bench.measure_row(row, start, repeats=1, limit=bench.TimeLimit(LIMIT_S))
    assert "did not answer within 1 s" in found["rivals"]["silent"]["failed"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_driver_leaves_no_arm(tmp_path, number):
    program, notes = tmp_path / "fake.py", tmp_path / "notes.json"
    program.write_text(FAKE)
    arm = {"program": str(program), "notes": str(notes), "sleeps": 99}
    driver = f"""
import signal, sys
sys.path.insert(0, {str(TOOLS)!r})
import bench
signal.signal(signal.SIGINT, signal.default_int_handler)  # as where this runs in a terminal
bench.make_rows = lambda **_: [bench.Row("S1", "a / b", 1, {{"a": {arm!r}}})]
sys.exit(bench.main(["--rows=S1"]))
"""
    process = subprocess.Popen([sys.executable, "-c", driver], stderr=subprocess.PIPE, text=True)
    ends = time.monotonic() + 300
    while not notes.exists() and time.monotonic() < ends:
        time.sleep(0.02)
    arm_id = json.loads(notes.read_text())["id"]
    process.send_signal(number)
    _, said = process.communicate(timeout=300)
    if number == signal.SIGKILL:
        assert process.returncode == -number  # and it cannot wait for the arm, as we do
        with contextlib.suppress(psutil.NoSuchProcess):
            while psutil.Process(arm_id).status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < ends
                time.sleep(0.02)
        return
    assert process.returncode == 128 + number
    assert re.search(
        r"bench: arm 'a' had not answered after \d+ s; its last lines:\n  at work", said
    )
    assert not psutil.pid_exists(arm_id)


def test_an_unknown_row_is_a_mistake_in_the_call(bench, capsys):
    assert bench.main(["--rows=S1,X"]) == 2
    assert "--rows=X: there is no such row; the rows are S1, S2, S3" in capsys.readouterr().err


def test_rows_are_chosen_by_how_they_begin(bench):
    rows = bench.make_rows(batch=8)
    assert [each.name for each in bench.chosen(["T1", "S2", "E2"], rows)] == [
        *("S2", "E2", "E2", "T1a", "T1b")
    ]
    assert bench.chosen(None, rows) == list(rows)


def test_rows_that_lack_something_are_not_run_and_the_reason_is_kept(
    bench, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(bench, "gpu_names", lambda: ["NVIDIA H200"])
    measured = {"ratio": 1.0, "repeats": 3}
    monkeypatch.setattr(bench, "measure_with", lambda *_: iter([measured]))
    flags = [f"--output={tmp_path}", "--torch-python=/no/python"]
    assert bench.main(["--rows=S,E,D1", *flags]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "S3 on 1xH200: not run: /no/python has no torch and torchvision" in printed[2]
    assert "D1 on 2xH200: not run: needs 2 GPUs, but only 1 can be used" in printed
    assert set(json.loads(printed[-1])) == {"S1 on 1xH200", "S2 on 1xH200", "S4 on 1xH200"}
    files = {each.name for each in tmp_path.iterdir()}
    assert files == {f"speed-{name}-1xH200.json" for name in ("S1", "S2", "S3", "S4", "E1")}
    found = json.loads((tmp_path / "speed-E1-1xH200.json").read_text())
    assert found["not run"] == "needs --jpegs=DIR"
    bench.main(["--rows=E1", *flags, f"--jpegs={tmp_path}"])
    bench.main(["--rows=E1", *flags])
    found = json.loads((tmp_path / "speed-E1-1xH200.json").read_text())
    assert found["ratio"] == 1.0  # a reason takes the place of no figure


def test_a_failed_row_does_not_stop_the_others_and_keeps_its_turns(
    bench, tmp_path, capsys, monkeypatch
):
    def measure(row, *_):
        if row.name != "S1":
            yield {"ratio": 2.0, "repeats": 1}
        if row.name != "S4":
            raise bench.ArmError("arm 'a' ended with exit code 1")

    monkeypatch.setattr(bench, "gpu_names", list)
    monkeypatch.setattr(bench, "measure_with", measure)
    assert bench.main(["--rows=S1,S2,S4", f"--output={tmp_path}"]) == 1
    printed = capsys.readouterr()
    assert printed.err.count("arm 'a' ended with exit code 1") == 2
    assert list(json.loads(printed.out.splitlines()[-1]).values()) == [2.0, 2.0]
    _, file = sorted(tmp_path.iterdir())
    found = json.loads(file.read_text())
    assert (found["row"], found["goal"], found["gpus"], found["ratio"]) == ("S4", 2.5, 1, 2.0)
    assert found["command"] == f"python tools/bench.py --rows=S1,S2,S4 --output={tmp_path}"
    assert found["date"]


def test_more_gpus_than_there_are_is_a_mistake_in_the_call(bench, capsys, monkeypatch):
    monkeypatch.setattr(bench, "gpu_names", lambda: ["NVIDIA H200"])
    assert bench.main(["--gpus=2"]) == 2
    assert "--gpus=2, but this machine has 1; use --gpus=1 or fewer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("--repeats=0", "--repeats: '0'; expected a whole number of at least 1"),
        ("--batch=x", "--batch: 'x'; expected a whole number of at least 1"),
        ("--gpus=-1", "--gpus: '-1'; expected a whole number of at least 0"),
        ("--ours=[1]", "--ours: '[1]'; expected a JSON object of settings"),
        ("--ours={", "value: '{'"),
        (
            '--ours={"steps_per_executon": 10}',
            "no setting 'steps_per_executon'; did you mean 'steps_per_execution'?",
        ),
    ],
)
def test_flags_that_are_not_what_they_may_be(bench, capsys, flag, sentence):
    with pytest.raises(SystemExit, match="2"):
        bench.main([flag])
    assert sentence in capsys.readouterr().err


def test_every_setting_of_an_arm_is_one_that_its_program_lists(bench):
    for row in bench.make_rows(batch=8):
        for settings in (*row.ours.values(), *row.rivals.values()):
            known = bench.listed_settings(settings["program"]) | bench.OF_DRIVER
            assert {*settings} - {*bench.WORK} <= known


def test_a_row_of_images_in_memory_is_against_all_ways_to_keep_them(bench):
    rivals = row_of(bench, "T1b").rivals
    assert {each["data"] for each in rivals.values()} == {"cached", "gathered", "arrays"}
    assert len(rivals) == 6  # each in executions of one step, and of an epoch
    assert {each["data"] for each in row_of(bench, "T1a").rivals.values()} == {"files"}


def test_settings_of_an_arm_come_from_the_flags_and_ours_from_the_command_line(bench):
    arguments = ["--batch=7", "--jpegs=/x", '--ours={"steps_per_execution": 10}']
    options = bench.parse(arguments)
    row = bench.with_work(row_of(bench, "E1"), options)
    (ours, *_), (rival,) = row.ours.values(), row.rivals.values()
    assert (ours["batch"], ours["jpegs"], ours["loader"]) == (7, "/x", "dali_gpu")
    assert (ours["steps_per_execution"], rival["steps_per_execution"]) == (10, "epoch")
    assert "jpegs" not in bench.with_work(row_of(bench, "S1"), options).ours["mixed_float16"]


def test_an_arm_keeps_its_own_environment_beside_that_of_the_command_line(bench):
    options = bench.parse(['--ours={"environment": {"A": "1"}}'])
    one, graphs = bench.with_work(row_of(bench, "D1", gpus=2), options).ours.values()
    assert one["environment"] == {"A": "1"}
    assert graphs["environment"] == {
        "A": "1",
        "XLA_FLAGS": "--xla_gpu_enable_command_buffer=+COLLECTIVES",
    }
    (s1,) = bench.with_work(row_of(bench, "S1"), bench.parse([])).ours.values()
    assert "environment" not in s1


def test_where_tfaccel_is_compared_with_itself_both_sides_are_set_up_alike(bench):
    options = bench.parse(["--jpegs=/x", '--ours={"setup": {"memory": 9000}, "epoch_steps": 7}'])
    for name, is_shared in [("E1", True), ("S2", False)]:
        row = bench.with_work(row_of(bench, name), options)
        assert all(each["setup"] == {"memory": 9000} for each in row.ours.values())
        assert all(("setup" in each) is is_shared for each in row.rivals.values())
        assert not any("epoch_steps" in each for each in row.rivals.values())


def test_every_arm_has_a_program_and_a_command(bench):
    for row in bench.make_rows(batch=8):
        for settings in (*row.ours.values(), *row.rivals.values()):
            command = bench.command_of(settings, torch_python="torch's", scratch="/tmp/x")
            assert pathlib.Path(command[-1]).is_file()
            assert (command[0] == "torch's") == ("torch" in command[-1])
            assert not any("--nproc-per-node" in each for each in command)
    by_two = row_of(bench, "D2", gpus=4).ours["one process"] | {"processes": 2}
    assert "--nproc-per-node=2" in bench.command_of(by_two, torch_python="", scratch="/tmp/x")


def test_an_arm_sees_so_many_gpus(bench, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    assert bench.environment_of(2)["CUDA_VISIBLE_DEVICES"] == "4,6"
    assert bench.environment_of(0)["CUDA_VISIBLE_DEVICES"] == "-1"
    assert bench.hardware(["NVIDIA H100 80GB HBM3"], num_used=2) == "2xH100-80GB-HBM3"


def test_another_interpreter_does_not_get_this_ones_libraries(bench, monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/of/this/one")
    monkeypatch.setenv("PYTHONPATH", "/its/packages")
    own, other = bench.environment_of(0), bench.environment_of(0, python="/another/python")
    assert own["LD_LIBRARY_PATH"] == "/of/this/one"
    assert own["PYTHONPATH"] == f"{TOOLS}:/its/packages"
    assert "LD_LIBRARY_PATH" not in other
    assert other["PYTHONPATH"] == str(TOOLS)


def test_a_folder_that_is_not_laid_out_so_is_named_before_anything_runs(bench, tmp_path):
    options = bench.parse([f"--mnist={tmp_path}"])
    row = row_of(bench, "T1a")
    assert (
        bench.lacking(row, options, 1) == f"--mnist={tmp_path} is not a folder with training in it"
    )
    (tmp_path / "training").mkdir()
    assert bench.lacking(row, options, 1) is None


def test_the_table_has_a_line_for_each_row_and_machine(bench, tmp_path):
    facts = {"date": "2026-11-22", "goal": 9, "gpus": 1, "row": "S1"}
    for name, ratio in (("1xH100", 8.123), ("1xH200", 9.0)):
        result = {**facts, "hardware": name, "ratio": ratio}
        (tmp_path / f"speed-S1-{name}.json").write_text(json.dumps(result))
    result = {**facts, "row": "E2", "gpus": 4, "hardware": "4xH200", "ratio": 0.95, "p99/p50": 1.25}
    (tmp_path / "speed-E2-4xH200.json").write_text(json.dumps(result))
    reason = {**facts, "row": "S3", "hardware": "1xH200", "not run": "no torch here"}
    (tmp_path / "speed-S3-1xH200.json").write_text(json.dumps(reason))
    lines = bench.speed_table(bench.make_rows(batch=256), tmp_path).splitlines()
    cells = [[each.strip() for each in line.split("|")[1:-1]] for line in lines[2:]]
    assert [each[0] for each in cells[:4]] == ["S1", "S1", "S2", "S3"]
    assert cells[0][2:] == ["8.12", "9 or more", "1xH100, 2026-11-22"]
    assert cells[1][2:] == ["9", "9 or more", "1xH200, 2026-11-22"]
    assert cells[2][2:] == ["not run", "1.25 or more", ""]
    assert cells[3][2] == "not run: no torch here"
    e2 = [each for each in cells if each[0] == "E2"]
    assert [each[2] for each in e2] == ["not run", "0.95; p99/p50 1.25"]
    assert e2[1][3] == "0.93 or more; 1.3 or less"
    result["p99/p50"] = None
    (tmp_path / "speed-E2-4xH200.json").write_text(json.dumps(result))
    last = bench.speed_table(bench.make_rows(batch=256), tmp_path)
    assert "| 0.95; p99/p50 was not measured | 0.93 or more; 1.3 or less |" in last


@pytest.mark.parametrize(
    ("row", "ratio", "words"),
    [
        ("E1", 0.96996, "0.96996"),
        ("E1", 0.9701, "0.97"),
        ("C1", 0.1504, "0.1504"),
        ("C1", 0.15, "0.15"),
    ],
)
def test_a_missed_goal_is_not_rounded_to_a_met_one(bench, tmp_path, row, ratio, words):
    result = {"row": row, "gpus": 1, "hardware": "H100", "date": "2026-11-26", "ratio": ratio}
    (tmp_path / f"speed-{row}-H100.json").write_text(json.dumps(result))
    assert f"| {words} | " in bench.speed_table(bench.make_rows(batch=256), tmp_path)


def test_another_program_measures_t2_and_the_table_shows_it(bench, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "gpu_names", lambda: ["NVIDIA H200"])
    assert bench.main(["--rows=T2", f"--output={tmp_path}"]) == 0
    assert "T2 on 1xH200: not run: tools/bench_cifar.py measures it" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    facts = {"row": "T2", "gpus": 1, "hardware": "1xH200", "date": "2026-11-22"}
    for ratio, words in ((1.25, "1.25"), (None, "at least one side did not reach 94%")):
        (tmp_path / "speed-T2-1xH200.json").write_text(json.dumps({**facts, "ratio": ratio}))
        lines = bench.speed_table(bench.make_rows(batch=256), tmp_path).splitlines()
        (line,) = (each for each in lines if each.startswith("| T2 |"))
        assert line.endswith(f"| {words} | 1.5 or less | 1xH200, 2026-11-22 |")


def test_the_readmes_show_what_the_files_hold(bench):
    results, rows = TOOLS / "results", bench.make_rows(batch=256)
    assert list(results.glob("speed-*.json"))
    assert bench.speed_table(rows, results) in (results / "README.md").read_text()
    assert bench.short_lines(rows, results) in (ROOT / "README.md").read_text()


# Rows of networks, and the time limit.


def of_network(rates, *, peak_mib, data_mib=0):
    """Returns the settings of a fake arm of a network's row."""
    figures = {"peak_memory_mib": peak_mib, "data_mib": data_mib, "step_ms": 2.5}
    more = figures | {"tokens_per_second": 8000.0}
    return {"values": rates, "measure": "rows_per_second", "more": more}


@pytest.fixture
def network_of(a_row):
    """Returns a network's row: ours has 900 MiB beside its batches, the rivals 1,000 and 600."""

    def make(peak_mib=1000, **fields):
        return a_row(
            {"a": of_network([2000.0, 1900.0, 2100.0], peak_mib=peak_mib, data_mib=100)},
            {
                "quick": of_network([1000.0] * 3, peak_mib=1050, data_mib=50),
                "small": of_network([950.0] * 3, peak_mib=600),
            },
            measure="rows_per_second",
            **fields,
        )

    return make


def test_memory_is_compared_with_the_least_of_the_rivals_and_without_batches(
    bench, fake, network_of
):
    limit = bench.TimeLimit(LIMIT_S)
    *_, found = bench.measure_row(network_of(memory_goal=1.4), fake, repeats=3, limit=limit)
    assert found["memory ratio"] == 1.5
    assert (found["ratio"], found["is_met"]) == (2, False)  # for memory alone
    assert found["arms"]["a"]["spread"] == 0.1
    (found,) = bench.measure_row(network_of(memory_goal=1.5), fake, repeats=1, limit=limit)
    assert found["is_met"]
    (found,) = bench.measure_row(network_of(None), fake, repeats=1, limit=limit)
    assert (found["memory ratio"], found["is_met"]) == (None, True)  # on a CPU, without a goal


def test_each_arm_of_a_network_has_a_line(bench, fake, network_of):
    row = network_of()
    row.rivals["dead"] = {"values": [], "dies": "at once"}
    *_, found = bench.measure_row(row, fake, repeats=3, limit=bench.TimeLimit(LIMIT_S))
    ours, quick, _, dead = bench.arm_lines(found)
    assert ours == (
        "  ours a: 2,000 rows/s, 8,000 tokens/s, 2.50 ms a step, spread 10.0%; "
        "peak 1,000 MiB, 100 of them batches; first step after 7.0 s"
    )
    assert quick.startswith("  rival quick: 1,000 rows/s")
    assert dead == "  rival dead: arm 'dead' ended with exit code 1; its last lines:"


def test_a_time_limit_leaves_out_arms_and_then_turns(bench, fake, a_row, tmp_path, capsys):
    now = [0]

    def start(name, *arguments):
        now[0] += 1000  # it is set up
        process = fake(name, *arguments)
        stretch = process.stretch

        def timed(**limits):
            now[0] += 20
            return stretch(**limits)

        process.stretch = timed
        return process

    rivals = {name: {"values": [2.0] * 3} for name in ("b", "c", "d")}
    # The third arm begins with 1,080 s left, the fourth with 80: too few, as 100 are for stretches.
    limit = bench.TimeLimit(LIMIT_S, ends=3080, clock=lambda: now[0])
    (found,) = bench.measure_row(a_row(rivals=rivals), start, repeats=3, limit=limit)
    assert (found["repeats"], found["ratio"]) == (1, 1.5)
    assert (tmp_path / "turns").read_text().split() == ["a", "b", "c"]
    why = "arm 'd' was not started: the time limit is reached"
    assert found["rivals"]["d"]["failed"] == why
    said = capsys.readouterr().err
    assert f"bench: {why}" in said
    assert "ends after 1 of 3 turns: the time limit has no room for a further one of 60 s" in said


def test_a_row_is_not_begun_at_the_end_of_the_time_limit(bench, capsys, monkeypatch):
    monkeypatch.setattr(bench, "gpu_names", lambda: ["NVIDIA H200"])
    monkeypatch.setattr(bench, "measure_with", lambda *_: pytest.fail("it was begun"))
    assert bench.main(["--rows=S1", "--time-limit=1"]) == 0
    assert "S1 on 1xH200: not run: the time limit is reached" in capsys.readouterr().out


def network_rows(bench, **size):
    return [each for each in bench.make_rows(batch=8, **size) if each.measure == "rows_per_second"]


def test_no_name_of_a_row_begins_with_another(bench):
    names = {each.name for each in bench.make_rows(batch=8)}
    assert not [(a, b) for a in names for b in names if a != b and b.startswith(a)]


@pytest.mark.parametrize("tiny", [False, True])
def test_each_network_has_a_row_whose_sides_have_the_same_work(bench, tiny):
    from bench_arms import networks

    rows = network_rows(bench, tiny=tiny)
    seen = []
    for row in rows:
        arms = [*row.ours.values(), *row.rivals.values()]
        work = {
            tuple(each[name] for name in ("network", "tiny", "batch", "size", "drop", "steps"))
            for each in arms
        }
        assert len(work) == 1
        seen.append(arms[0]["network"])
        assert {each["mode"] for each in row.rivals.values()} == {"default", "max-autotune"}
        assert {*row.ours} == {"mixed_bfloat16", "mixed_float16"}
        assert ("gpu" in row.needs) is not tiny
        assert "torch" in row.needs
        ours = bench.with_work(row, bench.parse(["--batch=3"])).ours["mixed_float16"]
        assert ours["batch"] == networks.find(arms[0]["network"], tiny=tiny).batch
    assert sorted(seen) == sorted(networks.NETWORKS)


def test_both_sides_have_each_network(bench):
    from bench_arms import keras_networks, networks

    def keys(name):
        """Returns the keys of a dict that the program of PyTorch, which is not here, makes."""
        body = ast.parse((TOOLS / "bench_arms" / "torch_models.py").read_text()).body
        (made,) = (
            each.value
            for each in body
            if isinstance(each, ast.Assign) and each.targets[0].id == name
        )
        return {each.value for each in made.keys}

    by_source = {"torchvision": keys("TORCHVISION"), "timm": keys("TIMM")}
    for network in networks.NETWORKS.values():
        assert network.model in {*keras_networks.APPLICATIONS, *keras_networks.OWN}
        assert network.model in by_source.get(network.source, keys("OWN"))


def test_networks_of_both_sides_need_no_package(bench):
    program = ast.parse((TOOLS / "bench_arms" / "networks.py").read_text())
    imports = [each for each in ast.walk(program) if isinstance(each, ast.Import | ast.ImportFrom)]
    assert [ast.unparse(each) for each in imports] == ["import dataclasses"]


def test_rows_of_networks_need_gpus_or_their_tiny_size_and_packages(bench, monkeypatch):
    options = bench.parse(["--torch-python=/of/torch"])
    (bert,) = (each for each in network_rows(bench) if each.name == "L1")
    assert bench.lacking(bert, options, 0) == "needs 1 GPU, but only 0 can be used"
    (bert,) = (each for each in network_rows(bench, tiny=True) if each.name == "L1")
    assert bench.lacking(bert, options, 0).startswith("/of/torch has no torch and torchvision")
    monkeypatch.setattr(bench, "has_torch", lambda _: True)
    expected = "/of/torch has no transformers; install it, or use --torch-python"
    assert bench.lacking(bert, options, 0).startswith(expected)
    assert bench.has_packages(sys.executable, "numpy")
    assert not bench.has_packages(sys.executable, "numpy", "no_such_package")


def test_arms_of_networks_can_be_left_out_but_not_all_of_a_side(bench, capsys, monkeypatch):
    row = network_rows(bench)[0]
    left = bench.without(row, ["max-autotune", "mixed_float16"])
    assert ([*left.ours], [*left.rivals]) == (["mixed_bfloat16"], ["bfloat16"])
    assert bench.without(row_of(bench, "S3"), ["bfloat16"]) == row_of(bench, "S3")
    monkeypatch.setattr(bench, "gpu_names", list)
    assert bench.main(["--rows=V7", "--leave-out=mixed"]) == 2
    said = capsys.readouterr().err
    assert "leaves out all of mixed_bfloat16, mixed_float16 in row V7; each side needs an" in said


def test_a_setting_that_a_row_has_not_is_a_mistake_in_the_call(bench):
    options = bench.parse(['--ours={"loader": "dali_cpu"}'])
    with pytest.raises(bench.UsageError, match="row V1 has no setting 'loader'; leave it out"):
        bench.with_work(network_rows(bench)[0], options)
    options = bench.parse(['--ours={"steps_per_execution": 5}'])
    ours = bench.with_work(network_rows(bench)[0], options).ours
    assert {each["steps_per_execution"] for each in ours.values()} == {5}


def test_each_arm_of_a_network_compiles_from_nothing(bench, network_of, monkeypatch):
    folders = []

    class Started(bench.ArmProcess):
        """An arm that is set up, and no process."""

        def __init__(self, name, command, settings, *, environment):
            own = {environment[each] for each in bench.CACHES}
            assert not any(os.listdir(each) for each in own)
            folders.append(own)
            self._settings = settings

        def __exit__(self, *_):
            pass

        def tell_end(self):
            pass

        def ready(self, **_):
            return {"settings": self._settings, "environment": {}, "seconds_to_first_step": 1.0}

        def stretch(self, **_):
            figures = {"rows_per_second": self._settings["values"][0]}
            return figures | self._settings["more"]

    monkeypatch.setattr(bench, "ArmProcess", Started)
    monkeypatch.setattr(bench, "command_of", lambda *_, **__: [sys.executable])
    row = network_of()
    arms = [*row.ours.values(), *row.rivals.values()]
    for each in arms:
        each["program"] = "of/the/test.py"
    list(bench.measure_with(row, bench.parse(["--repeats=1"]), 0))
    assert len(set.union(*folders)) == len(folders) == 3


def test_the_table_shows_memory_beside_its_goal(bench, tmp_path):
    facts = {"gpus": 1, "hardware": "1xH100", "date": "2026-11-28", "ratio": 1.2}
    for name, ratio in (("V7", 1.0004), ("V6", 1.21)):
        result = {**facts, "row": name, "memory ratio": ratio}
        (tmp_path / f"speed-{name}-1xH100.json").write_text(json.dumps(result))
    lines = bench.speed_table(bench.make_rows(batch=256), tmp_path)
    assert "| 1.2; memory 1.0004 | 1.1 or more; memory 1 or less |" in lines
    assert "| 1.2; memory 1.21 | 1.25 or more | 1xH100, 2026-11-28 |" in lines


def test_a_decoder_sees_no_later_token_and_has_a_tied_head(bench):
    from bench_arms import keras_networks, networks

    network = networks.find("gpt2", tiny=True)
    model = keras_networks.build(network)
    shapes = [tuple(each.shape) for each in model.trainable_variables]
    assert shapes.count((network.vocabulary, network.width)) == 1
    assert (network.width, network.vocabulary) not in shapes
    ids = np.arange(2 * network.size).reshape(2, -1) % network.vocabulary
    later = ids.copy()
    later[:, 5:] = 0
    both = [np.array(model(each)) for each in (ids, later)]
    assert both[0].shape == (2, network.size, network.vocabulary)
    np.testing.assert_allclose(both[0][:, :5], both[1][:, :5], atol=1e-6)
    assert np.abs(both[0][:, 5:] - both[1][:, 5:]).max() > 1e-3


def test_attention_alone_is_the_mean_square_of_an_attention(bench):
    from bench_arms import keras_networks, networks

    model = keras_networks.build(networks.find("attention", tiny=True))
    query, key, value = (each.numpy().astype(float) for each in model.trainable_variables)
    scores = np.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(query.shape[-1])
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    y = np.einsum("bhqk,bkhd->bqhd", weights, value)
    expected = (y**2).sum((2, 3)).mean()
    np.testing.assert_allclose(model(np.zeros((1, 1))), [[expected]], rtol=1e-5)


# The arms themselves, at a size for the CPU.

SMALL = (
    "--gpus=0",
    "--image-size=32",
    "--batch=8",
    "--drop=2",
    "--steps=4",
    "--repeats=1",
    "--model=MobileNetV3Small",
)


@pytest.fixture
def images(tmp_path):
    """A folder of a few JPEGs, and one as MNIST's, of 400 PNGs."""
    random = np.random.default_rng(0)
    for index in range(6):
        pixels = random.integers(0, 256, (60, 80, 3), dtype=np.uint8)
        PIL.Image.fromarray(pixels).save(tmp_path / f"{index}.JPEG")
    for index in range(200):
        path = tmp_path / "training" / str(index % 10) / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.fromarray(random.integers(0, 256, (28, 28), dtype=np.uint8)).save(path)
    return tmp_path


def check_arms(found):
    for arm in (*found["arms"].values(), *found["rivals"].values()):
        assert arm["stretches"][0]["images_per_second"] > 0
        assert arm["stretches"][0]["timed_steps"] >= 4
        assert arm["seconds_to_first_step"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("row", ["S1", "E1", "T1a"])
def test_arms_run(bench, images, capsys, row):
    folder = images / "results"
    flags = [f"--jpegs={images}", f"--mnist={images}", f"--output={folder}"]
    ours = {"loader": "dali_cpu", "step_times": True, "steps_per_execution": 1, "epoch_steps": 6}
    flags += [f"--ours={json.dumps(ours)}"] if row == "E1" else []
    assert bench.main([f"--rows={row}", *SMALL, *flags]) == 0, capsys.readouterr().err
    (file,) = folder.iterdir()
    found = json.loads(file.read_text())
    check_arms(found)
    assert found["ratio"] > 0
    if row == "E1":
        (stretch,) = found["arms"]["ten steps in an execution"]["stretches"]
        assert stretch["step_p99_s"] >= stretch["step_p50_s"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["S2", "T1b"])
def test_arms_of_keras_run_however_they_are_fed(bench, images, name):
    row = row_of(bench, name)
    quick = {"precision": "float32", "jit_compile": False}  # XLA takes 25 s for each
    by_data = {each["data"]: each | quick for each in row.rivals.values()}
    first, *others = by_data.items()
    row = dataclasses.replace(row, ours=dict([first]), rivals=dict(others))
    *_, found = bench.measure_with(row, bench.parse([*SMALL, f"--mnist={images}"]), 0)
    check_arms(found)


@pytest.mark.slow
def test_arms_of_torch_run(bench, tmp_path, capsys):
    if not bench.has_torch(sys.executable):
        pytest.skip("torch and torchvision are not installed")
    assert bench.main(["--rows=S3", *SMALL, f"--output={tmp_path}"]) == 0, capsys.readouterr().err


@pytest.mark.slow
def test_an_arm_of_two_processes_runs(bench):
    row = row_of(bench, "D1", 2)
    on_cpu = {"gpus": 0, "precision": "float32", "xla": False}
    both = {f"{count}": {**on_cpu, "processes": count} for count in (0, 2)}
    both = {name: row.ours["one process"] | each for name, each in both.items()}
    row = dataclasses.replace(row, ours={"2": both["2"]}, rivals={"0": both["0"]})
    options = bench.parse([*SMALL, "--repeats=2"])
    *_, found = bench.measure_with(row, options, 0)
    check_arms(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["V4", "V6", "V7", "L1", "L3", "L4", "L5"])
def test_arms_of_networks_run(bench, name):
    """V1, V2, V3 and V5 differ from V4 by a name, and L2 from L1 by its size."""
    (row,) = (each for each in network_rows(bench, tiny=True) if each.name == name)
    first, second = row.ours.items()  # in place of the rivals, which need torch
    row = dataclasses.replace(row, ours=dict([first]), rivals=dict([second]))
    (found,) = bench.measure_with(row, bench.parse(["--repeats=1"]), 0)
    check_network(found)
    assert len(list(bench.arm_lines(found))) == 2


def check_network(found):
    arms = [*found["arms"].values(), *found["rivals"].values()]
    for arm in arms:
        (stretch,) = arm["stretches"]
        assert stretch["rows_per_second"] > 0
        assert stretch["timed_steps"] == 2
        expected = 2 * arm["settings"]["batch"] / stretch["seconds"]
        assert stretch["rows_per_second"] == pytest.approx(expected)
        assert arm["seconds_to_first_step"] > 0
    return [each["parameters"] for each in arms]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["V6", "L3"])
def test_arms_of_compiled_networks_run(bench, name):
    """Their networks are our own, so both sides have as many parameters."""
    if not bench.has_torch(TORCH_PYTHON):
        pytest.skip("torch and torchvision are not installed; set TORCH_PYTHON")
    (row,) = (each for each in network_rows(bench, tiny=True) if each.name == name)
    flags = ["--repeats=1", f"--torch-python={TORCH_PYTHON}"]
    row = bench.without(row, ["max-autotune", "mixed_float16"])
    (found,) = bench.measure_with(row, bench.parse(flags), 0)
    assert len(set(check_network(found))) == 1
