"""Records the size and hash of a checkpoint's files, so that damage is found before they are read.

Takes a folder; gives MANIFEST.json in it, and later checks all files against it.

    write_manifest(folder)
    verify(folder)            # or CheckpointError: "arrays.index is missing"

    arrays.index                   TensorFlow's checkpoint of named arrays
    arrays.data-00000-of-00001
    state.json                     the rest of the state
    MANIFEST.json                  size and sha256 of each of these files
"""

import hashlib
import json
import os
import pathlib
from typing import Any

from tfaccel.common.errors import RunError
from tfaccel.common.regular_file import open_regular, read_regular

FORMAT_VERSION = 1
MARKER = "tfaccel checkpoint"
ARRAYS = "arrays"
STATE = "state.json"
MANIFEST = "MANIFEST.json"
FILES = (f"{ARRAYS}.index", f"{ARRAYS}.data-00000-of-00001", STATE)


class CheckpointError(RunError):
    """A checkpoint cannot be written, or is damaged."""


def write_manifest(folder: pathlib.Path) -> None:
    """Writes the manifest of the folder's files."""
    files = {name: _measure(folder / name) for name in FILES}
    manifest = {"format": MARKER, "format_version": FORMAT_VERSION, "files": files}
    # The file ends with its last brace: with one byte less, it is not JSON.
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2))


def verify(folder: pathlib.Path) -> None:
    """Checks every file. 200 MB take 0.14 s if they are in memory (2 CPU cores, 2026-11-21).

    Raises:
      CheckpointError: a file is missing, a file differs from the manifest, or the manifest itself
        is not valid.
      OSError: a file cannot be read.
    """
    for name, written in read_manifest(folder)["files"].items():
        if not (folder / name).is_file():
            raise CheckpointError(f"{name} is missing")
        measured = _measure(folder / name)
        if measured["size"] != written["size"]:
            raise CheckpointError(
                f"{name} has {measured['size']} bytes, but was written with {written['size']}"
            )
        if measured != written:
            raise CheckpointError(f"{name} has changed since it was written: its sha256 differs")


def read_manifest(folder: pathlib.Path) -> dict[str, Any]:
    """Returns the manifest: {"files": {name: {"size": bytes, "sha256": hex}}, ...}.

    Raises:
      CheckpointError: it is missing, not a manifest of tfaccel, or of a newer tfaccel.
      OSError: it cannot be read.
    """
    try:
        manifest = json.loads(read_regular(folder / MANIFEST))
    except FileNotFoundError:
        raise CheckpointError(f"{MANIFEST} is missing") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{MANIFEST} is not JSON") from None
    if not isinstance(manifest, dict) or manifest.get("format") != MARKER:
        raise CheckpointError(f"{MANIFEST} is not the manifest of a tfaccel checkpoint")
    version = manifest.get("format_version")
    if not isinstance(version, int) or version < 1:
        raise CheckpointError(f"{MANIFEST} has format version {version!r}, which does not exist")
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"a newer tfaccel made it, in format version {version}; this one reads versions up to "
            f"{FORMAT_VERSION}"
        )
    files = manifest.get("files")
    if not isinstance(files, dict) or set(files) != set(FILES):
        raise CheckpointError(f"{MANIFEST} does not list a checkpoint's files")
    if not all(
        isinstance(each, dict) and set(each) == {"size", "sha256"} for each in files.values()
    ):
        raise CheckpointError(f"{MANIFEST} does not list sizes and hashes")
    return manifest


def _measure(path: pathlib.Path) -> dict[str, Any]:
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"size": os.fstat(file.fileno()).st_size, "sha256": digest}
