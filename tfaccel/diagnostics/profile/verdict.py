"""What bounds a run, by how much, and what to do: from three rates, without measuring anything.

print(judge(Ceilings(step, loader, real), Setup(...)).sentence)

With s and l the seconds that step and loader take for a batch by themselves, a run that does both
at once takes max(s, l), one that takes turns s + l. More than that is lost in neither of them.
"""

import dataclasses

from tfaccel.common.tables import in_figures
from tfaccel.diagnostics.profile.rates import Rate

NEAR = 0.1  # within which two ceilings are alike: machines vary by as much from day to day
LOST = 0.15  # of the lower ceiling, below which a run is as good as it gets
# Of what both make in turn: less says that neither is what is slow. (Beside busy cores, a run was
# seen at 0.82 of it that had nothing else wrong with it.)
LOST_BY_HOST = 0.3
SEARCH = "--search tries other threads, queues, decoder shares and places for the loader"


@dataclasses.dataclass(frozen=True)
class Setup:
    """What was measured, and on what.

    Attributes:
      model: its name.
      loader: one of config.LOADERS but "auto"; "examples" or "pipeline" for a user's own.
      global_batch_size: images per step over all replicas.
      replicas: of the run.
      on_gpu: whether they are GPUs.
      precision: a Keras dtype policy.
      xla: whether training steps are compiled with XLA.
      not_for_xla: what of the model or the data XLA cannot compile; None where nothing is known.
      steps_per_execution: between two looks of the host.
      threads: of each replica's loader; None where that is not known.
      cores: for each replica, likewise.
      epoch_steps: steps of an epoch, likewise.
      from_config: whether flags of `tfaccel train` change it, or arguments in a script.
      searches: whether a search follows anyway.
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
      step: of one batch that stays on the device.
      loader: of batches that nothing trains on.
      real: of both together, as `fit` does it.
    """

    step: Rate
    loader: Rate
    real: Rate


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What bounds the run.

    Attributes:
      bound: "loader", "step", "both" (they are alike) or "host" (neither).
      lost: part of the lower ceiling that the run does not get, 0..1.
      sentence: the same with the figures.
      advice: what to do, the most promising first.
    """

    bound: str
    lost: float
    sentence: str
    advice: tuple[str, ...]


def judge(ceilings: Ceilings, setup: Setup) -> Verdict:
    """Returns what bounds a run."""
    step, loader, real = (getattr(ceilings, each).median for each in ("step", "loader", "real"))
    alone, loader = loader, max(loader, real)  # a run shows that its loader can do as much
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
            f"step and loader are alike ({step:,.0f} and {alone:,.0f} images/s): "
            f"the run gets {real:,.0f}, and to be faster it needs both"
        )
    if bound != "host" and lost > LOST:
        sentence += f". {_lost(lost, in_turn, real, setup)}"
    return Verdict(bound, lost, sentence, tuple(_advice(bound, lost, setup)))


def milliseconds(rate: Rate, setup: Setup) -> float:
    """Returns what a step takes at a rate."""
    return 1000 * setup.global_batch_size / rate.median


def _loader(ceilings: Ceilings, setup: Setup) -> str:
    step, loader, real = ceilings.step.median, ceilings.loader.median, ceilings.real.median
    took, waited = milliseconds(ceilings.real, setup), 1000 * ceilings.real.waited_s
    return (
        f"the loader bounds: alone it gives {loader:,.0f} images/s, the step would take "
        f"{step:,.0f}, the run gets {real:,.0f}; of the {in_figures(took)} ms of a step "
        f"{in_figures(min(waited, took))} ms are waiting for its batch"
    )


def _step(ceilings: Ceilings) -> str:
    step, loader, real = ceilings.step.median, ceilings.loader.median, ceilings.real.median
    compared = (
        f"{_times(loader / step)} as many"
        if loader > min(step, real)
        else "but kept up with the step"
    )
    return (
        f"the step bounds: the run gets {real:,.0f} of the {step:,.0f} images/s ({real / step:.0%})"
        f" that it makes with its batch on the device; the loader alone gives {loader:,.0f}, "
        f"{compared}"
    )


def _host(ceilings: Ceilings, setup: Setup) -> str:
    took, step, loader = (
        milliseconds(each, setup) for each in (ceilings.real, ceilings.step, ceilings.loader)
    )
    return (
        f"neither bounds: a step of the run takes {in_figures(took)} ms, which the step "
        f"({in_figures(step)} ms) and the loader ({in_figures(loader)} ms) do not add up to; "
        f"{in_figures(took - step - loader)} ms are lost between them, in callbacks, Python and "
        "launches"
    )


def _lost(lost: float, in_turn: float, real: float, setup: Setup) -> str:
    """Returns where the part of the lower ceiling goes that the run does not get."""
    said = f"{lost:.0%} of the lower ceiling is lost where both run together"
    if not setup.on_gpu and abs(real / in_turn - 1) < LOST:
        return (
            f"{said}: they share the cores, and one after the other would make {in_turn:,.0f} "
            "images/s"
        )
    return f"{said}, at the hand-over or because they share {_shared(setup)}"


def _shared(setup: Setup) -> str:
    if not setup.on_gpu:
        return "the cores"
    return "the GPU" if setup.loader == "dali_gpu" else "the host"


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
        return ["make the data's own code faster, or read files by tfaccel.sources"]
    advice = []
    if setup.threads and setup.cores and setup.threads < setup.cores:
        advice.append(
            f"--config.dali.threads={setup.cores}: the loader has {setup.threads} of "
            f"{setup.cores} cores"
        )
    if setup.loader in ("dali_cpu", "tf_data", "cache") and setup.on_gpu:
        how = _asked(setup, "data.loader=dali_gpu", "loader='dali_gpu'")
        advice.append(f"{how} decodes and augments on the GPU")
    if setup.loader in ("dali_gpu", "dali_cpu", "tf_data"):
        size = _asked(setup, "data.stored_size=HEIGHT,WIDTH", "stored_size=(HEIGHT, WIDTH)")
        kept = _asked(setup, "data.loader=cache", "loader='cache'")
        advice.append(
            f"{size} with {kept} (or memory) decodes once; windows are then cut out of smaller "
            "images"
        )
    return advice + _search(setup)


def _for_step(setup: Setup) -> list[str]:
    advice = []
    if setup.on_gpu and not setup.xla and setup.not_for_xla:
        advice.append(f"leave XLA off: {setup.not_for_xla}")
    elif setup.on_gpu and not setup.xla:
        advice.append(_asked(setup, "runtime.xla=True", "tfaccel.setup(xla=True)"))
    if not setup.on_gpu and setup.xla:
        # The digits' network: 2,600 images/s with, 7,500 without (2 CPU cores, 2026-11-22).
        how = _asked(setup, "runtime.xla=False", "tfaccel.setup(xla=False)")
        advice.append(f"try {how}: on a CPU that may be faster")
    if setup.on_gpu and setup.precision == "float32":
        name = "mixed_float16"
        advice.append(
            _asked(setup, f"runtime.precision={name}", f"tfaccel.setup(precision='{name}')")
        )
    if setup.on_gpu:
        by = " (`tfaccel autobatch`)" if setup.from_config else ""
        advice.append(f"a larger batch{by}, or more GPUs")
    lint = "`tfaccel lint`" if setup.from_config else "tfaccel.lint(model)"
    shown = "; --trace=FOLDER shows each operation" if setup.from_config else ""
    return [*advice, f"{lint} says what the model wastes{shown}"]


def _for_host(setup: Setup) -> list[str]:
    shown = "; --trace=FOLDER shows what the host does between steps" if setup.from_config else ""
    return [*_more_steps(setup), f"a larger batch{shown}"]


def _more_steps(setup: Setup) -> list[str]:
    """Returns the advice to look less often, unless an epoch is one execution already."""
    now = setup.steps_per_execution
    more = min(max(10, 2 * now), setup.epoch_steps or 10**9)
    if more <= now:
        return []
    how = _asked(
        setup,
        f"train.steps_per_execution={more}",
        f"run.compile(..., steps_per_execution={more})",
    )
    return [f"{how}: the host looks {f'once in {now} steps' if now > 1 else 'at every step'}"]


def _search(setup: Setup) -> list[str]:
    return [SEARCH] if setup.from_config and not setup.searches else []


def _asked(setup: Setup, field: str, argument: str) -> str:
    """Returns how a setting is asked for: by a flag of `tfaccel train`, or in a script."""
    return f"--config.{field}" if setup.from_config else argument
