"""One checkpoint's folder: whole under its name or not there, and removed only if it is ours.

Takes what writes the files; gives the folder its name once every byte is on the disk itself.

    fill(unfinished, write)
    put_in_place(unfinished, final)
    remove(final)

    step-00001200/                  the state after step 1200
    step-00001200-untested/         the same, before the validation that follows that step
    step-00001200.tmp-<process>/    being written, or being removed: worth nothing
    step-00001200.old-<number>/     whole, from an earlier run of that step that another replaces
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
# TensorFlow writes each of its files under the longer name first.
_OURS = re.compile(
    rf"({'|'.join(map(re.escape, FILES[:2]))})(\.tempstate\d+)?|{re.escape(STATE)}|{MANIFEST}"
)


class Name(NamedTuple):
    """What a folder's name says. What is newer compares as larger, whatever a clock says.

    Attributes:
      step: after which the state was taken.
      tested: whether validation after it is part of the state.
      in_place: False for one that another is replacing.
      unfinished: whether it is being written or removed.
    """

    step: int
    tested: bool
    in_place: bool = True
    unfinished: bool = False

    def __str__(self):
        """Returns the name of the whole checkpoint."""
        return f"step-{self.step:08d}{'' if self.tested else '-untested'}"


def parse(folder: pathlib.Path) -> Name | None:
    """Returns what a folder's name says, or None where it is not a checkpoint's."""
    match = _NAME.fullmatch(folder.name)
    if match is None:
        return None
    step, untested, old, unfinished = match.groups()
    return Name(int(step), not untested, not old, bool(unfinished))


def unfinished_path(path: pathlib.Path) -> pathlib.Path:
    """Returns the name under which this process writes or removes the checkpoint `path`."""
    return path.with_name(f"{parse(path)}.tmp-{os.getpid()}")


def make_root(root: pathlib.Path) -> None:
    """Makes the folder of all checkpoints, where it is not there yet."""
    if not root.is_dir():
        os.makedirs(root)
        to_disk(root.parent)


def fill(unfinished: pathlib.Path, write: Callable[[pathlib.Path], None]) -> None:
    """Makes the folder, lets `write` put FILES into it, and brings all to the disk itself.

    Raises:
      OSError: as of any file. What is there by then stays.
    """
    os.mkdir(unfinished)
    write(unfinished)
    write_manifest(unfinished)
    for name in (*FILES, MANIFEST):
        to_disk(unfinished / name)
    to_disk(unfinished)


def put_in_place(unfinished: pathlib.Path, final: pathlib.Path) -> None:
    """Gives a filled folder its name. What had that name goes aside first, and is removed last.

    Raises:
      OSError: what had the name has it again.
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
    """Returns whether this is proved to be a checkpoint of ours that holds nothing else."""
    try:
        read_manifest(folder)
        return parse(folder) is not None and _holds_ours_alone(folder)
    except (CheckpointError, OSError):
        return False


def remove(folder: pathlib.Path) -> None:
    """Removes a checkpoint of ours. Should the process be killed, none is left that looks whole."""
    unfinished = unfinished_path(folder)
    remove_unfinished(unfinished)  # of an earlier process with this one's number
    os.rename(folder, unfinished)
    to_disk(folder.parent)
    remove_unfinished(unfinished)


def remove_unfinished(unfinished: pathlib.Path) -> None:
    """Removes what is left under a temporary name, if anything, unless others put files there."""
    if _holds_ours_alone(unfinished):
        for name in os.listdir(unfinished):
            os.unlink(unfinished / name)
        os.rmdir(unfinished)


def _put_aside(final: pathlib.Path) -> pathlib.Path:
    names = (final.with_name(f"{final.name}.old-{number}") for number in itertools.count())
    aside = next(each for each in names if not os.path.lexists(each))
    os.rename(final, aside)
    return aside


def _holds_ours_alone(folder: pathlib.Path) -> bool:
    """Returns whether it is a folder, not a link to one, of plain files named as we name them."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    with os.scandir(folder) as entries:
        return all(_OURS.fullmatch(e.name) and e.is_file(follow_symlinks=False) for e in entries)


def to_disk(path: pathlib.Path) -> None:
    """Returns once a file's bytes, or a folder's names, would outlast a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have no such thing for folders.
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(descriptor)
