"""What XLA compiled for this GPU before, kept for the next process: TensorFlow's persistent cache.

Takes what decides how XLA compiles; tells TensorFlow the place, in ~/.cache/tfaccel/xla.

    prepare(wanted=True)                # before TensorFlow is asked for its devices
    use({"tensorflow": "2.21.0", "gpus": [...], "tf32": True})      # before XLA compiles
    leave_out("compile_cache=False asks for that")                  # compile anew

An entry is found by the program's text and shapes, and its text is compared whole; neither says
which GPU, driver, library or flags it was compiled for. So each set of these has a folder.

TensorFlow reads the place once, with the first question for its devices, when it is not yet known
which there are; and a notebook may call `setup` again with other settings. So the place is a link
of this process, and `use` points it at a folder. Entries are programs, so that the folders are the
user's alone.

On the CPU nothing is kept: XLA's CPU programs name features that its own loader does not know, and
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

from tfaccel.common import temporary
from tfaccel.process.cache_folder import cache_folder
from tfaccel.runtime.private_names import devices_are_known

log = logging.getLogger("tfaccel")

DEVICE_TYPE = "GPU"
FLAG = "--tf_xla_persistent_cache_directory"
LINK_PREFIX = "tfaccel-xla-"  # so that a child does not take its parent's link for a user's choice
OURS = re.compile(rf"{FLAG}=\S*/{LINK_PREFIX}\S+( --tf_xla_persistent_cache_device_types=\S+)?")

MOST_BYTES = 4 << 30  # ResNet-50's step is about 30 MB
LARGEST_BYTES = 64 << 20
# Where an entry cannot be written, the run ends with TensorFlow's error.
LEAST_FREE_BYTES = 1 << 30
DAY_S = 24 * 3600

_own: list[temporary.Held] = []  # the folder of the link, for as long as the process


def prepare(*, wanted: bool) -> None:
    """Tells TensorFlow a place where nothing is kept yet, before it reads its flags.

    Args:
      wanted: whether `use` is to follow. If not, this process keeps nothing, nor takes its parent's
        place.
    """
    if _is_prepared() or devices_are_known():
        return  # TensorFlow has read its flags
    temporary.remove_left()  # of any kind: each start clears up after processes that were killed
    flags, root = _flags(), cache_folder("xla")
    if wanted and FLAG not in flags:
        with contextlib.suppress(OSError):  # `use` will say it
            _make_own(root)
            _remove_oldest(root)
            _check_room(root)
            place = f"{FLAG}={_link()} --tf_xla_persistent_cache_device_types={DEVICE_TYPE}"
            flags = f"{flags} {place}".strip()
    os.environ["TF_XLA_FLAGS"] = flags


def use(decides: Mapping[str, object]) -> None:
    """Lets XLA take programs from the cache, and put there what it compiles.

    Args:
      decides: JSON-ready, what an entry must have been compiled with.
    """
    if FLAG in _flags():
        return log.info("compile cache: as TF_XLA_FLAGS says")
    text = json.dumps(dict(decides), indent=2, sort_keys=True)
    folder = cache_folder("xla") / hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    try:
        _make_own(folder.parent)
        _make_own(folder)
        _check_room(folder)
        if not _is_prepared():
            return leave_out(
                "TensorFlow has read its flags: only the first tfaccel.setup, before any other "
                "use of TensorFlow, can ask for it"
            )
        (folder / "settings.json").write_text(text)
        _remove_unfinished(folder)
        _point_to(folder)
    except OSError as error:
        return leave_out(f"{folder} cannot be used ({error.strerror or error})")
    entries = len(list(folder.glob("*.pb")))
    no_error = "; 'Error parsing text-format' is TensorFlow's first guess at each, and no error"
    return log.info(
        "compile cache: %s, %d programs%s", folder, entries, no_error if entries else ""
    )


def leave_out(reason: str) -> None:
    """Lets XLA compile everything anew, and says why."""
    if _is_prepared():
        _point_to(_unused())
    log.info("compile cache: none, because %s", reason)


def _flags() -> str:
    """Returns TF_XLA_FLAGS without what `prepare` added, in this process or its parent."""
    return OURS.sub("", os.environ.get("TF_XLA_FLAGS", "")).strip()


def _is_prepared() -> bool:
    return _link.cache_info().currsize > 0


@functools.cache
def _link() -> pathlib.Path:
    """Returns this process's link, which points to a folder of its own at first."""
    # TensorFlow's flags take no blank or quote in a path.
    plain = not re.search(r"[\s'\"\\]", tempfile.gettempdir())
    _own.append(temporary.Held("xla", parent=None if plain else "/tmp"))
    own = _own[-1].path
    unused = own / "unused"  # TensorFlow ends the run where there is none
    unused.mkdir()
    link = own / "entries"
    link.symlink_to(unused)
    return link


def _unused() -> pathlib.Path:
    return _link().parent / "unused"


def _point_to(folder: pathlib.Path) -> None:
    _link().unlink(missing_ok=True)
    _link().symlink_to(folder)


# The folder. Other processes write and remove there at the same time.


def _make_own(folder: pathlib.Path) -> None:
    """Makes the folder, and those it is in; OSError where another user could write there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(f"{folder} is not this user's alone; remove it, or chmod 700")


def _check_room(folder: pathlib.Path) -> None:
    """Raises OSError where the disk, or the user's quota, has no room for an entry."""
    if shutil.disk_usage(folder).free < LEAST_FREE_BYTES:
        raise OSError(f"less than {LEAST_FREE_BYTES >> 20} MiB are free")
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, LARGEST_BYTES)


def _remove_oldest(root: pathlib.Path) -> None:
    """Removes what was not read for longest, until the rest is small enough."""
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
    """Removes what killed processes left, and entries that are cut off.

    TensorFlow would end the run with an error that names none. It renames an entry when it is
    written, but does not wait for the disk: after a power cut it may be short or empty.
    """
    for path, found in _found(folder, "*.tmp"):
        if time.time() - found.st_mtime > DAY_S:
            path.unlink(missing_ok=True)
    for path, found in _found(folder, "*.pb"):
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            if not _is_whole(file, found.st_size):
                log.warning("compile cache: %s is damaged, and removed", path)
                path.unlink(missing_ok=True)


def _found(folder: pathlib.Path, pattern: str) -> Iterator[tuple[pathlib.Path, os.stat_result]]:
    for path in folder.glob(pattern):
        with contextlib.suppress(FileNotFoundError):
            yield path, path.stat()


def _is_whole(file: BinaryIO, size: int) -> bool:
    """Returns whether a protocol buffer's outermost fields end where the file does.

    TensorFlow's wheel has no Python class of its entries. These have fields of bytes alone.
    """
    num_fields = 0
    while file.tell() < size:
        if _varint(file) & 7 != 2:
            return False
        file.seek(_varint(file), os.SEEK_CUR)
        num_fields += 1
    return num_fields >= 3 and file.tell() == size  # key, program and executable


def _varint(file: BinaryIO) -> int:
    """Returns a number in protocol buffers' encoding: 7 bits a byte, the last one below 128."""
    number = 0
    for shift in range(0, 64, 7):
        byte = file.read(1)
        if not byte:
            break
        number |= (byte[0] & 127) << shift
        if byte[0] < 128:
            break
    return number
