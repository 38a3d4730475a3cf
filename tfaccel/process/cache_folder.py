"""The folder for files that can be made again: manifests, indexes, decoded images, small data.

folder = cache_folder("index")    # ~/.cache/tfaccel/index
"""

import os
import pathlib


def cache_folder(name: str) -> pathlib.Path:
    """Returns the folder of that name in XDG_CACHE_HOME or ~/.cache. It may not exist yet."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return pathlib.Path(cache).expanduser() / "tfaccel" / name
