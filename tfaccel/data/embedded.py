"""Writes a small data set that a Python package contains to the cache, once, as image files.

root = write_once("digits", write)
"""

import logging
import os
import pathlib
import tempfile
from collections.abc import Callable

from tfaccel.common.errors import UserError
from tfaccel.process.cache_folder import cache_folder

log = logging.getLogger("tfaccel")

WRITTEN_AT = 1_700_000_000  # in seconds: every file gets this time of change


def write_once(name: str, write: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """Writes a data set to the user's cache folder on first use, and returns its folder.

    Args:
      name: the data set's name.
      write: a function that writes the files into the empty folder that it is given.

    Raises:
      UserError: the files cannot be written.
    """
    root = cache_folder(name)
    if root.is_dir():
        log.info("data: the embedded %s, in %s", name, root)
        return root
    log.info("data: writing the embedded %s to %s", name, root)
    # The files are written beside the folder and renamed, so a killed process leaves no partial
    # data set, and if two processes write at once, the later one finds the folder and keeps it.
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{name}.", dir=root.parent) as aside:
            unfinished = pathlib.Path(aside, name)
            unfinished.mkdir()
            write(unfinished)
            for file in unfinished.rglob("*"):  # so a resume accepts files that were written again
                os.utime(file, (WRITTEN_AT, WRITTEN_AT))
            try:
                unfinished.rename(root)
            except OSError:
                if not root.is_dir():
                    raise
    except OSError as error:
        raise UserError(
            f"the embedded {name} cannot be written to {root.parent} ({error.strerror}); set "
            "XDG_CACHE_HOME to a folder that can be written, or give --config.data.root"
        ) from error
    return root
