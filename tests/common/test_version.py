"""pyproject.toml states the supported versions. Every other place that names one agrees with it."""

import pathlib
import re
import tomllib

import keras
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import tfaccel
from tfaccel import UserError
from tfaccel.common.version import KERAS
from tfaccel.keras_internals import check_keras

ROOT = pathlib.Path(tfaccel.__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
RANGES = {each.name: each.specifier for each in map(Requirement, PROJECT["dependencies"])}


def minors(first, last=None):
    """The range of the versions from minor version "3.15" to the last one; to itself by default."""
    major, minor = (last or first).split(".")
    return SpecifierSet(f">={first},<{major}.{int(minor) + 1}")


def test_tfaccel_has_one_version():
    assert tfaccel.__version__ == PROJECT["version"]


def test_every_version_of_keras_that_pyproject_allows_was_tried():
    """The next one may be tried before it is allowed: then its release changes one bound."""
    allowed = [each for each in KERAS if f"{each}.0" in RANGES["keras"]]
    assert RANGES["keras"] == minors(allowed[0], allowed[-1])


def test_tensorflow_for_gpus_has_the_versions_of_that_for_cpus():
    (on_gpus,) = map(Requirement, EXTRAS["gpu"])
    assert on_gpus.specifier == RANGES["tensorflow"]


def test_the_page_on_installing_names_the_versions_of_pyproject():
    page = (ROOT / "tfaccel/common/INSTALL.md").read_text()
    found = re.findall(r"'((?:tensorflow|keras|nvidia-dali)[^']*[<>=~][^']*)'", page)
    assert found
    for text in found:
        assert Requirement(text).specifier == RANGES[Requirement(text).name], text
    (pinned,) = re.findall(r"TensorFlow (\S+), Keras (\S+) and DALI (\S+) are pinned", page)
    names = ("tensorflow", "keras", "nvidia-dali-cuda120")
    assert [minors(each) for each in pinned] == [RANGES[each] for each in names]


@pytest.mark.parametrize("file", ["README.md", ".ci/run"])
def test_the_versions_of_python_are_those_of_pyproject(file):
    first, last = re.search(r"Python (3\.\d+) to 3\.(\d+)", (ROOT / file).read_text()).groups()
    assert SpecifierSet(PROJECT["requires-python"]) == SpecifierSet(f">={first},<3.{int(last) + 1}")


@pytest.mark.parametrize("version", ["3.17.0", "3.1.5", "4.0", "3.14.9", "2.15.0"])
def test_another_keras_is_refused(version):
    with pytest.raises(
        UserError, match=rf"Keras {version} is installed.*Keras 3\.15\.x and 3\.16\.x only"
    ):
        check_keras(version)


@pytest.mark.parametrize("version", ["3.15.0", "3.15.9", "3.16.0.dev2026102704", keras.__version__])
def test_this_keras_is_taken(version):
    check_keras(version)
