"""The driver and its GPUs, as values: what a child that asked NVML told.

facts = from_told(start("tfaccel.diagnostics.doctor.facts.nvml", {}, seconds=10).told())
visible(facts, os.environ).gpus
"""

import dataclasses
from collections.abc import Mapping

from tfaccel.diagnostics.doctor.facts.child import Told


@dataclasses.dataclass(frozen=True)
class Driver:
    """NVIDIA's driver: its version, and the newest CUDA that it knows, e.g. (12, 8)."""

    version: str
    cuda: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Holder:
    """A process with memory of a GPU. Where it is not of this container, it has no name here."""

    pid: int
    name: str | None
    bytes: int | None


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU. None is what its driver does not tell.

    Attributes:
      index: as NVML and nvidia-smi count.
      uuid: its own name.
      name: of its kind.
      capability: what CUDA can do on it, e.g. (9, 0).
      memory_total: bytes.
      memory_used: bytes, by whichever process.
      holders: these processes, as far as they can be seen.
      mig: whether it is cut into slices.
      ecc_errors: memory errors that could not be corrected since the driver was loaded.
      remap: whether rows of its memory wait to be replaced, and whether that failed: 0 or 1 each.
      slowdowns: NVML's bits of why its clocks are low.
      power_limit_w: what it may take now.
      power_default_w: what it was made for.
      persistence: whether the driver stays loaded while nobody uses it.
      compute_mode: NVML's, 0 where any process may use it.
      has_jpeg_engine: whether NVML tells the use of one. (Some GPUs of CUDA 7.5 say so wrongly.)
      nvlinks: that are up.
    """

    index: int
    uuid: str
    name: str
    capability: tuple[int, int]
    memory_total: int
    memory_used: int
    holders: tuple[Holder, ...]
    mig: bool
    ecc_errors: int | None
    remap: tuple[int, int] | None
    slowdowns: int | None
    power_limit_w: int | None
    power_default_w: int | None
    persistence: bool | None
    compute_mode: int | None
    has_jpeg_engine: bool
    nvlinks: int


@dataclasses.dataclass(frozen=True)
class Gpus:
    """All of them.

    Attributes:
      driver: None if there is none, or it does not answer.
      gpus: in NVML's order.
      links: how two of them reach each other, by their indices: "NVLink" or the way over PCIe.
      problem: why the driver does not answer; None if it does, or there is none.
    """

    driver: Driver | None
    gpus: tuple[Gpu, ...]
    links: Mapping[tuple[int, int], str]
    problem: str | None


def visible(facts: Gpus, environment: Mapping[str, str]) -> Gpus:
    """Returns the facts of those GPUs that CUDA_VISIBLE_DEVICES leaves; of all if it is not clear.

    Ordinals are taken as NVML's, as they are among GPUs of one kind.
    """
    given = environment.get("CUDA_VISIBLE_DEVICES")
    if given is None or "MIG" in given:
        return facts
    chosen = []
    for each in filter(None, map(str.strip, given.split(","))):
        one = [gpu for gpu in facts.gpus if each == str(gpu.index) or gpu.uuid.startswith(each)]
        if len(one) != 1:
            break  # CUDA takes none from the first wrong one on
        chosen += one
    return dataclasses.replace(facts, gpus=tuple(chosen))


def from_told(told: Told) -> Gpus:
    """Returns the facts out of what the child told."""
    problem = told.failed.get("start") or told.failed.get("driver") or told.failed.get("GPUs")
    driver, found = told.facts.get("driver"), told.facts.get("GPUs") or {}
    return Gpus(
        driver=Driver(driver["version"], tuple(driver["cuda"])) if driver else None,
        gpus=tuple(map(_gpu, found.get("gpus", ()))),
        links={(a, b): how for a, b, how in found.get("links", ())},
        problem=problem,
    )


def _gpu(fields: dict) -> Gpu:
    holders = tuple(Holder(**each) for each in fields["holders"])
    remap = fields["remap"] and tuple(fields["remap"])
    capability = tuple(fields["capability"])
    return Gpu(**{**fields, "holders": holders, "remap": remap, "capability": capability})
