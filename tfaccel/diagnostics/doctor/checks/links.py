"""How gradients get from GPU to GPU: by NCCL, over NVLink or PCIe.

nccl(gpus, packages, told), nvlink(gpus)
"""

import pathlib
from collections.abc import Mapping, Sequence

from packaging.specifiers import SpecifierSet

from tfaccel.diagnostics.doctor.facts.child import Told
from tfaccel.diagnostics.doctor.facts.gpus import Gpus
from tfaccel.diagnostics.doctor.facts.packages import Packages
from tfaccel.diagnostics.doctor.table import Finding, error, ok, warning

NCCL = "nvidia-nccl-cu12"


def nccl(gpus: Gpus, packages: Packages, told: Told | None) -> Finding:
    """Judges NCCL, by which gradients are summed between GPUs."""
    version, wanted = packages.versions.get(NCCL), packages.cuda_ranges.get(NCCL, "")
    if len(gpus.gpus) < 2:
        return ok("NCCL", f"{version or 'not installed'}, needed by two GPUs or more")
    in_use = (told.facts.get("libraries in use") or {}) if told else {}
    path = next((each for each in in_use.values() if "libnccl" in pathlib.Path(each).name), None)
    if version and SpecifierSet(wanted).contains(version):
        return ok("NCCL", version)
    if path:
        return ok("NCCL", f"not a wheel, but {path}")
    return error(
        "NCCL",
        f"{version or 'not installed'}, but TensorFlow asks for {wanted or 'it'} to use "
        f"{len(gpus.gpus)} GPUs",
        packages.install(f"{NCCL}{wanted}"),
    )


def nvlink(gpus: Gpus) -> Finding | None:
    """Judges how gradients get from GPU to GPU; None for one alone."""
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
            f"{len(slow)} of {len(ways)} pairs have none (e.g. GPUs {between}); sums of gradients "
            "take some ten times as long, which large models feel",
            "choose GPUs that have it (`nvidia-smi topo -m`), or use larger batches",
        )
    numbers = _by_value({each.index: each.nvlinks for each in gpus.gpus})
    if len(numbers) > 1:
        said = ", ".join(
            f"{number} links on {name_gpus(those)}" for number, those in sorted(numbers.items())
        )
        return warning("NVLink", said, "see `nvidia-smi nvlink -s`; restart, or have it looked at")
    (number,) = numbers
    links = f", {number} links each" if number else ""
    return ok("NVLink", f"between all {len(gpus.gpus)} GPUs{links}")


def name_gpus(indices: Sequence[int]) -> str:
    """Returns "GPU 1", or "GPUs 1, 3"."""
    return f"GPU{'s' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"


def _by_value(values: Mapping[int, int]) -> dict[int, list[int]]:
    found = {}
    for key, value in values.items():
        found.setdefault(value, []).append(key)
    return found
