"""Checks the driver and the CUDA libraries against TensorFlow, and whether TensorFlow starts.

driver(gpus, packages, num_on_bus=2)
"""

from collections.abc import Mapping

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tfaccel.diagnostics.doctor.facts.child import Answers
from tfaccel.diagnostics.doctor.facts.gpus import Gpus
from tfaccel.diagnostics.doctor.facts.packages import Packages
from tfaccel.diagnostics.doctor.table import Finding, error, ok, warning

# The oldest driver that runs a CUDA of each major version:
# https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
COMPILER = "nvidia-cuda-nvcc-cu12"
# The libraries with code for GPUs of compute capability 10.0 and more (pytorch issue 145949).
FIRST_OF_NEW = (10, 0)
KNOW_NEW = {
    "nvidia-cublas-cu12": "12.8",
    "nvidia-cuda-nvcc-cu12": "12.8",
    "nvidia-cudnn-cu12": "9.7",
    "nvidia-nccl-cu12": "2.25.1",
}
# What a step says on a GPU for which TensorFlow has no code.
NO_KERNEL = ("INVALID_PTX", "INVALID_HANDLE", "no kernel image")


def driver(gpus: Gpus, packages: Packages, *, num_on_bus: int, quick: bool = False) -> Finding:
    """Checks whether the driver is new enough for the CUDA that TensorFlow was built for.

    Args:
      gpus: the answers of NVML.
      packages: the installed packages, which name that CUDA and the compiler that XLA runs.
      num_on_bus: the number of NVIDIA cards in the machine, with or without a driver.
      quick: whether NVML had only a short time to answer.
    """
    if gpus.problem:
        return _no_answer(gpus.problem, quick=quick)
    if gpus.driver is None and num_on_bus:
        return error(
            "driver",
            f"the PCI bus has {num_on_bus} NVIDIA card(s), but this process finds no driver",
            "install NVIDIA's driver; in a container, start it with `docker run --gpus=all`; or set"
            " CUDA_VISIBLE_DEVICES=-1 to train on the CPU",
        )
    if gpus.driver is None:
        return warning(
            "driver",
            "there is no NVIDIA driver and no GPU, so training will run on the CPU",
            "use a machine with GPUs to train on GPUs; to train on the CPU, nothing is missing",
        )
    found = f"{gpus.driver.version}, supports CUDA up to {'.'.join(map(str, gpus.driver.cuda))}"
    built_for = packages.build and packages.build.cuda
    if not built_for:
        return ok("driver", found)
    wanted = max(Version(built_for), Version(packages.versions.get(COMPILER, built_for)))
    major = Version(built_for).major
    if gpus.driver.cuda[0] < major:
        oldest = OLDEST_DRIVER.get(major)
        return error(
            "driver",
            f"{found}, but TensorFlow is built for CUDA {built_for}",
            f"install a driver for CUDA {major}" + (f": {oldest} or newer" if oldest else ""),
        )
    if gpus.driver.cuda < (wanted.major, wanted.minor):
        return warning(
            "driver",
            f"{found}, older than the CUDA libraries ({wanted}); training works, but XLA compiles "
            "more slowly, and the driver may refuse the newest GPUs",
            f"install a driver for CUDA {wanted.major}.{wanted.minor}",
        )
    return ok("driver", found)


def _no_answer(problem: str, *, quick: bool) -> Finding:
    if "no answer" in problem and quick:
        return warning(
            "driver",
            f"NVML {problem}; a driver that is loaded for each use can need more time",
            "run `tfaccel doctor` without --quick; `sudo nvidia-smi -pm 1` keeps the driver loaded",
        )
    if "Mismatch" in problem:
        return error(
            "driver",
            f"the driver's kernel module and its libraries have different versions ({problem})",
            "restart the machine; the driver was updated while it was in use",
        )
    return error(
        "driver",
        f"NVML {problem}",
        "check whether `nvidia-smi` answers and what `dmesg` reports for NVRM; restart the machine",
    )


def libraries(
    gpus: Gpus, packages: Packages, answers: Answers | None, environment: Mapping[str, str]
) -> Finding:
    """Checks the versions of the CUDA wheels and the folders that they are loaded from."""
    name, versions = "CUDA libraries", packages.versions
    wheels = {each: versions[each] for each in packages.cuda_ranges if each in versions}
    if not gpus.gpus:
        return ok(name, f"{f'{len(wheels)} wheels' if wheels else 'none'}; only a GPU needs them")
    faults = [
        f"{each} is {wheels[each]}, not {wanted}" if each in wheels else f"{each} is not installed"
        for each, wanted in packages.cuda_ranges.items()
        if each not in wheels or not SpecifierSet(wanted).contains(wheels[each])
    ]
    if faults and not wheels:
        # CUDA may be installed in the system, without metadata, so the trial decides.
        if _ran(gpus, answers):
            return ok(name, "no wheels; TensorFlow runs with the CUDA libraries of the system")
        faults = ["none of the wheels that TensorFlow asks for is installed"]
    if faults:
        more = f", and {len(faults) - 3} more" if len(faults) > 3 else ""
        fix = packages.install(packages.wanted("tensorflow", extra="and-cuda"))
        return error(name, f"{', '.join(faults[:3])}{more}", f"{fix}, or `uv run --extra gpu ...`")
    if old := _too_old(gpus, wheels):
        has = ", ".join(f"{each} {wheels[each]}" for each in old)
        found = f"{has}: too old for a GPU of compute capability 10.0 or more"
        return error(name, found, packages.install(*(f"{each}>={old[each]}" for each in old)))
    in_use = (answers.facts.get("libraries in use") or {}) if answers else {}
    foreign = [path for path in in_use.values() if "/nvidia/" not in path]
    if foreign:
        is_set = environment.get("LD_LIBRARY_PATH")
        return warning(
            name,
            f"some are loaded from outside the wheels: {', '.join(foreign[:2])}",
            "unset LD_LIBRARY_PATH" if is_set else "check /etc/ld.so.conf.d for another CUDA",
        )
    return ok(name, f"{len(wheels)} wheels, in the versions that TensorFlow requires")


def _too_old(gpus: Gpus, wheels: Mapping[str, str]) -> dict[str, str]:
    """Returns the wheels that have no code for one of the GPUs, and the first version that has."""
    if max(each.capability for each in gpus.gpus) < FIRST_OF_NEW:
        return {}
    known = {each: KNOW_NEW[each] for each in KNOW_NEW if each in wheels}
    return {each: first for each, first in known.items() if Version(wheels[each]) < Version(first)}


def devices(gpus: Gpus, answers: Answers) -> Finding:
    """Checks whether TensorFlow sees every GPU and computes on each of them."""
    name, expected = "devices", len(gpus.gpus)
    # Keras is needed because the module that loads the CUDA libraries imports it.
    needed = ("start", "TensorFlow", "Keras")
    if before := next((each for each in needed if each in answers.failed), None):
        return warning(name, f"not tried, because {before} failed", "solve that problem first")
    see = "see the lines `driver` and `CUDA libraries`"
    if why := answers.why_not("devices"):
        return error(name, f"TensorFlow's search for GPUs {why}", see)
    seen = answers.facts["devices"]["gpus"]
    if seen != expected and not any(each.mig for each in gpus.gpus):
        fix = f"{see}, and check CUDA_VISIBLE_DEVICES"
        return error(name, f"TensorFlow sees {seen} of {expected} GPUs", fix)
    if why := answers.failed.get("a step"):
        is_of_kernels = any(each in why for each in NO_KERNEL)
        line = "GPUs" if is_of_kernels else "CUDA libraries"
        return error(name, f"a TensorFlow step failed: {why}", f"see the line `{line}`")
    if not seen:
        return ok(name, "TensorFlow computed on the CPU")
    return ok(name, f"TensorFlow computed on {f'all {seen} GPUs' if seen > 1 else 'the GPU'}")


def _ran(gpus: Gpus, answers: Answers | None) -> bool:
    """Returns whether the trial computed on every GPU."""
    if answers is None or "a step" not in answers.facts:
        return False
    return answers.facts.get("devices", {}).get("gpus") == len(gpus.gpus)
