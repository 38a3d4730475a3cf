"""The workdir, which has the files of a run, and the lock that keeps a second run out of it.

Takes the path; makes the folder if needed, and gives it once no other run uses it:

    DIR/config.json        the resolved config, without secrets
    DIR/environment.json   versions and hardware
    DIR/checkpoints/       the state of training: see tfaccel/training/checkpoint/
    DIR/log.txt            the full log: every choice and its reason
    DIR/metrics.csv        a line per epoch
    DIR/metrics.jsonl      the same, and records within epochs
    DIR/tensorboard/       the same for TensorBoard, and the settings for its page HPARAMS
    DIR/trackers.json      the ids of the run in MLflow and Weights & Biases
    DIR/wandb/             what Weights & Biases keeps, with it
    DIR/first_batch.png    the first augmented images, with their labels
    DIR/report.html        the run's page: curves, first images, speed, memory, confusion matrix
    DIR/export/1/          SavedModel and model.keras
    DIR/evaluation/1/      a report of `tfaccel evaluate`
    DIR/result.json        the result, which the command also prints as its last line
    DIR/launch/            what each rank of `tfaccel launch` printed
    DIR/run.lock           locked by the process that writes here
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
from tfaccel.training.checkpoint.folder import parse as parse_checkpoint

log = logging.getLogger("tfaccel")

RESUMES = ("auto", "required", "never")

# A folder is a workdir if it has one of these files.
WRITTEN = ("config.json", "metrics.jsonl", "metrics.csv")
MOST_LEVELS = 4  # from the workdir to its deepest file: export/1/variables/variables.index
# The temporary names that `own_files.replace` gives.
_UNFINISHED = re.compile(
    r"\.(config|environment|result|metrics|first_batch|trackers|report)"
    r"\.(jsonl?|csv|png|html)\.\d+(\.[0-9a-f]{8})?"
)

_locks = set()  # descriptors of the lock files of the folders that this process holds


def _close_in_child() -> None:
    """Closes a forked child's copies, because a lock lasts until all of its copies are closed."""
    while _locks:
        os.close(_locks.pop())


os.register_at_fork(after_in_child=_close_in_child)


def check_usable(path: pathlib.Path, *, resume: str) -> pathlib.Path:
    """Returns the absolute path of a workdir that this run may start or resume. Writes nothing.

    Args:
      path: the workdir.
      resume: "auto" to resume from the newest checkpoint if there is one, "required" for an error
        if there is no checkpoint, "never" for an error if there is a run.

    Raises:
      UserError: `resume` does not allow what is there, or the workdir cannot be written.
    """
    path = local_path(path).absolute()
    check_choice("resume", resume, RESUMES)
    # Below a folder without search permission, os.path returns False where pathlib raises.
    if resume == "never" and os.path.exists(path / "config.json"):
        raise UserError(f"workdir {path} already holds a run; give another --workdir, or remove it")
    if resume == "required" and not os.path.isdir(path / "checkpoints"):
        raise UserError(
            f"workdir {path} has no checkpoints to resume from; check the path, or remove "
            "--resume=required to start a new run"
        )
    there = next(each for each in (path, *path.parents) if os.path.exists(each))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "is not writable" if there.is_dir() else "is a file"
        raise UserError(
            f"workdir {path} cannot be written, because {there} {why}; give another --workdir"
        )
    return path


@contextlib.contextmanager
def held(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Makes the folder if needed, and locks it within the context.

    The system releases the lock when this process ends, in whatever way. On NFS version 3, locks
    need the lock service.

    Yields:
      The absolute path.

    Raises:
      UserError: the folder cannot be made or written.
      RunError: a live run has locked it. After a machine is lost, a network file system may keep
        its locks for a while.
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
        if file in _locks:  # a forked child has closed it
            _locks.remove(file)
            os.close(file)


def _remove_unfinished(path: pathlib.Path) -> None:
    """Removes the temporary files that killed processes left."""
    for each in path.glob(".*"):
        if _UNFINISHED.fullmatch(each.name):
            with contextlib.suppress(OSError):
                each.unlink()


def _lock(file: int, path: pathlib.Path) -> bool:
    """Locks the file, and returns True; or warns and returns False if it cannot be locked."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if not isinstance(error, BlockingIOError):
            log.warning(
                "workdir: %s cannot be locked (%s); make sure that no other run writes there",
                *(path, error.strerror),
            )
            return False
        holder = os.read(file, 200).decode(errors="replace").strip() or "another process"
        raise RunError(
            f"{path} is used by a live run ({holder}); wait for it, stop it, or give another folder"
        ) from None
    os.ftruncate(file, 0)
    os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return True


def finished(path: pathlib.Path, config: dict) -> dict | None:
    """Returns the result of a complete run of this config in the workdir; None if there is none."""
    written, now = _compared(_read(path / "config.json")), _compared(_as_written(config))
    if now.get("runtime", {}).get("xla", True) is None and isinstance(written, dict):
        # With XLA at its default, a run with any setting of XLA will do.
        written = written | {"runtime": written.get("runtime", {}) | {"xla": None}}
    if written == now:
        return _read(path / "result.json")
    return None


def workdir_of(given: str | os.PathLike) -> pathlib.Path:
    """Returns the absolute workdir of a path, which is the workdir itself or a path below it.

    If there is no workdir, it returns the path, and the code that reads it raises an error.
    """
    return _nearest_workdir(local_path(given).absolute())


def workdirs_in(given: str | os.PathLike) -> list[pathlib.Path]:
    """Returns the workdir of a path; or, for a folder of several workdirs, these by name."""
    path = local_path(given)
    may_hold_some = os.path.isdir(path) and not _is_workdir(path)
    inside = sorted(filter(_is_workdir, path.glob("*/"))) if may_hold_some else []
    return inside or [_nearest_workdir(path) if os.path.exists(path) else path]


def _nearest_workdir(path: pathlib.Path) -> pathlib.Path:
    """Returns the path, or the folder above it, that is a workdir; the path if there is none."""
    nearest = (path, *path.parents[:MOST_LEVELS])
    return next((each for each in nearest if _is_workdir(each)), path)


def _is_workdir(path: pathlib.Path) -> bool:
    return any(os.path.isfile(path / name) for name in WRITTEN)


def read_config(path: pathlib.Path) -> Config:
    """Returns the config of the run in a workdir.

    Raises:
      UserError: there is no config, or this version does not understand it.
    """
    written = _read(path / "config.json")
    if not isinstance(written, dict):
        raise UserError(
            f"{path} holds no run (it has no readable config.json); give the workdir of a `tfaccel "
            "train`"
        )
    return parse(ml_collections.ConfigDict(_of_earlier(written)))


def _of_earlier(written: dict) -> dict:
    """Returns a config with what earlier versions wrote in today's words.

    Until 2026-11-30 the loss of target images was "cross_entropy", too, and had no effect.
    """
    data, recipe = written.get("data", {}), written.get("train", {})
    is_restoration = data.get("source") == "pairs" and data.get("targets") != "mask"
    if is_restoration and recipe.get("loss") == "cross_entropy":
        return written | {"train": recipe | {"loss": "auto"}}
    return written


def check_no_other(path: pathlib.Path, config: dict) -> None:
    """Raises UserError if the workdir has another config's run, unless it has checkpoints.

    A checkpoint names the changed settings when the run resumes.
    """
    before = _compared(_read(path / "config.json"))
    if before not in (None, _compared(_as_written(config))) and not any(
        path.glob("checkpoints/step-*")
    ):
        raise UserError(
            f"workdir {path} already holds another run; give another --workdir, or remove it"
        )


def has_checkpoints(path: pathlib.Path) -> bool:
    """Returns whether a run in this workdir would resume."""
    names = [parse_checkpoint(each) for each in path.glob("checkpoints/step-*")]
    return any(each is not None and not each.unfinished for each in names)


def write_config(path: pathlib.Path, config: dict) -> None:
    """Writes config.json, without secrets.

    Raises:
      UserError: see `check_no_other`.
    """
    check_no_other(path, config)
    # The old results go first: if this run is killed here, it must not have another run's.
    for name in ("result.json", "report.html"):
        (path / name).unlink(missing_ok=True)
    write_json(path / "config.json", _as_written(config))


def next_version(folder: pathlib.Path) -> pathlib.Path:
    """Returns the path of the folder's next version: the largest number so far plus 1, from 1."""
    newest = max((int(each.name) for each in versions(folder)), default=0)
    return folder / str(newest + 1)


def versions(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the entries of a folder with a number as their name, the largest last."""
    numbered = [each for each in folder.glob("*") if each.name.isdecimal()]
    return sorted(numbered, key=lambda each: int(each.name))


def _compared(written: object) -> object:
    """Returns what makes a config another run's: all but where its numbers go."""
    if not isinstance(written, dict):
        return written
    return {name: each for name, each in written.items() if name != "log"}


def _as_written(config: dict) -> dict:
    return json.loads(json.dumps(redacted(config)))


def _read(path: pathlib.Path) -> dict | None:
    try:
        return json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError):
        return None


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes `value` as indented JSON, completely or not at all.

    Raises:
      RunError: it cannot be written, for example on a full disk.
    """
    try:
        replace(path, (json.dumps(value, indent=2) + "\n").encode())
    except OSError as error:
        raise RunError(
            f"{path} {not_written(error, path.parent)}, or give another --workdir"
        ) from error
