"""Small data sets that come with an installed package: written as image files, once, to the cache.

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

WRITTEN_AT = 1_700_000_000  # seconds: the time of every file, of any start


def write_once(name: str, write: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """Has a data set written on first use, to the user's cache folder, and returns its folder.

    Args:
      name: of the data set.
      write: puts its files into the empty folder that it is given.

    Raises:
      UserError: it cannot be written there.
    """
    root = cache_folder(name)
    if root.is_dir():
        log.info("data: the embedded %s, in %s", name, root)
        return root
    log.info("data: writing the embedded %s to %s", name, root)
    # Written aside and renamed: a killed process leaves no half data set, and of two processes
    # that write at once the later one finds the folder there and keeps it.
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{name}.", dir=root.parent) as aside:
            unfinished = pathlib.Path(aside, name)
            unfinished.mkdir()
            write(unfinished)
            for file in unfinished.rglob("*"):  # written anew they are the same, for a resume too
                os.utime(file, (WRITTEN_AT, WRITTEN_AT))
            _rename(unfinished, root)
    except OSError as error:
        raise UserError(
            f"the embedded {name} cannot be written to {root.parent} ({error.strerror}); set "
            "XDG_CACHE_HOME to a folder that can be written, or give --config.data.root"
        ) from error
    return root


def _rename(unfinished: pathlib.Path, root: pathlib.Path) -> None:
    """Gives a folder its name, unless another has it."""
    try:
        unfinished.rename(root)
    except OSError:
        if not root.is_dir():
            raise
