"""The checkpoints of a run: written whole, read back only if whole, and the oldest removed.

Takes snapshots, arrays by name and a state for JSON; gives a folder per step, and back from them
the newest snapshot that is undamaged. Their order is that of steps; no clock is asked.

    store = Store(workdir / "checkpoints", keep_last=3, keep_best=1, largest_is_best=True)
    store.write(Snapshot({"model/0": kernel}, {"step": 1200}), score=0.76)
    snapshot = store.newest()

One process writes at a time: whoever calls has locked the folder. TensorFlow is imported when the
first arrays are written or read.
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

from tfaccel.common.disk_errors import free_bytes, mib, not_written
from tfaccel.common.errors import UserError
from tfaccel.common.regular_file import read_regular
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
    """All that decides how a run goes on.

    Attributes:
      arrays: by unique name. Nobody changes them while they are written.
      state: for JSON, whose keys are text; "step" is the number of the last step done.
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
        """What tells it from another of the same step."""
        digest = hashlib.blake2b(json.dumps(self.state, sort_keys=True).encode(), digest_size=8)
        for name, array in sorted(self.arrays.items()):
            digest.update(name.encode() + np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


class Store:
    """The folder of a run's checkpoints.

    Attributes:
      folder: of this run alone.
    """

    def __init__(
        self, folder: pathlib.Path, *, keep_last: int, keep_best: int, largest_is_best: bool
    ):
        """Touches nothing on the disk.

        Args:
          folder: of this run alone; made by the first `write`.
          keep_last: how many of the newest steps stay, the last one written among them.
          keep_best: how many of those with the best score stay beside them.
          largest_is_best: whether the best score is the largest, or the smallest.
        """
        self.folder = pathlib.Path(folder)
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._largest_is_best = largest_is_best
        self._damaged = set()  # names, as far as `newest` has looked

    def write(
        self, snapshot: Snapshot, *, score: float | None = None, tested: bool = True
    ) -> pathlib.Path:
        """Writes a checkpoint whole or not at all, then removes those that are not to be kept.

        Args:
          snapshot: of finite arrays.
          score: what `keep_best` compares; one that is not finite is never best.
          tested: False for the state after the last step of an epoch, before its validation: it
            counts as older than the same step's after it, and goes when that is there.

        Raises:
          CheckpointError: an array is not finite, or the disk does not take it; it says which.
            Earlier checkpoints are as they were, and nothing is left of this one.
        """
        _check_finite(snapshot)
        name = folders.Name(snapshot.step, tested)
        # The state is apart from what is ours, so that it comes back exactly as it was.
        ours = {"format_version": FORMAT_VERSION, "step": snapshot.step, "score": score}
        text = json.dumps(ours | {"state": snapshot.state}, indent=2) + "\n"
        final = self.folder / str(name)
        unfinished = folders.unfinished_path(final)
        try:
            folders.make_root(self.folder)
            folders.remove_unfinished(unfinished)  # of an earlier process with this one's number
            folders.fill(unfinished, lambda path: _write_files(path, snapshot.arrays, text))
            folders.put_in_place(unfinished, final)
        except OSError as error:
            with contextlib.suppress(OSError):
                folders.remove_unfinished(unfinished)
            raise CheckpointError(
                f"checkpoint {final} "
                f"{not_written(error, self.folder, num_bytes=snapshot.num_bytes + len(text))}, or "
                "give another workdir"
            ) from error
        self._damaged.discard(name)
        self._rotate(name)
        return final

    def steps(self) -> list[pathlib.Path]:
        """Returns the folders of checkpoints, told by their names alone, the newest last.

        Raises:
          CheckpointError: the folder is not to be read: that is no reason to start anew.
        """
        try:
            inside = [each for each in self.folder.iterdir() if each.is_dir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(
                f"checkpoints in {self.folder} cannot be read ({error.strerror}); allow it, or "
                "give another workdir"
            ) from error
        named = [(name, each) for each in inside if (name := folders.parse(each))]
        return [each for name, each in sorted(named) if not name.unfinished]

    def newest(self) -> Snapshot | None:
        """Returns the newest undamaged checkpoint, or None where there is none of any kind.

        A damaged one is named in a warning, and the one before is tried.

        Raises:
          CheckpointError: there are some, and all of them are damaged.
        """
        return self._first_whole(reversed(self.steps()))

    def best(self) -> Snapshot | None:
        """Returns the undamaged checkpoint of the best score, or None where none has a score.

        Raises:
          CheckpointError: there are some, and all of them are damaged.
        """
        named = {folders.parse(each): each for each in self.steps()}
        scores = {name: _score(each) for name, each in named.items()}
        best = best_first(scores, largest_is_best=self._largest_is_best)
        return self._first_whole(named[name] for name in best)

    def _first_whole(self, candidates: Iterable[pathlib.Path]) -> Snapshot | None:
        damaged = []
        for folder in candidates:
            try:
                return _read(folder)
            except CheckpointError as error:
                log.warning("checkpoint %s is passed over: %s", folder, error)
                self._damaged.add(folders.parse(folder))
                damaged.append(f"{folder.name} ({error})")
        if damaged:
            raise CheckpointError(
                f"none of the checkpoints in {self.folder} can be used: {'; '.join(damaged)}; "
                "put one back from a copy, or remove them to start from the beginning"
            )
        return None

    def remove_unfinished(self) -> None:
        """Clears away what killed writers left. Nobody else may be writing.

        One that was put aside for another has its name again where the other did not come.

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
                f"what an unfinished checkpoint left in {self.folder} cannot be removed "
                f"({error.strerror}); allow it, or give another workdir"
            ) from error

    def _rotate(self, written: folders.Name) -> None:
        """Removes all but the last and the best, of which no damaged one takes the place.

        A later step's, of before, is left alone.
        """
        ours = {folders.parse(each): each for each in self.steps() if folders.is_ours(each)}
        ours = {name: each for name, each in ours.items() if name.in_place and name <= written}
        scores = {name: _score(each) for name, each in ours.items() if name not in self._damaged}
        kept = to_keep(
            scores,
            keep_last=self._keep_last,
            keep_best=self._keep_best,
            largest_is_best=self._largest_is_best,
        )
        for name in ours.keys() - kept:
            try:
                folders.remove(ours[name])
            except OSError as error:
                log.warning("checkpoint %s cannot be removed (%s)", ours[name], error.strerror)


def check_space(folder: pathlib.Path, num_bytes: int, *, keep: int) -> None:
    """Says early what a disk cannot hold.

    Args:
      folder: of the checkpoints; it may not exist yet.
      num_bytes: of one checkpoint.
      keep: how many stay, the last and the best. One more is there while it is written.

    Raises:
      UserError: there is no room for one checkpoint beside those that are there.
    """
    free = free_bytes(folder)
    if free < num_bytes:
        raise UserError(
            f"checkpoints in {folder} take {mib(num_bytes)} each, and {mib(free)} are free "
            "there; make room, or give another workdir"
        )
    there = sum(each.stat().st_size for each in folder.glob("step-*/*") if each.is_file())
    if free + there < (keep + 1) * num_bytes:
        log.warning(
            "checkpoints in %s: %d of %s are to be there at a time, and with those of before there "
            "is room for %d; make room, or keep fewer",
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
        raise CheckpointError(f"it holds step {step}, which is not what its name says")
    return Snapshot(read_arrays(folder / ARRAYS), state)


def _score(folder: pathlib.Path) -> float | None:
    # It may be damaged.
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        return float(json.loads(read_regular(folder / STATE))["score"])
    return None


def _settle(aside: pathlib.Path, final: pathlib.Path) -> None:
    """Ends what a killed writer began: the one aside is removed, or has its name again."""
    if not os.path.lexists(final):
        os.rename(aside, final)
    elif folders.is_ours(aside):
        with contextlib.suppress(CheckpointError):
            verify(final)
            folders.remove(aside)


def _check_finite(snapshot: Snapshot) -> None:
    for name, array in snapshot.arrays.items():
        if name.startswith(("metric/", "callback/")):
            continue  # a smallest loss starts as infinity
        # 100 MB take 0.07 s (2 CPU cores, 2026-11-21).
        if np.asarray(array).dtype.kind not in "biu" and not np.isfinite(array).all():
            raise CheckpointError(
                f"the state after step {snapshot.step} is not saved: '{name}' has values that are "
                "infinite or NaN; an earlier checkpoint is the last good one"
            )
