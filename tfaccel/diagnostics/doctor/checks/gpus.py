"""The GPUs themselves: which, who holds their memory, their health and JPEG engines.

check(visible(gpus, os.environ), packages.build, own_pid=os.getpid(), engines=None)
"""

import re
from collections.abc import Mapping, Sequence

from tfaccel.diagnostics.doctor.checks.links import name_gpus
from tfaccel.diagnostics.doctor.facts.gpus import Gpu, Gpus, Holder
from tfaccel.diagnostics.doctor.facts.packages import Build
from tfaccel.diagnostics.doctor.table import Finding, error, ok, warning, worst

GIB = 2**30
HELD = 0.05  # of a GPU's memory; an idle driver keeps up to 1%
LITTLE = 0.1  # of it free is too little to train anything
HEAT, POWER = 0x20 | 0x40, 0x80  # of NVML's ClocksEventReasons
PROHIBITED, EXCLUSIVE = 2, 3  # of NVML's compute modes


def check(
    gpus: Gpus, build: Build | None, *, own_pid: int, engines: Mapping[str, int] | None
) -> list[Finding]:
    """Returns a line for each; none where there is no GPU.

    Args:
      gpus: those that are visible.
      build: what TensorFlow was built for.
      own_pid: of the caller, whose memory is its own affair.
      engines: JPEG decoders of each, as nvJPEG tells them; None where it was not asked.
    """
    if not gpus.gpus:
        return []
    return [kinds(gpus, build), memory(gpus, own_pid=own_pid), health(gpus), jpeg(gpus, engines)]


def kinds(gpus: Gpus, build: Build | None) -> Finding:
    """Judges which GPUs these are."""
    names = [each.name for each in gpus.gpus]
    sizes = {round(each.memory_total / GIB) for each in gpus.gpus}
    each_has = f"{sizes.pop()} GiB each" if len(sizes) == 1 else "of several sizes"
    counted = [f"{names.count(each)} x {each}" for each in dict.fromkeys(names)]
    faults, oldest = [], _oldest(build)
    for gpu in gpus.gpus:
        if gpu.capability < oldest:
            faults.append(
                error(
                    "GPUs",
                    f"GPU {gpu.index}, {gpu.name}, has compute capability {_dotted(gpu.capability)}"
                    f"; TensorFlow takes at least {_dotted(oldest)}",
                    "leave it out by CUDA_VISIBLE_DEVICES",
                )
            )
        if gpu.mig:
            faults.append(
                warning(
                    "GPUs",
                    f"GPU {gpu.index} is cut into slices (MIG): a process sees one slice alone, "
                    "and NCCL does not work between slices",
                    f"sudo nvidia-smi -i {gpu.index} -mig 0, or train with one process on one",
                )
            )
    if len(counted) > 1 and not faults:
        faults.append(
            warning(
                "GPUs",
                f"they differ: {', '.join(counted)}; all wait for the slowest, and CUDA counts "
                "the fastest first",
                "choose GPUs of one kind, with CUDA_DEVICE_ORDER=PCI_BUS_ID to count as nvidia-smi",
            )
        )
    capable = _dotted(min(each.capability for each in gpus.gpus))
    return worst("GPUs", faults, f"{', '.join(counted)}, {each_has}, compute capability {capable}")


def memory(gpus: Gpus, *, own_pid: int) -> Finding:
    """Judges how much of it is free, and names who has the rest."""
    faults, strangers = [], {}
    for gpu in gpus.gpus:
        others = [each for each in gpu.holders if each.pid != own_pid]
        strangers |= {each.pid: each for each in others}
        is_own = bool(gpu.holders) and not others
        free, total = (gpu.memory_total - gpu.memory_used) / GIB, gpu.memory_total / GIB
        said = f"GPU {gpu.index}: {free:.0f} of {total:.0f} GiB free, held by {_who(others)}"
        end_it = "end that process, wait for it, or choose other GPUs by gpu_ids"
        if refusal := _refusal(gpu, others):
            fix = f"sudo nvidia-smi -i {gpu.index} -c DEFAULT"
            faults.append(error("GPU memory", f"GPU {gpu.index} {refusal}", fix))
        elif is_own:
            continue
        elif free < LITTLE * total:
            faults.append(error("GPU memory", said, end_it))
        elif gpu.memory_used > HELD * gpu.memory_total:
            faults.append(warning("GPU memory", said, end_it))
    least = min((each.memory_total - each.memory_used) / GIB for each in gpus.gpus)
    by = f"a little held by {_who([*strangers.values()])}" if strangers else "held by nobody else"
    return worst("GPU memory", faults, f"at least {least:.0f} GiB free on each, {by}")


def _refusal(gpu: Gpu, others: Sequence[Holder]) -> str | None:
    """Returns how its compute mode keeps this process out; None if it does not."""
    if gpu.compute_mode == PROHIBITED:
        return "takes no process"
    if gpu.compute_mode == EXCLUSIVE and others:
        return f"is exclusive, and in use by {_who(others)}"
    return None


def _who(holders: Sequence[Holder]) -> str:
    if not holders:
        return "no process that is seen here (in another container, perhaps)"
    told = [f"{each.name or 'a process outside this container'} ({each.pid})" for each in holders]
    return ", ".join(told[:3]) + (f" and {len(told) - 3} more" if len(told) > 3 else "")


def health(gpus: Gpus) -> Finding:
    """Judges memory errors, and what keeps clocks low."""
    faults = []
    for gpu in gpus.gpus:
        pending, failed = gpu.remap or (0, 0)
        limit, default = gpu.power_limit_w, gpu.power_default_w
        slowdowns = gpu.slowdowns or 0
        at = f"GPU {gpu.index}"
        for is_so, judge, found, fix in (
            (failed, error, "has bad memory that could not be remapped", "have it replaced"),
            (
                gpu.ecc_errors,
                error,
                f"had {gpu.ecc_errors} memory errors that could not be corrected",
                f"leave it out, reset it (sudo nvidia-smi -r -i {gpu.index}), or restart",
            ),
            (pending, warning, "waits to remap bad memory", "restart the machine, or reset it"),
            (
                slowdowns & HEAT,
                warning,
                "is slowed down by heat",
                "see to its cooling; `nvidia-smi -q -d PERFORMANCE` shows it",
            ),
            (
                slowdowns & POWER,
                warning,
                "is slowed down by its power supply",
                "see to the machine's power; `nvidia-smi -q -d PERFORMANCE` shows it",
            ),
            (
                limit and default and limit < 0.95 * default,
                warning,
                f"may take {limit} of {default} W",
                f"sudo nvidia-smi -i {gpu.index} -pl {default}, unless the limit is meant",
            ),
        ):
            if is_so:
                faults.append(judge("GPU health", f"{at} {found}", fix))
    fine = "no memory errors, no slowdown, full power"
    if any(each.persistence is False for each in gpus.gpus):
        fine += "; persistence mode is off, so that starts take seconds longer"
    return worst("GPU health", faults, fine)


def jpeg(gpus: Gpus, told: Mapping[str, int] | None) -> Finding:
    """Tells which GPUs decode JPEG in hardware: where none does, its own cores do it."""
    if told:
        numbers = {gpu.index: told.get(str(n), 0) for n, gpu in enumerate(gpus.gpus)}
    else:
        numbers = {each.index: int(each.has_jpeg_engine) for each in gpus.gpus}
    none = [index for index, number in numbers.items() if not number]
    if len(none) == len(numbers):
        return ok("nvJPEG", "no hardware engines: JPEG is decoded by the GPU's cores and the CPU")
    some = f"{max(numbers.values())} engines each" if told else "hardware engines"
    return ok("nvJPEG", f"{some}{f', none on {name_gpus(none)}' if none else ''}")


def _oldest(build: Build | None) -> tuple[int, int]:
    """Returns the least compute capability that TensorFlow has kernels for."""
    names = build.capabilities if build else ()
    told = filter(None, (re.fullmatch(r"(?:sm|compute)_(\d+)(\d)", each) for each in names))
    return min(((int(each[1]), int(each[2])) for each in told), default=(0, 0))


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
