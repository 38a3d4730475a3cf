"""`tfaccel profile`: what it prints, writes and refuses, on planted measures; and once for real."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import PIL.Image
import pytest

from tfaccel.cli import flags as cli_flags
from tfaccel.cli import main
from tfaccel.common.errors import UserError
from tfaccel.config import parse
from tfaccel.diagnostics.profile import run as room
from tfaccel.diagnostics.profile.child import Measured, measure_all
from tfaccel.diagnostics.profile.rates import Rate
from tfaccel.diagnostics.profile.search import Sample
from tfaccel.diagnostics.profile.table import Profile
from tfaccel.diagnostics.profile.verdict import Ceilings, Setup

pytestmark = pytest.mark.usefixtures("terminal")  # lines of 80 columns

REPOSITORY = pathlib.Path(__file__).parents[3]
DIGITS = f"--config={REPOSITORY}/configs/digits.py:smoke"


class Planted:
    """Children that answer at once: a run is as fast as its loader has threads, or fails."""

    def __init__(self, *, step=4000.0, loader=1000.0, real=900.0):
        rates = [Rate(each, each, each) for each in (step, loader, real)]
        setup = Setup("mnist_cnn", "tf_data", 64, threads=1, cores=4)
        profile = Profile(setup, Ceilings(*rates), memory_mib=500)
        self.measured = Measured(profile, ("dali_cpu", "tf_data", "memory"), 1437)
        self.configs = []

    def __call__(self, function, config, **settings):
        assert settings["seconds"] == 0.5
        if function is measure_all:
            return self.measured
        assert settings["timeout_s"] > 0
        self.configs.append(config)
        if config.data.loader == "dali_cpu":
            raise UserError("no DALI here")
        threads = config.dali.threads or 1
        return Sample(900.0 * threads if config.data.loader == "memory" else 800.0, 500 + threads)


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)

    def run(*arguments, planted=None):
        monkeypatch.setattr(room, "run_quietly", planted or Planted())
        code = main.main(["profile", DIGITS, "--seconds=0.5", *arguments])
        out = capsys.readouterr().out
        # A path stays whole, however long it is.
        lines = [each for each in out.splitlines() if not each.strip().startswith("/")]
        assert max(map(len, lines)) <= 80 or "--json" in arguments
        return code, out

    return run


def test_help_is_narrow_and_names_every_flag(capsys):
    assert main.main(["profile", "--help"]) == 0
    out = capsys.readouterr().out
    for flag in ("seconds", "trace", "search", "minutes", "memory-mib", "out", "json"):
        assert f"--{flag}" in out
    assert max(map(len, out.splitlines())) <= 100


def test_a_profile_alone(command):
    code, out = command()
    assert code == 0
    assert "the loader limits the run: the loader alone reaches 1,000 images/s" in " ".join(
        out.split()
    )
    assert "--config.dali.threads=4" in out
    assert "--search tries other threads" in out


def test_a_search_finds_the_best_and_writes_a_config_that_has_it(command, tmp_path):
    code, out = command("--search", "--out=tuned.py", "--config.train.epochs=2")
    assert code == 0
    assert "best: --config.data.loader=memory --config.dali.threads=4: 3,600" in out
    assert "--search tries other threads" not in out
    assert "no DALI here" in out
    assert "written:" in out
    written = cli_flags.parse_config_flags("train", ["--config=tuned.py"])[0].config
    config = parse(written)
    assert (config.data.loader, config.dali.threads, config.train.epochs) == ("memory", 4, 2)


def test_nothing_is_written_where_nothing_is_faster(command, tmp_path):
    class Slow(Planted):
        def __call__(self, function, config, **settings):
            found = super().__call__(function, config, **settings)
            return Sample(800.0) if isinstance(found, Sample) else found

    _, out = command("--search", "--out=tuned.py", planted=Slow())
    assert "no other is faster" in out
    assert not (tmp_path / "tuned.py").exists()


def test_no_search_where_the_step_bounds(command):
    planted = Planted(step=1000.0, loader=9000.0, real=990.0)
    _, out = command("--search", planted=planted)
    assert "no search: the run reaches 99% of the step's images/s" in " ".join(out.split())
    assert not planted.configs
    # But it must take less memory.
    _, out = command("--search", "--memory-mib=400", planted=planted)
    assert planted.configs
    assert "no setting that was tried stays below --memory-mib" in out


def test_json_is_one_object(command):
    _, out = command("--search", "--json")
    values = json.loads(out)
    assert values["verdict"]["bound"] == "loader"
    assert values["images_per_second"]["step"]["median"] == 4000
    assert values["search"]["best"]["dali.threads"] == 4


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--out=a.py"], "--out is only for --search; add --search or remove --out"),
        (["--memory-mib=100"], "--memory-mib is only for --search"),
        (["--minutes=3"], "--minutes is only for --search"),
        (["--search", "--minutes=0"], "minutes=0.0; expected a number above 0"),
        (["--trace=/proc/nothing"], "trace /proc/nothing cannot be created"),
        (["--search", "--out=/no/folder/a.py"], "out /no/folder/a.py cannot be written"),
    ],
)
def test_mistakes_are_sentences(command, arguments, sentence):
    with pytest.raises(UserError, match=sentence):
        command(*arguments)


def test_several_workers_are_refused(command, monkeypatch):
    workers = {"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}}
    task = {"task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(workers | task))
    with pytest.raises(UserError, match="profile needs one process with all its GPUs, but there"):
        command()


@pytest.fixture
def photographs(tmp_path):
    """A root of large JPEG files, of two classes: slow to decode, and small once they are."""
    rng = np.random.default_rng(0)
    for split in ("training", "testing"):
        for index in range(64):
            path = tmp_path / "data" / split / "ab"[index % 2] / f"{index}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            noise = rng.integers(0, 256, (90, 90, 3), dtype=np.uint8)
            PIL.Image.fromarray(noise).resize((900, 900)).save(path)
    return tmp_path / "data"


@pytest.mark.slow
def test_a_slow_decoder_is_found_replaced_and_the_written_config_trains(photographs, tmp_path):
    def tfaccel(*arguments):
        done = subprocess.run(
            [sys.executable, "-m", "tfaccel", *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    data = (f"--config.data.root={photographs}", "--config.data.channels=3")
    slow = ("--config.data.loader=dali_cpu", "--config.dali.threads=1", "--config.runtime.xla=0")
    search = ("--search", "--minutes=3", "--out=tuned.py", "--trace=trace")
    out = tfaccel("profile", DIGITS, "--seconds=1", *data, *slow, *search)
    assert "verdict  the loader limits the run" in out
    assert list((tmp_path / "trace").rglob("*.xplane.pb"))
    assert "--config.data.loader=" in out
    trained = tfaccel("train", "--config=tuned.py", "--workdir=run", "--config.train.epochs=10")
    # Twice what the slow decoder gives, and more (2 cores, 2026-11-22).
    assert json.loads(trained.splitlines()[-1])["images_per_second"] > 500
