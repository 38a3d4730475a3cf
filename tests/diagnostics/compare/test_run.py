"""The command from end to end, in real processes on the CPU."""

import json
import math
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tfaccel.cli import main
from tfaccel.common.errors import UserError
from tfaccel.config import Config
from tfaccel.diagnostics.compare import run as room
from tfaccel.diagnostics.compare.arm import ArmError, OutOfTimeError
from tfaccel.diagnostics.compare.pace import Pace, fitted
from tfaccel.diagnostics.compare.variants import Facts

DIGITS = f"--config={pathlib.Path(__file__).parents[3]}/configs/digits.py"
FACTS = Facts(
    loaders=("tf_data", "dali_cpu"),
    gpu_ids=(),
    num_examples=1437,
    global_batch_size=64,
    environment={"cpu_cores": 2, "gpus": []},
)
SPEEDS = {"tf_data": 100.0, "dali_cpu": 300.0}


class PlantedArm:
    """Answers at once, as fast as its loader."""

    first_step_s, peak_mib, waited = 2.0, (), 0.0

    pace = Pace(2.0, 0.01, epoch_steps=1000)

    def __init__(self, config, settings, *, log, limit):
        self.config, self.losses = config, [2.0] * 60
        log.write_text("what it printed")

    def stretch(self):
        return SPEEDS[self.config.data.loader] / (1 if not self.config.runtime.xla else 2)

    def close(self):
        pass


@pytest.fixture
def planted(monkeypatch):
    monkeypatch.setattr(room, "run_quietly", lambda function, config: FACTS)
    monkeypatch.setattr(room, "ArmProcess", PlantedArm)


@pytest.fixture
def without_pictures(monkeypatch):
    """Reports have none, which take longer to draw than all else."""
    monkeypatch.setattr(room.page, "_has_rates", lambda comparison: False)
    monkeypatch.setattr(room.page, "_has_losses", lambda comparison: False)


@pytest.mark.parametrize("is_to_fail", [True, False])
def test_without_a_report_logs_stay_only_where_a_row_names_one(monkeypatch, is_to_fail):
    seen = []

    class Fails(PlantedArm):
        def __init__(self, config, settings, *, log, limit):
            super().__init__(config, settings, log=log, limit=limit)
            seen.append(log)
            if is_to_fail and config.runtime.xla:
                raise ArmError(f"its process did not answer within 1 s; log: {log}")

    monkeypatch.setattr(room, "run_quietly", lambda function, config: FACTS)
    monkeypatch.setattr(room, "ArmProcess", Fails)
    comparison = room.compare(Config(), repeats=3, minutes=1, say=lambda text: None)
    failed = [each for each in comparison.rows if each.status == "failed"]
    assert bool(failed) is is_to_fail
    assert {each.is_file() for each in seen} == {is_to_fail}
    shutil.rmtree(seen[0].parent, ignore_errors=True)


def test_a_path_is_no_config():
    with pytest.raises(UserError, match=r"config='digits.py'; expected what a config file's get_c"):
        room.compare("digits.py", minutes=1)


@pytest.mark.usefixtures("planted")
def test_the_command_prints_the_table_and_writes_the_report(tmp_path, capsys):
    out = tmp_path / "report"
    override = "--config.train.epochs=7"
    assert main.main(["compare", DIGITS, override, "--repeats=3", f"--out={out}"]) == 0
    printed, told = capsys.readouterr()
    assert (
        "the best is dali_cpu, float32, no XLA: 3.00 times as fast as the plain variant" in printed
    )
    assert f"tfaccel train {DIGITS} --config.train.epochs=7 \\\n" in printed
    assert "--config.data.loader=dali_cpu" in printed
    assert printed.endswith(f"{out}/report.html\n")
    assert "at most 60 minutes" in told
    assert "more minutes at the speed of the plain variant" in told
    names = {each.name for each in out.iterdir()}
    assert names == {
        "report.html",
        "report.md",
        "results.json",
        "speed.png",
        "losses.png",
        "logs",
    }
    results = json.loads((out / "results.json").read_text())
    assert results["settings"] == {"steps": 50, "repeats": 3, "minutes": 60, "grid": False}


@pytest.mark.usefixtures("planted", "without_pictures")
@pytest.mark.parametrize(
    ("number", "ends_with", "code"),
    [(signal.SIGINT, KeyboardInterrupt, None), (signal.SIGTERM, SystemExit, 143)],
)
def test_an_interruption_leaves_the_report_of_what_was_measured(
    tmp_path, capsys, monkeypatch, number, ends_with, code
):
    class Interrupted(PlantedArm):
        def stretch(self):
            if self.config.runtime.xla:
                signal.raise_signal(number)
            return super().stretch()

    monkeypatch.setattr(room, "ArmProcess", Interrupted)
    # A shell has what it starts in the background ignore SIGINT, and so would this process.
    handler = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}[number]
    out, original = tmp_path / "report", signal.signal(number, handler)
    try:
        with pytest.raises(ends_with) as raised:
            main.main(["compare", DIGITS, "--repeats=3", f"--out={out}"])
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, original)
    assert getattr(raised.value, "code", None) == code
    assert f"interrupted; the results so far are in {out}" in capsys.readouterr().err
    rows = json.loads((out / "results.json").read_text())["rows"]
    assert [each["status"] for each in rows] == ["plain", "left out"]
    assert rows[-1]["why"] == "interrupted"
    assert (out / "report.html").is_file()


@pytest.mark.usefixtures("planted", "without_pictures")
def test_a_second_sigterm_does_not_take_the_report_away(tmp_path, monkeypatch):
    """A scheduler may send it to the job and to each process, and then once more."""

    class Interrupted(PlantedArm):
        def stretch(self):
            signal.raise_signal(signal.SIGTERM)

        def close(self):
            signal.raise_signal(signal.SIGTERM)

    def write(*args):
        signal.raise_signal(signal.SIGTERM)
        written(*args)

    written = room.page.write
    monkeypatch.setattr(room, "ArmProcess", Interrupted)
    monkeypatch.setattr(room.page, "write", write)
    with pytest.raises(SystemExit):
        main.main(["compare", DIGITS, "--repeats=3", f"--out={tmp_path / 'report'}"])
    assert (tmp_path / "report" / "report.html").is_file()


@pytest.mark.slow  # half a minute of real processes
def test_a_real_one_that_sigterm_ends_leaves_its_report_and_no_process(tmp_path):
    out = tmp_path / "report"
    command = [sys.executable, "-m", "tfaccel", "compare", DIGITS, f"--out={out}", "--steps=10"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if " 1 plain: " in line:
            break
    ends = time.monotonic() + 300
    while len(alive := psutil.Process(process.pid).children(recursive=True)) < 2:
        assert time.monotonic() < ends
        time.sleep(0.1)
    process.terminate()
    said = process.stderr.read()
    assert process.wait(timeout=300) == 143, said
    assert f"interrupted; the results so far are in {out}" in said
    assert psutil.wait_procs(alive, timeout=300)[1] == []
    rows = json.loads((out / "results.json").read_text())["rows"]
    assert [each["status"] for each in rows] == ["plain", "left out"]


@pytest.mark.usefixtures("planted")
def test_json_is_all_that_is_printed(capsys):
    assert main.main(["compare", DIGITS, "--repeats=3", "--grid", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert len(said["rows"]) == 2 * 2 * 3 + 1  # and the ceiling
    assert said["rows"][said["winner"] - 1]["variant"]["loader"] == "dali_cpu"


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--repeats=2", "repeats=2; expected"),
        ("--steps=0", "steps=0; expected"),
        ("--steps=1.5", "steps=1.5; expected"),
        ("--minutes=0", "minutes=0.0; expected"),
        ("extra", "'extra' is not a flag"),
    ],
)
def test_mistakes_are_told_before_anything_starts(flag, message):
    with pytest.raises(UserError, match=message):
        main.main(["compare", DIGITS, flag])


def test_a_folder_that_is_in_use_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is not empty; give a new folder"):
        main.main(["compare", DIGITS, f"--out={tmp_path}"])


class SlowArm(PlantedArm):
    """Starts in 5 s, and a step takes a second, by a clock that nobody waits for."""

    pace = Pace(5.0, 1.0, epoch_steps=1000)
    clock = None  # a list of one number, that all arms share

    def __init__(self, config, settings, *, log, limit):
        super().__init__(config, settings, log=log, limit=limit)
        self.limit, self.settings = limit, fitted(settings, self.pace)
        self.spend(self.pace.start_s + self.settings.warm_up)

    def spend(self, seconds):
        left, _ = self.limit()
        self.clock[0] += min(left, seconds)
        if left < seconds:
            raise OutOfTimeError("the time was over", start_s=5.0, pace=self.pace)

    def stretch(self):
        self.spend(self.settings.lead_in + self.settings.steps)
        return super().stretch()


class NeverReady(SlowArm):
    def spend(self, seconds):
        self.clock[0] += self.limit()[0]
        raise OutOfTimeError("the time was over before its first step ended")


@pytest.mark.parametrize(
    ("arm", "minutes", "measured", "summary"),
    [
        (SlowArm, 9, 5, "takes 5 s to start and 1 s for each step; use about --minutes="),
        (
            SlowArm,
            1,
            1,
            "only tf_data, float32, no XLA was measured, so nothing is compared; there",
        ),
        pytest.param(
            *(SlowArm, 2, 2, "float32, no XLA; there was no time for 3 of 6 variants: the plain"),
            marks=pytest.mark.slow,
        ),
        (NeverReady, 2, 0, "nothing was measured; there was no time for"),
    ],
)
def test_a_slow_step_has_shorter_stretches_and_the_minutes_that_would_do(
    tmp_path, capsys, monkeypatch, arm, minutes, measured, summary
):
    monkeypatch.setattr(room, "run_quietly", lambda function, config: FACTS)
    monkeypatch.setattr(room, "ArmProcess", arm)
    monkeypatch.setattr(arm, "clock", [0.0])
    monkeypatch.setattr(room.time, "monotonic", lambda: arm.clock[0])
    out = tmp_path / "report"
    arguments = [DIGITS, f"--minutes={minutes}", f"--out={out}", "--repeats=3"]
    assert main.main(["compare", *arguments]) == (0 if measured > 1 else 1)
    assert arm.clock[0] <= 60 * minutes + 1
    results = json.loads((out / "results.json").read_text())
    rated = [each for each in results["rows"] if each["rates"]]
    assert len(rated) >= measured
    assert summary in results["summary"]
    minutes_named = re.findall(r"--minutes=(\d+)", results["summary"])
    assert minutes_named
    assert min(map(int, minutes_named)) > minutes
    # No picture is empty, and a rate that there is is shown.
    assert (out / "speed.png").exists() is bool(measured)
    assert ("<svg" in (out / "report.html").read_text()) is bool(measured)
    printed, told = capsys.readouterr()
    assert ("--config.data.loader=" in printed) is (measured > 1)
    if measured:
        assert results["stretch_steps"] < 50
        assert "stretches have " in told


def test_forecast_counts_starts_compilation_and_stretches_of_both():
    words = room.forecast(20.0, 10.0, (6, 10), 5, on_gpu=True)
    assert words.startswith("about 15 to 25 more minutes at the speed of the plain variant")
    assert room.forecast(1.0, 0.1, (2, 2), 3, on_gpu=False).startswith("about 1 more minutes")


@pytest.mark.slow  # a minute and a half of real processes
def test_digits_in_real_processes(tmp_path, capsys):
    out = tmp_path / "report"
    assert main.main(["compare", DIGITS, "--steps=10", "--repeats=3", f"--out={out}"]) == 0
    results = json.loads((out / "results.json").read_text())
    first = results["rows"][0]
    assert first["variant"] == {
        "loader": "tf_data",
        "arithmetic": "float32",
        "xla": False,
        "num_gpus": 0,
    }
    assert first["apart"] == 0
    assert len(first["rates"]) >= 3
    memory = next(each for each in results["rows"] if each["variant"]["loader"] == "memory")
    # The same pixels in the same order, whatever loader reads them.
    if memory["variant"]["arithmetic"] == "float32" and not memory["variant"]["xla"]:
        assert memory["apart"] == pytest.approx(0, abs=1e-4)
    for each in results["rows"]:
        assert each["status"] != "failed", each["why"]
        assert each["first_step_s"] > 1
        stretches = min(3, len(each["rates"]))  # of what is not half as fast, one
        assert len(each["losses"]) >= 23 + stretches * 15
        assert stretches in (1, 3)
        assert all(rate > 0 and math.isfinite(rate) for rate in each["rates"])
    assert results["rows"][-1]["status"] == "ceiling"
    assert "the best" in capsys.readouterr().out
