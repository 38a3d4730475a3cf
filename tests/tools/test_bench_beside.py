"""tools/bench_beside.py: arms of one's own beside each other, with tiny networks on the CPU."""

import json
import pathlib
import subprocess
import sys

import pytest

PROGRAM = pathlib.Path(__file__).parents[2] / "tools" / "bench_beside.py"


def run(*arguments):
    command = [sys.executable, str(PROGRAM), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=400)


@pytest.mark.parametrize("arm", ["new", "new=1", "={}", "new={"])
def test_an_arm_is_a_name_and_an_object(arm):
    done = run("--network=bert", f"--arm={arm}")
    assert done.returncode == 2
    assert "expected NAME={JSON object}" in done.stderr


def test_two_arms_with_one_name_are_a_mistake():
    done = run("--network=bert", "--arm=a={}", "--arm=a={}")
    assert done.returncode == 2
    assert "two arms have one name" in done.stderr


@pytest.mark.parametrize(
    ("settings", "words"),
    [('{"remat": "blocks"}', "setting 'remat'"), ('{"program": "a.py"}', "program 'a.py'; exp")],
)
def test_settings_that_no_arm_has_are_a_mistake(settings, words):
    done = run("--network=bert", f"--arm=a={settings}")
    assert done.returncode == 2
    assert words in done.stderr


@pytest.mark.slow
def test_arms_are_timed_in_turns_and_a_failed_one_is_left_out(tmp_path):
    done = run(
        "--network=lstm", "--smoke", "--repeats=2", "--precision=float32", f"--trace={tmp_path}",
        "--arm=new={}", '--arm=wrong={"step": {"accumulation_steps": -1}}',
        '--arm=other={"only": ["bert"]}',
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["failed"] == ["lstm.wrong"]
    assert {name: len(found) for name, found in result["stretches"].items()} == {"lstm.new": 2}
    assert "accumulation_steps" in done.stdout
    assert (tmp_path / "lstm.new.txt").exists()  # of a CPU, without GPU kernels


@pytest.mark.slow
def test_a_time_limit_leaves_out_stretches(tmp_path):
    done = run(
        "--network=lstm", "--smoke", "--repeats=3", "--precision=float32", "--time-limit=1",
        f"--trace={tmp_path}", "--arm=new={}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "--time-limit: 1 s are over" in done.stdout
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(result["stretches"]["lstm.new"]) == 1
    assert "| new |" in done.stdout
    assert not list(tmp_path.iterdir())
