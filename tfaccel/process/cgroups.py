"""The memory and CPU limits of this process's control groups, set by a container or a scheduler.

min(memory_rooms(), default=None), cpu_quota()

The file names are those of the Linux kernel's admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst and
scheduler/sched-bwc.rst. `groups` is the file with the names of this process's groups: "0::/path" in
version 2, "4:memory:/path" in version 1. `root` is the folder of all groups; a container may see
only its own group there.
"""

import pathlib
from collections.abc import Iterator

GROUPS = pathlib.Path("/proc/self/cgroup")
ROOT = pathlib.Path("/sys/fs/cgroup")


def memory_rooms(groups: pathlib.Path = GROUPS, root: pathlib.Path = ROOT) -> list[int]:
    """Returns the bytes that are free under each limit on this process's groups and their parents.

    Cached pages of files count as free, because the kernel can drop them, except for those of
    /dev/shm and other tmpfs.
    """
    rooms = []
    for folder, version in _folders("memory", groups, root):
        names = ("memory.max", "memory.current", "file", "shmem")
        if version == 1:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_shmem")
        rooms += _room(folder, *names)
    return rooms


def _room(folder: pathlib.Path, limit: str, used: str, cache: str, shared: str) -> list[int]:
    """Returns a list with the free bytes, or an empty one if there is no limit."""
    allowed, taken, stat = (_text(folder / name) for name in (limit, used, "memory.stat"))
    # The root group has no such files. Version 1 writes "no limit" as a huge number.
    if not allowed.isdigit() or not taken.isdigit():
        return []
    pages = dict(line.split() for line in stat.splitlines())
    makes_way = int(pages.get(cache, 0)) - int(pages.get(shared, 0))
    return [max(0, int(allowed) - int(taken) + makes_way)]


def cpu_quota(groups: pathlib.Path = GROUPS, root: pathlib.Path = ROOT) -> float | None:
    """Returns the number of cores whose time this process may use, e.g. 2.5; None for no limit."""
    found = []
    for folder, version in _folders("cpu", groups, root):
        names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = " ".join(_text(folder / name) for name in names).split()
        if len(words) == 2 and words[0].isdigit():
            found.append(int(words[0]) / int(words[1]))
    return min(found, default=None)


def _folders(
    controller: str, groups: pathlib.Path, root: pathlib.Path
) -> Iterator[tuple[pathlib.Path, int]]:
    """Yields the folders of this process's groups and their parents, with the groups' version."""
    for line in _text(groups).splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds and controller not in kinds.split(","):
            continue
        own = pathlib.PurePath(path.lstrip("/"))
        for each in dict.fromkeys((own, *own.parents)):
            # Version 1 has a folder for each set of controllers, such as "cpu,cpuacct".
            yield (root / kinds / each, 1) if kinds else (root / each, 2)


def _text(file: pathlib.Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
