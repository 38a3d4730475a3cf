"""The batch script, run by bash with stand-ins for Slurm; tests/engines/ has a real Slurm."""

import json
import os
import stat
import subprocess

import pytest

from tfaccel.common.errors import UserError
from tfaccel.launch import options, slurm

TRAIN = ["train", "--config=configs/digits.py"]


@pytest.fixture
def bash(tmp_path):
    """Runs a script with an srun that ends with `code`; returns exit code, calls and output."""

    def bash(script, *, code=0, restarts=0):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        for name, ends_with in {"srun": code, "scontrol": 0}.items():
            file = folder / name
            file.write_text(
                f'#!/bin/sh\nfor each in {name} "$@"; do printf \'%s\\n\' "$each"; done'
                f" >> {tmp_path}/calls\nexit {ends_with}\n"
            )
            file.chmod(file.stat().st_mode | stat.S_IXUSR)
        (tmp_path / "calls").write_text("")
        done = subprocess.run(
            ["bash", "-c", script],
            env=os.environ
            | {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "12011"}
            | ({"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}),
            capture_output=True,
            text=True,
        )
        return done.returncode, (tmp_path / "calls").read_text().splitlines(), done.stderr

    return bash


def parsed(tmp_path, *flags, command=TRAIN):
    command = [*command, f"--workdir={tmp_path / 'run'}"]
    return options.parse(["--engine=slurm", *flags, *command], {})


def test_the_script_starts_a_launcher_on_each_node(tmp_path, bash):
    flags = ("--nnodes=2", "--nproc-per-node=4", "--step-timeout=20.5")
    script = slurm.script(*parsed(tmp_path, *flags, command=[*TRAIN, "--note=it's $HOME"]))
    directives = [each for each in script.splitlines() if each.startswith("#SBATCH ")]
    assert "#SBATCH --nodes=2" in directives
    assert "#SBATCH --ntasks-per-node=1" in directives
    assert "#SBATCH --signal=TERM@120" in directives
    code, calls, _ = bash(script)
    assert code == 0
    assert calls[:1] == ["srun"]
    assert calls[calls.index("launch") :] == [
        "launch",
        "--nnodes=2",
        "--nproc-per-node=4",
        "--step-timeout=20.5",
        f"--log-dir={tmp_path}/run/launch/12011-0",
        *TRAIN,
        "--note=it's $HOME",
        f"--workdir={tmp_path}/run",
    ]


@pytest.mark.parametrize(
    ("code", "restarts", "requeued"),
    [
        (0, 0, False),
        (1, 0, True),
        (2, 0, False),  # a mistake in the call
        (130, 0, False),  # Ctrl-C
        (137, 0, True),  # killed
        (143, 1, True),  # saved before the time limit
        (1, 2, False),  # the last one that --max-restarts=2 allows
    ],
)
def test_the_job_is_queued_again_by_exit_code(code, restarts, requeued, tmp_path, bash):
    script = slurm.script(*parsed(tmp_path, "--max-restarts=2"))
    ended_with, calls, said = bash(script, code=code, restarts=restarts)
    assert ended_with == code
    assert calls[-3:] == ["scontrol", "requeue", "12011"] if requeued else "scontrol" not in calls
    assert (f"restart {restarts + 1} of at most 2" in said) == requeued


def test_slurm_itself_may_not_begin_it_again_without_end(tmp_path, bash):
    script = slurm.script(*parsed(tmp_path, "--max-restarts=2"))
    code, calls, said = bash(script, restarts=3)
    assert (code, calls) == (1, [])
    assert "this is restart 3, but the most is 2" in said


def test_print_writes_nothing(tmp_path, capsys):
    assert slurm.run(*parsed(tmp_path, "--print", "--sbatch=--partition=gpu --time=8:00:00")) == 0
    assert "#SBATCH --partition=gpu\n#SBATCH --time=8:00:00\n" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_the_script_is_submitted(tmp_path, monkeypatch, capsys):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/called\necho "7;a_cluster"\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert slurm.run(*parsed(tmp_path)) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["job"] == "7"
    assert (tmp_path / "called").read_text() == f"--parsable {said['script']}\n"
    sbatch.write_text("#!/bin/sh\necho 'invalid partition' >&2; exit 1\n")
    with pytest.raises(UserError, match=r"Slurm rejects .* \(invalid partition\)"):
        slurm.run(*parsed(tmp_path))


def test_no_sbatch_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="there is no sbatch here; submit from"):
        slurm.run(*parsed(tmp_path))


@pytest.mark.parametrize(
    ("sbatch", "message"),
    [
        ("-p gpu", "has '-p'; expected"),
        ("--time 8", "has '8'; expected"),
        ("--comment=$(reboot)", "expected sbatch options"),
        ("--nodes=4", "which the script sets itself"),
        ("--array=1-4", "which the script sets itself"),
    ],
)
def test_sbatch_options_are_options_alone(sbatch, message, tmp_path):
    with pytest.raises(UserError, match=message.replace("$", r"\$")):
        slurm.script(*parsed(tmp_path, f"--sbatch={sbatch}"))


@pytest.mark.parametrize("name", ["a b", "a%j", "a\nb", "$(reboot)"])
def test_folders_that_a_script_cannot_name_are_refused(name, tmp_path):
    with pytest.raises(UserError, match="cannot be written into a batch script"):
        slurm.script(*parsed(tmp_path / name))


def test_names_that_a_script_cannot_have_are_refused(tmp_path):
    with pytest.raises(UserError, match="--name='a b'; expected"):
        slurm.script(*parsed(tmp_path, "--name=a b"))
