"""Lists the variants of an experiment, in the order to measure them, and builds their configs.

    levels = levels_of(("tf_data", "dali_gpu", "memory"), num_gpus=2)
    configured(config, levels.plain, gpu_ids=(0, 1))    # float32 without TF32, no XLA, one GPU

All variants do the same job: they have the config's data, global batch size, seed and recipe. On
several GPUs the global batch is divided over them. This module does not import TensorFlow.
"""

import dataclasses
import itertools
from collections.abc import Callable, Generator
from typing import NamedTuple

from tfaccel.config import Config

SLOW = "slow"  # sent to `one_by_one` for a variant with correct losses that was nearly as fast
PASSES = 2
CEILING = "float16"  # the O3 level of NVIDIA Apex: weights and updates are float16 too
# XLA comes first: without it, float16 is hardly faster than TF32 (ResNet-50, H200). Next is the
# arithmetic, which shortens the step. The loader matters only once the step is short.
FACTORS = ("xla", "arithmetic", "loader", "num_gpus")


@dataclasses.dataclass(frozen=True)
class Facts:
    """The facts about an experiment on a machine that decide which variants exist.

    Attributes:
      loaders: the loaders that can read the data, the plain variant's first.
      gpu_ids: the GPUs that the config may use; empty on the CPU.
      num_examples: the number of training images.
      global_batch_size: the config's global batch size when it uses all of these GPUs.
      environment: versions and hardware.
    """

    loaders: tuple[str, ...]
    gpu_ids: tuple[int, ...]
    num_examples: int
    global_batch_size: int
    environment: dict


class Variant(NamedTuple):
    """One way of doing the job.

    Attributes:
      loader: a value of `data.loader`.
      arithmetic: "float32" (TF32 off), "TF32" (float32 with TF32 on), or a dtype policy
        ("mixed_float16", "mixed_bfloat16" or "float16"; TF32 is on for operations that stay in
        float32).
      xla: a value of `runtime.xla`.
      num_gpus: how many of the config's GPUs to use, from the first on; 0 for the CPU.
    """

    loader: str
    arithmetic: str
    xla: bool
    num_gpus: int

    def __str__(self):
        """Returns the variant in words, for example "memory, TF32, XLA, 2 GPUs"."""
        gpus = f", {self.num_gpus} GPU{'s' if self.num_gpus > 1 else ''}" if self.num_gpus else ""
        return f"{self.loader}, {self.arithmetic}, {'XLA' if self.xla else 'no XLA'}{gpus}"


@dataclasses.dataclass(frozen=True)
class Levels:
    """The values that each factor can have, the plain variant's first."""

    loader: tuple[str, ...]
    arithmetic: tuple[str, ...]
    xla: tuple[bool, ...]
    num_gpus: tuple[int, ...]

    @property
    def plain(self) -> Variant:
        """The variant with which the comparison begins: the first value of each factor."""
        return Variant(*(getattr(self, each)[0] for each in Variant._fields))


def levels_of(loaders: tuple[str, ...], *, num_gpus: int) -> Levels:
    """Returns the levels on a machine.

    Args:
      loaders: the loaders that can read the data, the plain variant's first.
      num_gpus: the number of GPUs that may be used. The levels are 1, 2, 4 and so on, and all.
    """
    tf32 = ("TF32",) if num_gpus else ()
    powers = [2**power for power in range(num_gpus.bit_length()) if 2**power < num_gpus]
    return Levels(
        loader=loaders,
        arithmetic=("float32", *tf32, "mixed_float16", "mixed_bfloat16"),
        xla=(False, True),
        num_gpus=(*powers, num_gpus),
    )


def every_combination(levels: Levels, *_) -> Generator[Variant, str, None]:
    """Yields every combination except the plain variant, those with few GPUs first.

    It takes the same arguments as `one_by_one`, but needs only the levels.
    """
    names = tuple(reversed(FACTORS))
    every = itertools.product(*(getattr(levels, each) for each in names))
    for values in itertools.islice(every, 1, None):
        yield Variant(**dict(zip(names, values, strict=True)))


def one_by_one(
    levels: Levels, champion: Callable[[], Variant], starved: bool = False
) -> Generator[Variant, str, None]:
    """Yields the best variant so far with one factor changed: each level, factor by factor.

    The caller sends the outcome of each variant to this generator. A change that was `SLOW` is
    tried again at the end if the best has changed by then: a quick loader, for example, is no gain
    before the step is quick.

    Args:
      levels: the levels of each factor.
      champion: returns the best variant so far.
      starved: whether the plain variant waits for its batches. The loaders then come first, because
        a shorter step is no gain until a quicker loader feeds it.
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
    """Returns the config of a variant.

    The compile cache is off, so that every process compiles and all starts are comparable. The
    global batch size is that on all GPUs of the experiment, `gpu_ids`.
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
    if variant.num_gpus:  # the CPU has neither TF32 nor GPU ids
        tf32, chosen = variant.arithmetic != "float32", gpu_ids[: variant.num_gpus]
        runtime = dataclasses.replace(runtime, tf32=tf32, gpu_ids=chosen)
    return dataclasses.replace(config, data=data, runtime=runtime)


def as_flags(config: Config, chosen: Config) -> list[str]:
    """Returns the flags of `tfaccel train` that turn the experiment's config into `chosen`."""
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
