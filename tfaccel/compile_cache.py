"""What XLA compiled for this GPU before, kept for the next process: TensorFlow's persistent cache.

Takes what decides how XLA compiles; tells TensorFlow the place, in ~/.cache/tfaccel/xla.

    use({"tensorflow": "2.21.0", "gpus": [...], "tf32": True})      # before XLA compiles
    leave_out()                                                     # compile anew

An entry is found by the program's text and shapes, and its text is compared whole; neither says
which GPU, driver, library or flags it was compiled for. So each set of these has a folder.

TensorFlow reads the place once, when XLA first compiles, and a notebook may call `setup` again with
other settings: the place is a link of this process, and `use` points it at another folder.

On the CPU nothing is kept: XLA's CPU programs name features that its own loader does not know, and
it warns of illegal instructions (TensorFlow 2.21).
"""

import atexit
import functools
import hashlib
import json
import logging
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Mapping
from typing import BinaryIO

from tfaccel.cache_folder import cache_folder

log = logging.getLogger("tfaccel")

DEVICE_TYPE = "GPU"
FLAG = "--tf_xla_persistent_cache_directory"
LINK_PREFIX = "tfaccel-xla-"  # so that a child does not take its parent's link for a user's choice
OURS = re.compile(rf"{FLAG}=\S*/{LINK_PREFIX}\S+( --tf_xla_persistent_cache_device_types=\S+)?")

MOST_BYTES = 4 << 30  # ResNet-50's step is about 30 MB
# A run that cannot write an entry ends with TensorFlow's error.
LEAST_FREE_BYTES = 1 << 30


def use(decides: Mapping[str, object]) -> None:
    """Lets XLA take programs from the cache, and put there what it compiles.

    Args:
      decides: JSON-ready, what an entry must have been compiled with.
    """
    text = json.dumps(dict(decides), indent=2, sort_keys=True)
    root = cache_folder("xla")
    folder = root / hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / "settings.json").write_text(text)
        _remove_damaged(folder)
        _remove_oldest(root)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return leave_out(f"{folder} cannot be used ({error.strerror})")
    if free < LEAST_FREE_BYTES:
        return leave_out(f"{free >> 20} MiB are free in {folder}, less than an entry may take")
    if not _point_to(folder):
        return None
    entries = len(list(folder.glob("*.pb")))
    log.info(
        "compile cache: %s, %d programs%s",
        folder,
        entries,
        "; TensorFlow's 'Error parsing text-format' is none, it is its first guess at each"
        if entries
        else "",
    )
    return None


def leave_out(reason: str) -> None:
    """Lets XLA compile everything anew, and says why."""
    if _link.cache_info().currsize:
        _point_to(_link().parent / "unused")
    log.info("compile cache: none, because %s", reason)


def _point_to(folder: pathlib.Path) -> bool:
    """Returns whether TensorFlow now looks there; it does not where a user has said another."""
    flags = OURS.sub("", os.environ.get("TF_XLA_FLAGS", "")).strip()
    if FLAG in flags:
        log.info("compile cache: as TF_XLA_FLAGS says")
        return False
    link = _link()
    link.unlink(missing_ok=True)
    link.symlink_to(folder)
    where = f"{FLAG}={link} --tf_xla_persistent_cache_device_types={DEVICE_TYPE}"
    os.environ["TF_XLA_FLAGS"] = f"{flags} {where}".strip()
    return True


@functools.cache
def _link() -> pathlib.Path:
    folder = tempfile.mkdtemp(prefix=LINK_PREFIX)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return pathlib.Path(folder) / "entries"


def _remove_oldest(root: pathlib.Path) -> None:
    """Removes what was not read for longest, until the rest is small enough."""
    entries = {each: each.stat() for each in root.glob("*/*.pb")}
    size = sum(each.st_size for each in entries.values())
    for path in sorted(
        entries, key=lambda each: max(entries[each].st_atime, entries[each].st_mtime)
    ):
        if size <= MOST_BYTES:
            return
        size -= entries[path].st_size
        path.unlink(missing_ok=True)


def _remove_damaged(folder: pathlib.Path) -> None:
    """Removes entries that are cut off: TensorFlow would end the run with an error that names none.

    It renames them when they are written, but does not wait for the disk: after a power cut they
    may be short or empty.
    """
    for path in folder.glob("*.pb"):
        with open(path, "rb") as file:
            is_whole = _is_whole(file, path.stat().st_size)
        if not is_whole:
            log.warning("compile cache: %s is damaged, and removed", path)
            path.unlink(missing_ok=True)


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
