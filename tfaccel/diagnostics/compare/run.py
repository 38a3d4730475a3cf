"""`tfaccel compare`: the same job in every way that this machine has, measured, in order.

    comparison = compare(parse(get_config()), steps=50, repeats=5, out="report")
    print(comparison)

This process starts no TensorFlow device: each variant has a process of its own.
"""

import dataclasses
import datetime
import itertools
import math
import os
import pathlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable

import ml_collections

from tfaccel.common.checks import check_flag, check_int, check_number
from tfaccel.common.errors import UserError
from tfaccel.common.local_path import local_path
from tfaccel.common.redact import shown
from tfaccel.common.tables import counted, in_figures
from tfaccel.config import Config, parse
from tfaccel.diagnostics.compare import page
from tfaccel.diagnostics.compare.arm import Arm, ArmProcess, OutOfTimeError
from tfaccel.diagnostics.compare.contest import Contest
from tfaccel.diagnostics.compare.facts import Facts
from tfaccel.diagnostics.compare.judge import FLOOR
from tfaccel.diagnostics.compare.pace import (
    Pace,
    Settings,
    fitted,
    least_steps,
    minutes_for,
    shortened,
)
from tfaccel.diagnostics.compare.table import Comparison
from tfaccel.diagnostics.compare.variants import (
    FACTORS,
    Levels,
    Variant,
    as_flags,
    configured,
    every_combination,
    levels_of,
    one_by_one,
)
from tfaccel.process.isolate import run_quietly

WARM_UP, LEAD_IN = 10, 5  # steps
LIMIT_S = 900.0  # for a process to start, with all that it compiles, and for a stretch
# What a forecast counts for XLA's compilation, of a network like ResNet-50.
COMPILE_GPU_S, COMPILE_CPU_S = 30.0, 5.0


def compare(
    config: Config | ml_collections.ConfigDict,
    *,
    steps: int = 50,
    repeats: int = 5,
    minutes: float = 60.0,
    grid: bool = False,
    out: str | os.PathLike | None = None,
    command: str = "tfaccel train",
    name: str = "",
    say: Callable[[str], None] | None = None,
) -> Comparison:
    """Trains the experiment for some steps in each way, and returns what is faster and as right.

    From plain tf.data, float32 without TF32, no XLA and one GPU, one factor after the other is
    added to the best so far, and kept if it is faster beyond the spread and its losses agree.

    Args:
      config: the experiment.
      steps: of a stretch that is timed.
      repeats: stretches of each variant, 3 at least.
      minutes: after which nothing more is started. Where a step is so slow that few variants would
        have time, stretches are shorter. What is left is said, and how many minutes would do.
      grid: whether every combination is measured instead.
      out: a new folder for report.html, report.md, results.json, speed.png and losses.png; None to
        write nothing.
      command: which trains the experiment as it is, to be shown with the flags that won.
      name: of the experiment.
      say: is told what happens meanwhile; None for lines on standard error.

    Raises:
      UserError: a mistake in the call or in the data.
      KeyboardInterrupt: Ctrl-C; the report of what was measured before is written.
      SystemExit: likewise, where a handler of SIGTERM raises it, as that of `tfaccel compare` does.
    """
    config = parse(config) if isinstance(config, ml_collections.ConfigDict) else config
    if not isinstance(config, Config):
        raise UserError(f"config={config!r}; expected what a config file's get_config() returns")
    check_int("steps", steps, at_least=1)
    check_int("repeats", repeats, at_least=3)
    check_number("minutes", minutes, above=0)
    check_flag("grid", grid)
    folder = local_path(out) if out else None
    if folder:
        page.check_folder(folder)
    say, ends = say or _on_stderr, time.monotonic() + 60 * minutes
    facts = run_quietly(_describe, config)
    levels = levels_of(facts.loaders, num_gpus=len(facts.gpu_ids))
    numbers = _numbers(levels, grid=grid)
    settings = Settings(steps, LEAD_IN, WARM_UP, repeats, variants=1 + numbers[0])
    say(
        f"{_plan(numbers, settings)}, {in_figures(minutes)} minutes at most; a closer estimate "
        "follows the plain one"
    )
    logs = _logs(folder)
    starts = _Starts(config, facts, settings, logs, ends, say=say)
    contest = Contest(
        starts,
        repeats=repeats,
        time_left=lambda: ends - time.monotonic(),
        say=say,
        begun=lambda start_s, stretch_s: say(
            forecast(start_s, stretch_s, numbers, repeats, on_gpu=bool(facts.gpu_ids))
        ),
    )
    interrupted = None
    try:
        contest.run(levels, every_combination if grid else one_by_one)
    except (KeyboardInterrupt, SystemExit) as error:
        interrupted = error
    if not folder and not any(each.status == "failed" for each in contest.rows):
        shutil.rmtree(logs, ignore_errors=True)  # else a row may name one of them
    how = _how(contest, _plan(numbers, starts.settings), facts, grid=grid)
    comparison = _comparison(config, facts, contest, name=name, command=command, how=how)
    asked = {"steps": steps, "repeats": repeats, "minutes": minutes, "grid": grid}
    comparison = dataclasses.replace(
        comparison,
        settings=asked,
        stretch_steps=starts.settings.steps,
        to_ask_for=to_ask_for(starts, settings, numbers, minutes=minutes),
    )
    if folder:
        page.write(comparison, folder)
    if interrupted:
        say(f"interrupted; {f'{folder} has' if folder else 'above is'} what was measured before")
        raise interrupted
    return comparison


def forecast(
    start_s: float, stretch_s: float, numbers: tuple[int, int], repeats: int, *, on_gpu: bool
) -> str:
    """Returns how long the rest takes at the plain one's speed, in words.

    Args:
      start_s: the plain one's, to the end of its first steps.
      stretch_s: of one of its stretches.
      numbers: of the other variants, least and most.
      repeats: stretches of each; as many of what it is compared with.
      on_gpu: where compiling takes longer.
    """
    each_s = start_s + (COMPILE_GPU_S if on_gpu else COMPILE_CPU_S) + 2 * repeats * stretch_s
    least, most = (max(1, round(number * each_s / 60)) for number in numbers)
    return f"about {_range(least, most)} more minutes at the plain one's speed; less if others gain"


def _numbers(levels: Levels, *, grid: bool) -> tuple[int, int]:
    """Returns the variants beside the plain one, least and most: another seed, and the ceiling."""
    if grid:
        number = len(every_combination(levels)) + 2
        return number, number
    changes = sum(len(getattr(levels, each)) - 1 for each in FACTORS)
    return changes + 2, 2 * changes + 2


def _range(least: int, most: int) -> str:
    return f"{least} to {most}" if most > least else str(least)


def _plan(numbers: tuple[int, int], settings: Settings) -> str:
    return (
        f"{_range(*numbers)} variants, {settings.repeats} stretches of "
        f"{counted(settings.steps, 'step')} each"
    )


def to_ask_for(
    starts: "_Starts", settings: Settings, numbers: tuple[int, int], *, minutes: float
) -> str:
    """Returns which `--minutes` would do, in words, where those that were given did not.

    Args:
      starts: which knows the plain one's pace, or how far it had come.
      settings: as they were asked for.
      numbers: of the other variants, least and most.
      minutes: that were given.
    """
    pace, most = starts.pace, settings._replace(variants=1 + numbers[1])
    if pace is None and starts.start_s is None:
        return (
            f"the first step alone took more than the {in_figures(minutes)} minutes; give several "
            f"times as many, e.g. --minutes={math.ceil(10 * minutes)}, or a smaller batch"
        )
    if pace is None:
        least = math.ceil(most.variants * starts.start_s / 60) + 1
        return (
            f"the first step alone took {starts.start_s:.0f} s, as it will for each variant; give "
            f"--minutes={least} at least"
        )
    longest = minutes_for(most, pace)
    used = starts.settings._replace(variants=most.variants)
    short = shortened(most, min(most.steps, least_steps(pace)))
    shortest = min(
        (each for each in (minutes_for(short, pace), minutes_for(used, pace)) if each > minutes),
        default=longest,
    )
    took = f"a step takes {in_figures(pace.step_s)} s, and a start {pace.start_s:.0f} s"
    if longest <= minutes:  # what was measured later was slower than the plain one
        return (
            f"{took} in the plain one, but others were slower; --minutes={2 * math.ceil(minutes)}"
        )
    if shortest >= longest:
        return f"{took}; about --minutes={longest} would do at the plain one's speed"
    return (
        f"{took}; at the plain one's speed about --minutes={shortest} would do for short "
        f"stretches, --minutes={longest} for {most.steps} steps each"
    )


def _describe(config: Config) -> Facts:
    from tfaccel.diagnostics.compare import child  # and TensorFlow: this runs in a child

    return child.describe(config)


class _Starts:
    """Starts variants' processes. The first that runs tells how long all of their stretches are.

    Attributes:
      settings: of the processes; once the first has run, with stretches for which there is time.
      pace: of the first; None until it is known.
      start_s: of the first, to its first step's end; None until it is known.
    """

    def __init__(
        self,
        config: Config,
        facts: Facts,
        settings: Settings,
        logs: pathlib.Path,
        ends: float,
        *,
        say: Callable[[str], None],
    ):
        """Starts nothing yet.

        Args:
          config: the experiment.
          facts: of the machine.
          settings: as they were asked for.
          logs: a folder; each log's name is the next number.
          ends: when the time for all is over.
          say: is told if stretches become shorter.
        """
        self._config, self._facts, self._logs, self._ends = config, facts, logs, ends
        self._say, self._numbers = say, itertools.count(1)
        self.settings, self.pace, self.start_s = settings, None, None

    def __call__(self, variant: Variant, seed: int) -> Arm:
        """Starts one, with the config's seed or so many more, and trains its first steps."""
        chosen = configured(self._config, variant, self._facts.gpu_ids)
        runtime = dataclasses.replace(chosen.runtime, seed=chosen.runtime.seed + seed)
        settings = self.settings
        if self.pace is None:
            settings = settings._replace(left_s=self._ends - time.monotonic())
        try:
            arm = ArmProcess(
                dataclasses.replace(chosen, runtime=runtime),
                settings,
                log=self._logs / f"{next(self._numbers)}.log",
                limit=self._limit,
            )
        except OutOfTimeError as error:
            self.pace, self.start_s = self.pace or error.pace, self.start_s or error.start_s
            raise
        if self.pace is None:
            self._take(arm.pace, settings)
        return arm

    def _take(self, pace: Pace, settings: Settings) -> None:
        """Takes what the first process has decided for itself, for all others."""
        self.pace, self.start_s, asked = pace, pace.start_s, self.settings
        self.settings = fitted(settings, pace)._replace(left_s=None)
        if self.settings.steps < asked.steps:
            self._say(
                f"a step takes {in_figures(pace.step_s)} s: stretches are of "
                f"{counted(self.settings.steps, 'step')}, not {asked.steps}, so that more variants "
                f"have time; --minutes={minutes_for(asked, pace)} would do for {asked.steps}"
            )

    def _limit(self) -> tuple[float, bool]:
        left = self._ends - time.monotonic()
        return min(LIMIT_S, left), left < LIMIT_S


def _logs(folder: pathlib.Path | None) -> pathlib.Path:
    """Returns a new folder for what the processes print: in the report's, or a temporary one."""
    if folder is None:
        return pathlib.Path(tempfile.mkdtemp(prefix="tfaccel-compare-"))
    (folder / "logs").mkdir()
    return folder / "logs"


def _comparison(
    config: Config, facts: Facts, contest: Contest, *, name: str, command: str, how: str
) -> Comparison:
    best = contest.champion
    chosen = configured(config, best.variant, facts.gpu_ids) if best else config
    what = f"{name}: " if name else ""
    return Comparison(
        title=f"{what}{config.model.name}, {counted(facts.num_examples, 'image')}, batches of "
        f"{facts.global_batch_size:,}, on {_machine(facts)}, {datetime.date.today().isoformat()}",
        rows=tuple(contest.rows),
        winner=best,
        flags=tuple(as_flags(config, chosen)),
        command=shown(command),
        how=how,
        tolerance=contest.tolerance,
        noise=contest.noise,
        settings={},
        environment=facts.environment,
    )


def _machine(facts: Facts) -> str:
    cores = counted(facts.environment["cpu_cores"], "CPU core")
    names = [each["name"] for each in facts.environment["gpus"]][: len(facts.gpu_ids)]
    return f"{len(names)} x {names[0]}, {cores}" if names else cores


def _how(contest: Contest, plan: str, facts: Facts, *, grid: bool) -> str:
    """Returns how it was measured, in words."""
    order = (
        "every combination"
        if grid
        else "one factor at a time, added to the best so far, the loaders first if the plain one "
        "waits for its batches most of the time; what was nearly as fast is tried once more if the "
        "best has changed since"
    )
    batch = (
        f" On several GPUs the batch of {facts.global_batch_size:,} is divided over them."
        if len(facts.gpu_ids) > 1
        else ""
    )
    noise = "not known" if contest.noise is None else f"{contest.noise:.1%}"
    return (
        f"{plan[:1].upper()}{plan[1:]}: {order}. All are the same job: data, batch, seed, recipe "
        f"and number of steps.{batch} Each has a process of its own, which trains in turn with the "
        "best so far; the time is that of training, without compilation, validation and "
        "checkpoints. One is kept if the middle half of its stretches is above the other's, by "
        "more than the plain one differs from itself in another process with another seed "
        f"({noise}), and if its losses are no further from the plain one's than twice that other "
        f"seed's, or {FLOOR:.0%} ({contest.tolerance:.1%}). One that is less than half as fast in "
        "its first stretch has no other."
    )


def _on_stderr(text: str) -> None:
    print(shown(f"tfaccel: compare: {text}"), file=sys.stderr, flush=True)
