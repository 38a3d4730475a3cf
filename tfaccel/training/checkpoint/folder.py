"""Creates and removes the folder of one checkpoint, so that a folder with its name is complete.

Takes a function that writes the files; gives the folder its name once every byte is on the disk.
A folder is removed only if it is proved to be a checkpoint of tfaccel.

    fill(unfinished, write)
    put_in_place(unfinished, final)
    remove(final)

    step-00001200/                  the state after step 1200
    step-00001200-untested/         the same, before the validation that follows that step
    step-00001200.tmp-<process>/    is being written or removed, and is incomplete
    step-00001200.old-<number>/     a complete older one, which a new one of this step replaces
"""

import errno
import itertools
import os
import pathlib
import re
from collections.abc import Callable
from typing import NamedTuple

from tfaccel.training.checkpoint.manifest import (
    FILES,
    MANIFEST,
    STATE,
    CheckpointError,
    read_manifest,
    write_manifest,
)

_NAME = re.compile(r"step-(\d{8,})(-untested)?(?:\.(?:(old)|(tmp))-\d+)?")
# TensorFlow first writes each of its files under the longer name.
_OURS = re.compile(
    rf"({'|'.join(map(re.escape, FILES[:2]))})(\.tempstate\d+)?|{re.escape(STATE)}|{MANIFEST}"
)


class Name(NamedTuple):
    """The parts of a folder's name. A newer checkpoint compares as larger; no clock is needed.

    Attributes:
      step: the last step of the state.
      tested: whether the state includes the validation after that step.
      in_place: False while another checkpoint replaces this one.
      unfinished: whether it is being written or removed.
    """

    step: int
    tested: bool
    in_place: bool = True
    unfinished: bool = False

    def __str__(self):
        """Returns the name of the complete checkpoint."""
        return f"step-{self.step:08d}{'' if self.tested else '-untested'}"


def parse(folder: pathlib.Path) -> Name | None:
    """Returns the parts of a folder's name, or None if it is not the name of a checkpoint."""
    match = _NAME.fullmatch(folder.name)
    if match is None:
        return None
    step, untested, old, unfinished = match.groups()
    return Name(int(step), not untested, not old, bool(unfinished))


def unfinished_path(path: pathlib.Path) -> pathlib.Path:
    """Returns the path under which this process writes or removes the checkpoint `path`."""
    return path.with_name(f"{parse(path)}.tmp-{os.getpid()}")


def make_root(root: pathlib.Path) -> None:
    """Makes the folder of all checkpoints, if it does not exist."""
    if not root.is_dir():
        os.makedirs(root)
        to_disk(root.parent)


def fill(unfinished: pathlib.Path, write: Callable[[pathlib.Path], None]) -> None:
    """Makes the folder, calls `write` to put FILES into it, and flushes everything to the disk.

    Raises:
      OSError: a file cannot be written. The files that are there stay.
    """
    os.mkdir(unfinished)
    write(unfinished)
    write_manifest(unfinished)
    for name in (*FILES, MANIFEST):
        to_disk(unfinished / name)
    to_disk(unfinished)


def put_in_place(unfinished: pathlib.Path, final: pathlib.Path) -> None:
    """Renames a filled folder to `final`.

    If `final` exists, it is renamed first, and removed at the end.

    Raises:
      OSError: it cannot be renamed; an old `final` has its name again.
    """
    aside = _put_aside(final) if os.path.lexists(final) else None
    try:
        os.rename(unfinished, final)
    except OSError:
        if aside:
            os.rename(aside, final)
        raise
    to_disk(final.parent)
    if aside and is_ours(aside):
        remove(aside)


def is_ours(folder: pathlib.Path) -> bool:
    """Returns whether the folder is certainly a checkpoint of tfaccel, and has no other files."""
    try:
        read_manifest(folder)
        return parse(folder) is not None and holds_only(folder, _OURS)
    except (CheckpointError, OSError):
        return False


def remove(folder: pathlib.Path) -> None:
    """Removes a checkpoint of tfaccel. If the process is killed, an unfinished folder is left."""
    unfinished = unfinished_path(folder)
    remove_unfinished(unfinished)  # an earlier process with the same number may have left it
    os.rename(folder, unfinished)
    to_disk(folder.parent)
    remove_unfinished(unfinished)


def remove_unfinished(unfinished: pathlib.Path) -> None:
    """Removes an unfinished folder, if it exists and has only files of a checkpoint."""
    if holds_only(unfinished, _OURS):
        for name in os.listdir(unfinished):
            os.unlink(unfinished / name)
        os.rmdir(unfinished)


def _put_aside(final: pathlib.Path) -> pathlib.Path:
    names = (final.with_name(f"{final.name}.old-{number}") for number in itertools.count())
    aside = next(each for each in names if not os.path.lexists(each))
    os.rename(final, aside)
    return aside


def holds_only(folder: pathlib.Path, names: re.Pattern, *, subfolders: bool = False) -> bool:
    """Returns whether this is a folder, not a link, of regular files with these names alone.

    With `subfolders` it may also have folders with these names, whatever is in them.

    Raises:
      OSError: the folder cannot be read.
    """

    def is_of_kind(entry: os.DirEntry) -> bool:
        is_folder = subfolders and entry.is_dir(follow_symlinks=False)
        return is_folder or entry.is_file(follow_symlinks=False)

    if folder.is_symlink() or not folder.is_dir():
        return False
    with os.scandir(folder) as entries:
        return all(names.fullmatch(each.name) and is_of_kind(each) for each in entries)


def to_disk(path: pathlib.Path) -> None:
    """Flushes a file's bytes or a folder's names to the disk, to survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot flush a folder.
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(descriptor)
