"""Values that change if a run's data is changed: sizes, times of change and samples of the bytes.

    of_files(("a/1.png", "a/2.png"))
    # {"bytes": 2310, "newest change": "2026-11-27T09:12:00+00:00", "sizes and times": "5c2a..."}
    of_array(images)

The values can be written as JSON. A million files take 3 s of wall time and 2 s of CPU, once in
each start (2 cores, 2026-11-27). A file that is replaced by one with the same size and the same
time of change is not noticed.
"""

import concurrent.futures
import datetime
import hashlib
import os
from collections.abc import Sequence

import numpy as np

NUM_THREADS = 16  # to hide the latency of a network drive
FILES_AT_A_TIME = 1024
SAMPLED_BYTES = 64 << 20  # of an array in memory; a smaller array is read wholly


def of_files(files: Sequence[str]) -> dict[str, object]:
    """Returns values that change with the files, and do not depend on their folder.

    Args:
      files: paths in the order of the source. A missing file counts as empty.
    """
    starts = range(0, len(files), FILES_AT_A_TIME)
    parts = (files[start : start + FILES_AT_A_TIME] for start in starts)
    with concurrent.futures.ThreadPoolExecutor(NUM_THREADS) as pool:
        states = np.concatenate([np.zeros((0, 2), np.int64), *pool.map(_states, parts)])
    newest = int(states[:, 1].max(initial=0)) / 1e9
    return {
        "bytes": int(states[:, 0].sum()),
        "newest change": datetime.datetime.fromtimestamp(newest, datetime.UTC).isoformat(),
        "sizes and times": _digest(states),
    }


def of_states(states: np.ndarray) -> dict[str, object]:
    """Returns values that change with files that a reader reads, as far as it knows.

    Args:
      states: [num_files, 2] int64, the size and the version of each; size -1 if it is unknown.
    """
    return {"bytes": int(states[:, 0].clip(0).sum()), "sizes and versions": _digest(states)}


def of_array(array: np.ndarray) -> dict[str, object]:
    """Returns values that change with the array.

    For an array that is mapped from a file, they are the file's size and time of change. For an
    array in memory, they are a digest of its rows, or of 64 MiB of rows, evenly spread, if the
    array is larger.

    Args:
      array: [num_examples, ...], of any numeric dtype.
    """
    file = getattr(array, "filename", None)
    if isinstance(array, np.memmap) and file:
        return of_files((str(file),))
    row_bytes = max(1, array.nbytes // max(1, len(array)))
    step = max(1, -(-len(array) * row_bytes // SAMPLED_BYTES))
    rows = np.ascontiguousarray(array[::step])
    return {"bytes": array.nbytes, "content" if step == 1 else f"each row of {step}": _digest(rows)}


def _states(files: Sequence[str]) -> np.ndarray:
    """Returns [num_files, 2] int64: the size in bytes, and the time of the last change in ns."""
    return np.array([_state(each) for each in files], np.int64)


def _state(file: str) -> tuple[int, int]:
    try:
        found = os.stat(file)
    except OSError:  # the loader that reads the file reports the error
        return 0, 0
    return found.st_size, found.st_mtime_ns


def _digest(array: np.ndarray) -> str:
    return hashlib.blake2b(array, digest_size=16).hexdigest()
