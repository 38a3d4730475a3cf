"""Measures an experiment's three rates, and searches for faster loader settings.

This module takes a checked config and gives tables. Every measurement runs in a child process, one
at a time.

    measured = measure_experiment(config, seconds=5.0, trace_to=None)
    table = search_experiment(config, measured, seconds=5.0, minutes=10.0, memory_mib=None)
"""

import dataclasses
import math
import os
import time
from collections.abc import Callable

from tfaccel.common import run_log
from tfaccel.common.errors import UserError
from tfaccel.common.run_log import summary
from tfaccel.common.tables import in_figures
from tfaccel.config import Config
from tfaccel.diagnostics.profile.child import Measured, measure_all, measure_once
from tfaccel.diagnostics.profile.knobs import make_knobs, with_changes
from tfaccel.diagnostics.profile.rates import DROPPED_SHARE
from tfaccel.diagnostics.profile.search import Found, Sample, Setting, Trial, TrialError, search
from tfaccel.diagnostics.profile.search_table import WORDS, SearchTable
from tfaccel.process.isolate import IsolatedError, run_quietly
from tfaccel.runtime.cluster import check_one_process, find

# There is no search if the run reaches this share of the step's rate: a loader could gain only the
# rest.
AS_GOOD = 0.97
# A loader that first decodes all images may take at most this share of the time for it.
DECODING_SHARE = 0.25
UNSTEADY = 0.1  # the relative difference between runs of one setting above which a remark is made
LEAST_TIMEOUT_S = 60.0


def measure_experiment(config: Config, *, seconds: float, trace_to: str | None) -> Measured:
    """Measures the three rates of an experiment.

    Args:
      config: the experiment.
      seconds: how long each rate is measured.
      trace_to: a folder for TensorFlow's own profile; None to write no profile.

    Raises:
      UserError: the config has a mistake, or the job has several workers.
      IsolatedError: the measurement failed for another reason.
    """
    run_log.show()
    check_one_process(find(os.environ), "profile")
    began = time.monotonic()
    # The children run quietly, because each one would log the same lines.
    measured = run_quietly(measure_all, config, seconds=seconds, trace_to=trace_to)
    others_s = 2 * (1 + DROPPED_SHARE) * seconds  # for the step alone and the loader alone
    run_s = max(seconds, time.monotonic() - began - others_s)
    return dataclasses.replace(measured, run_s=run_s)


def search_experiment(
    config: Config, measured: Measured, *, seconds: float, minutes: float, memory_mib: int | None
) -> SearchTable | str:
    """Searches for the fastest loader settings of an experiment.

    Args:
      config: the experiment.
      measured: the result of `measure_experiment`.
      seconds: how long each run of a setting is measured.
      minutes: the time limit of the search.
      memory_mib: the memory that a setting may take, in MiB; None for no limit.

    Returns:
      The trials and the best setting; or a sentence that says why there was no search.
    """
    profile, setup, run_s = measured.profile, measured.profile.setup, measured.run_s
    step, real = profile.ceilings.step.median, profile.ceilings.real.median
    fits = memory_mib is None or not profile.memory_mib or profile.memory_mib <= memory_mib
    if real >= AS_GOOD * step and fits:
        return (
            f"no search: the run reaches {real / step:.0%} of the step's images/s, so no loader "
            "setting can make it much faster"
        )
    budget_s = 60 * minutes
    placements, remarks = _affordable(measured, budget_s)
    start = {
        "data.loader": setup.loader,
        "dali.threads": setup.threads,
        "dali.prefetch_batches": config.dali.prefetch_batches,
        "dali.hw_decoder_load": config.dali.hw_decoder_load,
    }
    knobs = make_knobs(placements=placements, cores=setup.cores)
    if run_s > budget_s:
        changes = sum(len(each.values) for each in knobs if each.applies(start))
        return (
            f"no search: one run takes about {run_s:.0f} s, but --minutes="
            f"{in_figures(minutes)} allows only {in_figures(budget_s)} s for the search; use "
            f"--minutes={math.ceil((2 + changes) * run_s / 60)}"
        )
    summary("profile: %s", _estimate(knobs, start, run_s, minutes))
    found = search(
        start,
        knobs,
        _measuring(config, start, seconds=seconds, run_s=run_s),
        budget_s=budget_s,
        memory_mib=memory_mib,
        tell=_tell,
    )
    remarks += _unsteady(found)
    return SearchTable(found, tuple(remarks))


def _unsteady(found: Found) -> list[str]:
    """Returns a remark if the runs of the present setting differ a lot."""
    rates = [each.rate for each in found.trials[0].samples]
    apart = max(rates) / min(rates) - 1
    if apart < UNSTEADY:
        return []
    return [
        f"runs of the present setting differ by {apart:.0%}, so smaller gains cannot be seen; use "
        "a machine on which nothing else runs, or a larger --seconds"
    ]


def _affordable(measured: Measured, budget_s: float) -> tuple[list[str], list[str]]:
    """Returns the loaders to try, and a remark for each loader that takes too long to start."""
    decoding_s = measured.num_examples / measured.profile.ceilings.loader.median
    # The rate of a loader that stores images does not tell how long decoding takes.
    is_unknown = measured.profile.setup.loader in ("memory", "cache")
    placements, remarks = [], []
    for each in measured.placements:
        decodes_first = each in ("memory", "cache")
        if not decodes_first or is_unknown or decoding_s < DECODING_SHARE * budget_s:
            placements.append(each)
        else:
            remarks.append(
                f"data.loader={each} was not tried, because it first decodes all "
                f"{measured.num_examples:,} images, which takes about {decoding_s:,.0f} s"
            )
    return placements, remarks


def _estimate(knobs, start: Setting, run_s: float, minutes: float) -> str:
    others = sum(len({*each.values} - {start[each.name]}) for each in knobs if each.applies(start))
    least_s = (2 + others) * run_s
    least = f"{least_s:.0f} s" if least_s < 100 else f"{least_s / 60:.0f} minutes"
    return (
        f"search: up to {others} settings at first, with one run of {run_s:.0f} s each, and five "
        f"runs for a faster setting; this takes at least {least}, and the limit is --minutes="
        f"{in_figures(minutes)}"
    )


def _tell(trial: Trial) -> None:
    name = f"{trial.changed}={trial.setting[trial.changed]}" if trial.changed else "start"
    rate = f"{trial.rate:,.0f} images/s, " if trial.rate else ""
    why = f" ({trial.why})" if trial.why else ""
    summary("profile: %s: %s%s%s", name, rate, WORDS[trial.outcome], why)


def _measuring(
    config: Config, start: Setting, *, seconds: float, run_s: float
) -> Callable[[Setting, float], Sample]:
    """Returns a function that measures a setting once, in a child."""

    def measure(setting: Setting, left_s: float) -> Sample:
        changes = {name: setting[name] for name in setting if setting[name] != start[name]}
        # A run that takes more than ten times as long as the first is not worth the wait.
        timeout_s = max(1.0, min(left_s, max(LEAST_TIMEOUT_S, 10 * run_s)))
        try:
            return run_quietly(
                measure_once, with_changes(config, changes), seconds=seconds, timeout_s=timeout_s
            )
        except UserError as error:
            raise TrialError(str(error)) from error
        except IsolatedError as error:
            raise TrialError(_why(error)) from error

    return measure


def _why(error: IsolatedError) -> str:
    """Returns why a child failed, in one sentence with the path of its log if that helps."""
    if error.out_of_memory:
        error.log.unlink(missing_ok=True)
        return "out of memory"
    reason = error.reason.strip().splitlines() or ["no reason given"]
    return f"{reason[0]}; log: {error.log}"
