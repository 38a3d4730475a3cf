"""Checks NCCL's settings that no network card is needed to judge.

check(nccl_settings(os.environ), is_needed=True, has_other_hosts=True)
"""

from collections.abc import Mapping
from typing import NamedTuple

from tfaccel.diagnostics.doctor.facts.files import number
from tfaccel.diagnostics.doctor.facts.nccl_settings import Setting
from tfaccel.diagnostics.doctor.table import Finding, ok, warning

NAME = "NCCL settings"
# Names that programs set in the belief that NCCL reads them. NCCL 2.32 has none of them; those of
# PyTorch are read by its process groups, which TensorFlow does not have.
NOT_OF_NCCL = (
    "NCCL_TIMEOUT",
    "NCCL_TIMEOUT_S",
    "NCCL_TIMEOUT_MS",
    "NCCL_COMM_TIMEOUT",
    "NCCL_SOCKET_TIMEOUT",
    "NCCL_BLOCKING_WAIT",
    "NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_DESYNC_DEBUG",
)
OF_PYTORCH = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
WAITS = (
    "NCCL waits for other ranks without a limit, and tfaccel's peer_timeout_s ends the wait for a "
    "lost worker (`tfaccel help network` lists all limits)"
)


class Range(NamedTuple):
    """The numbers that a setting of InfiniBand may have, which gives it 5 or 3 bits."""

    name: str
    last: int
    meaning: str
    default: int


RANGES = (
    Range("NCCL_IB_TIMEOUT", 31, "the exponent N of 4.096 us * 2 ** N, not seconds", 20),
    Range("NCCL_IB_RETRY_CNT", 7, "a number of retries", 7),
)
FORCED = ("NCCL_ALGO", "NCCL_PROTO")


def check(
    settings: Mapping[str, Setting], *, is_needed: bool, has_other_hosts: bool
) -> list[Finding]:
    """Returns one line for each setting that matters.

    Args:
      settings: NCCL's settings.
      is_needed: whether a job on this machine would use NCCL.
      has_other_hosts: whether the environment names a job of several hosts.
    """
    found = [*_not_of_nccl(settings), *_ranges(settings)]
    if is_needed:
        found += [*_forced(settings), *_gpu_direct(settings), *_of_pytorch(settings)]
        found += _log(settings, has_other_hosts=has_other_hosts)
    return found


def _not_of_nccl(settings: Mapping[str, Setting]) -> list[Finding]:
    given = [settings[name] for name in NOT_OF_NCCL if name in settings]
    return [
        warning(NAME, f"{each}: NCCL has no such setting; {WAITS}", each.removal) for each in given
    ]


def _ranges(settings: Mapping[str, Setting]) -> list[Finding]:
    found = []
    for each in RANGES:
        setting = settings.get(each.name)
        if setting and number(setting.value) > each.last:
            said = f"{setting}: expected at most {each.last}, because it is {each.meaning}"
            fix = f"{setting.removal} (the default is {each.default}), or set a smaller number"
            found.append(warning(NAME, said, fix))
    return found


def _forced(settings: Mapping[str, Setting]) -> list[Finding]:
    """Returns a line for each choice that NCCL otherwise makes for each size of a sum."""
    said = "one choice for all sums, which NCCL otherwise makes for each size"
    given = [settings[name] for name in FORCED if name in settings]
    return [warning(NAME, f"{each}: {said}", each.removal) for each in given]


def _gpu_direct(settings: Mapping[str, Setting]) -> list[Finding]:
    level = settings.get("NCCL_NET_GDR_LEVEL")
    if level and level.value in ("LOC", "0"):
        said = f"{level}: cards never reach the GPUs' memory; data goes through the host's memory"
        return [warning(NAME, said, level.removal)]
    return []


def _of_pytorch(settings: Mapping[str, Setting]) -> list[Finding]:
    given = [str(settings[name]) for name in OF_PYTORCH if name in settings]
    said = "only PyTorch reads this; TensorFlow's workers use the addresses that the job names"
    return [ok(NAME, f"{', '.join(given)}: {said}")] if given else []


def _log(settings: Mapping[str, Setting], *, has_other_hosts: bool) -> list[Finding]:
    debug = settings.get("NCCL_DEBUG")
    if debug and debug.value.upper() in ("INFO", "TRACE"):
        said = f"{debug}: each rank prints many lines; the one with 'Using network' tells the way"
        return [ok(NAME, said)]
    if debug is None and has_other_hosts:
        return [ok(NAME, "NCCL_DEBUG=INFO, in a first run, shows which network NCCL uses")]
    return []
