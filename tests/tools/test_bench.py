import contextlib
import dataclasses
import functools
import json
import pathlib
import re
import signal
import subprocess
import sys
import time

import fake_arms
import numpy as np
import PIL.Image
import psutil
import pytest
from fake_arms import FAKE, LIMIT_S
from loaded_tool import TOOLS, loaded

ROOT = TOOLS.parent


@pytest.fixture(scope="module")
def bench():
    with loaded("bench") as module:
        yield module


@pytest.fixture
def fake(tmp_path, bench):
    return fake_arms.starter(bench, tmp_path)


@pytest.fixture
def a_row(bench):
    return functools.partial(fake_arms.row, bench)


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


@pytest.mark.parametrize("together", [False, True])
def test_arms_are_set_up_together_on_demand(bench, fake, a_row, together):
    """Then all are started before the first is waited for. A failed one is left out as ever."""
    events = []

    def start(name, *arguments):
        arm, events[len(events) :] = fake(name, *arguments), [f"start {name}"]
        own = arm.ready
        arm.ready = lambda **limit: (events.append(f"ready {name}"), own(**limit))[1]
        return arm

    row = a_row(rivals={"b": {"values": [2.0]}, "c": {"values": [2.0], "dies": "at once"}})
    limit = bench.TimeLimit(LIMIT_S)
    *_, found = bench.measure_row(row, start, repeats=1, limit=limit, together=together)
    starts, waits = ([f"{what} {each}" for each in "abc"] for what in ("start", "ready"))
    each_in_turn = [event for pair in zip(starts, waits, strict=True) for event in pair]
    assert events == (starts + waits if together else each_in_turn)
    assert (found["ratio"], "failed" in found["rivals"]["c"]) == (1.5, True)


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
    while not notes.exists() and process.poll() is None and time.monotonic() < ends:
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
        own = {"begin_without_xla": False, "memory": 9000}
        assert all(each["setup"] == own for each in row.ours.values())
        assert all(("setup" in each) is is_shared for each in row.rivals.values())
        assert not any("epoch_steps" in each for each in row.rivals.values())


def test_every_arm_has_a_program_and_a_command(bench):
    for row in bench.make_rows(batch=8):
        arms = [*row.ours.values(), *row.rivals.values()]
        assert (row.name[0] == "P") == any("processes" in each for each in arms)
        for settings in arms:
            command = bench.command_of(settings, torch_python="torch's", scratch="/tmp/x")
            assert pathlib.Path(command[-1]).is_file()
            assert (command[0] == "torch's") == ("torch" in command[-1])
            by_launcher = any("--nproc-per-node" in each for each in command)
            assert by_launcher == ("processes" in settings)
    (by_two,) = row_of(bench, "P2", gpus=4).ours.values()
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
        ("C1", 0.7004, "0.7004"),
        ("C1", 0.7, "0.7"),
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
