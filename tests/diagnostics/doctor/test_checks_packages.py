"""What is installed, judged by planted metadata and by what a planted trial told."""

import dataclasses
import importlib.metadata

import pytest

from tfaccel.diagnostics.doctor.checks import packages as checks
from tfaccel.diagnostics.doctor.facts.child import Answers
from tfaccel.diagnostics.doctor.facts.packages import Build, Packages, installed

PLUGIN = "nvidia-dali-tf-plugin-cuda120"
FINE = Packages(
    python="3.12.3",
    versions={
        "tfaccel": "0.1.0",
        "pillow": "12.0",
        "tensorflow": "2.21.0",
        "keras": "3.15.1",
        "nvidia-dali-cuda120": "2.4.0",
        PLUGIN: "2.4.0",
    },
    ranges={
        "pillow": ">=12",
        "tensorflow": "<2.22,>=2.21",
        "keras": "<3.16,>=3.15",
        "nvidia-dali-cuda120": "<2.5,>=2.4",
        PLUGIN: "<2.5,>=2.4",
    },
    python_range="<3.14,>=3.11",
    cuda_ranges={},
    build=Build(cuda="12.5.1", cudnn="9", capabilities=("sm_60", "compute_90")),
    plugin_binaries=("libdali_tf_current.so",),
    pip="pip",
)
DALI_13, PLUGIN_13 = "nvidia-dali-cuda130", "nvidia-dali-tf-plugin-cuda130"
TRIED = Answers({"TensorFlow": {}, "Keras": {}, "DALI": {}, "DALI plugin": {}, "a batch": {}})


def with_versions(**versions):
    kept = FINE.versions | {name.replace("_", "-"): value for name, value in versions.items()}
    return dataclasses.replace(FINE, versions={k: v for k, v in kept.items() if v is not None})


def test_a_sound_environment_is_ok_throughout():
    found = checks.check(FINE, TRIED, environment={}, keras_backend=None, has_gpu=True)
    assert {each.status for each in found} == {"ok"}, found
    names = ["Python", "TensorFlow", "Keras", "DALI", "DALI plugin", "other packages"]
    assert [each.name for each in found] == names


# What is planted, which line shows it, and words of the finding or its fix.
PLANTED = [
    ({"python": "3.10.4"}, "Python", "error", "3.10.4, but tfaccel requires <3.14,>=3.11"),
    ({"tensorflow": "2.20.0"}, "TensorFlow", "error", "pip install 'tensorflow<2.22,>=2.21'"),
    ({"tensorflow": None}, "TensorFlow", "error", "not installed"),
    ({"tensorflow_cpu": "2.21.0"}, "TensorFlow", "warning", "same folder"),
    ({"keras": "3.14.0"}, "Keras", "error", "pip install 'keras<3.16,>=3.15'"),
    ({"keras": "4.0.0"}, "Keras", "error", "4.0.0, but tfaccel requires <3.16,>=3.15"),
    ({"nvidia_dali_cuda120": None}, "DALI", "error", "not installed"),
    ({"nvidia_dali_cuda130": "2.4.0"}, "DALI", "error", "pip uninstall nvidia-dali-cuda130"),
    ({"pillow": "11.3"}, "other packages", "error", "pip install 'pillow>=12'"),
    ({"pillow": None}, "other packages", "error", "pillow is not installed"),
    ({"tfaccel": None}, "other packages", "warning", "pip install -e ."),
    ({PLUGIN: None}, "DALI plugin", "error", "not installed"),
    ({PLUGIN: "2.4.1"}, "DALI plugin", "error", "built for DALI 2.4.1, but DALI is 2.4.0"),
]


@pytest.mark.parametrize(("plant", "name", "status", "words"), PLANTED)
def test_a_planted_version_is_found(plant, name, status, words):
    packages = with_versions(**{key: value for key, value in plant.items() if key != "python"})
    packages = dataclasses.replace(packages, python=plant.get("python", packages.python))
    found = checks.check(packages, None, environment={}, keras_backend=None, has_gpu=True)
    (wrong,) = [each for each in found if each.status != "ok"]
    assert (wrong.name, wrong.status) == (name, status)
    assert words in f"{wrong.found} {wrong.fix}"


def test_dali_for_cuda_13_alone_is_told_with_what_was_tried():
    names = {DALI_13: "2.4.0", PLUGIN_13: "2.4.0", "nvidia-dali-cuda120": None, PLUGIN: None}
    found = checks.dali(with_versions(**names), TRIED)
    assert found.status == "warning"
    assert "nvidia-dali-cuda130 2.4.0 is installed, not nvidia-dali-cuda120" in found.found
    assert f"pip uninstall {DALI_13} {PLUGIN_13}, then pip install" in found.fix
    assert checks.plugin(with_versions(**names), TRIED).status == "ok"
    broken = checks.dali(with_versions(**names), Answers({}, {"DALI": "ended by SIGABRT"}))
    assert (broken.status, "SIGABRT" in broken.found) == ("error", True)
    unbuilt = checks.plugin(with_versions(**names | {PLUGIN_13: None}), None)
    assert f"'{PLUGIN_13}==2.4.0'" in unbuilt.fix


def test_another_keras_backend_is_an_error_wherever_it_is_set():
    for environment, file in (({"KERAS_BACKEND": "jax"}, None), ({}, "torch")):
        found = checks.keras(FINE, None, environment, file)
        assert found.status == "error"
        assert "KERAS_BACKEND=tensorflow" in found.fix
    assert checks.keras(FINE, None, {"KERAS_BACKEND": "tensorflow"}, "jax").status == "ok"


def test_tensorflow_without_cuda_is_an_error_only_where_there_is_a_gpu():
    packages = dataclasses.replace(FINE, build=Build(cuda=None, cudnn=None, capabilities=()))
    assert checks.tensorflow(packages, None, has_gpu=True).status == "error"
    assert "without CUDA" in checks.tensorflow(packages, None, has_gpu=False).found


def test_tensorflow_that_does_not_name_its_cuda_is_no_tensorflow_without_cuda():
    packages = dataclasses.replace(FINE, build=Build(cuda="", cudnn=None, capabilities=()))
    found = checks.tensorflow(packages, None, has_gpu=True)
    assert (found.status, found.found) == ("ok", "2.21.0, built with CUDA")


def test_a_plugin_without_its_binary_is_found_without_loading_it():
    packages = dataclasses.replace(FINE, plugin_binaries=())
    found = checks.plugin(packages, None)
    assert found.status == "error"
    assert "no libdali_tf*.so" in found.found
    assert f"--force-reinstall '{PLUGIN}==2.4.0'" in found.fix


ABORTED = Answers({"TensorFlow": {}, "DALI": {}}, {"DALI plugin": "was ended by SIGABRT"})
UNDEFINED = Answers(
    {"TensorFlow": {}, "DALI": {}}, {"DALI plugin": "NotFoundError: undefined symbol"}
)
NO_BATCH = Answers(
    {"TensorFlow": {}, "DALI": {}, "DALI plugin": {}}, {"a batch": "was ended by SIGV"}
)


@pytest.mark.parametrize("told", [ABORTED, UNDEFINED, NO_BATCH])
def test_a_plugin_that_does_not_work_with_this_tensorflow_is_to_be_built_again(told):
    found = checks.plugin(FINE, told)
    assert found.status == "error"
    assert next(iter(told.failed.values())) in found.found
    assert "--no-build-isolation" in found.fix


def test_what_was_never_reached_is_told_as_not_tried():
    told = Answers({}, {"TensorFlow": "gave no answer within 60 s"})
    tensorflow = checks.tensorflow(FINE, told, has_gpu=False)
    assert tensorflow.status == "error"
    assert "gave no answer within 60 s" in tensorflow.found
    plugin = checks.plugin(FINE, told)
    assert plugin.status == "warning"
    assert "not tried, because TensorFlow" in plugin.found


def test_what_cannot_be_tried_after_a_failure_is_no_second_error():
    told = Answers(
        {}, dict.fromkeys(("TensorFlow", "Keras", "DALI plugin"), "ImportError: libx.so")
    )
    found = checks.check(FINE, told, environment={}, keras_backend=None, has_gpu=False)
    assert [each.name for each in found if each.status == "error"] == ["TensorFlow"]


def test_the_metadata_of_this_environment_are_read_without_tensorflow():
    packages = installed()
    assert packages.versions["tensorflow"] == importlib.metadata.version("tensorflow")
    assert packages.build.cuda in ("12.5.1", "")  # TensorFlow 2.22.0rc0 does not name it
    assert packages.plugin_binaries == ("libdali_tf_current.so",)
    assert "nvidia-cudnn-cu12" in packages.cuda_ranges
    assert packages.pip == "uv pip" or packages.pip == "pip"


def test_a_planted_site_is_read_in_its_place(tmp_path):
    for name, version in (("keras", "3.9"), ("tfaccel", "0.1.0")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            "Requires-Dist: keras>=3.15\nRequires-Dist: ray>=2; extra == 'ray'\n"
        )
    packages = installed([str(tmp_path)])
    assert packages.versions == {"keras": "3.9", "tfaccel": "0.1.0"}
    assert packages.ranges == {"keras": ">=3.15"}
    assert packages.build is None
    found = checks.check(packages, None, environment={}, keras_backend=None, has_gpu=False)
    assert [each.name for each in found if each.status == "error"][:2] == ["TensorFlow", "Keras"]
