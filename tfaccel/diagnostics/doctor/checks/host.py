"""Checks whether the host's cores, memory, limits and disks are enough for its GPUs.

check(read_host(os.environ), num_gpus=2)
"""

import pathlib

from tfaccel.common.tables import in_figures
from tfaccel.diagnostics.doctor.facts.disk import Reading
from tfaccel.diagnostics.doctor.facts.host import CUFILE, Host
from tfaccel.diagnostics.doctor.table import Finding, error, ok, warning

MIB, GIB = 2**20, 2**30
CORES_PER_GPU = 4  # MLPerf's entries give DALI 6 threads a GPU; with fewer than 4, GPUs wait
MEMORY = 4 * GIB  # a process with TensorFlow and CUDA takes about 3 before any data
# NCCL fails with 64 MiB, which is Docker's default; NVIDIA recommends 1 GiB.
SHM_NEEDED, SHM_WANTED = 64 * MIB, GIB
FILES_NEEDED, FILES_WANTED, FILES_GOOD = 256, 1024, 65536
CACHE = 5 * GIB  # 4 for compiled XLA programs, and some spare room
SLOW_MB_PER_S, SLOW_FILES_PER_S = 100, 1000  # what a small GPU consumes: JPEG files of 110 KB


def check(host: Host, *, num_gpus: int) -> list[Finding]:
    """Returns one line for each check."""
    return [
        cores(host, num_gpus),
        memory(host),
        shared_memory(host, num_gpus=num_gpus),
        open_files(host),
        cache(host),
        *([direct_storage(host)] if num_gpus else []),
    ]


def cores(host: Host, num_gpus: int) -> Finding:
    """Checks whether there are enough cores for the GPUs."""
    if host.cpu_quota is not None and host.cpu_quota < host.cores:
        return warning(
            "cores",
            f"{host.cores}, but a container or a scheduler allows the time of only "
            f"{in_figures(host.cpu_quota)} of them; libraries start a thread for each core, and "
            "these threads then stand still for part of the time",
            "bind the process to cores, e.g. with `docker run --cpuset-cpus`, or raise the limit",
        )
    each = host.cores // max(1, num_gpus)
    if num_gpus and each < CORES_PER_GPU:
        return warning(
            "cores",
            f"{host.cores}: {each} for each of {num_gpus} GPUs; the GPUs may wait for images",
            f"request {CORES_PER_GPU * num_gpus} or more, e.g. with `sbatch --cpus-per-task`",
        )
    return ok("cores", f"{host.cores}" + (f", {each} for each GPU" if num_gpus > 1 else ""))


def memory(host: Host) -> Finding:
    """Checks whether the host has enough free memory."""
    free = host.memory_available
    said = f"{_size(free)} of {_size(host.memory_total)} free"
    if host.memory_room is not None and host.memory_room < free:
        free = host.memory_room
        said += f", but only {_size(free)} remain below the limit of a container or a scheduler"
    if free < MEMORY:
        judge = error if free < GIB else warning
        return judge(
            "memory",
            f"{said}; a run takes about 3 GiB before any data",
            "end other programs, or request more (`docker run --memory`, `sbatch --mem`)",
        )
    return ok("memory", said)


def shared_memory(host: Host, *, num_gpus: int) -> Finding:
    """Checks /dev/shm, which NCCL and the workers of one host use to exchange data."""
    found = f"{_size(host.shm_free)} free of {_size(host.shm_total)} in /dev/shm"
    if num_gpus < 2 or host.shm_free >= SHM_WANTED:
        return ok("shared memory", found)
    judge = error if host.shm_free <= SHM_NEEDED else warning
    return judge(
        "shared memory",
        f"{found}; NCCL between {num_gpus} GPUs may fail with so little",
        "docker run --shm-size=1g, or `mount -o remount,size=1G /dev/shm`; delete the files that "
        "ended processes left there",
    )


def open_files(host: Host) -> Finding:
    """Checks how many files a process may open: shards, sockets and libraries."""
    if host.open_files >= FILES_WANTED:
        return ok("open files", f"at most {host.open_files:,}")
    judge = error if host.open_files < FILES_NEEDED else warning
    fix = f"ulimit -n {FILES_GOOD}"
    if host.open_files_hard < FILES_WANTED:
        fix = f"raise the hard limit in /etc/security/limits.conf, then {fix}"
    elif host.open_files_hard < FILES_GOOD:
        fix = f"ulimit -n {host.open_files_hard}"
    return judge("open files", f"at most {host.open_files:,}, less than {FILES_WANTED:,}", fix)


def cache(host: Host) -> Finding:
    """Checks the folder for files that can be made again."""
    fix = "set XDG_CACHE_HOME to a folder on a disk with enough space, the same in every run"
    if not host.cache_writable:
        return warning("cache folder", f"{host.cache} cannot be written to", fix)
    found = f"{_size(host.cache_free)} free at {host.cache}"
    if host.cache_free < CACHE:
        return warning("cache folder", f"{found}; tfaccel uses up to {_size(CACHE)}", fix)
    return ok("cache folder", found)


def direct_storage(host: Host) -> Finding:
    """Reports whether GPUs can read files without the host's memory. It is no fault if not."""
    missing = [] if host.cufile else [f"no {CUFILE}"]
    missing += [] if host.nvidia_fs else ["no nvidia_fs module"]
    if missing:
        reason = ", ".join(missing)
        return ok("GDS", f"GPUDirect Storage: off ({reason}); reads go through the host's memory")
    # tfaccel's loaders do not use it, but your DALI pipeline can, with fn.readers.numpy on the GPU.
    return ok("GDS", f"GPUDirect Storage: on, through {host.cufile}")


def data(folder: pathlib.Path, reading: Reading | None, problem: str | None) -> Finding:
    """Checks how fast the data's files are read. `problem` says why there is no reading."""
    if reading is None:
        return error(
            "data",
            f"reading from {folder} {problem}",
            "check whether the disk or the file server answers (`ls`, `dmesg`)",
        )
    if not reading.num_bytes:
        return error("data", f"{folder} has no readable file", "pass the folder of the data")
    per_s = reading.num_bytes / 1e6 / max(reading.seconds, 1e-9)
    files_per_s = reading.num_files / max(reading.seconds, 1e-9)
    found = (
        f"read {_size(reading.num_bytes)} of {reading.num_files:,} files in {reading.seconds:.1f} "
        f"s: {per_s:,.0f} MB/s, {files_per_s:,.0f} files/s"
    )
    if reading.from_device is not None and reading.from_device < reading.num_bytes / 2:
        found += "; most of it was already in memory, so the disk itself is slower"
    if per_s < SLOW_MB_PER_S and files_per_s < SLOW_FILES_PER_S:
        return warning(
            "data",
            f"{found}, at {folder}; GPUs will wait for data in the first epoch, or in every epoch",
            'copy the data to a local SSD, pack it in shards, or use loader="cache" or "memory"',
        )
    return ok("data", found)


def _size(number: int) -> str:
    if number < GIB:
        return f"{number / MIB:.0f} MiB" if number < GIB // 2 else f"{number / GIB:.1f} GiB"
    return f"{number / GIB:,.0f} GiB"
