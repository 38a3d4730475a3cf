"""Whether Python, TensorFlow, Keras, DALI and its plugin fit one another, and work.

check(installed(), told, environment=os.environ, keras_backend=None, has_gpu=True)

`told` is what facts/trial.py came to; None where nothing was tried.
"""

from collections.abc import Mapping

from packaging.specifiers import SpecifierSet

from tfaccel.diagnostics.doctor.facts.child import Told
from tfaccel.diagnostics.doctor.facts.packages import Packages
from tfaccel.diagnostics.doctor.table import Finding, error, ok, warning

# What is tried with the help of what else.
NEEDS = {"Keras": ("TensorFlow",), "DALI plugin": ("TensorFlow", "DALI")}
DALI, PLUGIN = "nvidia-dali-cuda120", "nvidia-dali-tf-plugin-cuda120"
OTHER_TENSORFLOWS = ("tensorflow-cpu", "tf-nightly", "tf-nightly-cpu", "intel-tensorflow")


def check(
    packages: Packages,
    told: Told | None,
    *,
    environment: Mapping[str, str],
    keras_backend: str | None,
    has_gpu: bool,
) -> list[Finding]:
    """Returns a line for each.

    Args:
      packages: what is installed.
      told: by a trial; None for none.
      environment: for KERAS_BACKEND.
      keras_backend: what Keras's file of settings says.
      has_gpu: whether there is one to use.
    """
    return [
        python(packages),
        tensorflow(packages, told, has_gpu=has_gpu),
        keras(packages, told, environment, keras_backend),
        dali(packages, told),
        plugin(packages, told),
        others(packages),
    ]


def python(packages: Packages) -> Finding:
    """Judges Python's version."""
    if not _fits(packages.python, packages.python_range):
        return error(
            "Python",
            f"{packages.python}, but tfaccel takes {packages.python_range}",
            "make a virtual environment with another Python, e.g. `uv venv --python 3.12`",
        )
    return ok("Python", packages.python)


def tensorflow(packages: Packages, told: Told | None, *, has_gpu: bool) -> Finding:
    """Judges TensorFlow's version, what it was built for, and whether it starts."""
    name, versions, build = "TensorFlow", packages.versions, packages.build
    others = [each for each in OTHER_TENSORFLOWS if each in versions]
    if fault := _version_fault(name, "tensorflow", packages):
        return fault
    if others:
        return warning(
            name,
            f"{versions['tensorflow']} and {', '.join(others)} write to the same folder",
            packages.reinstall(f"tensorflow=={versions['tensorflow']}", without=others),
        )
    if fault := _trial_fault(name, told, packages.wanted("tensorflow"), packages):
        return fault
    if build and not build.cuda and has_gpu:
        return error(
            name,
            f"{versions['tensorflow']}, built without CUDA: it cannot use the GPUs here",
            packages.install(packages.wanted("tensorflow", extra="and-cuda")),
        )
    built = "without CUDA"
    if build and build.cuda:
        built = f"for CUDA {build.cuda}, cuDNN {build.cudnn}"
    return ok(name, f"{versions['tensorflow']}, built {built}" if build else versions["tensorflow"])


def keras(
    packages: Packages, told: Told | None, environment: Mapping[str, str], settings: str | None
) -> Finding:
    """Judges Keras's version and backend."""
    if fault := _version_fault("Keras", "keras", packages):
        return fault
    backend = environment.get("KERAS_BACKEND") or settings or "tensorflow"
    if backend != "tensorflow":
        where = "KERAS_BACKEND" if environment.get("KERAS_BACKEND") else "~/.keras/keras.json"
        return error(
            "Keras",
            f"its backend is {backend}, by {where}; tfaccel trains with TensorFlow",
            "export KERAS_BACKEND=tensorflow",
        )
    if fault := _trial_fault("Keras", told, packages.wanted("keras"), packages):
        return fault
    return ok("Keras", packages.versions["keras"])


def dali(packages: Packages, told: Told | None) -> Finding:
    """Judges DALI's version, and whether it can be loaded."""
    others = [
        each for each in packages.versions if each.startswith("nvidia-dali-cuda") and each != DALI
    ]
    if fault := _version_fault("DALI", DALI, packages):
        return fault
    if others:
        return error(
            "DALI",
            f"{DALI} {packages.versions[DALI]} and {', '.join(others)} write to the same folder",
            packages.reinstall(f"{DALI}=={packages.versions[DALI]}", without=others),
        )
    if fault := _trial_fault("DALI", told, packages.wanted(DALI), packages):
        return fault
    return ok("DALI", packages.versions[DALI])


def plugin(packages: Packages, told: Told | None) -> Finding:
    """Judges DALI's plugin: its version, its binary, and whether a batch comes through it."""
    name, versions = "DALI plugin", packages.versions
    of_dali = versions.get(DALI, "")
    build = _plugin_build(packages)
    if PLUGIN not in versions:
        return error(name, "not installed", f"with a C++ compiler: {build}")
    if of_dali and versions[PLUGIN] != of_dali:
        return error(name, f"of DALI {versions[PLUGIN]}, but DALI is {of_dali}", build)
    if not packages.plugin_binaries:
        return error(name, f"{versions[PLUGIN]} has no libdali_tf*.so", build)
    if told is None:
        return ok(name, f"{versions[PLUGIN]}, not loaded")
    if before := next((each for each in NEEDS[name] if each in told.failed), None):
        return _not_tried(name, f"{versions[PLUGIN]} was not tried, because {before} failed")
    for stage, without in ((name, "does not load"), ("a batch", "loads, but gives no batch")):
        if stage in told.failed:
            tensorflow = versions.get("tensorflow", "")
            return error(
                name,
                f"{versions[PLUGIN]} {without} with TensorFlow {tensorflow}: {told.failed[stage]}",
                f"build it against this TensorFlow: {build}",
            )
    if why := told.why_not(name):
        return _not_tried(name, f"{versions[PLUGIN]} {why}")
    return ok(name, f"{versions[PLUGIN]}, loaded, and it gave a batch")


def _plugin_build(packages: Packages) -> str:
    """Returns the command that compiles it for the TensorFlow that is there.

    pip's isolated build would take another TensorFlow, and its cache an earlier build.
    """
    no_cache = "--no-cache-dir" if packages.pip == "pip" else "--no-cache"
    version = packages.versions.get(DALI)
    wanted = f"{PLUGIN}=={version}" if version else packages.wanted(PLUGIN)
    options = f"--no-build-isolation --no-deps {no_cache} --force-reinstall"
    return f"{packages.pip} install {options} '{wanted}'"


def others(packages: Packages) -> Finding:
    """Judges the versions of all other packages that tfaccel asks for."""
    name, versions = "other packages", packages.versions
    if "tfaccel" not in versions:
        return warning(
            name,
            "tfaccel runs from a folder, not as a package, so that nothing says which versions it "
            "takes",
            f"{packages.pip} install -e . in its folder",
        )
    rest = [each for each in packages.ranges if each not in ("tensorflow", "keras", DALI, PLUGIN)]
    wrong = [
        each
        for each in rest
        if each not in versions or not _fits(versions[each], packages.ranges[each])
    ]
    if wrong:
        return error(
            name,
            ", ".join(f"{each} is {versions.get(each, 'not installed')}" for each in wrong),
            packages.install(*map(packages.wanted, wrong)),
        )
    return ok(name, f"all {len(rest)} that tfaccel asks for, in versions that it takes")


def _version_fault(name: str, package: str, packages: Packages) -> Finding | None:
    version, wanted = packages.versions.get(package), packages.ranges.get(package, "")
    fix = packages.install(packages.wanted(package))
    if version is None:
        return error(name, "not installed", fix)
    if not _fits(version, wanted):
        return error(name, f"{version}, but tfaccel takes {wanted}", fix)
    return None


def _trial_fault(name: str, told: Told | None, wanted: str, packages: Packages) -> Finding | None:
    if told is None:
        return None
    if before := next((each for each in NEEDS.get(name, ()) if each in told.failed), None):
        return _not_tried(name, f"not tried, because {before} failed")
    if name in told.failed or "start" in told.failed:
        return error(
            name,
            f"it does not start: {told.failed.get(name) or told.failed['start']}",
            packages.reinstall(wanted),
        )
    if why := told.why_not(name):
        return _not_tried(name, why)
    return None


def _not_tried(name: str, found: str) -> Finding:
    return warning(name, found, "mend that first")


def _fits(version: str, wanted: str) -> bool:
    return SpecifierSet(wanted).contains(version, prereleases=True)
