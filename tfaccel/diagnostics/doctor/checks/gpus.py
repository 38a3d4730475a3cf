"""Checks the GPUs: their kinds, the holders of their memory, their health and JPEG engines.

check(visible(gpus, os.environ), packages.build, own_pid=os.getpid(), engines=None)
"""

from collections.abc import Mapping, Sequence

from tfaccel.diagnostics.doctor.checks import capability
from tfaccel.diagnostics.doctor.checks.links import name_gpus
from tfaccel.diagnostics.doctor.facts.gpus import Gpu, Gpus, Holder
from tfaccel.diagnostics.doctor.facts.packages import Build
from tfaccel.diagnostics.doctor.table import Finding, error, merged, ok, warning

GIB = 2**30
HELD = 0.05  # share of a GPU's memory that may be in use; an idle driver keeps up to 1%
LITTLE = 0.1  # a smaller share of free memory is too little to train anything
HEAT, POWER = 0x20 | 0x40, 0x80  # bits of NVML's ClocksEventReasons
PROHIBITED, EXCLUSIVE = 2, 3  # NVML's compute modes


def check(
    gpus: Gpus, build: Build | None, *, own_pid: int, engines: Mapping[str, int] | None
) -> list[Finding]:
    """Returns one line for each check, or no line if there is no GPU.

    Args:
      gpus: the visible GPUs.
      build: what TensorFlow was built for.
      own_pid: the caller's process; the memory that it holds is no fault.
      engines: JPEG decoders of each GPU, from nvJPEG; None if nvJPEG was not asked.
    """
    if not gpus.gpus:
        return []
    return [kinds(gpus, build), memory(gpus, own_pid=own_pid), health(gpus), jpeg(gpus, engines)]


def kinds(gpus: Gpus, build: Build | None) -> Finding:
    """Checks whether TensorFlow supports the GPUs and whether they are of one kind."""
    names = [each.name for each in gpus.gpus]
    sizes = {round(each.memory_total / GIB) for each in gpus.gpus}
    each_has = f"{sizes.pop()} GiB each" if len(sizes) == 1 else "different memory sizes"
    counted = [f"{names.count(each)} x {each}" for each in dict.fromkeys(names)]
    faults = []
    for gpu in gpus.gpus:
        if fault := capability.check(gpu, build):
            faults.append(fault)
        if gpu.mig:
            faults.append(
                warning(
                    "GPUs",
                    f"GPU {gpu.index} is split into MIG slices; a process sees only one slice, and "
                    "NCCL does not work between slices",
                    f"sudo nvidia-smi -i {gpu.index} -mig 0, or train one process on one slice",
                )
            )
    if len(counted) > 1 and not faults:
        faults.append(
            warning(
                "GPUs",
                f"the GPUs differ: {', '.join(counted)}; every step waits for the slowest GPU, and "
                "CUDA numbers the fastest GPU first",
                "choose GPUs of one kind; CUDA_DEVICE_ORDER=PCI_BUS_ID numbers them as nvidia-smi",
            )
        )
    capable = capability.dotted(min(each.capability for each in gpus.gpus))
    return merged("GPUs", faults, f"{', '.join(counted)}, {each_has}, compute capability {capable}")


def memory(gpus: Gpus, *, own_pid: int) -> Finding:
    """Checks how much GPU memory is free, and names the processes that hold the rest."""
    faults, strangers = [], {}
    for gpu in gpus.gpus:
        others = [each for each in gpu.holders if each.pid != own_pid]
        strangers |= {each.pid: each for each in others}
        is_own = bool(gpu.holders) and not others
        free, total = (gpu.memory_total - gpu.memory_used) / GIB, gpu.memory_total / GIB
        said = f"GPU {gpu.index}: {free:.0f} of {total:.0f} GiB free, held by {_who(others)}"
        end_it = "end that process, wait for it, or choose other GPUs with gpu_ids"
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
    who = _who([*strangers.values()])
    by = f"a little held by {who}" if strangers else "no other process holds any"
    return merged("GPU memory", faults, f"at least {least:.0f} GiB free on each, {by}")


def _refusal(gpu: Gpu, others: Sequence[Holder]) -> str | None:
    """Returns how the GPU's compute mode keeps this process out, or None if it does not."""
    if gpu.compute_mode == PROHIBITED:
        return "accepts no process (compute mode PROHIBITED)"
    if gpu.compute_mode == EXCLUSIVE and others:
        return f"is exclusive, and {_who(others)} uses it"
    return None


def _who(holders: Sequence[Holder]) -> str:
    if not holders:
        return "a process that is not visible here (perhaps in another container)"
    names = [f"{each.name or 'a process outside this container'} ({each.pid})" for each in holders]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def health(gpus: Gpus) -> Finding:
    """Checks for memory errors, and for reasons that keep the clocks low."""
    faults = []
    for gpu in gpus.gpus:
        pending, failed = gpu.remap or (0, 0)
        limit, default = gpu.power_limit_w, gpu.power_default_w
        slowdowns = gpu.slowdowns or 0
        for is_so, judge, found, fix in (
            (failed, error, "has bad memory that cannot be remapped", "have the GPU replaced"),
            (
                gpu.ecc_errors,
                error,
                f"had {gpu.ecc_errors} memory errors that could not be corrected",
                f"exclude it, reset it (sudo nvidia-smi -r -i {gpu.index}), or restart the machine",
            ),
            (pending, warning, "has bad memory to remap", "restart the machine, or reset the GPU"),
            (
                slowdowns & HEAT,
                warning,
                "is too hot and lowers its clocks",
                "check its cooling; `nvidia-smi -q -d PERFORMANCE` shows the reason",
            ),
            (
                slowdowns & POWER,
                warning,
                "gets too little power and lowers its clocks",
                "check the power supply; `nvidia-smi -q -d PERFORMANCE` shows the reason",
            ),
            (
                limit and default and limit < 0.95 * default,
                warning,
                f"has a power limit of {limit} W, below the default of {default} W",
                f"sudo nvidia-smi -i {gpu.index} -pl {default}, unless the limit is intended",
            ),
        ):
            if is_so:
                faults.append(judge("GPU health", f"GPU {gpu.index} {found}", fix))
    fine = "no memory errors, no reduced clocks, full power"
    if any(each.persistence is False for each in gpus.gpus):
        fine += "; persistence mode is off, so each start takes a few seconds longer"
    return merged("GPU health", faults, fine)


def jpeg(gpus: Gpus, engines: Mapping[str, int] | None) -> Finding:
    """Reports which GPUs decode JPEG in hardware. The other GPUs decode on their cores."""
    if engines:
        numbers = {gpu.index: engines.get(str(n), 0) for n, gpu in enumerate(gpus.gpus)}
    else:
        numbers = {each.index: int(each.has_jpeg_engine) for each in gpus.gpus}
    none = [index for index, number in numbers.items() if not number]
    if len(none) == len(numbers):
        return ok("nvJPEG", "no hardware engines; the GPU's cores and the CPU decode JPEG")
    some = f"{max(numbers.values())} engines each" if engines else "hardware engines"
    return ok("nvJPEG", f"{some}{f', none on {name_gpus(none)}' if none else ''}")
