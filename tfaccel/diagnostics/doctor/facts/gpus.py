"""The driver and its GPUs as values, made from the answers of the child that asks NVML.

facts = from_answers(start("tfaccel.diagnostics.doctor.facts.nvml", {}, seconds=10).answers())
visible(facts, os.environ).gpus
"""

import dataclasses
from collections.abc import Mapping

from tfaccel.diagnostics.doctor.facts.child import Answers


@dataclasses.dataclass(frozen=True)
class Driver:
    """NVIDIA's driver: its version, and the newest CUDA that it supports, e.g. (12, 8)."""

    version: str
    cuda: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Holder:
    """A process that holds GPU memory. It has no name if it runs outside this container."""

    pid: int
    name: str | None
    bytes: int | None


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU. A value is None if the driver does not report it.

    Attributes:
      index: its number in NVML and nvidia-smi.
      uuid: its unique name.
      name: its model.
      capability: its CUDA compute capability, e.g. (9, 0).
      memory_total: bytes.
      memory_used: bytes, of all processes.
      holders: the processes that hold its memory, as far as they are visible.
      mig: whether it is split into MIG slices.
      ecc_errors: memory errors since the driver was loaded that could not be corrected.
      remap: whether memory rows wait to be remapped, and whether a remapping failed: 0 or 1 each.
      slowdowns: NVML's bits for the reasons of low clocks.
      power_limit_w: its power limit.
      power_default_w: its default power limit.
      persistence: whether the driver stays loaded while no process uses it.
      compute_mode: NVML's compute mode; 0 means that any process may use the GPU.
      has_jpeg_engine: whether NVML reports the load of a JPEG engine. (Some GPUs with compute
        capability 7.5 report it without having one.)
      nvlinks: the number of NVLinks that are up.
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
    """All GPUs of the machine, and their driver.

    Attributes:
      driver: None if there is no driver, or if it does not answer.
      gpus: in NVML's order.
      links: the connection of each pair of indices: "NVLink", or the route over PCIe.
      problem: why the driver does not answer; None if it does, or if there is no driver.
    """

    driver: Driver | None
    gpus: tuple[Gpu, ...]
    links: Mapping[tuple[int, int], str]
    problem: str | None


def visible(facts: Gpus, environment: Mapping[str, str]) -> Gpus:
    """Returns the GPUs that CUDA_VISIBLE_DEVICES leaves visible, or all if it names MIG slices.

    Ordinals are taken as NVML's indices, which is right if all GPUs are of one kind.
    """
    given = environment.get("CUDA_VISIBLE_DEVICES")
    if given is None or "MIG" in given:
        return facts
    chosen = []
    for each in filter(None, map(str.strip, given.split(","))):
        hits = [gpu for gpu in facts.gpus if each == str(gpu.index) or gpu.uuid.startswith(each)]
        if len(hits) != 1:
            break  # CUDA ignores the first wrong name and all names after it
        chosen += hits
    return dataclasses.replace(facts, gpus=tuple(chosen))


def from_answers(answers: Answers) -> Gpus:
    """Returns the facts that the child's answers contain."""
    stages = ("start", "driver", "GPUs")
    problem = next((answers.failed[each] for each in stages if each in answers.failed), None)
    driver, found = answers.facts.get("driver"), answers.facts.get("GPUs") or {}
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
