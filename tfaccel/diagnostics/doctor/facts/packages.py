"""The installed packages, read from their metadata and files without importing them.

installed().versions["tensorflow"]    # "2.21.0"
"""

import dataclasses
import importlib.metadata
import importlib.util
import pathlib
import platform
import runpy
from collections.abc import Mapping, Sequence

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tfaccel.diagnostics.doctor.facts.fat_binaries import capabilities


@dataclasses.dataclass(frozen=True)
class Build:
    """What TensorFlow was built for.

    Attributes:
      cuda: the version of CUDA, e.g. "12.5.1"; None if TensorFlow was built without CUDA, and ""
        if it was built with a CUDA that it does not name (2.22.0rc0).
      cudnn: the version of cuDNN.
      capabilities: "sm_80" stands for compiled kernels, "compute_90" for compiled kernels and for
        PTX, which the driver compiles for newer GPUs.
    """

    cuda: str | None
    cudnn: str | None
    capabilities: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Packages:
    """The installed versions and the required versions.

    Attributes:
      python: the version of this Python.
      versions: the version of every installed package, by canonical name.
      ranges: the versions that tfaccel requires, e.g. {"keras": "<3.16,>=3.15"}; empty if tfaccel
        is not installed as a package.
      python_range: the Python versions that tfaccel requires; empty likewise.
      cuda_ranges: the versions that this TensorFlow requires as tensorflow[and-cuda].
      build: what TensorFlow was built for; None if it does not say.
      plugin_binaries: the file names of the DALI plugin's libraries.
      pip: the command that installed tfaccel, "pip" or "uv pip".
    """

    python: str
    versions: Mapping[str, str]
    ranges: Mapping[str, str]
    python_range: str
    cuda_ranges: Mapping[str, str]
    build: Build | None
    plugin_binaries: tuple[str, ...]
    pip: str

    def install(self, *requirements: str) -> str:
        """Returns the command that installs the requirements."""
        return " ".join([self.pip, "install", *(f"'{each}'" for each in requirements)])

    def reinstall(self, requirement: str, *, without: Sequence[str] = ()) -> str:
        """Returns the command that installs one package again.

        Args:
          requirement: the package.
          without: packages to uninstall first, because they share the package's folder.
        """
        first = f"{self.pip} uninstall {' '.join(without)}, then " if without else ""
        return f"{first}{self.pip} install --force-reinstall --no-deps '{requirement}'"

    def wanted(self, name: str, *, extra: str = "") -> str:
        """Returns pip's requirement for a package, with the versions that tfaccel requires."""
        return f"{name}{f'[{extra}]' if extra else ''}{self.ranges.get(name, '')}"


def installed(path: Sequence[str] | None = None) -> Packages:
    """Reads the metadata of all packages. In tests, `path` replaces sys.path."""
    found = importlib.metadata.distributions(**({} if path is None else {"path": list(path)}))
    packages = {}
    for each in found:
        if each.name:  # the folder of an interrupted installation has no name
            packages.setdefault(canonicalize_name(each.name), each)  # Python imports the first one
    ours, tensorflow = packages.get("tfaccel"), packages.get("tensorflow")
    is_uv = ours is not None and (ours.read_text("INSTALLER") or "").strip() == "uv"
    return Packages(
        python=platform.python_version(),
        versions={name: each.version for name, each in packages.items()},
        ranges=_ranges(ours, extra=None),
        python_range=ours.metadata.get("Requires-Python", "") if ours else "",
        cuda_ranges=_ranges(tensorflow, extra="and-cuda"),
        build=_build() if path is None else None,
        plugin_binaries=_binaries("nvidia.dali_tf_plugin") if path is None else (),
        pip="uv pip" if is_uv else "pip",
    )


def _ranges(package: importlib.metadata.Distribution | None, extra: str | None) -> dict[str, str]:
    """Returns the versions that a package requires: always, or only with the given extra."""
    found = {}
    for each in map(Requirement, (package.requires or ()) if package else ()):
        applies = each.marker is None or each.marker.evaluate({"extra": extra or ""})
        is_of_extra = each.marker is not None and "extra" in str(each.marker)
        if applies and is_of_extra == (extra is not None):
            found[canonicalize_name(each.name)] = str(each.specifier)
    return found


def _build() -> Build | None:
    """Returns what TensorFlow's build_info.py says. That file imports only standard modules."""
    for root in _folders("tensorflow"):
        file = root / "python/platform/build_info.py"
        if file.is_file():
            info = runpy.run_path(str(file))["build_info"]
            is_cuda = info.get("is_cuda_build")
            names = info.get("cuda_compute_capabilities") or (_in_library(root) if is_cuda else ())
            return Build(
                cuda=info.get("cuda_version", "") if is_cuda else None,
                cudnn=info.get("cudnn_version"),
                capabilities=tuple(names),
            )
    return None


def _in_library(tensorflow: pathlib.Path) -> tuple[str, ...]:
    """Returns the compute capabilities of the code in TensorFlow's library."""
    return tuple(
        each
        for library in sorted(tensorflow.glob("libtensorflow_cc.so*"))[:1]
        for each in capabilities(library)
    )


def _binaries(package: str) -> tuple[str, ...]:
    top, _, rest = package.partition(".")
    folders = [root / rest.replace(".", "/") for root in _folders(top)]
    return tuple(sorted(each.name for root in folders for each in root.glob("libdali_tf*.so")))


def _folders(package: str) -> list[pathlib.Path]:
    spec = importlib.util.find_spec(package)
    return [pathlib.Path(each) for each in (spec and spec.submodule_search_locations) or ()]
