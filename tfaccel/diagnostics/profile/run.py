"""`tfaccel profile`: an experiment's three rates, and a search for loader settings that suit it.

Takes a checked config; gives tables. Everything is measured in child processes, one at a time.

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

AS_GOOD = 0.97  # of the step's rate: no loader can make a run faster by more than what is left
DECODING_SHARE = 0.25  # of the time, which a loader that decodes all images first may take for that
UNSTEADY = 0.1  # of runs of one setting
LEAST_TIMEOUT_S = 60.0


@dataclasses.dataclass(frozen=True)
class Timed:
    """What was measured, and how long a run of a search will take.

    Attributes:
      measured: the experiment as it is.
      run_s: seconds of one real run with all that comes before it.
    """

    measured: Measured
    run_s: float


def measure_experiment(config: Config, *, seconds: float, trace_to: str | None) -> Timed:
    """Returns the three rates of an experiment.

    Args:
      config: the experiment.
      seconds: that each is measured for.
      trace_to: a folder for TensorFlow's own profile; None for none.

    Raises:
      UserError: a mistake in the config, or this is a job of several workers.
      IsolatedError: the measurement failed for another reason.
    """
    run_log.show()
    cluster = find(os.environ)
    check_one_process(cluster, "profile")
    began = time.monotonic()
    # In silence: what each child says of itself is the same every time.
    measured = run_quietly(measure_all, config, seconds=seconds, trace_to=trace_to)
    others_s = 2 * (1 + DROPPED_SHARE) * seconds  # of step and loader, by themselves
    return Timed(measured, max(seconds, time.monotonic() - began - others_s))


def search_experiment(
    config: Config, timed: Timed, *, seconds: float, minutes: float, memory_mib: int | None
) -> SearchTable | str:
    """Returns the trials and the best of an experiment's loader settings, or why there are none.

    Args:
      config: the experiment.
      timed: of `measure_experiment`.
      seconds: that each trial is measured for.
      minutes: for all of it.
      memory_mib: above which a setting is none to use; None for no limit.
    """
    profile, setup = timed.measured.profile, timed.measured.profile.setup
    step, real = profile.ceilings.step.median, profile.ceilings.real.median
    fits = memory_mib is None or not profile.memory_mib or profile.memory_mib <= memory_mib
    if real >= AS_GOOD * step and fits:
        return (
            f"no search: the run has {real / step:.0%} of the step's images/s, so that no setting "
            "of the loader can make it faster"
        )
    budget_s = 60 * minutes
    placements, remarks = _affordable(timed.measured, budget_s)
    start = {
        "data.loader": setup.loader,
        "dali.threads": setup.threads,
        "dali.prefetch_batches": config.dali.prefetch_batches,
        "dali.hw_decoder_load": config.dali.hw_decoder_load,
    }
    knobs = make_knobs(placements=placements, cores=setup.cores)
    if timed.run_s > budget_s:
        changes = sum(len(each.values) for each in knobs if each.applies(start))
        return (
            f"no search: one run takes about {timed.run_s:.0f} s, and --minutes="
            f"{in_figures(minutes)} has {in_figures(budget_s)} s for all of it; give --minutes="
            f"{math.ceil((2 + changes) * timed.run_s / 60)}"
        )
    summary("profile: %s", _estimate(knobs, start, timed.run_s, minutes))
    found = search(
        start,
        knobs,
        _measuring(config, start, seconds=seconds, run_s=timed.run_s),
        budget_s=budget_s,
        memory_mib=memory_mib,
        tell=_tell,
    )
    remarks += _unsteady(found)
    return SearchTable(found, tuple(remarks))


def _unsteady(found: Found) -> list[str]:
    """Returns a remark where runs of the present setting differ by much."""
    rates = [each.rate for each in found.trials[0].samples]
    apart = max(rates) / min(rates) - 1
    if apart < UNSTEADY:
        return []
    return [
        f"runs of the present setting differ by {apart:.0%}: something else uses this machine, or "
        "--seconds is short; only gains beyond that can be told"
    ]


def _affordable(measured: Measured, budget_s: float) -> tuple[list[str], list[str]]:
    """Returns the loaders to try, and of each that takes too long to begin with, a remark."""
    decoding_s = measured.num_examples / measured.profile.ceilings.loader.median
    placements, remarks = [], []
    for each in measured.placements:
        known = measured.profile.setup.loader in ("memory", "cache")  # of which that is no measure
        if each not in ("memory", "cache") or known or decoding_s < DECODING_SHARE * budget_s:
            placements.append(each)
        else:
            remarks.append(
                f"not tried: data.loader={each}, which first decodes all "
                f"{measured.num_examples:,} images, about {decoding_s:,.0f} s"
            )
    return placements, remarks


def _estimate(knobs, start: Setting, run_s: float, minutes: float) -> str:
    others = sum(len({*each.values} - {start[each.name]}) for each in knobs if each.applies(start))
    return (
        f"search: up to {others} settings at first, {run_s:.0f} s a run, one for each and five for "
        f"one that is faster: {_duration((2 + others) * run_s)} and more, of at most the "
        f"{in_figures(minutes)} of --minutes"
    )


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"


def _tell(trial: Trial) -> None:
    name = f"{trial.changed}={trial.setting[trial.changed]}" if trial.changed else "start"
    rate = f"{trial.rate:,.0f} images/s, " if trial.rate else ""
    why = f" ({trial.why})" if trial.why else ""
    summary("profile: %s: %s%s%s", name, rate, WORDS[trial.outcome], why)


def _measuring(
    config: Config, start: Setting, *, seconds: float, run_s: float
) -> Callable[[Setting, float], Sample]:
    """Returns what measures a setting once, in a child."""

    def measure(setting: Setting, left_s: float) -> Sample:
        changes = {name: setting[name] for name in setting if setting[name] != start[name]}
        # One that is ten times as slow is none to wait for.
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
    """Returns one sentence; where it does not say enough, the log's path is in it."""
    if error.out_of_memory:
        error.log.unlink(missing_ok=True)
        return "out of memory"
    reason = error.reason.strip().splitlines() or ["no reason given"]
    return f"{reason[0]}; log: {error.log}"
