"""Shards, and files that remember where the examples of each one are.

Takes paths or patterns of shards, and the function that looks through one; gives ranges of bytes
and labels, one for each example. They are kept in files beside the shard, so that a shard is looked
through once: 1.3 million TFRecords of 15 features take two minutes then (80 us of CPU each),
and seconds afterwards (1.3 ms a shard; 2-core CPU, 2026-11-21).

    found = examples(list_shards("train-*"), key="...", index_dir=None, rows=rows)
    found.images, found.labels
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import glob
import hashlib
import io
import logging
import os
import pathlib
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, BinaryIO

import numpy as np

from tfaccel.common.errors import UserError
from tfaccel.common.regular_file import NOT_REGULAR, is_special, open_regular
from tfaccel.common.run_log import summary
from tfaccel.data.source import Blobs
from tfaccel.data.sources.paths import absolute, nearest
from tfaccel.process.cache_folder import cache_folder

VERSION = 2  # of the columns' files: others are made anew
OURS = (".idx", ".npz")  # lie beside the shards, so that a pattern may match them
NUM_THREADS = 8  # to hide the latency of a network drive

log = logging.getLogger("tfaccel")

Columns = dict[str, np.ndarray]
Pattern = str | os.PathLike | Sequence[str | os.PathLike]


def list_shards(pattern: Pattern) -> tuple[str, ...]:
    """Returns the absolute paths of shards, sorted, each once; says which are links to one file.

    Args:
      pattern: a path, a pattern with * ? or [], or a sequence of those.

    Raises:
      UserError: no file is there, or one is empty.
    """
    shards = find_shards(pattern)
    _say_twice(shards)
    return shards


def find_shards(pattern: Pattern) -> tuple[str, ...]:
    """Returns the same, and says nothing."""
    patterns = [pattern] if isinstance(pattern, str | os.PathLike) else pattern
    shards = sorted({shard for each in patterns for shard in _matches(absolute(each))})
    if not shards:
        raise UserError(f"no shards were given: {pattern!r}; expected a path or a pattern")
    for shard in shards:
        if is_special(shard):
            raise UserError(f"shard {shard} is {NOT_REGULAR}; copy what it gives into a file")
        if os.path.getsize(shard) == 0:
            raise UserError(f"shard {shard} is empty; write it again, or remove it")
    return tuple(shards)


def _say_twice(shards: Sequence[str]) -> None:
    """Warns of shards that are one file by a link, whose examples count more than once."""
    if any(map(os.path.islink, shards)):
        first = {}
        for shard in shards:
            before = first.setdefault(os.path.realpath(shard), shard)
            if before != shard:
                log.warning(
                    "data: shards %s and %s are one file, by a link; its examples count twice",
                    before,
                    shard,
                )


def _matches(pattern: pathlib.Path) -> list[str]:
    if pattern.is_dir():
        raise UserError(f"{pattern} is a folder; expected a pattern of its shards: {pattern}/*")
    if pattern.exists():
        return [str(pattern)]
    if not glob.has_magic(str(pattern)):
        hint = "; write a range of shards with *, not {}" if "{" in pattern.name else ""
        cure = hint or nearest(pattern, kind="file", wanted="the shards")
        raise UserError(f"shard {pattern} does not exist{cure}")
    # What is there is meant as it is, whatever its name has.
    folder = next(each for each in pattern.parents if each.is_dir())
    within = os.path.join(glob.escape(str(folder)), pattern.relative_to(folder))
    found = glob.glob(within, recursive=True)
    # Of "a[1]-*.tar" the brackets may be a name's own, where nothing matches them as a pattern.
    if not found and "[" in (own := str(pattern.relative_to(folder))):
        within = os.path.join(glob.escape(str(folder)), own.replace("[", "[[]"))
        found = glob.glob(within, recursive=True)
    found = [each for each in found if not each.endswith(OURS)]
    found = [each for each in found if os.path.isfile(each)]
    if not found:
        cure = nearest(pattern, kind="file", wanted="the shards")
        raise UserError(f"no shard matches {pattern}{cure}")
    return found


class Keeper:
    """Keeps what was found in a shard in a file, which later processes find.

    Attributes:
      index_dir: the folder of such files; None for the shards' own. Where it cannot be written,
        they are in the user's cache folder: XDG_CACHE_HOME, or ~/.cache.
      written_to: the folders into which this keeper has written.
    """

    def __init__(self, index_dir: str | os.PathLike | None):
        """Takes the folder. Nothing is written yet."""
        self.index_dir = None if index_dir is None else absolute(index_dir)
        self.written_to: set[str] = set()

    def read(self, shard: str, suffix: str, parse: Callable[[pathlib.Path], Any]) -> Any:
        """Returns what `parse` gives for a file that was kept of the shard, or None.

        Args:
          shard: its path.
          suffix: of the file: what its name has instead of the shard's `.tar`, or beyond its name.
          parse: returns None for a file that is missing, broken or does not fit.
        """
        parsed = (parse(place) for place in self._places(shard, suffix))
        return next((each for each in parsed if each is not None), None)

    def write(self, shard: str, suffix: str, data: bytes) -> None:
        """Keeps a file of the shard: written aside, then renamed.

        So a reader finds a whole file or none, and of two processes at once the later one wins.
        """
        for place in self._places(shard, suffix):
            # Not seen by patterns, for its dot. Two machines may share the folder: no process id.
            unfinished = place.with_name(f".{place.name}.{uuid.uuid4().hex}")
            try:
                place.parent.mkdir(parents=True, exist_ok=True)
                unfinished.write_bytes(data)
                os.replace(unfinished, place)
            except OSError as error:
                failure = error
                with contextlib.suppress(OSError):
                    unfinished.unlink()  # the disk is full
            else:
                self.written_to.add(str(place.parent))
                return
        log.warning(
            "data: %s cannot be kept (%s): the next run makes it again", place, failure.strerror
        )

    def _places(self, shard: str, suffix: str) -> tuple[pathlib.Path, pathlib.Path]:
        beside = pathlib.Path(shard)
        name = beside.name.removesuffix(".tar") + suffix
        if suffix.endswith(".npz"):  # but for DALI's: hidden from a user's own pattern of shards
            name = f".{name}"
        # Shards of different folders have equal names.
        prefix = hashlib.sha256(os.fsencode(beside.parent)).hexdigest()[:16]
        in_cache = cache_folder("index") / f"{prefix}-{name}"
        if self.index_dir is None:
            return beside.parent / name, in_cache
        # DALI's may be there already, made by its own tools; it is compared with the shard's bytes.
        own = name if suffix == ".idx" else f".{prefix}{name}"
        return self.index_dir / own, in_cache


@dataclasses.dataclass(frozen=True)
class Found:
    """The examples of all shards, in the order of the shards, then of the file.

    Attributes:
      images: ranges of bytes.
      labels: [num_examples] int64, or names as bytes; None for pairs.
      targets: of pairs, ranges of bytes; None for labelled images.
    """

    images: Blobs
    labels: np.ndarray | None
    targets: Blobs | None


def examples(
    shards: Sequence[str],
    *,
    key: str,
    index_dir: str | os.PathLike | None,
    rows: Callable[[BinaryIO, Keeper], Iterable[dict]],
) -> Found:
    """Returns where each example is, from what was kept or by looking through the shards.

    Args:
      shards: their paths.
      key: all that the rows depend on beside the shard.
      index_dir: see Keeper.
      rows: yields, from an open shard, each example's "image_offset" and "image_size", and its
        "label" or its "target_offset" and "target_size".

    Raises:
      UserError: a shard cannot be read, or some have numbers as labels and others names.
    """
    keeper = Keeper(index_dir)
    suffix = f".{hashlib.sha256(key.encode()).hexdigest()[:8]}.npz"

    def load(shard):
        return keeper.read(
            shard,
            suffix,
            functools.partial(_load, stamp=_stamp(shard, key), shard_size=os.path.getsize(shard)),
        )

    def make(shard):
        stamp = _stamp(shard, key)  # before: if the shard changes meanwhile, it is looked at again
        try:
            with open_regular(shard, buffering=0) as file:
                columns = _as_columns(rows(file, keeper))
        except OSError as error:
            raise UserError(f"shard {shard} cannot be read ({error.strerror})") from error
        keeper.write(shard, suffix, _dump(columns, stamp))
        return columns

    with concurrent.futures.ThreadPoolExecutor(NUM_THREADS) as pool:
        found = dict(zip(shards, pool.map(load, shards), strict=True))
        new = [shard for shard, columns in found.items() if columns is None]
        if new:
            summary(
                "data: looking through %d of %d shards, once; first %s",
                len(new),
                len(shards),
                new[0],
            )
            found.update(zip(new, pool.map(make, new), strict=True))
    if keeper.written_to:
        log.info("data: wrote the shards' indexes to %s", ", ".join(sorted(keeper.written_to)))
    found = list(found.values())
    for name in found[0]:
        if len({each[name].dtype.kind for each in found}) > 1:
            raise UserError(f"some of {shards[0]}, ... have a number as {name} and others a name")
    columns = {name: np.concatenate([each[name] for each in found]) for name in found[0]}
    counts = [len(each["image_size"]) for each in found]
    shard = np.repeat(np.arange(len(shards), dtype=np.int32), counts)

    def blobs(name):
        return Blobs(tuple(shards), shard, columns[f"{name}_offset"], columns[f"{name}_size"])

    labels = columns.get("label")
    return Found(blobs("image"), labels, blobs("target") if labels is None else None)


def _as_columns(rows: Iterable[dict]) -> Columns:
    """Returns rows of equal keys, at least one, as an array for each key."""
    columns = collections.defaultdict(list)
    for row in rows:
        for name, cell in row.items():
            columns[name].append(cell)
    return {name: np.array(cells) for name, cells in columns.items()}


def _stamp(shard: str, key: str) -> str:
    """Returns what changes when the columns must be made anew."""
    status = os.stat(shard)
    return f"{VERSION} {status.st_size} {status.st_mtime_ns} {key}"


def _load(place: pathlib.Path, stamp: str, shard_size: int) -> Columns | None:
    """Returns the columns that were kept, None where they are of another shard, or damaged."""
    try:
        with open_regular(place) as opened, np.load(opened, allow_pickle=False) as file:
            if str(file["stamp"]) != stamp:
                return None
            columns = {name: file[name] for name in file.files if name != "stamp"}
        return columns if _fit(columns, shard_size) else None
    except Exception:  # a damaged file may make its reader raise anything: it is made anew
        return None


def _fit(columns: Columns, shard_size: int) -> bool:
    """Returns whether all columns have as many cells, and all ranges of bytes lie in the shard."""
    sizes = {len(each) for each in columns.values() if each.ndim == 1}
    if len(sizes) != 1 or any(each.ndim != 1 for each in columns.values()):
        return False
    parts = [each.removesuffix("_size") for each in columns if each.endswith("_size")]
    if "image" not in parts or not {"target_size", "label"} & columns.keys():
        return False
    for offsets, sizes in ((columns[f"{each}_offset"], columns[f"{each}_size"]) for each in parts):
        if min(offsets.min(), sizes.min()) < 0 or (sizes > shard_size - offsets).any():
            return False
    return True


def _dump(columns: Columns, stamp: str) -> bytes:
    file = io.BytesIO()
    np.savez(file, stamp=np.array(stamp), **columns)
    return file.getvalue()
