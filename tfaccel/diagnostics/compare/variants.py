"""Which variants of an experiment are compared, in which order, and what config each is.

Takes what there is to choose from; gives variants, and each as a config. Needs no TensorFlow.

    levels = levels_of(("tf_data", "dali_gpu", "memory"), num_gpus=2)
    configured(config, levels.plain, gpu_ids=(0, 1))    # float32 without TF32, no XLA, one GPU

All are the same job: data, global batch, seed and recipe are the config's own. On several GPUs the
global batch is divided over them.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tfaccel.config import Config

SLOW = "slow"  # what is sent to `one_by_one` of a variant that was right, and nearly as fast
PASSES = 2
CEILING = "float16"  # Apex's O3: weights and updates too
# XLA first: without it float16 is hardly faster than TF32 (ResNet-50, H200). Then what makes the
# step shorter, then what feeds it, which matters once the step is short.
FACTORS = ("xla", "arithmetic", "loader", "num_gpus")


class Variant(NamedTuple):
    """One way of doing the job.

    Attributes:
      loader: as `data.loader`.
      arithmetic: "float32" (TF32 off), "TF32" (float32, whose products may use it), or a dtype
        policy ("mixed_float16", "mixed_bfloat16", "float16"; TF32 on, for what stays float32).
      xla: as `runtime.xla`.
      num_gpus: the first so many of the config's GPUs; 0 for the CPU.
    """

    loader: str
    arithmetic: str
    xla: bool
    num_gpus: int

    def __str__(self):
        """Returns it in words."""
        gpus = f", {self.num_gpus} GPU{'s' if self.num_gpus > 1 else ''}" if self.num_gpus else ""
        return f"{self.loader}, {self.arithmetic}, {'XLA' if self.xla else 'no XLA'}{gpus}"


@dataclasses.dataclass(frozen=True)
class Levels:
    """What each factor can be, the plain one first."""

    loader: tuple[str, ...]
    arithmetic: tuple[str, ...]
    xla: tuple[bool, ...]
    num_gpus: tuple[int, ...]

    @property
    def plain(self) -> Variant:
        """What all begins with."""
        return Variant(*(getattr(self, each)[0] for each in Variant._fields))


def levels_of(loaders: tuple[str, ...], *, num_gpus: int) -> Levels:
    """Returns the levels on a machine.

    Args:
      loaders: which can read the data, the plain one first.
      num_gpus: that may be used; of more than two, 1, 2, 4 and so on are tried, and all.
    """
    tf32 = ("TF32",) if num_gpus else ()
    powers = [2**power for power in range(num_gpus.bit_length()) if 2**power < num_gpus]
    return Levels(
        loader=loaders,
        arithmetic=("float32", *tf32, "mixed_float16", "mixed_bfloat16"),
        xla=(False, True),
        num_gpus=(*powers, num_gpus),
    )


def every_combination(
    levels: Levels, champion: Callable[[], Variant] | None = None, starved: bool = False
) -> list[Variant]:
    """Returns every combination but the plain one, few GPUs first."""
    names = tuple(reversed(FACTORS))
    every = itertools.product(*(getattr(levels, each) for each in names))
    return [Variant(**dict(zip(names, each, strict=True))) for each in every][1:]


def one_by_one(
    levels: Levels, champion: Callable[[], Variant], starved: bool = False
) -> Iterator[Variant]:
    """Yields the best so far with one factor changed: each level, factor by factor.

    It takes, by `send`, what became of the variant. What was `SLOW` is tried once more at the end,
    if what is best has changed since: a quick loader is no gain before the step is quick.

    Args:
      levels: what there is to choose from.
      champion: gives the best so far.
      starved: whether the plain one waits for its batches: what feeds the step comes first then, as
        nothing that makes it shorter is a gain before.
    """
    factors = sorted(FACTORS, key=lambda each: each != "loader") if starved else FACTORS
    changes = [(factor, each) for factor in factors for each in getattr(levels, factor)[1:]]
    tried = {levels.plain}
    for _ in range(PASSES):
        slow = []
        for factor, level in changes:
            candidate = champion()._replace(**{factor: level})
            if candidate in tried:
                continue
            tried.add(candidate)
            if (yield candidate) == SLOW:
                slow.append((factor, level))
        changes = slow


def configured(config: Config, variant: Variant, gpu_ids: tuple[int, ...]) -> Config:
    """Returns the experiment as the variant does it.

    What XLA compiles is not kept for the next process, so that all starts are alike.

    Args:
      config: the experiment.
      variant: how it is done.
      gpu_ids: all that the experiment may use.
    """
    stores = variant.loader in ("memory", "cache")
    data = dataclasses.replace(
        config.data,
        loader=variant.loader,
        stored_size=config.data.stored_size if stores else None,
        global_batch_size=config.data.whole_batch(max(1, len(gpu_ids))),
        batch_per_replica=None,
    )
    is_float32 = variant.arithmetic in ("float32", "TF32")
    runtime = dataclasses.replace(
        config.runtime,
        precision="float32" if is_float32 else variant.arithmetic,
        xla=variant.xla,
        compile_cache=False,
    )
    if variant.num_gpus:  # the CPU has neither
        tf32, chosen = variant.arithmetic != "float32", gpu_ids[: variant.num_gpus]
        runtime = dataclasses.replace(runtime, tf32=tf32, gpu_ids=chosen)
    return dataclasses.replace(config, data=data, runtime=runtime)


def as_flags(config: Config, chosen: Config) -> list[str]:
    """Returns the flags of `tfaccel train` that make one config of the other.

    Args:
      config: the experiment.
      chosen: by `configured`.
    """
    flags = []
    for section in ("data", "runtime"):
        before, after = (dataclasses.asdict(getattr(each, section)) for each in (config, chosen))
        for name, value in after.items():
            if value == before[name] or name == "compile_cache":
                continue
            if name == "gpu_ids":
                value = ",".join(map(str, value))
            flags.append(f"--config.{section}.{name}={value}")
    return flags
