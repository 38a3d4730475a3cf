"""Whether driver and CUDA libraries are those that TensorFlow wants, and whether it starts.

driver(gpus, packages, num_on_bus=2)
"""

from collections.abc import Mapping

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tfaccel.diagnostics.doctor.facts.child import Told
from tfaccel.diagnostics.doctor.facts.gpus import Gpus
from tfaccel.diagnostics.doctor.facts.packages import Packages
from tfaccel.diagnostics.doctor.table import Finding, error, ok, warning

# The oldest driver with which a CUDA of this major version runs:
# https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
COMPILER = "nvidia-cuda-nvcc-cu12"


def driver(gpus: Gpus, packages: Packages, *, num_on_bus: int, quick: bool = False) -> Finding:
    """Judges the driver's age by the CUDA that TensorFlow was built for.

    Args:
      gpus: what NVML told.
      packages: for that CUDA, and the compiler that XLA runs.
      num_on_bus: NVIDIA's cards that the machine has, with or without a driver.
      quick: whether NVML was given little time.
    """
    if gpus.problem:
        return _no_answer(gpus.problem, quick=quick)
    if gpus.driver is None and num_on_bus:
        return error(
            "driver",
            f"{num_on_bus} card(s) by NVIDIA on the PCI bus, but no driver that can be reached",
            "install NVIDIA's driver, in a container start it with `docker run --gpus=all`, or set "
            "CUDA_VISIBLE_DEVICES=-1 to train on the CPU",
        )
    if gpus.driver is None:
        return warning(
            "driver",
            "there is no NVIDIA driver and no GPU: training will run on the CPU",
            "to train on GPUs, take a machine that has them; else all is well",
        )
    found = f"{gpus.driver.version}, for CUDA up to {'.'.join(map(str, gpus.driver.cuda))}"
    built_for = packages.build and packages.build.cuda
    if not built_for:
        return ok("driver", found)
    wanted = max(Version(built_for), Version(packages.versions.get(COMPILER, built_for)))
    major = Version(built_for).major
    if gpus.driver.cuda[0] < major:
        return error(
            "driver",
            f"{found}, but TensorFlow is built for CUDA {built_for}",
            f"install a driver for CUDA {major}" + _oldest_driver(major),
        )
    if gpus.driver.cuda < (wanted.major, wanted.minor):
        return warning(
            "driver",
            f"{found}, older than the {wanted} of the CUDA libraries: it works, but XLA compiles "
            "more slowly, and the newest GPUs may be refused",
            f"install a driver for CUDA {wanted.major}.{wanted.minor}",
        )
    return ok("driver", found)


def _oldest_driver(cuda_major: int) -> str:
    oldest = OLDEST_DRIVER.get(cuda_major)
    return f": {oldest} or newer" if oldest else ""


def _no_answer(problem: str, *, quick: bool) -> Finding:
    if "no answer" in problem and quick:
        return warning(
            "driver",
            f"NVML {problem}, which it may need where the driver is loaded for each use",
            "see `tfaccel doctor` without --quick; sudo nvidia-smi -pm 1 keeps the driver loaded",
        )
    if "Mismatch" in problem:
        return error(
            "driver",
            f"its kernel module and its libraries are of two versions ({problem})",
            "restart the machine; it was updated while in use",
        )
    return error(
        "driver",
        f"NVML {problem}",
        "see whether `nvidia-smi` answers and what `dmesg` says of NVRM; restart the machine",
    )


def libraries(
    gpus: Gpus, packages: Packages, told: Told | None, environment: Mapping[str, str]
) -> Finding:
    """Judges the CUDA wheels by what this TensorFlow asks for, and where they are loaded from."""
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
        # They may be the system's, which no list names: what counts is whether they work.
        if _ran(gpus, told):
            return ok(name, "not wheels but the system's, and TensorFlow runs with them")
        faults = ["none of the wheels that TensorFlow asks for is installed"]
    if faults:
        more = f", and {len(faults) - 3} more" if len(faults) > 3 else ""
        fix = packages.install(packages.wanted("tensorflow", extra="and-cuda"))
        return error(name, f"{', '.join(faults[:3])}{more}", f"{fix}, or `uv run --extra gpu ...`")
    in_use = (told.facts.get("libraries in use") or {}) if told else {}
    foreign = [path for path in in_use.values() if "/nvidia/" not in path]
    if foreign:
        is_set = environment.get("LD_LIBRARY_PATH")
        return warning(
            name,
            f"loaded from outside the wheels: {', '.join(foreign[:2])}",
            "unset LD_LIBRARY_PATH" if is_set else "look in /etc/ld.so.conf.d for another CUDA",
        )
    return ok(name, f"{len(wheels)} wheels, in the versions that TensorFlow asks for")


def devices(gpus: Gpus, told: Told) -> Finding:
    """Judges whether TensorFlow sees the GPUs and computes on each."""
    name, expected = "devices", len(gpus.gpus)
    # Keras, because the CUDA libraries are loaded by a room that imports it.
    needed = ("start", "TensorFlow", "Keras")
    if before := next((each for each in needed if each in told.failed), None):
        return warning(name, f"not tried, because {before} failed", "mend that first")
    if why := told.why_not("devices"):
        return error(name, f"TensorFlow's search for GPUs {why}", "see driver and CUDA libraries")
    seen = told.facts["devices"]["gpus"]
    if seen != expected and not _has_slices(gpus):
        return error(
            name,
            f"TensorFlow sees {seen} of {expected} GPUs",
            "see driver and CUDA libraries here, and CUDA_VISIBLE_DEVICES",
        )
    if why := told.failed.get("a step"):
        return error(name, f"a step of TensorFlow's failed: {why}", "see CUDA libraries here")
    if not seen:
        return ok(name, "TensorFlow computed on the CPU")
    return ok(name, f"TensorFlow computed on {f'all {seen} GPUs' if seen > 1 else 'the GPU'}")


def _has_slices(gpus: Gpus) -> bool:
    return any(each.mig for each in gpus.gpus)


def _ran(gpus: Gpus, told: Told | None) -> bool:
    """Whether TensorFlow was seen to compute on the GPUs."""
    if told is None or "a step" not in told.facts:
        return False
    return told.facts.get("devices", {}).get("gpus") == len(gpus.gpus)
