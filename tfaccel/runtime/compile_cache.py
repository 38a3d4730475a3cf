"""Keeps the programs that XLA compiled for a GPU, with TensorFlow's persistent cache.

The cache is in ~/.cache/tfaccel/xla.

    prepare(wanted=True)                # before TensorFlow is asked for its devices
    use({"tensorflow": "2.21.0", "gpus": [...], "tf32": True})      # before XLA compiles
    leave_out("compile_cache=False is set")                         # use no cache

TensorFlow finds an entry by the program's text and shapes, and compares the whole text. An entry
does not record the GPU, driver, library versions and flags that it was compiled for, so each set of
these has its own folder.

TensorFlow reads the cache's path once, when it is first asked for its devices. At that time the
devices are not known yet, and a notebook may later call `setup` with other settings. The path is
therefore a link that belongs to this process, and `use` makes it point to a folder. Entries are
programs, so only the user may access the folders.

Nothing is kept on the CPU. XLA's CPU programs name features that its own loader does not know, and
it warns of illegal instructions (TensorFlow 2.21).
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
import pathlib
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import BinaryIO

from tfaccel.common import own_files, temporary
from tfaccel.process.cache_folder import cache_folder, make_own
from tfaccel.runtime.private_names import devices_are_known

log = logging.getLogger("tfaccel")

DEVICE_TYPE = "GPU"
FLAG = "--tf_xla_persistent_cache_directory"
LINK_PREFIX = "tfaccel-xla-"  # tells a parent's link from a user's choice
OURS = re.compile(rf"{FLAG}=\S*/{LINK_PREFIX}\S+( --tf_xla_persistent_cache_device_types=\S+)?")

MOST_BYTES = 4 << 30  # ResNet-50's step is about 30 MB
LARGEST_BYTES = 64 << 20
# If an entry cannot be written, TensorFlow ends the run with an error.
LEAST_FREE_BYTES = 1 << 30
DAY_S = 24 * 3600

_own: list[temporary.Held] = []  # the folder of the link; it lives as long as the process


def prepare(*, wanted: bool) -> None:
    """Gives TensorFlow an empty folder as its cache, before it reads its flags.

    Args:
      wanted: whether `use` will follow. If not, this process has no cache, not even its parent's.
    """
    if _is_prepared() or devices_are_known():
        return  # TensorFlow has read its flags
    temporary.remove_left()  # every start removes what killed processes left
    flags, root = _flags(), cache_folder("xla")
    if wanted and FLAG not in flags:
        with contextlib.suppress(OSError):  # `use` will report it
            make_own(root)
            _remove_oldest(root)
            check_room(root)
            place = f"{FLAG}={_link()} --tf_xla_persistent_cache_device_types={DEVICE_TYPE}"
            flags = f"{flags} {place}".strip()
    os.environ["TF_XLA_FLAGS"] = flags


def use(decides: Mapping[str, object]) -> None:
    """Makes XLA use the cache for `decides`: all that an entry depends on, as values for JSON."""
    if FLAG in _flags():
        return log.info("compile cache: set by TF_XLA_FLAGS")
    text = json.dumps(dict(decides), indent=2, sort_keys=True)
    folder = cache_folder("xla") / hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    try:
        make_own(folder.parent)
        make_own(folder)
        check_room(folder)
        if not _is_prepared():
            return leave_out(
                "TensorFlow has read its flags: only the first tfaccel.setup can turn it on, and "
                "only before any other use of TensorFlow"
            )
        (folder / "settings.json").write_text(text)
        _remove_unfinished(folder)
        _point_to(folder)
    except OSError as error:
        return leave_out(f"{folder} cannot be used ({error.strerror or error})")
    entries = len(list(folder.glob("*.pb")))
    no_error = "; TensorFlow may print 'Error parsing text-format' for each, which is no error"
    return log.info(
        "compile cache: %s, %d programs%s", folder, entries, no_error if entries else ""
    )


def leave_out(reason: str) -> None:
    """Makes XLA compile everything again, and logs the reason."""
    if _is_prepared():
        _point_to(_link().parent / "unused")
    log.info("compile cache: off, because %s", reason)


# Which programs are there. TensorFlow knows it only once a step is traced, so words stand for it.


def programs() -> frozenset[str]:
    """Returns the names of the entries in the folder that this process uses."""
    folder = _in_use()
    return frozenset(each.name for each in folder.glob("*.pb")) if folder else frozenset()


def has(of: str) -> bool:
    """Returns whether all programs that an earlier process compiled for `of` are still there."""
    folder = _in_use()
    if folder is None:
        return False
    try:
        names = json.loads(_list_of(folder, of).read_bytes())
        return bool(names) and all((folder / str(each)).exists() for each in names)
    except (OSError, ValueError, TypeError):
        return False


def note(of: str, before: frozenset[str]) -> None:
    """Keeps which programs were compiled for `of`: those that were not there before.

    Args:
      of: what the programs depend on, such as the model, the batch and the optimizer.
      before: what `programs()` returned before XLA compiled them.
    """
    folder, new = _in_use(), programs() - before
    if folder is not None and new:
        with contextlib.suppress(OSError):  # then the next process takes them for missing
            own_files.replace(_list_of(folder, of), json.dumps(sorted(new)).encode())


def _list_of(folder: pathlib.Path, of: str) -> pathlib.Path:
    return folder / f"{hashlib.blake2b(of.encode(), digest_size=16).hexdigest()}.programs.json"


def _in_use() -> pathlib.Path | None:
    if not _is_prepared():
        return None
    folder = _link().resolve()
    return None if folder == (_link().parent / "unused").resolve() else folder


def _flags() -> str:
    """Returns TF_XLA_FLAGS without the part that `prepare` added, here or in the parent."""
    return OURS.sub("", os.environ.get("TF_XLA_FLAGS", "")).strip()


def _is_prepared() -> bool:
    return _link.cache_info().currsize > 0


@functools.cache
def _link() -> pathlib.Path:
    """Returns this process's link, which first points to an empty folder."""
    # TensorFlow's flags do not allow blanks or quotes in a path.
    plain = not re.search(r"[\s'\"\\]", tempfile.gettempdir())
    _own.append(temporary.Held("xla", parent=None if plain else "/tmp"))
    own = _own[-1].path
    unused = own / "unused"  # without it, TensorFlow would end the run
    unused.mkdir()
    link = own / "entries"
    link.symlink_to(unused)
    return link


def _point_to(folder: pathlib.Path) -> None:
    _link().unlink(missing_ok=True)
    _link().symlink_to(folder)


# The folder. Other processes write and remove files there at the same time.


def check_room(folder: pathlib.Path) -> None:
    """Raises OSError if the disk, or the user's quota, has no room for what XLA writes."""
    if shutil.disk_usage(folder).free < LEAST_FREE_BYTES:
        raise OSError(f"less than {LEAST_FREE_BYTES >> 20} MiB are free")
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, LARGEST_BYTES)


def _remove_oldest(root: pathlib.Path) -> None:
    """Removes the entries that were not used for longest, until the rest is small enough."""
    entries = dict(_found(root, "*/*.pb"))
    size = sum(each.st_size for each in entries.values())
    for path in sorted(
        entries, key=lambda each: max(entries[each].st_atime, entries[each].st_mtime)
    ):
        if size <= MOST_BYTES:
            return
        size -= entries[path].st_size
        path.unlink(missing_ok=True)


def _remove_unfinished(folder: pathlib.Path) -> None:
    """Removes entries that are incomplete.

    TensorFlow would end the run with an error that does not name the file. It renames an entry
    after writing it, but does not wait for the disk, so that a power cut may leave a short file.
    """
    for path, found in _found(folder, "*.tmp"):
        if time.time() - found.st_mtime > DAY_S:
            path.unlink(missing_ok=True)
    for path, found in _found(folder, "*.pb"):
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            if not _is_whole(file, found.st_size):
                log.warning("compile cache: removed %s, which was damaged", path)
                path.unlink(missing_ok=True)


def _found(folder: pathlib.Path, pattern: str) -> Iterator[tuple[pathlib.Path, os.stat_result]]:
    for path in folder.glob(pattern):
        with contextlib.suppress(FileNotFoundError):
            yield path, path.stat()


def _is_whole(file: BinaryIO, size: int) -> bool:
    """Returns whether the outermost fields of a protocol buffer end at the end of the file.

    TensorFlow's wheel has no Python class for its entries. Their fields are all bytes.
    """
    num_fields = 0
    while file.tell() < size:
        if _varint(file) & 7 != 2:
            return False
        file.seek(_varint(file), os.SEEK_CUR)
        num_fields += 1
    return num_fields >= 3 and file.tell() == size  # key, program and executable


def _varint(file: BinaryIO) -> int:
    """Returns a number in protocol buffers' encoding: 7 bits per byte, the last byte below 128."""
    number = 0
    for shift in range(0, 64, 7):
        byte = file.read(1)
        if not byte:
            break
        number |= (byte[0] & 127) << shift
        if byte[0] < 128:
            break
    return number
