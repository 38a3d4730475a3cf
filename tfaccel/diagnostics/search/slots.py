"""What each trial has of this host: one GPU, and its share of the CPU cores.

gpus(os.environ, gpu_ids=None)               # ["0", "1"]; [] without a GPU
share_of_cores(range(16), 0, number=2)       # {0, 1, ..., 7}
"""

from collections.abc import Collection, Mapping

import pynvml

from tfaccel.common.errors import UserError
from tfaccel.common.tables import counted


def gpus(environment: Mapping[str, str], *, gpu_ids: tuple[int, ...] | None) -> list[str]:
    """Returns the value of CUDA_VISIBLE_DEVICES for each GPU that a trial may have.

    Args:
      environment: of this process; a scheduler may show it only some GPUs.
      gpu_ids: `runtime.gpu_ids` of the config: indices among the visible GPUs, () for none, None
        for all.

    Raises:
      UserError: there is no such GPU.
    """
    if gpu_ids == ():
        return []
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        names = [str(index) for index in range(_num_installed())]
    else:
        names = [each.strip() for each in visible.split(",") if each.strip() not in ("", "-1")]
    for each in gpu_ids or ():
        if each >= len(names):
            raise UserError(
                f"gpu_ids has GPU {each}, but {counted(len(names), 'GPU')} can be seen; use "
                "smaller indices, or remove gpu_ids"
            )
    return names if gpu_ids is None else [names[each] for each in gpu_ids]


def of_one(gpu: str | None) -> dict[str, str]:
    """Returns the environment variables that show a process one GPU, or none."""
    if gpu is None:
        return {"CUDA_VISIBLE_DEVICES": "-1"}
    # NVML's order, and nvidia-smi's. CUDA's own puts the fastest GPU first.
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if gpu.isdecimal() else {}
    return {"CUDA_VISIBLE_DEVICES": gpu} | order


def share_of_cores(cores: Collection[int], index: int, number: int) -> set[int]:
    """Returns the CPU cores of a trial: its share of those of this process, next to each other.

    Args:
      cores: of this process.
      index: of the trial among those that run at once.
      number: of trials that run at once. If there are fewer cores than that, each gets all cores.
    """
    each = len(cores) // number
    return set(sorted(cores)[index * each :][:each]) if each else set(cores)


def _num_installed() -> int:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # there is no driver
        return 0
    try:
        return pynvml.nvmlDeviceGetCount()
    finally:
        pynvml.nvmlShutdown()
