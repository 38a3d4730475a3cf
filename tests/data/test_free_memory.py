import psutil
import pytest

from tfaccel.data.free_memory import cgroup_rooms, free_bytes, nvml_name
from tfaccel.runtime import Device

V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_shmem")
V2 = ("memory.max", "memory.current", "file", "shmem")


def group(folder, names, limit, used, cache, shared=0):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    stat = f"anon 1\n{names[2]} {cache}\n{names[3]} {shared}\n"
    (folder / "memory.stat").write_text(stat)


@pytest.mark.parametrize(
    ("line", "base", "names"),
    [("0::/", "", V2), ("4:cpu,memory:/", "cpu,memory", V1)],
    ids=["v2", "v1"],
)
def test_each_limit_above_a_process_is_seen_and_pages_of_files_make_way(
    tmp_path, line, base, names
):
    root, groups = tmp_path / "cgroup", tmp_path / "groups"
    groups.write_text(f"9:cpuset:/\n{line}slurm/job_1\n")
    group(root / base / "slurm", names, 1000, 700, 700, shared=100)
    group(root / base / "slurm/job_1", names, "max" if base == "" else 2**63, 650, 0)
    assert min(cgroup_rooms(groups, root)) == 900


def test_a_container_sees_its_own_group_as_the_root(tmp_path):
    (tmp_path / "groups").write_text("0::/of/the/host\n")
    group(tmp_path / "cgroup", V2, 1000, 900, 0)
    assert cgroup_rooms(tmp_path / "groups", tmp_path / "cgroup") == [100]
    (tmp_path / "cgroup/memory.stat").write_text("anon 1\n")
    assert cgroup_rooms(tmp_path / "groups", tmp_path / "cgroup") == [100]


def test_without_groups_there_is_no_limit(tmp_path):
    assert cgroup_rooms(tmp_path / "groups", tmp_path) == []
    (tmp_path / "groups").write_text("0::/\n")
    assert cgroup_rooms(tmp_path / "groups", tmp_path) == []


def test_what_is_free_here_is_shared_by_the_workers_of_the_machine():
    cpu = Device("/cpu:0", None)
    assert 0 < free_bytes(cpu) <= psutil.virtual_memory().total
    assert free_bytes(cpu, 4) < 0.3 * free_bytes(cpu)


@pytest.mark.parametrize(
    ("visible", "name"),
    [(None, 1), ("", 1), ("3,2", 2), ("GPU-a, GPU-b", "GPU-b"), ("0,MIG-x", "MIG-x")],
)
def test_what_nvml_calls_a_gpu(visible, name):
    assert nvml_name(1, visible) == name
