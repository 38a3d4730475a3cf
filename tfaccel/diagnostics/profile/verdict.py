"""Decides from three rates what limits a run and by how much, and gives advice.

print(judge(Ceilings(step, loader, real), Setup(...)).sentence)

Let s and l be the seconds that the step and the loader alone take for a batch. A run that overlaps
them takes max(s, l). A run in which they take turns takes s + l. Any further time is lost outside
both. This module measures nothing.
"""

import dataclasses

from tfaccel.common.tables import in_figures
from tfaccel.diagnostics.profile.rates import Rate

NEAR = 0.1  # two rates within this share are alike: a machine varies as much from day to day
LOST = 0.15  # a run that loses less than this share of the lower rate is as good as it gets
# Let r be the rate if step and loader take turns. A run that loses more than this share of r is
# limited by neither of them. With busy cores, a run without any other fault lost 0.18 of r.
LOST_BY_HOST = 0.3
SEARCH = "--search tries other threads, queues, decoder shares and places for the loader"


@dataclasses.dataclass(frozen=True)
class Setup:
    """The facts about a run that its verdict needs.

    Attributes:
      model: the name of the model.
      loader: one of config.LOADERS except "auto"; "examples" or "pipeline" for a user's own data.
      global_batch_size: images per step over all replicas.
      replicas: the number of replicas.
      on_gpu: True if the replicas are GPUs.
      precision: a Keras dtype policy.
      xla: True if training steps are compiled with XLA.
      not_for_xla: the part of the model or the data that XLA cannot compile; None if no such part
        is known.
      steps_per_execution: the steps in one launch from the host.
      threads: the threads of each replica's loader; None if they are not known.
      cores: the CPU cores for each replica; None if they are not known.
      epoch_steps: the steps in an epoch; None if they are not known.
      from_config: True if flags of `tfaccel train` change the run; False if arguments in a script
        do.
      searches: True if a search follows, so that the advice does not suggest one.
    """

    model: str
    loader: str
    global_batch_size: int
    replicas: int = 1
    on_gpu: bool = False
    precision: str = "float32"
    xla: bool = True
    not_for_xla: str | None = None
    steps_per_execution: int = 1
    threads: int | None = None
    cores: int | None = None
    epoch_steps: int | None = None
    from_config: bool = True
    searches: bool = False


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """The three rates.

    Attributes:
      step: the rate of the step alone, on a batch that stays on the device.
      loader: the rate of the loader alone, without training.
      real: the rate of both together in `fit`.
    """

    step: Rate
    loader: Rate
    real: Rate


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What limits the run.

    Attributes:
      bound: "loader", "step", "both" (they are equally fast) or "host" (neither of them).
      lost: the share of the lower rate that the run does not reach, from 0 to 1.
      sentence: the verdict in words, with figures.
      advice: what to do, the most promising first.
    """

    bound: str
    lost: float
    sentence: str
    advice: tuple[str, ...]


def judge(ceilings: Ceilings, setup: Setup) -> Verdict:
    """Returns the verdict for a run."""
    step, loader, real = (getattr(ceilings, each).median for each in ("step", "loader", "real"))
    alone, loader = loader, max(loader, real)  # the run shows that the loader can be as fast
    lost = max(0.0, 1 - real / min(step, loader))
    in_turn = 1 / (1 / step + 1 / loader)
    if real < in_turn * (1 - LOST_BY_HOST):
        bound, sentence = "host", _host(ceilings, setup)
    elif loader < step * (1 - NEAR):
        bound, sentence = "loader", _loader(ceilings, setup)
    elif step < loader * (1 - NEAR) or alone < real * (1 - NEAR):
        bound, sentence = "step", _step(ceilings)
    else:
        bound = "both"
        sentence = (
            f"step and loader are equally fast ({step:,.0f} and {alone:,.0f} images/s); the run "
            f"reaches {real:,.0f}, and only a faster step and a faster loader together help"
        )
    if bound != "host" and lost > LOST:
        sentence += f". {_lost(lost, in_turn, real, setup)}"
    return Verdict(bound, lost, sentence, tuple(_advice(bound, lost, setup)))


def milliseconds(rate: Rate, setup: Setup) -> float:
    """Returns the milliseconds that a step takes at this rate."""
    return 1000 * setup.global_batch_size / rate.median


def _loader(ceilings: Ceilings, setup: Setup) -> str:
    step, loader, real = ceilings.step.median, ceilings.loader.median, ceilings.real.median
    took, waited = milliseconds(ceilings.real, setup), 1000 * ceilings.real.waited_s
    return (
        f"the loader limits the run: the loader alone reaches {loader:,.0f} images/s, the step "
        f"alone {step:,.0f}, and the run {real:,.0f}; each step of the run takes "
        f"{in_figures(took)} ms, of which it waits {in_figures(min(waited, took))} ms for its batch"
    )


def _step(ceilings: Ceilings) -> str:
    step, loader, real = ceilings.step.median, ceilings.loader.median, ceilings.real.median
    compared = (
        f"{_times(loader / step)} as many"
        if loader > min(step, real)
        else "but it kept up with the step in the run"
    )
    return (
        f"the step limits the run: the run reaches {real:,.0f} of the {step:,.0f} images/s "
        f"({real / step:.0%}) of the step alone; the loader alone reaches {loader:,.0f}, {compared}"
    )


def _host(ceilings: Ceilings, setup: Setup) -> str:
    took, step, loader = (
        milliseconds(each, setup) for each in (ceilings.real, ceilings.step, ceilings.loader)
    )
    return (
        f"neither the step nor the loader limits the run: a step of the run takes "
        f"{in_figures(took)} ms, the step alone {in_figures(step)} ms and the loader alone "
        f"{in_figures(loader)} ms; the other {in_figures(took - step - loader)} ms are lost in "
        "callbacks, Python and launches"
    )


def _lost(lost: float, in_turn: float, real: float, setup: Setup) -> str:
    """Returns why the run does not reach the lower rate."""
    said = f"{lost:.0%} of the lower rate is lost when step and loader run together"
    if not setup.on_gpu and abs(real / in_turn - 1) < LOST:
        return f"{said}: they share the cores, and in turn would reach {in_turn:,.0f} images/s"
    shared = "the cores"
    if setup.on_gpu:
        shared = "the GPU" if setup.loader == "dali_gpu" else "the host"
    return f"{said}, in the hand-over or because they share {shared}"


def _times(factor: float) -> str:
    return f"{factor:,.1f} times" if factor < 10 else f"{factor:,.0f} times"


def _advice(bound: str, lost: float, setup: Setup) -> list[str]:
    if bound == "host":
        return _for_host(setup)
    advice = []
    if bound in ("loader", "both"):
        advice += _for_loader(setup)
    if bound in ("step", "both"):
        advice += _for_step(setup)
    if bound == "step" and lost > LOST:
        advice += _more_steps(setup) if setup.on_gpu else []
        advice += _search(setup)
    return advice


def _for_loader(setup: Setup) -> list[str]:
    if setup.loader in ("examples", "pipeline"):
        return ["make your data code faster, or read the files with tfaccel.sources"]
    advice = []
    if setup.threads and setup.cores and setup.threads < setup.cores:
        advice.append(
            f"--config.dali.threads={setup.cores}: the loader uses {setup.threads} of "
            f"{setup.cores} cores"
        )
    if setup.loader in ("dali_cpu", "tf_data", "cache") and setup.on_gpu:
        how = _asked(setup, "data.loader=dali_gpu", "loader='dali_gpu'")
        advice.append(f"{how} decodes and augments on the GPU")
    if setup.loader in ("dali_gpu", "dali_cpu", "tf_data"):
        size = _asked(setup, "data.stored_size=HEIGHT,WIDTH", "stored_size=(HEIGHT, WIDTH)")
        kept = _asked(setup, "data.loader=cache", "loader='cache'")
        advice.append(
            f"{size} with {kept} (or memory) decodes each image once, and crops are then cut from "
            "smaller images"
        )
    return advice + _search(setup)


def _for_step(setup: Setup) -> list[str]:
    advice = []
    if setup.on_gpu and not setup.xla and setup.not_for_xla:
        advice.append(f"leave XLA off: {setup.not_for_xla}")
    elif setup.on_gpu and not setup.xla:
        advice.append(_asked(setup, "runtime.xla=True", "tfaccel.setup(xla=True)"))
    if not setup.on_gpu and setup.xla:
        # The network of configs/digits.py: 2,600 images/s with XLA, 7,500 without (2 CPU cores,
        # 2026-11-22).
        how = _asked(setup, "runtime.xla=False", "tfaccel.setup(xla=False)")
        advice.append(f"try {how}, which may be faster on a CPU")
    if setup.on_gpu and setup.precision == "float32":
        how = "runtime.precision=mixed_float16", "tfaccel.setup(precision='mixed_float16')"
        advice.append(_asked(setup, *how))
    if setup.on_gpu:
        how = " (see `tfaccel autobatch`)" if setup.from_config else ""
        advice.append(f"use a larger batch{how}, or more GPUs")
    lint = "`tfaccel lint`" if setup.from_config else "tfaccel.lint(model)"
    shown = "; --trace=FOLDER shows each operation" if setup.from_config else ""
    return [*advice, f"{lint} reports what the model wastes{shown}"]


def _for_host(setup: Setup) -> list[str]:
    shown = "; --trace=FOLDER shows what the host does between steps" if setup.from_config else ""
    return [*_more_steps(setup), f"use a larger batch{shown}"]


def _more_steps(setup: Setup) -> list[str]:
    """Returns the advice to launch more steps at once, unless an execution is an epoch."""
    now = setup.steps_per_execution
    more = min(max(10, 2 * now), setup.epoch_steps or 10**9)
    if more <= now:
        return []
    setting = f"steps_per_execution={more}"
    how = _asked(setup, f"train.{setting}", f"run.compile(..., {setting})")
    return [f"{how}: the host now waits after every {f'{now} steps' if now > 1 else 'step'}"]


def _search(setup: Setup) -> list[str]:
    return [SEARCH] if setup.from_config and not setup.searches else []


def _asked(setup: Setup, field: str, argument: str) -> str:
    """Returns a setting as a flag of `tfaccel train`, or as an argument in a script."""
    return f"--config.{field}" if setup.from_config else argument
