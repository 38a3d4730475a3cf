"""The flags of `tfaccel launch`, and what is wrong with them."""

import math
import pathlib
import sys
import tempfile

import pytest

from tfaccel.common.errors import UserError
from tfaccel.launch.options import Options, argv_of, digest_of, flags_of, parse

TRAIN = ("train", "--config=configs/digits.py", "--workdir=runs/a")


def test_what_is_not_said_has_a_default():
    options, command = parse(TRAIN, {})
    assert command == TRAIN
    assert options == Options(log_dir=pathlib.Path.cwd() / "runs" / "a" / "launch")


def test_flags_stand_before_the_command_and_its_own_are_left_alone():
    flags = ["--nproc-per-node=2", "--nnodes", "3", "--node-rank=1", "--master-addr=n9"]
    command = (*TRAIN, "--nnodes=7", "--resume=auto")
    options, received = parse([*flags, "--step-timeout=1.5", "--log-dir=/logs", *command], {})
    assert received == command
    assert (options.num_ranks_per_node, options.num_nodes, options.node_rank) == (2, 3, 1)
    assert (options.num_ranks, options.master_addr, options.step_timeout_s) == (6, "n9", 1.5)
    assert options.log_dir == pathlib.Path("/logs")


@pytest.mark.parametrize("engine", ["local", "slurm"])
def test_a_dry_run_leaves_nothing_in_its_workdir(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    options, _ = parse([f"--engine={engine}", *TRAIN, "--dry-run"], {})
    assert pathlib.Path.cwd() / "runs" not in options.log_dir.parents
    assert (options.log_dir.parent == tmp_path) == (engine == "local")
    options, _ = parse(["--log-dir=/logs", *TRAIN, "--dry-run"], {})
    assert options.log_dir == pathlib.Path("/logs")


@pytest.mark.parametrize("engine", ["local", "slurm"])
def test_a_dry_run_needs_no_workdir(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    train = ["train", "--config=configs/digits.py"]
    options, _ = parse([f"--engine={engine}", *train, "--dry-run"], {})
    assert (options.log_dir.parent == tmp_path) == (engine == "local")
    with pytest.raises(UserError, match="without --workdir"):
        parse([f"--engine={engine}", *train], {})


@pytest.mark.parametrize("engine", ["local", "slurm"])
def test_a_selftest_needs_no_workdir(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    options, command = parse([f"--engine={engine}", "selftest", "--xla=on"], {})
    assert list(command) == ["selftest", "--xla=on"]
    assert (options.log_dir.parent == tmp_path) == (engine == "local")


@pytest.mark.parametrize(
    "spelt",
    [["--workdir=x/y"], ["--workdir", "x/y"], ["-workdir=x/y"], ["--workdir=a", "--workdir=x/y"]],
)
def test_a_workdir_is_found_as_absl_finds_it(spelt):
    options, _ = parse(["train", "--config=c.py", *spelt], {})
    assert options.log_dir == pathlib.Path.cwd() / "x" / "y" / "launch"


@pytest.mark.parametrize("spelt", ["--dry-run=true", "--dry_run", "-dry-run", "--dry_run=1"])
def test_a_dry_run_is_found_as_absl_finds_it(spelt, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    options, _ = parse([*TRAIN, spelt], {})
    assert options.log_dir.parent == tmp_path


def test_a_call_that_is_refused_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(UserError, match="without --master-addr"):
        parse(["--nnodes=2", *TRAIN, "--dry-run"], {})
    assert not list(tmp_path.iterdir())


def test_an_ipv6_address_may_stand_in_brackets():
    for host in ("::1", "[::1]"):
        options, _ = parse(["--nnodes=2", f"--master-addr={host}", *TRAIN], {})
        assert options.master_addr == "::1"


def test_a_rank_runs_train_or_a_script_by_this_python(tmp_path):
    assert argv_of(TRAIN) == [sys.executable, "-m", "tfaccel", *TRAIN]
    script = tmp_path / "a b.py"
    script.touch()
    assert argv_of([str(script), "--x"]) == [sys.executable, str(script), "--x"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "no command to launch"),
        (["trian"], "cannot launch 'trian'; did you mean 'train'"),
        (["script.py"], "script script.py does not exist"),
        (["train", "--config=a.py"], "train without --workdir=DIR"),
        (["--nproc-per-nod=2", *TRAIN], "did you mean --nproc-per-node"),
        (["--nproc-per-node=0", *TRAIN], "nproc-per-node=0"),
        (["--max-restarts=-1", *TRAIN], "max-restarts=-1"),
        (["--step-timeout=-1", *TRAIN], "step-timeout=-1"),
        (["--grace=0", *TRAIN], "grace=0"),
        (["--nnodes=2", "--node-rank=2", *TRAIN], "--node-rank=2 of --nnodes=2; expected 0 to 1"),
        (["--nnodes=2", *TRAIN], "--nnodes=2 without --master-addr"),
        (["--node-timeout=1.5", *TRAIN], "node-timeout=1.5"),
        (["--print", *TRAIN], "--print with --engine=local"),
    ],
)
def test_a_mistake_in_the_call_is_a_sentence(arguments, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=sentence.replace("(", r"\(")):
        parse(arguments, {})


def test_a_tf_config_that_is_there_already_is_refused():
    with pytest.raises(UserError, match="TF_CONFIG is set"):
        parse(TRAIN, {"TF_CONFIG": "{}"})


def test_no_seconds_are_no_limit_which_an_engine_passes_on():
    options, _ = parse(["--step-timeout=0", "--start-timeout=0", *TRAIN], {})
    assert (options.step_timeout_s, options.start_timeout_s) == (math.inf, math.inf)
    assert flags_of(options) == ["--start-timeout=0", "--step-timeout=0"]
    assert parse([*flags_of(options), *TRAIN], {})[0] == options


def test_a_digest_tells_commands_apart():
    assert digest_of(["train", "a b"]) != digest_of(["train", "a", "b"])
