"""The folder in which a run leaves what it did, and the lock that keeps a second run out of it.

Takes the path; gives the folder, made or found again once it is sure that no other run is in it:

    DIR/config.json        the resolved config, without secrets
    DIR/environment.json   versions and hardware
    DIR/checkpoints/       the state of training: see tfaccel/checkpoint/
    DIR/log.txt            all that the run said of itself: every choice and its reason
    DIR/metrics.csv        a line per epoch
    DIR/metrics.jsonl      the same, and every so many steps
    DIR/tensorboard/       the same for TensorBoard
    DIR/first_batch.png    the first augmented images, with their labels
    DIR/export/1/          SavedModel and model.keras
    DIR/result.json        what the command's last line says
    DIR/launch/            what each rank printed, of `tfaccel launch`
    DIR/run.lock           held by the process that writes here
"""

import contextlib
import fcntl
import json
import logging
import os
import pathlib
import re
import socket
from collections.abc import Iterator
from typing import Any

import ml_collections

from tfaccel.common.checks import check_choice
from tfaccel.common.disk_errors import not_written
from tfaccel.common.errors import RunError, UserError
from tfaccel.common.local_path import local_path
from tfaccel.common.own_files import open_own, replace
from tfaccel.common.redact import redacted
from tfaccel.common.regular_file import read_regular
from tfaccel.config import Config, parse

log = logging.getLogger("tfaccel")

RESUMES = ("auto", "required", "never")

# Files that tell a workdir, and the levels above a path of which one may be its workdir: the
# deepest are as export/1/variables/variables.index.
WRITTEN = ("config.json", "metrics.jsonl", "metrics.csv")
MOST_LEVELS = 4
# As `own_files.replace` names them.
_UNFINISHED = re.compile(
    r"\.(config|environment|result|metrics|first_batch)\.(jsonl?|csv|png)\.\d+(\.[0-9a-f]{8})?"
)

_locks = set()  # descriptors of the folders that this process holds


def _let_go() -> None:
    """Closes a forked child's copies: a lock is kept for as long as anybody has it open."""
    while _locks:
        os.close(_locks.pop())


os.register_at_fork(after_in_child=_let_go)


def check_usable(path: pathlib.Path, *, resume: str) -> pathlib.Path:
    """Returns the absolute path of a workdir that this run may write or go on with. Writes nothing.

    Args:
      path: the workdir.
      resume: "auto" to go on from the newest checkpoint where there is one, "required" for an error
        where there is none, "never" for an error where there is a run.

    Raises:
      UserError: the path and `resume` do not agree, or it cannot be written.
    """
    path = local_path(path).absolute()
    check_choice("resume", resume, RESUMES)
    # os.path's say False, where pathlib's raise: below a folder that may not be searched.
    if resume == "never" and os.path.exists(path / "config.json"):
        raise UserError(f"workdir {path} already holds a run; give another --workdir, or remove it")
    if resume == "required" and not os.path.isdir(path / "checkpoints"):
        raise UserError(
            f"workdir {path} has no checkpoints to resume from; check the path, or leave out "
            "--resume=required to begin anew"
        )
    there = next(each for each in (path, *path.parents) if os.path.exists(each))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "may not be written to" if there.is_dir() else "is a file"
        raise UserError(
            f"workdir {path} cannot be written, because {there} {why}; give another --workdir"
        )
    return path


@contextlib.contextmanager
def held(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Makes the folder if need be; within the context, no other process can hold it.

    However this process ends, the system lets go. (Of NFS, version 3 needs its lock service.)

    Yields:
      The absolute path.

    Raises:
      UserError: it cannot be made or written.
      RunError: a live run holds it. (Of a lost machine, a file system may think so for a while.)
    """
    path = local_path(path).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        file = open_own(path / "run.lock", os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise UserError(f"{path} {not_written(error, path)}, or give another folder") from error
    _locks.add(file)
    try:
        if _lock(file, path):
            _remove_unfinished(path)
        yield path
    finally:
        if file in _locks:  # of a forked child it is closed
            _locks.remove(file)
            os.close(file)


def _remove_unfinished(path: pathlib.Path) -> None:
    """Removes what killed processes left of files that they were about to replace."""
    for each in path.glob(".*"):
        if _UNFINISHED.fullmatch(each.name):
            with contextlib.suppress(OSError):
                each.unlink()


def _lock(file: int, path: pathlib.Path) -> bool:
    """Returns whether it is locked; where the file system has no locks, nobody can say."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if not isinstance(error, BlockingIOError):
            log.warning(
                "workdir: %s cannot be locked (%s); be sure that no other run writes there",
                path,
                error.strerror,
            )
            return False
        holder = os.read(file, 200).decode(errors="replace").strip() or "another process"
        raise RunError(
            f"{path} is held by a live run ({holder}); wait for it, stop it, or give another "
            "--workdir"
        ) from None
    os.ftruncate(file, 0)
    os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return True


def finished(path: pathlib.Path, config: dict) -> dict | None:
    """Returns the result of a run of this config that ended there; None where there is none."""
    written, now = _read(path / "config.json"), _as_written(config)
    if now.get("runtime", {}).get("xla", True) is None and isinstance(written, dict):
        # The default of XLA, which was on everywhere before, asks for nothing in particular.
        written = written | {"runtime": written.get("runtime", {}) | {"xla": None}}
    if written == now:
        return _read(path / "result.json")
    return None


def workdir_of(given: str | os.PathLike) -> pathlib.Path:
    """Returns the absolute path of the run that a path is of: its workdir, or what is in there.

    A path of no run is returned as it is: whoever reads it says what is wrong.
    """
    path = local_path(given).absolute()
    nearest = (path, *path.parents[:MOST_LEVELS])
    return next((each for each in nearest if _is_workdir(each)), path)


def workdirs_in(given: str | os.PathLike) -> list[pathlib.Path]:
    """Returns the run that a path is of, or, of a folder that holds runs, all of them by name."""
    path = local_path(given)
    if not _is_workdir(path) and os.path.isdir(path):
        found = sorted(each for each in path.glob("*/") if _is_workdir(each))
        if found:
            return found
    if _is_workdir(path) or not os.path.exists(path):
        return [path]
    return [next((each for each in path.parents[:MOST_LEVELS] if _is_workdir(each)), path)]


def _is_workdir(path: pathlib.Path) -> bool:
    return any(os.path.isfile(path / name) for name in WRITTEN)


def read_config(path: pathlib.Path) -> Config:
    """Returns the config of the run in a workdir.

    Raises:
      UserError: there is none, or not one that this version understands.
    """
    written = _read(path / "config.json")
    if not isinstance(written, dict):
        raise UserError(
            f"{path} holds no run (there is no config.json that can be read); give the workdir of "
            "a `tfaccel train`"
        )
    return parse(ml_collections.ConfigDict(written))


def check_no_other(path: pathlib.Path, config: dict) -> None:
    """Raises UserError for a workdir of another run that has no checkpoint to tell what changed."""
    before = _read(path / "config.json")
    if before not in (None, _as_written(config)) and not any(path.glob("checkpoints/step-*")):
        raise UserError(f"workdir {path} already holds another run; give another, or remove it")


def write_config(path: pathlib.Path, config: dict) -> None:
    """Writes config.json, without secrets.

    Raises:
      UserError: as `check_no_other`.
    """
    check_no_other(path, config)
    # First, or a run that is killed between the two would have ended with the result of another.
    (path / "result.json").unlink(missing_ok=True)
    write_json(path / "config.json", _as_written(config))


def next_version(folder: pathlib.Path) -> pathlib.Path:
    """Returns the folder's next version: a number above all that are there, from 1."""
    newest = max((int(each.name) for each in versions(folder)), default=0)
    return folder / str(newest + 1)


def versions(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns what in a folder has a number for its name, the largest last."""
    numbered = [each for each in folder.glob("*") if each.name.isdecimal()]
    return sorted(numbered, key=lambda each: int(each.name))


def _as_written(config: dict) -> dict:
    return json.loads(json.dumps(redacted(config)))


def _read(path: pathlib.Path) -> dict | None:
    try:
        return json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError):
        return None


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes `value` as indented JSON, whole or not at all.

    Raises:
      RunError: it cannot be written, as on a full disk.
    """
    try:
        replace(path, (json.dumps(value, indent=2) + "\n").encode())
    except OSError as error:
        raise RunError(
            f"{path} {not_written(error, path.parent)}, or give another --workdir"
        ) from error
