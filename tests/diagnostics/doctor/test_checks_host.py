"""Cores, memory, limits, disk and variables, judged by planted facts."""

import dataclasses
import pathlib

import pytest
from test_checks_gpus import GPUS

from tfaccel.diagnostics.doctor.checks import host as checks
from tfaccel.diagnostics.doctor.checks import variables
from tfaccel.diagnostics.doctor.facts import host as facts
from tfaccel.diagnostics.doctor.facts.disk import Reading
from tfaccel.diagnostics.doctor.facts.gpus import visible
from tfaccel.diagnostics.doctor.facts.host import Host
from tfaccel.diagnostics.doctor.table import ok

GIB = 2**30
HOST = Host(
    cores=32,
    cpu_quota=None,
    memory_total=256 * GIB,
    memory_available=200 * GIB,
    memory_room=None,
    shm_total=64 * GIB,
    shm_free=60 * GIB,
    open_files=65536,
    open_files_hard=1048576,
    cache=pathlib.Path("/home/me/.cache/tfaccel"),
    cache_free=500 * GIB,
    cache_writable=True,
    gpus_on_bus=2,
    cufile="/lib/libcufile.so.0",
    nvidia_fs=True,
    keras_backend=None,
)


def test_a_sound_host_is_ok_throughout():
    found = checks.check(HOST, num_gpus=2)
    assert {each.status for each in found} == {"ok"}, found
    assert [each.name for each in found] == [
        "cores", "memory", "shared memory", "open files", "cache folder", "GDS"
    ]  # fmt: skip


PLANTED = [
    ({"cores": 4}, 2, "cores", "warning", "2 for each of 2 GPUs"),
    ({"cpu_quota": 3.0}, 0, "cores", "warning", "3 of them"),
    ({"memory_available": GIB // 2}, 0, "memory", "error", "0.5 GiB"),
    ({"memory_available": 3 * GIB}, 0, "memory", "warning", "3 GiB"),
    ({"memory_room": 2 * GIB}, 0, "memory", "warning", "only 2 GiB remain below the limit"),
    ({"memory_room": 0}, 0, "memory", "error", "only 0 MiB remain below the limit"),
    ({"shm_total": 64 << 20, "shm_free": 64 << 20}, 2, "shared memory", "error", "--shm-size"),
    ({"shm_total": 512 << 20, "shm_free": 512 << 20}, 2, "shared memory", "warning", "--shm-size"),
    ({"shm_free": 1 << 20}, 2, "shared memory", "error", "1 MiB free"),
    ({"open_files": 64}, 0, "open files", "error", "ulimit -n 65536"),
    ({"open_files": 512, "open_files_hard": 512}, 0, "open files", "warning", "limits.conf"),
    ({"cache_free": GIB // 2}, 0, "cache folder", "warning", "XDG_CACHE_HOME"),
    ({"cache_writable": False}, 0, "cache folder", "warning", "cannot be written"),
]


@pytest.mark.parametrize(("plant", "num_gpus", "name", "status", "words"), PLANTED)
def test_a_planted_shortage_is_named(plant, num_gpus, name, status, words):
    found = checks.check(dataclasses.replace(HOST, **plant), num_gpus=num_gpus)
    (wrong,) = [each for each in found if each.status != "ok"]
    assert (wrong.name, wrong.status) == (name, status)
    assert words in f"{wrong.found} {wrong.fix}"


def test_small_shared_memory_is_fine_for_one_process():
    small = dataclasses.replace(HOST, shm_total=64 << 20, shm_free=64 << 20)
    assert checks.shared_memory(small, num_gpus=1).status == "ok"


THROUGH_HOST = "reads go through the host's memory"
STORAGES = [
    ({}, "GPUDirect Storage: on, through /lib/libcufile.so.0"),
    (
        {"nvidia_fs": False},
        f"GPUDirect Storage: off (no nvidia_fs module); {THROUGH_HOST}",
    ),
    ({"cufile": None}, f"GPUDirect Storage: off (no libcufile.so.0); {THROUGH_HOST}"),
    (
        {"cufile": None, "nvidia_fs": False},
        f"GPUDirect Storage: off (no libcufile.so.0, no nvidia_fs module); {THROUGH_HOST}",
    ),
]


@pytest.mark.parametrize(("plant", "words"), STORAGES)
def test_b15_direct_storage_is_told_and_never_a_fault(plant, words):
    planted = dataclasses.replace(HOST, **plant)
    assert checks.check(planted, num_gpus=1)[-1] == ok("GDS", words)
    assert "GDS" not in [each.name for each in checks.check(planted, num_gpus=0)]


def test_b15_the_library_is_found_in_its_wheel_or_where_libraries_are_loaded_from(
    tmp_path, monkeypatch
):
    asked = []
    monkeypatch.setattr(facts, "find_library", lambda name: asked.append(name))
    assert facts._cufile(["/nowhere", str(tmp_path)]) is None
    monkeypatch.setattr(facts, "find_library", lambda name: f"lib{name}.so.0")
    assert facts._cufile([]) == "libcufile.so.0"
    wheel = tmp_path / "nvidia" / "cufile" / "lib" / "libcufile.so.0"
    wheel.parent.mkdir(parents=True)
    wheel.touch()
    assert facts._cufile(["/nowhere", str(tmp_path)]) == str(wheel)
    assert asked == ["cufile"]


def test_b15_the_module_is_known_by_its_counters(tmp_path, monkeypatch):
    counters = tmp_path / "stats"
    monkeypatch.setattr(facts, "NVIDIA_FS", counters)
    assert not facts.read_host({}).nvidia_fs
    counters.touch()
    assert facts.read_host({}).nvidia_fs


def reading(**fields):
    size = 100 << 20
    plain = {"num_files": 1000, "num_bytes": size, "seconds": 1.0, "from_device": size}
    return Reading(**{**plain, **fields})


READINGS = [
    (reading(), "ok", "100 MiB of 1,000 files in 1.0 s: 105 MB/s, 1,000 files/s"),
    (reading(seconds=5.0), "warning", "21 MB/s"),
    (reading(num_bytes=1 << 20, seconds=0.1), "ok", "10,000 files/s"),  # small files
    (reading(from_device=0), "ok", "already in memory"),
    (reading(num_files=0, num_bytes=0), "error", "no readable file"),
]


@pytest.mark.parametrize(("planted", "status", "words"), READINGS)
def test_a_slow_disk_is_named_with_what_was_read(planted, status, words):
    found = checks.data(pathlib.Path("/data"), planted, None)
    assert found.status == status
    assert words in found.found


def test_a_folder_that_cannot_be_read_in_time_is_an_error():
    found = checks.data(pathlib.Path("/data"), None, "gave no answer within 15 s")
    assert found.status == "error"
    assert "gave no answer within 15 s" in found.found


# ----- Variables.

VARIABLES = [
    ({}, 2, None, ""),
    ({"PATH": "/bin", "XLA_FLAGS": ""}, 2, None, ""),
    ({"CUDA_VISIBLE_DEVICES": "-1"}, 2, "warning", "hides all 2 GPUs"),
    ({"CUDA_VISIBLE_DEVICES": ""}, 1, "warning", "hides all 1 GPUs"),
    ({"CUDA_VISIBLE_DEVICES": "-1"}, 0, None, ""),
    ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 2, "warning", "NoDevFiles hides all 2 GPUs"),
    ({"CUDA_VISIBLE_DEVICES": "GPU-of-another-machine"}, 2, "warning", "hides all 2 GPUs"),
    ({"CUDA_VISIBLE_DEVICES": "GPU-1"}, 2, None, ""),
    ({"CUDA_VISIBLE_DEVICES": "0,2"}, 2, "error", "there is no GPU 2"),
    ({"CUDA_VISIBLE_DEVICES": "1"}, 2, None, ""),
    ({"XLA_FLAGS": "--xla_dump_to=/tmp/x"}, 0, "warning", "--xla_dump_to"),
    ({"XLA_FLAGS": "--xla_gpu_autotune_level=0"}, 0, "ok", "autotune_level=0"),
    ({"TF_XLA_FLAGS": "--tf_xla_auto_jit=2"}, 0, "warning", "auto_jit"),
    ({"TF_GPU_ALLOCATOR": "cuda_malloc_async"}, 2, "warning", "growth"),
    ({"TF_FORCE_GPU_ALLOW_GROWTH": "false"}, 2, "warning", "growth"),
    ({"TF_USE_LEGACY_KERAS": "1"}, 0, "error", "Keras 2"),
    ({"NVIDIA_TF32_OVERRIDE": "0"}, 2, "warning", "TF32"),
    ({"CUDA_LAUNCH_BLOCKING": "1"}, 2, "warning", "one kernel after another"),
    ({"CUDA_CACHE_DISABLE": "1"}, 2, "warning", "every start"),
    ({"TF_CONFIG": "{bad"}, 0, "error", "TF_CONFIG='{bad' cannot be read"),
    ({"TF_CONFIG": "{}"}, 0, None, ""),
    ({"NCCL_P2P_DISABLE": "1"}, 2, "warning", "NVLink"),
    ({"NCCL_P2P_DISABLE": "1"}, 1, None, ""),
    ({"NCCL_P2P_DISABLE": "0"}, 2, None, ""),
]


@pytest.mark.parametrize(("environment", "num_gpus", "status", "words"), VARIABLES)
def test_a_variable_that_matters_has_a_line(environment, num_gpus, status, words):
    gpus = dataclasses.replace(GPUS, gpus=GPUS.gpus[:num_gpus])
    num_visible = len(visible(gpus, environment).gpus)
    found = variables.check(environment, num_gpus, num_visible=num_visible)
    assert [each.status for each in found] == ([status] if status else [])
    assert words in " ".join(each.found for each in found)


def test_a_cuda_on_the_library_path_is_named(tmp_path):
    assert variables.check({"LD_LIBRARY_PATH": str(tmp_path)}, 1, num_visible=1) == []
    (tmp_path / "libcudart.so.11.0").touch()
    path = {"LD_LIBRARY_PATH": f"/nowhere:{tmp_path}"}
    (found,) = variables.check(path, 1, num_visible=1)
    assert found.status == "warning"
    assert str(tmp_path) in found.found
