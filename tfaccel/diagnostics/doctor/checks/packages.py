"""Checks whether Python, TensorFlow, Keras, DALI and its plugin work and fit together.

check(installed(), answers, environment=os.environ, keras_backend=None, has_gpu=True)

`answers` come from the child that runs facts/trial.py; they are None if nothing was tried.
"""

from collections.abc import Mapping

from packaging.specifiers import SpecifierSet

from tfaccel.diagnostics.doctor.facts.child import Answers
from tfaccel.diagnostics.doctor.facts.packages import Packages
from tfaccel.diagnostics.doctor.table import Finding, error, ok, warning

# The stages that must succeed before a stage is tried.
NEEDS = {"Keras": ("TensorFlow",), "DALI plugin": ("TensorFlow", "DALI")}
DALI, PLUGIN = "nvidia-dali-cuda120", "nvidia-dali-tf-plugin-cuda120"
OTHER_TENSORFLOWS = ("tensorflow-cpu", "tf-nightly", "tf-nightly-cpu", "intel-tensorflow")


def check(
    packages: Packages,
    answers: Answers | None,
    *,
    environment: Mapping[str, str],
    keras_backend: str | None,
    has_gpu: bool,
) -> list[Finding]:
    """Returns one line for each check. `keras_backend` is the one in Keras's settings file."""
    return [
        python(packages),
        tensorflow(packages, answers, has_gpu=has_gpu),
        keras(packages, answers, environment, keras_backend),
        dali(packages, answers),
        plugin(packages, answers),
        others(packages),
    ]


def python(packages: Packages) -> Finding:
    """Checks Python's version."""
    if not _fits(packages.python, packages.python_range):
        return error(
            "Python",
            f"{packages.python}, but tfaccel requires {packages.python_range}",
            "make a virtual environment with another Python, e.g. `uv venv --python 3.12`",
        )
    return ok("Python", packages.python)


def tensorflow(packages: Packages, answers: Answers | None, *, has_gpu: bool) -> Finding:
    """Checks TensorFlow's version, its CUDA, and whether it starts."""
    name, versions, build = "TensorFlow", packages.versions, packages.build
    others = [each for each in OTHER_TENSORFLOWS if each in versions]
    if fault := _version_fault(name, "tensorflow", packages):
        return fault
    if others:
        return warning(
            name,
            f"{versions['tensorflow']} and {', '.join(others)} are installed into the same folder",
            packages.reinstall(f"tensorflow=={versions['tensorflow']}", without=others),
        )
    if fault := _trial_fault(name, answers, packages.wanted("tensorflow"), packages):
        return fault
    if build and build.cuda is None and has_gpu:
        return error(
            name,
            f"{versions['tensorflow']}, built without CUDA, so it cannot use this machine's GPUs",
            packages.install(packages.wanted("tensorflow", extra="and-cuda")),
        )
    built = "without CUDA" if build and build.cuda is None else "with CUDA"
    if build and build.cuda:
        built = f"for CUDA {build.cuda}, cuDNN {build.cudnn}"
    return ok(name, f"{versions['tensorflow']}, built {built}" if build else versions["tensorflow"])


def keras(
    packages: Packages,
    answers: Answers | None,
    environment: Mapping[str, str],
    settings: str | None,
) -> Finding:
    """Checks Keras's version and backend."""
    if fault := _version_fault("Keras", "keras", packages):
        return fault
    backend = environment.get("KERAS_BACKEND") or settings or "tensorflow"
    if backend != "tensorflow":
        where = "KERAS_BACKEND" if environment.get("KERAS_BACKEND") else "~/.keras/keras.json"
        return error(
            "Keras",
            f"the backend is {backend}, set by {where}; tfaccel trains with TensorFlow",
            "export KERAS_BACKEND=tensorflow",
        )
    if fault := _trial_fault("Keras", answers, packages.wanted("keras"), packages):
        return fault
    return ok("Keras", packages.versions["keras"])


def dali(packages: Packages, answers: Answers | None) -> Finding:
    """Checks DALI's version, and whether it loads."""
    name = _in_place_of(DALI, packages)
    others = [
        each for each in packages.versions if each.startswith("nvidia-dali-cuda") and each != name
    ]
    if name == DALI and (fault := _version_fault("DALI", DALI, packages)):
        return fault
    version = packages.versions[name]
    if others:
        return error(
            "DALI",
            f"{name} {version} and {', '.join(others)} are installed into the same folder",
            packages.reinstall(f"{name}=={version}", without=others),
        )
    if fault := _trial_fault("DALI", answers, packages.wanted(name), packages):
        return fault
    if name != DALI:
        return warning(
            "DALI",
            f"{name} {version} is installed, not {DALI}; its loaders passed our tests on the CPU "
            "(2026-11-30), and were not tried on a GPU",
            packages.reinstall(packages.wanted(DALI), without=[name, _plugin_of(name)]),
        )
    return ok("DALI", version)


def _in_place_of(package: str, packages: Packages) -> str:
    """Returns the package, or another one of it that is installed alone: for CUDA 13."""
    stem = package.removesuffix("120")
    others = [each for each in packages.versions if each.startswith(stem)]
    return others[0] if len(others) == 1 else package


def _plugin_of(name: str) -> str:
    return name.replace("nvidia-dali-", "nvidia-dali-tf-plugin-")


def plugin(packages: Packages, answers: Answers | None) -> Finding:
    """Checks DALI's plugin: its version, its binary, and whether it delivers a batch."""
    name, versions = "DALI plugin", packages.versions
    version = versions.get(_in_place_of(PLUGIN, packages))
    dali_version = versions.get(_in_place_of(DALI, packages))
    build = _plugin_build(packages)
    if version is None:
        return error(name, "not installed", f"with a C++ compiler: {build}")
    if dali_version and version != dali_version:
        return error(name, f"built for DALI {version}, but DALI is {dali_version}", build)
    if not packages.plugin_binaries:
        return error(name, f"{version} has no libdali_tf*.so", build)
    if answers is None:
        return ok(name, f"{version}, not loaded")
    if before := next((each for each in NEEDS[name] if each in answers.failed), None):
        return _not_tried(name, f"{version} was not tried, because {before} failed")
    for stage, fault in ((name, "does not load"), ("a batch", "loads, but delivers no batch")):
        if stage in answers.failed:
            tensorflow = versions.get("tensorflow", "")
            return error(
                name,
                f"{version} {fault} with TensorFlow {tensorflow}: {answers.failed[stage]}",
                f"build it for this TensorFlow: {build}",
            )
    if why := answers.why_not(name):
        return _not_tried(name, f"{version} {why}")
    return ok(name, f"{version}, loads and delivers a batch")


def _plugin_build(packages: Packages) -> str:
    """Returns the command that compiles the plugin for the installed TensorFlow.

    pip's isolated build would install another TensorFlow, and pip's cache may hold an older build.
    """
    no_cache = "--no-cache-dir" if packages.pip == "pip" else "--no-cache"
    dali_name = _in_place_of(DALI, packages)
    version, package = packages.versions.get(dali_name), _plugin_of(dali_name)
    wanted = f"{package}=={version}" if version else packages.wanted(PLUGIN)
    options = f"--no-build-isolation --no-deps {no_cache} --force-reinstall"
    return f"{packages.pip} install {options} '{wanted}'"


def others(packages: Packages) -> Finding:
    """Checks the versions of all other packages that tfaccel requires."""
    name, versions = "other packages", packages.versions
    if "tfaccel" not in versions:
        return warning(
            name,
            "tfaccel runs from a folder, not as a package, so its required versions are unknown",
            f"{packages.pip} install -e . in that folder",
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
    return ok(name, f"all {len(rest)} that tfaccel requires, in versions that it supports")


def _version_fault(name: str, package: str, packages: Packages) -> Finding | None:
    version, wanted = packages.versions.get(package), packages.ranges.get(package, "")
    fix = packages.install(packages.wanted(package))
    if version is None:
        return error(name, "not installed", fix)
    if not _fits(version, wanted):
        return error(name, f"{version}, but tfaccel requires {wanted}", fix)
    return None


def _trial_fault(
    name: str, answers: Answers | None, wanted: str, packages: Packages
) -> Finding | None:
    if answers is None:
        return None
    if before := next((each for each in NEEDS.get(name, ()) if each in answers.failed), None):
        return _not_tried(name, f"not tried, because {before} failed")
    if name in answers.failed or "start" in answers.failed:
        return error(
            name,
            f"does not start: {answers.failed.get(name) or answers.failed['start']}",
            packages.reinstall(wanted),
        )
    if why := answers.why_not(name):
        return _not_tried(name, why)
    return None


def _not_tried(name: str, found: str) -> Finding:
    return warning(name, found, "solve that problem first")


def _fits(version: str, wanted: str) -> bool:
    return SpecifierSet(wanted).contains(version, prereleases=True)
