"""A whole search: as many trials at once as there are GPUs, until the study has enough of them.

    result = search(base, space, workdir=pathlib.Path("runs/search"), trials=20)

Several processes may call it at the same time with the same folder, also on several hosts.
"""

import concurrent.futures
import contextlib
import dataclasses
import logging
import os
import pathlib
import threading
import warnings
from collections.abc import Sequence

import ml_collections
import optuna
from optuna.trial import TrialState

from tfaccel.common.errors import RunError, UserError
from tfaccel.common.run_log import summary
from tfaccel.common.tables import counted, in_figures
from tfaccel.config import Config, parse
from tfaccel.diagnostics.search import config_files, trial
from tfaccel.diagnostics.search.shared_study import Held, SharedStudy
from tfaccel.diagnostics.search.slots import gpus, share_of_cores
from tfaccel.diagnostics.search.space import Space, SpaceError
from tfaccel.process import waits
from tfaccel.training.checkpoint.rotation import largest_is_best
from tfaccel.training.trackers.mlflow import MLflow

log = logging.getLogger("tfaccel")

BEST = "best.py"
MOST_FAILURES = 3  # at the start: then the mistake is probably in the config


def search(
    base: ml_collections.ConfigDict,
    space: Space,
    *,
    workdir: pathlib.Path,
    trials: int,
    jobs: int | None = None,
) -> dict:
    """Runs trials until the study in the folder has `trials` of them, over all processes.

    Args:
      base: the experiment, of which each trial changes some fields.
      space: says which fields, and has Optuna's sampler and pruner.
      workdir: the search's own folder. If there is a search, it goes on.
      trials: the number of trials in the whole study, including those that were pruned or failed.
      jobs: the number of trials at once; None for one on each GPU, or one on the CPU.

    Returns:
      A JSON-ready dict: value, parameters, trial, workdir, export and config of the best trial, and
      the number of trials by state. `export` is None if the export failed.

    Raises:
      UserError: the space or the config has a mistake; the folder has another search; or there are
        more jobs than GPUs.
      RunError: no trial was complete.
      SystemExit, KeyboardInterrupt: a signal asked to stop. The trials have saved their state, and
        the next call with this folder continues them.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # Of TPESampler's constant_liar and of the callback for trials that were left behind.
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    config = parse(base)
    slots = _slots(config, jobs)
    metric = config.train.monitor
    os.makedirs(workdir, exist_ok=True)
    study = SharedStudy(
        workdir,
        direction="maximize" if largest_is_best(metric) else "minimize",
        space=space,
        facts={"metric": metric, "config": _facts(config)},
    )
    if not study.study.get_trials(deepcopy=False):
        _try_space(space, base)
    if "mlflow" in (config.log.trackers or ()):
        with study.alone(), waits.on("preparing MLflow for the trials"):
            MLflow(project=config.log.project).prepare()
    summary(
        "search: %s, of which the one with the %s %s is the best; %d at once; in %s",
        *(counted(trials, "trial"), "largest" if largest_is_best(metric) else "smallest", metric),
        *(len(slots), workdir),
    )
    each = _Trials(study, base, space, metric=metric, at_most=trials, best=workdir / BEST)
    each.run(slots)
    return each.result(gpu=slots[0])


def _try_space(space: Space, base: ml_collections.ConfigDict) -> None:
    """Calls the user's function once, so that its mistakes begin no trial."""
    with contextlib.suppress(optuna.TrialPruned):
        try:
            space.config_for(optuna.create_study().ask(), base)
        except SpaceError:
            raise
        except UserError as error:  # other parameters may suit
            log.warning("search: some parameters do not suit the config: %s", error)


def _slots(config: Config, jobs: int | None) -> list[str | None]:
    """Returns the GPU of each trial that runs at the same time; None for the CPU."""
    names = gpus(os.environ, gpu_ids=config.runtime.gpu_ids)
    if names and jobs is not None and jobs > len(names):
        raise UserError(
            f"--jobs={jobs}, but {counted(len(names), 'GPU')} can be seen and each trial has one "
            f"of its own; use --jobs={len(names)} or less"
        )
    return (names or [None] * (jobs or 1))[:jobs]


def _facts(config: Config) -> dict:
    """Returns the settings that all starts of a search must share: not where its numbers go."""
    facts = dataclasses.asdict(config)
    del facts["log"], facts["runtime"]["gpu_ids"]
    return facts


class _Trials:
    """The trials of this process."""

    def __init__(
        self,
        study: SharedStudy,
        base: ml_collections.ConfigDict,
        space: Space,
        *,
        metric: str,
        at_most: int,
        best: pathlib.Path,
    ):
        self._study, self._base, self._space = study, base, space
        self._metric, self._at_most, self._best = metric, at_most, best
        self._stop = threading.Event()

    def run(self, slots: Sequence[str | None]) -> None:
        """Runs trials, one after the other in each slot, in a thread for each."""
        cores = os.sched_getaffinity(0)
        with concurrent.futures.ThreadPoolExecutor(len(slots)) as pool:
            try:
                running = [
                    pool.submit(self._in_slot, gpu, share_of_cores(cores, index, len(slots)))
                    for index, gpu in enumerate(slots)
                ]
                for each in running:
                    each.result()
            except BaseException:
                self._stop.set()  # the trials save their state
                raise

    def _in_slot(self, gpu: str | None, cores: set[int]) -> None:
        os.sched_setaffinity(0, cores)  # of this thread, and of the processes that it starts
        while not self._stop.is_set():
            held = self._study.ask(at_most=self._at_most)
            if held is None:
                return
            try:
                self._end(held, self._run(held, gpu))
            except BaseException:
                self._stop.set()
                raise

    def _run(self, held: Held, gpu: str | None) -> trial.Ended:
        try:
            config = self._space.config_for(held.trial, self._base)
        except optuna.TrialPruned:
            return trial.Ended("pruned")
        except SpaceError:
            self._study.leave(held)
            raise
        except UserError as error:  # fields that do not suit each other
            return trial.Ended("failed", why=str(error))
        if gpu is not None:  # CUDA_VISIBLE_DEVICES has the only one that it sees
            runtime = dataclasses.replace(config.runtime, gpu_ids=None)
            config = dataclasses.replace(config, runtime=runtime)
        where = "the CPU" if gpu is None else f"GPU {gpu}"
        in_ = f"trials/{held.folder.name}"  # another number if it is tried again
        number, parameters = held.trial.number, held.trial.params
        summary("search: trial %d in %s on %s: %s", number, in_, where, parameters)
        return trial.run(held, config, gpu=gpu, metric=self._metric, stop=self._stop)

    def _end(self, held: Held, ended: trial.Ended) -> None:
        number = held.trial.number
        if ended.state == "left":
            self._study.leave(held)
            log.warning("search: trial %d was stopped; the same command continues it", number)
            return
        if ended.state == "failed":
            self._study.tell(held, state=TrialState.FAIL)
            log.warning("search: trial %d failed: %s", number, ended.why)
            self._check_failures(ended.why)
            return
        if ended.state == "pruned":
            self._study.tell(held, state=TrialState.PRUNED)
            summary("search: trial %d was pruned", number)
            return
        self._study.tell(held, value=ended.value)
        best = self._write_best()
        summary(
            "search: trial %d: %s=%s; the best is trial %d with %s",
            *(number, self._metric, in_figures(ended.value), best.number, in_figures(best.value)),
        )

    def _check_failures(self, why: str) -> None:
        counts = self._study.counts()
        if counts["fail"] >= MOST_FAILURES and not counts["complete"] + counts["pruned"]:
            raise RunError(
                f"the first {counts['fail']} trials failed, so the search stops; the last one: "
                f"{why}"
            )

    def _write_best(self) -> optuna.trial.FrozenTrial:
        with self._study.alone():  # of two processes, the second one sees the first one's trial
            best = self._study.best()
            said = f"Trial {best.number}, the best of its search: {self._metric}={best.value:.6g}"
            source = self._study.folder_of(best) / "config.py"
            config_files.copy(source, self._best, said=said)
        return best

    def result(self, *, gpu: str | None) -> dict:
        """Exports the best trial on that GPU; returns the trial and the numbers of trials."""
        best = self._study.best()
        if best is None:
            counts = self._study.counts()
            raise RunError(
                f"no trial is complete ({counts['fail']} failed, {counts['pruned']} were pruned), "
                "so there is no best one; their folders in trials/ have their output"
            )
        folder = self._study.folder_of(best)
        return {
            "metric": self._metric,
            "value": best.value,
            "parameters": best.params,
            "trial": best.number,
            "workdir": str(folder),
            "export": _exported(folder, gpu),
            "config": str(self._best),
            "trials": self._study.counts(),
        }


def _exported(folder: pathlib.Path, gpu: str | None) -> str | None:
    """Exports the best trial. A failure is a warning, because the search itself is good."""
    try:
        path = trial.export(folder, gpu=gpu)
    except RunError as error:
        log.warning("search: the best trial cannot be exported: %s", error)
        return None
    summary("search: the best trial is exported to %s", path)
    return str(path)
