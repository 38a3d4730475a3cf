"""The tool that runs tests with other versions."""

import datetime
import pathlib
import tomllib
import xml.etree.ElementTree as ElementTree

import pytest
from loaded_tool import TOOLS, loaded

PROJECT = (TOOLS.parent / "pyproject.toml").read_text()
USE = {
    "tensorflow": "tensorflow==2.22.0rc0",
    "keras": "keras-nightly>=3.16.0.dev0,<3.17",
    "nvidia-dali-cuda120": "nvidia-dali-cuda130>=2.4",
}
REPORT = """<testsuites><testsuite>
<testcase classname="tests.step.test_a" name="test_fine" time="1"/>
<testcase classname="tests.step.test_a" name="test_left"><skipped message="slow"/></testcase>
<testcase classname="tests.step.test_a" name="test_values[1]"><failure message="assert 1 == 2">
def test_values():
E       assert 1 == 2</failure></testcase>
<testcase classname="" name="tests.keras_internals.test_b"><error message="collection failure">
E   ImportError: cannot import name 'get_keras_mask' from 'keras.src.backend' (/venv/keras)</error>
</testcase>
<testcase classname="tests.keras_internals.test_c" name="test_names[Loss.call is called]">
<failure message="Failed: tfaccel relies on this private name: Loss.call is called. Keras 3.16.0
 with TensorFlow 2.22.0 has changed it">E   Failed</failure></testcase>
</testsuite></testsuites>"""


@pytest.fixture(scope="module")
def tool():
    with loaded("try_versions") as module:
        yield module


def test_the_copy_requires_the_other_versions(tool):
    text = tool.with_versions(PROJECT, USE, python="3.14")
    read = tomllib.loads(text)
    project, uv = read["project"], read["tool"]["uv"]
    assert project["requires-python"] == "==3.14.*"
    assert "tensorflow==2.22.0rc0" in project["dependencies"]
    assert any(each.startswith("keras-nightly") for each in project["dependencies"])
    assert not any(each.startswith("keras>") for each in project["dependencies"])
    assert project["optional-dependencies"]["gpu"] == ["tensorflow[and-cuda]==2.22.0rc0"]
    assert uv["override-dependencies"] == [
        "tensorflow==2.22.0rc0",
        "keras ; python_version < '0'",  # other packages that ask for keras get none
        "nvidia-dali-cuda120 ; python_version < '0'",
    ]
    (built,) = uv["extra-build-dependencies"].values()
    assert [each["requirement"] for each in built] == ["tensorflow", "nvidia-dali-cuda130"]


def test_what_is_not_replaced_stays(tool):
    text = tool.with_versions(PROJECT, {"keras": "keras==3.16.0"}, python="3.11")
    listed = tool.requirements(text)
    assert any(each.startswith("keras-hub>=0.32") for each in listed)
    assert any(each.startswith("tensorflow>=") for each in listed)
    assert any(each.startswith("tf2onnx") for each in listed)  # of an extra that the suite needs
    assert not any(each.startswith("tfaccel") for each in listed)


def test_a_package_is_left_out(tool):
    text = tool.with_versions(PROJECT, {"keras-hub": ""}, python="3.14")
    assert not any(each.startswith("keras-hub") for each in tool.requirements(text))


def test_private_names_are_blamed_first(tool):
    counts, broken = tool.results(ElementTree.fromstring(REPORT))
    assert counts["tests/step"] == {"passed": 1, "failed": 1, "skipped": 1}
    assert counts["tests/keras_internals"] == {"failed": 2}
    rows = tool.broken_table(broken)[2:]
    assert [row.split("|")[1].strip() for row in rows] == [
        "Loss.call is called",
        "keras.src.backend.get_keras_mask",
        "none named",
    ]
    assert "assert 1 == 2" in rows[-1]
    assert "test_a::test_values[1]" in rows[-1]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (
            "No module named 'keras.src.backend.tensorflow.core'",
            "keras.src.backend.tensorflow.core",
        ),
        ("module 'keras.src.backend' has no attribute 'numpy'", "keras.src.backend.numpy"),
        ("No module named 'mlflow'", None),
        ("assert 1 == 2", None),
    ],
)
def test_an_error_blames_only_private_names(tool, line, name):
    assert tool.blamed(line) == name


def test_the_page_says_what_the_registry_lacks(tool):
    why = tool.uv_reason("  \u2718 No solution found:\n  \u2570\u2500 no tensorflow==9\n")
    assert why == "No solution found: no tensorflow==9"
    lines = tool.registry_table({"3.14": f"nothing: {why}"}, today=datetime.date(2026, 11, 30))
    assert "on 2026-11-30" in lines[0]
    assert lines[-1] == f"| 3.14 | nothing: {why} |"


def test_a_reason_is_one_short_sentence_without_addresses(tool):
    told = "error: No solution found\n cause: Because a has no wheels, we can conclude that b\n"
    assert tool.uv_reason(told) == "a has no wheels"
    assert tool.uv_reason("error: not downloaded: https://host/python") == (
        "error: not downloaded: a download"
    )


def test_no_environment_is_no_success(tool, monkeypatch, tmp_path):
    monkeypatch.setattr(tool, "registry", lambda *_: "nothing: no version")
    monkeypatch.setattr(tool, "make_environment", lambda *_: "no interpreter for Python 3.14")
    page = pathlib.Path(tmp_path, "page.md")
    assert tool.main(["--python=3.14", f"--folder={tmp_path}", f"--output={page}"]) == 2
    assert "for Python 3.14: no interpreter for Python 3.14" in page.read_text()
