"""Asks NVML about the driver and its GPUs, in a child, because a lost GPU may hang NVML.

start("tfaccel.diagnostics.doctor.facts.nvml", {}, seconds=10).answers().facts["GPUs"]
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import psutil
import pynvml

from tfaccel.diagnostics.doctor.facts.gpus import Gpu, Holder

_PATHS = {
    pynvml.NVML_TOPOLOGY_INTERNAL: "PCIe, on one board",
    pynvml.NVML_TOPOLOGY_SINGLE: "PCIe, through one switch",
    pynvml.NVML_TOPOLOGY_MULTIPLE: "PCIe, through several switches",
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "PCIe, through the CPU",
    pynvml.NVML_TOPOLOGY_NODE: "PCIe, through the CPU",
    pynvml.NVML_TOPOLOGY_SYSTEM: "PCIe, from one CPU to the other",
}


def stages(arguments: Mapping) -> dict[str, Callable[[], Any]]:
    """Returns the stages: the driver, and its GPUs."""
    return {"driver": _driver, "GPUs": _gpus}


def _driver() -> dict | None:
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return None
    number = pynvml.nvmlSystemGetCudaDriverVersion()
    return {
        "version": pynvml.nvmlSystemGetDriverVersion(),
        "cuda": (number // 1000, number % 1000 // 10),
    }


def _gpus() -> dict:
    try:
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())
        ]
    except pynvml.NVMLError_Uninitialized:
        return {}  # there is no driver
    gpus = [dataclasses.asdict(_read(*each)) for each in enumerate(handles)]
    pairs = itertools.combinations(range(len(handles)), 2)
    return {"gpus": gpus, "links": [(a, b, _link(handles[a], handles[b])) for a, b in pairs]}


def _ask(function: Callable, *arguments) -> Any:
    """Returns NVML's answer, or None if the GPU, the driver or the user's rights give none."""
    try:
        return function(*arguments)
    except pynvml.NVMLError:
        return None


def _read(index: int, handle) -> Gpu:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    volatile = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
    remapped = _ask(pynvml.nvmlDeviceGetRemappedRows, handle)
    limit = _ask(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    default = _ask(pynvml.nvmlDeviceGetPowerManagementDefaultLimit, handle)
    persistence = _ask(pynvml.nvmlDeviceGetPersistenceMode, handle)
    links = range(pynvml.NVML_NVLINK_MAX_LINKS)
    return Gpu(
        index=index,
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        name=pynvml.nvmlDeviceGetName(handle),
        capability=tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
        memory_total=memory.total,
        memory_used=memory.used,
        holders=_holders(handle),
        mig=bool((_ask(pynvml.nvmlDeviceGetMigMode, handle) or [0])[0]),
        ecc_errors=_ask(pynvml.nvmlDeviceGetTotalEccErrors, handle, *volatile),
        remap=remapped and (int(remapped[2]), int(remapped[3])),
        slowdowns=_ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle),
        power_limit_w=limit and limit // 1000,
        power_default_w=default and default // 1000,
        persistence=None if persistence is None else bool(persistence),
        compute_mode=_ask(pynvml.nvmlDeviceGetComputeMode, handle),
        has_jpeg_engine=_ask(pynvml.nvmlDeviceGetJpgUtilization, handle) is not None,
        nvlinks=sum(_ask(pynvml.nvmlDeviceGetNvLinkState, handle, link) == 1 for link in links),
    )


def _holders(handle) -> tuple[Holder, ...]:
    kinds = (
        pynvml.nvmlDeviceGetComputeRunningProcesses,
        pynvml.nvmlDeviceGetGraphicsRunningProcesses,
    )
    found = {each.pid: each for kind in kinds for each in _ask(kind, handle) or ()}
    return tuple(Holder(pid, _name(pid), each.usedGpuMemory) for pid, each in found.items())


def _name(pid: int) -> str | None:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return None


def _link(one, other) -> str:
    by_nvlink = _ask(pynvml.nvmlDeviceGetP2PStatus, one, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    if by_nvlink == pynvml.NVML_P2P_STATUS_OK:
        return "NVLink"
    path = _ask(pynvml.nvmlDeviceGetTopologyCommonAncestor, one, other)
    return _PATHS.get(path, "a connection that the driver does not report")
