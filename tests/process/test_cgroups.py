"""Limits of a container or a scheduler, of either version of groups, planted in a folder."""

import pytest

from tfaccel.process.cgroups import cpu_quota, memory_rooms

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
    assert min(memory_rooms(groups, root)) == 900


def test_a_container_sees_its_own_group_as_the_root(tmp_path):
    (tmp_path / "groups").write_text("0::/of/the/host\n")
    group(tmp_path / "cgroup", V2, 1000, 900, 0)
    assert memory_rooms(tmp_path / "groups", tmp_path / "cgroup") == [100]
    (tmp_path / "cgroup/memory.stat").write_text("anon 1\n")
    assert memory_rooms(tmp_path / "groups", tmp_path / "cgroup") == [100]


def test_without_groups_there_is_no_limit(tmp_path):
    assert memory_rooms(tmp_path / "groups", tmp_path) == []
    (tmp_path / "groups").write_text("0::/\n")
    assert memory_rooms(tmp_path / "groups", tmp_path) == []


# ----- Cores.

CPU = [
    ("2", {"cpu.max": "250000 100000"}, 2.5),
    ("2", {"cpu.max": "max 100000"}, None),
    ("1", {"cpu.cfs_quota_us": "400000", "cpu.cfs_period_us": "100000"}, 4.0),
    ("1", {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, None),
    ("2", {}, None),
]


def plant(root, version, files):
    (root / "groups").write_text("0::/a/b\n" if version == "2" else "3:cpu,x:/a/b\n")
    folder = root / "cgroup" / ("a" if version == "2" else "cpu,x/a")
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text + "\n")
    return root / "groups", root / "cgroup"


@pytest.mark.parametrize(("version", "files", "quota"), CPU)
def test_the_quota_of_cores_is_read_from_either_version_of_groups(tmp_path, version, files, quota):
    assert cpu_quota(*plant(tmp_path, version, files)) == quota
