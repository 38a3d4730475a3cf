"""Writes the checkpoints of a run, reads the newest undamaged one, and removes the oldest ones.

Takes snapshots; gives a folder per step, and from these folders the newest snapshot that is
undamaged. A checkpoint is written completely or not at all. The order of checkpoints is the order
of their steps; no clock is used.

    store = Store(workdir / "checkpoints", keep_last=3, keep_best=1, largest_is_best=True)
    store.write(Snapshot({"model/0": kernel}, {"step": 1200}), score=0.76)
    snapshot = store.newest()

Only one process may write at a time, so the caller locks the folder. TensorFlow is imported when
the first arrays are written or read.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tfaccel.common.disk_errors import check_free, mib, not_written
from tfaccel.common.errors import UserError
from tfaccel.common.regular_file import read_regular
from tfaccel.process import waits
from tfaccel.training.checkpoint import folder as folders
from tfaccel.training.checkpoint.manifest import (
    ARRAYS,
    FORMAT_VERSION,
    STATE,
    CheckpointError,
    verify,
)
from tfaccel.training.checkpoint.rotation import best_first, to_keep

log = logging.getLogger("tfaccel")


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Everything that decides how a run continues.

    Attributes:
      arrays: by unique name. They must not change while they are written.
      state: JSON-ready, with text as keys; "step" is the number of the last step done.
    """

    arrays: dict[str, np.ndarray]
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """The number of the last step done."""
        return self.state["step"]

    @property
    def num_bytes(self) -> int:
        """The bytes of all arrays; their files have a few kB more."""
        return sum(np.asarray(each).nbytes for each in self.arrays.values())

    @property
    def digest(self) -> str:
        """A hash of the state and the arrays."""
        digest = hashlib.blake2b(json.dumps(self.state, sort_keys=True).encode(), digest_size=8)
        for name, array in sorted(self.arrays.items()):
            digest.update(name.encode() + np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


class Store:
    """The folder of a run's checkpoints.

    Attributes:
      folder: only for this run's checkpoints.
    """

    def __init__(
        self, folder: pathlib.Path, *, keep_last: int, keep_best: int, largest_is_best: bool
    ):
        """Touches nothing on the disk: the first `write` makes the folder.

        For the other arguments, see `rotation.to_keep`.
        """
        self.folder = pathlib.Path(folder)
        self._keep = {"keep_last": keep_last, "keep_best": keep_best}
        self._largest_is_best = largest_is_best
        self._damaged = set()  # the names of damaged checkpoints that were found so far

    def write(
        self, snapshot: Snapshot, *, score: float | None = None, tested: bool = True
    ) -> pathlib.Path:
        """Writes a checkpoint completely or not at all, then removes those that need not stay.

        Args:
          snapshot: its arrays are finite.
          score: compared for `keep_best`; an infinite or NaN score is never best.
          tested: False for the state after the last step of an epoch, before its validation. It
            counts as older than the tested checkpoint of the same step, which replaces it.

        Raises:
          CheckpointError: an array is not finite, or the disk refuses the files. Earlier
            checkpoints are unchanged, and nothing is left of this one.
        """
        _check_finite(snapshot)
        name = folders.Name(snapshot.step, tested)
        # The caller's state has a key to itself, so that it is read back exactly as it was.
        ours = {"format_version": FORMAT_VERSION, "step": snapshot.step, "score": score}
        text = json.dumps(ours | {"state": snapshot.state}, indent=2) + "\n"
        final = self.folder / str(name)
        unfinished = folders.unfinished_path(final)
        try:
            folders.make_root(self.folder)
            folders.remove_unfinished(unfinished)  # left by an earlier process with this number
            folders.fill(unfinished, lambda path: _write_files(path, snapshot.arrays, text))
            folders.put_in_place(unfinished, final)
        except OSError as error:
            with contextlib.suppress(OSError):
                folders.remove_unfinished(unfinished)
            raise CheckpointError(
                f"checkpoint {final} "
                f"{not_written(error, self.folder, num_bytes=snapshot.num_bytes + len(text))}, or "
                "give another folder"
            ) from error
        self._damaged.discard(name)
        self._rotate(name)
        return final

    def steps(self) -> list[pathlib.Path]:
        """Returns the folders that have a checkpoint's name, the newest last.

        Raises:
          CheckpointError: the folder cannot be read. That is no reason to start a new run.
        """
        try:
            inside = [each for each in self.folder.iterdir() if each.is_dir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(
                f"checkpoints in {self.folder} cannot be read ({error.strerror}); change the "
                "permissions, or give another folder"
            ) from error
        named = [(name, each) for each in inside if (name := folders.parse(each))]
        return [each for name, each in sorted(named) if not name.unfinished]

    def newest(self) -> Snapshot | None:
        """Returns the newest undamaged checkpoint, or None if there is no checkpoint.

        For each damaged checkpoint it logs a warning, and tries the previous one.

        Raises:
          CheckpointError: there are checkpoints, and all of them are damaged.
        """
        return self._first_undamaged(reversed(self.steps()))

    def best(self) -> Snapshot | None:
        """Returns the undamaged checkpoint with the best score, or None if none has a score.

        Raises:
          CheckpointError: there are checkpoints with a score, and all of them are damaged.
        """
        named = {folders.parse(each): each for each in self.steps()}
        scores = {name: _score(each) for name, each in named.items()}
        best = best_first(scores, largest_is_best=self._largest_is_best)
        return self._first_undamaged(named[name] for name in best)

    def of_step(self, step: int) -> Snapshot:
        """Returns the checkpoint of a step, the tested one if there are two.

        Raises:
          UserError: there is none.
          CheckpointError: it is damaged.
        """
        named = {folders.parse(each): each for each in self.steps()}
        own = sorted((name for name in named if name.step == step), reverse=True)
        if not own:
            there = sorted({name.step for name in named})
            raise UserError(
                f"{self.folder} has no checkpoint of step {step}; expected one of "
                f"{', '.join(map(str, there)) or 'none'}"
            )
        return self._first_undamaged(named[name] for name in own)

    def _first_undamaged(self, candidates: Iterable[pathlib.Path]) -> Snapshot | None:
        damaged = []
        for folder in candidates:
            try:
                with waits.on("reading the checkpoint"):
                    return _read(folder)
            except CheckpointError as error:
                log.warning("checkpoint %s is skipped: %s", folder, error)
                self._damaged.add(folders.parse(folder))
                damaged.append(f"{folder.name} ({error})")
        if damaged:
            raise CheckpointError(
                f"none of the checkpoints in {self.folder} can be used: {'; '.join(damaged)}; "
                "restore one from a copy, or remove them to start from the beginning"
            )
        return None

    def remove_unfinished(self) -> None:
        """Removes what killed writers left. No other process may be writing.

        A complete checkpoint that was renamed to be replaced gets its name back if the new one does
        not exist.

        Raises:
          CheckpointError: the disk does not allow it.
        """
        try:
            for folder in sorted(self.folder.iterdir()) if self.folder.is_dir() else ():
                name = folders.parse(folder)
                if name and name.unfinished:
                    folders.remove_unfinished(folder)
                elif name and not name.in_place:
                    _settle(folder, folder.with_name(str(name)))
        except OSError as error:
            raise CheckpointError(
                f"files of an unfinished checkpoint in {self.folder} cannot be removed "
                f"({error.strerror}); change the permissions, or give another folder"
            ) from error

    def _rotate(self, written: folders.Name) -> None:
        """Removes all checkpoints but the last and the best. A damaged one counts as neither.

        Checkpoints of steps later than `written`, which an earlier run left, stay.
        """
        ours = {folders.parse(each): each for each in self.steps() if folders.is_ours(each)}
        ours = {name: each for name, each in ours.items() if name.in_place and name <= written}
        scores = {name: _score(each) for name, each in ours.items() if name not in self._damaged}
        kept = to_keep(scores, **self._keep, largest_is_best=self._largest_is_best)
        for name in ours.keys() - kept:
            try:
                folders.remove(ours[name])
            except OSError as error:
                log.warning("checkpoint %s cannot be removed (%s)", ours[name], error.strerror)


def check_space(folder: pathlib.Path, num_bytes: int, *, keep: int) -> None:
    """Checks whether the disk has room for the checkpoints of a run; warns if it may not suffice.

    Args:
      folder: of the checkpoints; it may not exist yet.
      num_bytes: of one checkpoint.
      keep: how many checkpoints stay. While one is written, there is one more.

    Raises:
      UserError: there is no room for another checkpoint.
    """
    free = check_free(folder, num_bytes, what="a checkpoint needs", fix="give another folder")
    there = sum(each.stat().st_size for each in folder.glob("step-*/*") if each.is_file())
    if free + there < (keep + 1) * num_bytes:
        log.warning(
            "checkpoints in %s: up to %d of %s each exist at a time, but there is room for only "
            "%d, including those that exist; make room, or keep fewer",
            *(folder, keep + 1, mib(num_bytes), (free + there) // num_bytes),
        )


def _write_files(folder: pathlib.Path, arrays: Mapping[str, np.ndarray], text: str) -> None:
    from tfaccel.training.checkpoint.arrays import write_arrays  # TensorFlow takes 6 s to import

    write_arrays(folder / ARRAYS, arrays)
    (folder / STATE).write_text(text)


def _read(folder: pathlib.Path) -> Snapshot:
    from tfaccel.training.checkpoint.arrays import read_arrays

    try:
        verify(folder)  # before anything is parsed
        stored = json.loads(read_regular(folder / STATE))
        step, state = stored["step"], stored["state"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"it cannot be read ({error})") from error
    if step != folders.parse(folder).step:
        raise CheckpointError(f"it holds step {step}, but its name has another step")
    return Snapshot(read_arrays(folder / ARRAYS), state)


def _score(folder: pathlib.Path) -> float | None:
    # The file may be damaged.
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        return float(json.loads(read_regular(folder / STATE))["score"])
    return None


def _settle(aside: pathlib.Path, final: pathlib.Path) -> None:
    """Removes an old checkpoint if a new one has replaced it; else gives it its name back."""
    if not os.path.lexists(final):
        os.rename(aside, final)
    elif folders.is_ours(aside):
        with contextlib.suppress(CheckpointError):
            verify(final)
            folders.remove(aside)


def _check_finite(snapshot: Snapshot) -> None:
    for name, array in snapshot.arrays.items():
        if name.startswith(("metric/", "callback/")):
            continue  # these may be infinite: the smallest loss so far starts at infinity
        # 100 MB take 0.07 s (2 CPU cores, 2026-11-21).
        if np.asarray(array).dtype.kind not in "biu" and not np.isfinite(array).all():
            raise CheckpointError(
                f"the state after step {snapshot.step} is not saved: '{name}' has values that are "
                "infinite or NaN; resume from an earlier checkpoint"
            )
