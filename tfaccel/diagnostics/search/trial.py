"""Runs one trial: a `tfaccel train` in a process of its own, on one GPU.

Takes the trial, its config and a GPU; gives how it ended. Meanwhile it reads the run's
metrics.jsonl, reports the metric of each epoch to Optuna, and ends the process if Optuna's pruner
says so.

    ended = run(held, config, gpu="0", metric="val_accuracy", stop=event)
"""

import dataclasses
import math
import pathlib
import signal
import sys
import threading

import optuna

from tfaccel.common.errors import RunError
from tfaccel.config import Config
from tfaccel.diagnostics.search import config_files
from tfaccel.diagnostics.search.shared_study import Held
from tfaccel.diagnostics.search.slots import of_one
from tfaccel.launch import rank_environment
from tfaccel.process import waits
from tfaccel.process.child import Child, how_it_ended
from tfaccel.training.checkpoint.rotation import largest_is_best
from tfaccel.training.logs import json_lines
from tfaccel.training.workdir import versions

TRAIN = (sys.executable, "-m", "tfaccel", "train")
EXPORT = (sys.executable, "-m", "tfaccel", "export")
POLL_S = 1.0
GRACE_S = 60.0  # for a checkpoint and the trackers, after SIGTERM


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a trial ended.

    Attributes:
      state: "complete", "pruned", "failed", or "left" if it shall continue later.
      value: of the metric, if it is complete.
      why: why it failed, in a sentence.
    """

    state: str
    value: float | None = None
    why: str = ""


def run(
    held: Held, config: Config, *, gpu: str | None, metric: str, stop: threading.Event
) -> Ended:
    """Trains the config in the trial's folder.

    Args:
      held: the trial.
      config: of the trial; its gpu_ids must be None for a GPU.
      gpu: a value of CUDA_VISIBLE_DEVICES; None for the CPU.
      metric: the log that Optuna gets.
      stop: asks the trial to save its state and to stop.
    """
    folder = held.folder
    said = f"Trial {held.trial.number} of a search: {held.trial.params}"
    config_files.write(folder / "config.py", config, said=said)
    watch = Watch(held.trial, folder / "metrics.jsonl", metric)
    with (
        open(folder / "output.txt", "ab") as output,
        Child(
            # Only the best trial is exported, at the end of the search.
            [
                *(*TRAIN, f"--config={folder / 'config.py'}", f"--workdir={folder}"),
                "--config.train.export=False",
            ],
            env=rank_environment.alone() | of_one(gpu),  # also if Slurm started several searches
            stdout=output,
            stderr=output,
            grace_s=GRACE_S,
        ) as child,
    ):
        while not child.wait(POLL_S, until=stop.is_set):
            if watch.reports() and held.trial.should_prune():
                return Ended("pruned")
        code = child.exit_code()
        if code is None:  # it was asked to stop
            return Ended("left")
    watch.reports()
    if code in (-signal.SIGTERM, config.checkpoint.exit_code):  # a scheduler stopped all processes
        return Ended("left")
    if code:
        return Ended("failed", why=f"it {how_it_ended(code)}{_last_error(folder / 'output.txt')}")
    value = watch.value(of_best=config.train.early_stopping_epochs is not None)
    if value is None:
        return Ended("failed", why=f"its epochs have no {metric}")
    return Ended("complete", value=value)


def export(folder: pathlib.Path, *, gpu: str | None) -> pathlib.Path:
    """Exports a trial in a process of its own, unless it has an export, and returns its path.

    Args:
      folder: the trial's.
      gpu: a value of CUDA_VISIBLE_DEVICES; None for the CPU.

    Raises:
      RunError: the command failed; the message says why.
    """
    if done := versions(folder / "export"):
        return done[-1]
    with (
        open(folder / "output.txt", "ab") as output,
        Child(
            [*EXPORT, f"--workdir={folder}"],
            env=rank_environment.alone() | of_one(gpu),
            stdout=output,
            stderr=output,
            grace_s=GRACE_S,
        ) as child,
        waits.on("exporting the best trial"),
    ):
        child.wait(math.inf)
        code = child.exit_code()
    if code:
        raise RunError(f"it {how_it_ended(code)}{_last_error(folder / 'output.txt')}")
    return versions(folder / "export")[-1]


class Watch:
    """Reads the epochs of a run as they come, and reports them to Optuna."""

    def __init__(self, trial: optuna.Trial, path: pathlib.Path, metric: str):
        """Takes the trial, and the run's metrics.jsonl, which may not exist yet."""
        self._trial, self._path, self._metric = trial, path, metric
        self._values: dict[int, float] = {}

    def reports(self) -> bool:
        """Reports the epochs that are new; returns whether there are some."""
        if not self._path.exists():
            return False
        values = {
            int(each["epoch"]): float(each[self._metric])
            for each in json_lines.read(self._path)
            if each["record"] == "epoch" and self._metric in each
        }
        new = {epoch: each for epoch, each in values.items() if epoch not in self._values}
        for epoch, each in sorted(new.items()):
            self._trial.report(each, step=epoch)
        self._values |= new
        return bool(new)

    def value(self, *, of_best: bool) -> float | None:
        """Returns the last epoch's value, or the best epoch's; None if there is none."""
        if not self._values:
            return None
        if not of_best:
            return self._values[max(self._values)]
        best = max if largest_is_best(self._metric) else min
        return best(self._values.values())


def _last_error(path: pathlib.Path) -> str:
    """Returns the last error that the command printed, or where to look."""
    lines = path.read_text(errors="replace").splitlines()
    errors = [each for each in lines if each.startswith("tfaccel: error: ")]
    said = f": {errors[-1].removeprefix('tfaccel: error: ')}" if errors else ""
    return f"{said} ({path})"
