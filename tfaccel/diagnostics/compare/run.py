"""`tfaccel compare`: trains the same job in every way that this machine offers, and compares them.

    comparison = compare(parse(get_config()), steps=50, repeats=5, out="report")
    print(comparison)

Each variant runs in its own process. This process does not start a TensorFlow device.
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
from tfaccel.diagnostics.compare.arm import ArmProcess, OutOfTimeError
from tfaccel.diagnostics.compare.contest import Contest
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
    Facts,
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
LIMIT_S = 900.0  # for the start of a process, including compilation, and for each stretch
# The time that a forecast allows for XLA's compilation of a network such as ResNet-50.
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
    """Trains some steps of the experiment in each way, and returns which way is best.

    The comparison starts with the plain variant: tf.data, float32 without TF32, no XLA, one GPU. It
    then changes one factor after the other in the best variant so far. A change is kept if it is
    faster beyond the spread and the losses agree.

    Args:
      config: the experiment.
      steps: the number of timed steps in a stretch.
      repeats: the number of stretches for each variant, at least 3.
      minutes: the time limit. If a step is so slow that few variants would fit, the stretches are
        shorter. The report lists the variants that were left out, and how many minutes would
        suffice.
      grid: True to measure every combination of the factors.
      out: a new folder for report.html, report.md, results.json, speed.png, losses.png and logs;
        None to write no report.
      command: the command that trains the experiment; the report shows it with the best flags.
      name: the name of the experiment, for the title.
      say: receives progress messages; None to print them to standard error.

    Raises:
      UserError: an argument or the data set has a fault.
      KeyboardInterrupt: Ctrl-C was pressed; the report has the variants measured before.
      SystemExit: a SIGTERM handler raised it, as that of `tfaccel compare` does; the report has the
        variants measured before.
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
        f"{_plan(numbers, settings)}, at most {in_figures(minutes)} minutes; a closer estimate "
        "follows after the plain variant"
    )
    logs = folder / "logs" if folder else pathlib.Path(tempfile.mkdtemp(prefix="tfaccel-compare-"))
    logs.mkdir(exist_ok=True)
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
        shutil.rmtree(logs, ignore_errors=True)  # the row of a failed variant may name its log
    best = contest.champion
    chosen = configured(config, best.variant, facts.gpu_ids) if best else config
    comparison = Comparison(
        title=_title(config, facts, name=name),
        rows=tuple(contest.rows),
        winner=best,
        flags=tuple(as_flags(config, chosen)),
        command=shown(command),
        how=_how(contest, _plan(numbers, starts.settings), facts, grid=grid),
        tolerance=contest.tolerance,
        noise=contest.noise,
        settings={"steps": steps, "repeats": repeats, "minutes": minutes, "grid": grid},
        environment=facts.environment,
        stretch_steps=starts.settings.steps,
        to_ask_for=to_ask_for(starts, settings, numbers, minutes=minutes),
    )
    if folder:
        page.write(comparison, folder)
    if interrupted:
        where = f"in {folder}" if folder else "in the lines above"
        say(f"interrupted; the results so far are {where}")
        raise interrupted
    return comparison


def forecast(
    start_s: float, stretch_s: float, numbers: tuple[int, int], repeats: int, *, on_gpu: bool
) -> str:
    """Returns, in words, how long the other variants take at the speed of the plain variant.

    Args:
      start_s: seconds that the plain variant took to start and to train its first steps.
      stretch_s: seconds for one of its stretches.
      numbers: the least and the largest number of other variants.
      repeats: the number of stretches for each variant, and for its opponent in the duel.
      on_gpu: True on a GPU, where compilation takes longer.
    """
    each_s = start_s + (COMPILE_GPU_S if on_gpu else COMPILE_CPU_S) + 2 * repeats * stretch_s
    least, most = (max(1, round(number * each_s / 60)) for number in numbers)
    return (
        f"about {_range(least, most)} more minutes at the speed of the plain variant; less if "
        "others are faster"
    )


def _numbers(levels: Levels, *, grid: bool) -> tuple[int, int]:
    """Returns the least and the largest number of variants besides the plain one.

    The numbers include the plain variant's run with another seed, and the ceiling.
    """
    if grid:
        number = math.prod(len(getattr(levels, each)) for each in FACTORS) + 1
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
    """Returns advice on `--minutes`, in words, for a comparison that ran out of time.

    Args:
      starts: knows the pace of the plain variant, or how far its process had come.
      settings: the requested settings.
      numbers: the least and the largest number of other variants.
      minutes: the time limit of this comparison.
    """
    pace, most = starts.pace, settings._replace(variants=1 + numbers[1])
    if pace is None and starts.start_s is None:
        return (
            f"the first step alone took more than {in_figures(minutes)} minutes; use a much longer "
            f"limit, for example --minutes={math.ceil(10 * minutes)}, or a smaller batch"
        )
    if pace is None:
        least = math.ceil(most.variants * starts.start_s / 60) + 1
        return (
            f"the first step alone took {starts.start_s:.0f} s, as it will for each variant; use "
            f"at least --minutes={least}"
        )
    longest = minutes_for(most, pace)
    used = starts.settings._replace(variants=most.variants)
    short = shortened(most, min(most.steps, least_steps(pace)))
    shortest = min(
        (each for each in (minutes_for(short, pace), minutes_for(used, pace)) if each > minutes),
        default=longest,
    )
    took = (
        f"the plain variant takes {pace.start_s:.0f} s to start and {in_figures(pace.step_s)} s "
        "for each step"
    )
    if longest <= minutes:
        return f"{took}, but other variants were slower; use --minutes={2 * math.ceil(minutes)}"
    if shortest >= longest:
        return f"{took}; use about --minutes={longest}"
    return (
        f"{took}; use about --minutes={shortest} for short stretches, or --minutes={longest} for "
        f"stretches of {counted(most.steps, 'step')}"
    )


def _describe(config: Config) -> Facts:
    from tfaccel.diagnostics.compare import child  # imports TensorFlow; this runs in a child

    return child.describe(config)


class _Starts:
    """Starts the variants' processes.

    The first process that runs decides the length of the stretches for all processes.

    Attributes:
      settings: the settings of the processes; fitted to the time after the first process.
      pace: the pace of the first process; None until it is known.
      start_s: seconds from the start of the first process to the end of its first step; None until
        it is known.
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
        """Takes the parts of the comparison; a call starts a process.

        Args:
          config: the experiment.
          facts: the facts about the experiment on this machine.
          settings: the requested settings.
          logs: a folder for the logs; their names are 1.log, 2.log and so on.
          ends: the value of time.monotonic() at which the comparison ends.
          say: receives a message if the stretches become shorter.
        """
        self._config, self._facts, self._logs, self._ends = config, facts, logs, ends
        self._say, self._numbers = say, itertools.count(1)
        self.settings, self.pace, self.start_s = settings, None, None

    def __call__(self, variant: Variant, seed: int) -> ArmProcess:
        """Starts a variant's process and trains its first steps; adds `seed` to the config's."""
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
        """Uses the settings that the first process chose for all later processes."""
        self.pace, self.start_s, asked = pace, pace.start_s, self.settings
        self.settings = fitted(settings, pace)._replace(left_s=None)
        if self.settings.steps < asked.steps:
            self._say(
                f"a step takes {in_figures(pace.step_s)} s, so stretches have "
                f"{counted(self.settings.steps, 'step')} instead of {asked.steps}, to leave time "
                f"for more variants; for {asked.steps}, use --minutes={minutes_for(asked, pace)}"
            )

    def _limit(self) -> tuple[float, bool]:
        left = self._ends - time.monotonic()
        return min(LIMIT_S, left), left < LIMIT_S


def _title(config: Config, facts: Facts, *, name: str) -> str:
    machine = counted(facts.environment["cpu_cores"], "CPU core")
    gpus = [each["name"] for each in facts.environment["gpus"]][: len(facts.gpu_ids)]
    if gpus:
        machine = f"{len(gpus)} x {gpus[0]}, {machine}"
    return (
        f"{f'{name}: ' if name else ''}{config.model.name}, "
        f"{counted(facts.num_examples, 'image')}, batches of {facts.global_batch_size:,}, "
        f"on {machine}, {datetime.date.today().isoformat()}"
    )


def _how(contest: Contest, plan: str, facts: Facts, *, grid: bool) -> str:
    """Returns the description of the method for the report."""
    order = (
        "The comparison measures every combination."
        if grid
        else "The comparison changes one factor at a time in the best variant so far. The loaders "
        "come first if the plain variant waits for its batches most of the time. A variant that "
        "was nearly as fast is tried again if the best has changed since."
    )
    batch = (
        f" On several GPUs, the batch of {facts.global_batch_size:,} is divided over them."
        if len(facts.gpu_ids) > 1
        else ""
    )
    noise = "not known" if contest.noise is None else f"{contest.noise:.1%}"
    return (
        f"{plan[:1].upper()}{plan[1:]}. {order} All variants do the same job: data, batch, seed, "
        f"recipe and number of steps are equal.{batch} Each variant runs in its own process and "
        "trains in turn with the best so far. The time includes training only, not compilation, "
        "validation or checkpoints. The plain variant is trained in a second process with another "
        "seed, which gives two limits. A variant is kept if the middle half of its stretches is "
        "above that of the best so far, if its gain exceeds the difference in speed between these "
        f"two processes ({noise}), and if its losses agree. Losses agree if their distance from "
        "the plain variant's is at most twice that between these two processes, or at most "
        f"{FLOOR:.0%} if that is more ({contest.tolerance:.1%}). A variant that is less than half "
        "as fast in its first stretch gets no second stretch."
    )


def _on_stderr(text: str) -> None:
    print(shown(f"tfaccel: compare: {text}"), file=sys.stderr, flush=True)
