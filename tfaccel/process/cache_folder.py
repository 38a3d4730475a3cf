"""The folder for files that can be made again: manifests, indexes, decoded images, small data.

folder = cache_folder("index")    # ~/.cache/tfaccel/index
make_own(folder)                  # for files that are run as programs
"""

import os
import pathlib


def cache_folder(name: str) -> pathlib.Path:
    """Returns the folder of that name in XDG_CACHE_HOME or ~/.cache. It may not exist yet."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return pathlib.Path(cache).expanduser() / "tfaccel" / name


def make_own(folder: pathlib.Path) -> None:
    """Makes the folder and its parents; raises OSError if another user could write to it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(f"other users can write to {folder}; remove it, or run chmod 700")
