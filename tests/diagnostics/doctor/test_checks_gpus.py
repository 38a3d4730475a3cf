"""Driver, CUDA libraries and GPUs, judged by planted facts."""

import dataclasses

import pytest

from tfaccel.diagnostics.doctor.checks import cuda, gpus, links
from tfaccel.diagnostics.doctor.facts.child import Answers
from tfaccel.diagnostics.doctor.facts.gpus import Driver, Gpu, Gpus, Holder, from_answers, visible
from tfaccel.diagnostics.doctor.facts.packages import Build, Packages

GIB = 2**30
H200 = Gpu(
    index=0,
    uuid="GPU-0",
    name="NVIDIA H200",
    capability=(9, 0),
    memory_total=140 * GIB,
    memory_used=1 * GIB,
    holders=(),
    mig=False,
    ecc_errors=0,
    remap=(0, 0),
    slowdowns=0,
    power_limit_w=700,
    power_default_w=700,
    persistence=True,
    compute_mode=0,
    has_jpeg_engine=True,
    nvlinks=18,
)
TWO = (H200, dataclasses.replace(H200, index=1, uuid="GPU-1"))
DRIVER = Driver("580.95.05", (13, 0))
GPUS = Gpus(DRIVER, TWO, {(0, 1): "NVLink"}, None)
NONE = Gpus(None, (), {}, None)
BUILD = Build(cuda="12.5.1", cudnn="9", capabilities=("sm_60", "sm_89", "compute_90"))
WHEELS = {"nvidia-cublas-cu12": "<13.0,>=12.5.3.2", "nvidia-cudnn-cu12": "<10.0,>=9.3.0.75"}
PACKAGES = Packages(
    python="3.12.3",
    versions={
        "tensorflow": "2.21.0",
        "nvidia-cublas-cu12": "12.9.3.13",
        "nvidia-cudnn-cu12": "9.28.0.42",
        "nvidia-nccl-cu12": "2.32.3",
    },
    ranges={"tensorflow": "<2.22,>=2.21"},
    python_range="",
    cuda_ranges={**WHEELS, "nvidia-nccl-cu12": "<3.0,>=2.27.7"},
    build=BUILD,
    plugin_binaries=(),
    pip="uv pip",
)


def changed(**fields):
    """Two GPUs of which the second is different."""
    return dataclasses.replace(GPUS, gpus=(TWO[0], dataclasses.replace(TWO[1], **fields)))


def without(name):
    versions = {key: value for key, value in PACKAGES.versions.items() if key != name}
    return dataclasses.replace(PACKAGES, versions=versions)


# ----- The driver.


def test_a_machine_without_a_gpu_is_told_so_and_is_no_error():
    found = cuda.driver(NONE, PACKAGES, num_on_bus=0)
    assert found.status == "warning"
    assert "training will run on the CPU" in found.found
    assert cuda.libraries(NONE, without("nvidia-cudnn-cu12"), None, {}).status == "ok"


def test_a_card_without_a_driver_is_an_error():
    found = cuda.driver(NONE, PACKAGES, num_on_bus=2)
    assert found.status == "error"
    assert "--gpus=all" in found.fix


DRIVERS = [
    (Driver("470.82", (11, 4)), "error", "driver for CUDA 12: 525 or newer"),
    (Driver("535.54.03", (12, 2)), "warning", "older than the CUDA libraries (12.5.1)"),
    (Driver("580.95.05", (13, 0)), "ok", ""),
]


@pytest.mark.parametrize(("planted", "status", "words"), DRIVERS)
def test_a_driver_is_judged_by_the_cuda_that_tensorflow_was_built_for(planted, status, words):
    found = cuda.driver(dataclasses.replace(GPUS, driver=planted), PACKAGES, num_on_bus=2)
    assert found.status == status
    assert words in f"{found.found} {found.fix}"


def test_a_driver_and_library_that_differ_need_a_restart():
    mismatched = Gpus(None, (), {}, "NVMLError_LibRmVersionMismatch: Driver/library mismatch")
    found = cuda.driver(mismatched, PACKAGES, num_on_bus=1)
    assert found.status == "error"
    assert "restart the machine" in found.fix


def test_a_driver_that_hangs_is_a_finding():
    told = Answers({}, {"driver": "gave no answer within 10 s"})
    found = cuda.driver(from_answers(told), PACKAGES, num_on_bus=1)
    assert found.status == "error"
    assert "gave no answer within 10 s" in found.found


# ----- CUDA libraries, NCCL, TensorFlow's devices.


def test_a_missing_wheel_is_named_with_the_command_that_installs_it():
    found = cuda.libraries(GPUS, without("nvidia-cudnn-cu12"), None, {})
    assert found.status == "error"
    assert "nvidia-cudnn-cu12 is not installed" in found.found
    assert "uv pip install 'tensorflow[and-cuda]<2.22,>=2.21'" in found.fix


def test_a_wheel_of_a_version_that_tensorflow_does_not_want_is_named():
    versions = {**PACKAGES.versions, "nvidia-cudnn-cu12": "8.9.7.29"}
    found = cuda.libraries(GPUS, dataclasses.replace(PACKAGES, versions=versions), None, {})
    assert found.status == "error"
    assert "nvidia-cudnn-cu12 is 8.9.7.29, not <10.0,>=9.3.0.75" in found.found


def test_libraries_that_are_no_wheels_are_fine_where_tensorflow_ran_on_all_gpus():
    versions = {"tensorflow": "2.21.0"}
    ran = Answers({"devices": {"gpus": 2}, "a step": {}, "libraries in use": {}})
    packages = dataclasses.replace(PACKAGES, versions=versions)
    assert cuda.libraries(GPUS, packages, ran, {}).status == "ok"
    assert cuda.libraries(GPUS, packages, None, {}).status == "error"


def test_libraries_from_somewhere_else_than_the_wheels_are_named():
    foreign = {"libcudnn.so.9": "/opt/cuda-11/lib/libcudnn.so.9"}
    told = Answers({"devices": {"gpus": 2}, "a step": {}, "libraries in use": foreign})
    found = cuda.libraries(GPUS, PACKAGES, told, {"LD_LIBRARY_PATH": "/opt/cuda-11/lib"})
    assert found.status == "warning"
    assert "/opt/cuda-11/lib/libcudnn.so.9" in found.found
    assert "LD_LIBRARY_PATH" in found.fix


def test_nccl_is_needed_by_two_gpus():
    assert links.nccl(GPUS, PACKAGES, None).found.startswith("2.32.3")
    assert links.nccl(GPUS, without("nvidia-nccl-cu12"), None).status == "error"
    one = dataclasses.replace(GPUS, gpus=TWO[:1])
    assert links.nccl(one, without("nvidia-nccl-cu12"), None).status == "ok"


def test_gpus_that_tensorflow_does_not_see_are_an_error():
    assert cuda.devices(GPUS, Answers({"devices": {"gpus": 2}, "a step": {}})).status == "ok"
    for told, words in (
        (Answers({"devices": {"gpus": 0}}), "TensorFlow sees 0 of 2"),
        (Answers({"devices": {"gpus": 2}}, {"a step": "was ended by SIGSEGV"}), "SIGSEGV"),
        (Answers({}, {"devices": "gave no answer within 9 s"}), "gave no answer"),
    ):
        found = cuda.devices(GPUS, told)
        assert found.status == "error"
        assert words in found.found
    by_keras = Answers({"TensorFlow": {}}, {"Keras": "no jax", "devices": "no jax"})
    assert cuda.devices(GPUS, by_keras).status == "warning"


# ----- GPUs.


def test_sound_gpus_are_ok_throughout():
    found = gpus.check(GPUS, BUILD, own_pid=1, engines=None)
    assert {each.status for each in found} == {"ok"}, found
    text = " ".join(each.found for each in found)
    assert "2 x NVIDIA H200, 140 GiB each" in text
    assert "18 links each" in links.nvlink(GPUS).found


HELD = (Holder(pid=4242, name="python train.py", bytes=100 * GIB),)
PLANTED = [
    (
        {"memory_used": 101 * GIB, "holders": HELD},
        "GPU memory",
        "warning",
        "python train.py (4242)",
    ),
    (
        {"memory_used": 139 * GIB, "holders": HELD},
        "GPU memory",
        "error",
        "GPU 1: 1 of 140 GiB free",
    ),
    (
        {"memory_used": 6 * GIB, "holders": HELD},
        "GPU memory",
        "ok",
        "134 GiB free on each, a little held by python train.py (4242)",
    ),
    ({"memory_used": 99 * GIB}, "GPU memory", "warning", "by a process that is not visible here"),
    ({"compute_mode": 3, "holders": HELD}, "GPU memory", "error", "exclusive"),
    ({"compute_mode": 2}, "GPU memory", "error", "nvidia-smi -i 1 -c DEFAULT"),
    ({"ecc_errors": 3}, "GPU health", "error", "3 memory errors"),
    ({"remap": (1, 0)}, "GPU health", "warning", "restart"),
    ({"remap": (0, 1)}, "GPU health", "error", "replace"),
    ({"slowdowns": 0x40}, "GPU health", "warning", "too hot"),
    ({"slowdowns": 0x80}, "GPU health", "warning", "power"),
    ({"power_limit_w": 300}, "GPU health", "warning", "limit of 300 W, below the default of 700 W"),
    ({"mig": True}, "GPUs", "warning", "MIG"),
    ({"capability": (5, 2), "name": "Tesla M40"}, "GPUs", "error", "requires 6.0 or more"),
    ({"name": "NVIDIA A100"}, "GPUs", "warning", "differ"),
    ({"has_jpeg_engine": False}, "nvJPEG", "ok", "none on GPU 1"),
]


@pytest.mark.parametrize(("plant", "name", "status", "words"), PLANTED)
def test_a_planted_fault_of_one_gpu_is_named(plant, name, status, words):
    found = gpus.check(changed(**plant), BUILD, own_pid=1, engines=None)
    (line,) = [each for each in found if each.name == name]
    assert line.status == status
    assert words in f"{line.found} {line.fix}"
    assert not [each for each in found if each.name != name and each.status != "ok"]


# What TensorFlow 2.21's wheel was built for.
WHEEL = Build("12.5.1", "9", ("sm_60", "sm_70", "sm_80", "sm_89", "compute_90"))
SOURCE = Build("12.9.1", "9", ("sm_90", "sm_100"))  # no PTX


@pytest.mark.parametrize(
    ("capability", "build", "status", "words"),
    [
        ((9, 0), WHEEL, "ok", "compute capability 9.0"),
        ((7, 5), WHEEL, "ok", "compute capability 7.5"),
        ((8, 6), WHEEL, "ok", "compute capability 8.6"),
        ((10, 0), WHEEL, "warning", "are for GPUs up to 9.0; the driver compiles them again"),
        ((10, 0), WHEEL, "warning", "CUDA 12.8 or newer"),
        ((12, 0), WHEEL, "warning", "HERMETIC_CUDA_COMPUTE_CAPABILITIES=sm_120"),
        ((12, 0), WHEEL, "warning", "export CUDA_CACHE_MAXSIZE=4294967296"),
        ((10, 3), SOURCE, "ok", "compute capability 10.3"),
        ((12, 0), SOURCE, "error", "TensorFlow has no kernels that run on it"),
        ((12, 0), None, "ok", "compute capability 12.0"),
        ((12, 0), Build("", None, ()), "ok", "compute capability 12.0"),
    ],
)
def test_a_gpu_newer_than_tensorflow_is_named(capability, build, status, words):
    newer = dataclasses.replace(H200, capability=capability)
    found = gpus.kinds(dataclasses.replace(GPUS, gpus=(newer,)), build)
    assert found.status == status
    assert words in f"{found.found} {found.fix}"


def test_libraries_that_are_older_than_the_gpu_are_named():
    newer = changed(capability=(12, 0))
    assert cuda.libraries(newer, PACKAGES, None, {}).status == "ok"
    old = {**PACKAGES.versions, "nvidia-cudnn-cu12": "9.5.1", "nvidia-cublas-cu12": "12.6.4"}
    packages = dataclasses.replace(PACKAGES, versions=old)
    assert cuda.libraries(GPUS, packages, None, {}).status == "ok"
    found = cuda.libraries(newer, packages, None, {})
    assert found.status == "error"
    assert "nvidia-cublas-cu12 12.6.4, nvidia-cudnn-cu12 9.5.1: too old" in found.found
    assert "'nvidia-cublas-cu12>=12.8' 'nvidia-cudnn-cu12>=9.7'" in found.fix


@pytest.mark.parametrize(
    ("why", "line"),
    [
        ("'cuLaunchKernel' failed with 'CUDA_ERROR_INVALID_HANDLE'", "GPUs"),
        ("no", "CUDA libraries"),
    ],
)
def test_a_step_that_fails_for_want_of_kernels_points_to_the_gpus(why, line):
    answers = Answers({"devices": {"gpus": 2}}, {"a step": why})
    assert cuda.devices(GPUS, answers).fix == f"see the line `{line}`"


def test_memory_that_is_held_by_the_caller_itself_is_no_fault():
    mine = changed(memory_used=101 * GIB, holders=HELD)
    assert gpus.memory(mine, own_pid=4242).status == "ok"


def test_gpus_over_pcie_are_told_what_that_means():
    far = {(0, 1): "PCIe, through the CPU"}
    found = links.nvlink(dataclasses.replace(GPUS, links=far))
    assert found.status == "warning"
    assert "through the CPU" in found.found
    assert links.nvlink(dataclasses.replace(GPUS, gpus=TWO[:1], links={})) is None


def test_links_that_are_down_are_named():
    found = links.nvlink(changed(nvlinks=9))
    assert found.status == "warning"
    assert "9 links on GPU 1, 18 links on GPU 0" in found.found


def test_the_numbers_of_engines_are_those_that_nvjpeg_tells():
    assert "7 engines" in gpus.jpeg(GPUS, {"0": 7, "1": 7}).found


@pytest.mark.parametrize(
    ("value", "indices"),
    [
        (None, [0, 1]),
        ("1", [1]),
        ("GPU-1", [1]),
        ("", []),
        ("-1", []),
        ("MIG-x", [0, 1]),
        ("1,0", [1, 0]),
    ],
)
def test_only_the_visible_gpus_are_judged(value, indices):
    environment = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert [each.index for each in visible(GPUS, environment).gpus] == indices
