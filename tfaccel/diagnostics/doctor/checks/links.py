"""Checks NCCL, and whether NVLink or PCIe connects the GPUs.

nccl(gpus, packages, answers), nvlink(gpus)
"""

import pathlib
from collections.abc import Sequence

from packaging.specifiers import SpecifierSet

from tfaccel.diagnostics.doctor.facts.child import Answers
from tfaccel.diagnostics.doctor.facts.gpus import Gpus
from tfaccel.diagnostics.doctor.facts.packages import Packages
from tfaccel.diagnostics.doctor.table import Finding, error, ok, warning

NCCL = "nvidia-nccl-cu12"


def nccl(gpus: Gpus, packages: Packages, answers: Answers | None) -> Finding:
    """Checks the version of NCCL, which sums gradients over GPUs."""
    version, wanted = packages.versions.get(NCCL), packages.cuda_ranges.get(NCCL, "")
    if len(gpus.gpus) < 2:
        return ok("NCCL", f"{version or 'not installed'}; only two GPUs or more need it")
    in_use = (answers.facts.get("libraries in use") or {}) if answers else {}
    path = next((each for each in in_use.values() if "libnccl" in pathlib.Path(each).name), None)
    if version and SpecifierSet(wanted).contains(version):
        return ok("NCCL", version)
    if path:
        return ok("NCCL", f"no wheel; {path} is loaded")
    return error(
        "NCCL",
        f"{version or 'not installed'}, but TensorFlow requires {wanted or 'NCCL'} for "
        f"{len(gpus.gpus)} GPUs",
        packages.install(f"{NCCL}{wanted}"),
    )


def nvlink(gpus: Gpus) -> Finding | None:
    """Checks the links between GPUs. Returns None if there are fewer than two GPUs."""
    if len(gpus.gpus) < 2:
        return None
    indices = {each.index for each in gpus.gpus}
    ways = {pair: how for pair, how in gpus.links.items() if indices.issuperset(pair)}
    slow = {pair: how for pair, how in ways.items() if how != "NVLink"}
    if slow:
        first_of_each = {how: pair for pair, how in reversed(slow.items())}
        between = "; ".join(f"{a} and {b}: {how}" for how, (a, b) in first_of_each.items())
        return warning(
            "NVLink",
            f"{len(slow)} of {len(ways)} pairs have no NVLink (e.g. GPUs {between}); an all-reduce "
            "of gradients takes about ten times as long, which slows down large models",
            "choose GPUs with NVLink (`nvidia-smi topo -m`), or use larger batches",
        )
    gpus_by_number = {}
    for each in gpus.gpus:
        gpus_by_number.setdefault(each.nvlinks, []).append(each.index)
    if len(gpus_by_number) > 1:
        said = ", ".join(
            f"{number} links on {name_gpus(indices)}"
            for number, indices in sorted(gpus_by_number.items())
        )
        fix = "check `nvidia-smi nvlink -s`; restart the machine, or have it repaired"
        return warning("NVLink", said, fix)
    (number,) = gpus_by_number
    links = f", {number} links each" if number else ""
    return ok("NVLink", f"between all {len(gpus.gpus)} GPUs{links}")


def name_gpus(indices: Sequence[int]) -> str:
    """Returns "GPU 1", or "GPUs 1, 3"."""
    return f"GPU{'s' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"
