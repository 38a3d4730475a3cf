"""A folder's path that TensorFlow reads as it is, also where it holds `[`, `*`, `?` or `\\`.

TensorFlow 2.21 writes a checkpoint or a SavedModel under the path that it is given, and looks for
it by that path as a pattern: what lies in `runs/lr=[0.1]` is written and never found again.

    with literal(folder) as plain:
        reader = tf.train.load_checkpoint(f"{plain}/arrays")
"""

import contextlib
import logging
import os
import pathlib
from collections.abc import Iterator

log = logging.getLogger("tfaccel")

MAGIC = frozenset("*?[]\\")


def has_magic(path: str | os.PathLike) -> bool:
    """Returns whether the path, taken for a pattern, may stand for other paths."""
    return not MAGIC.isdisjoint(str(path))


@contextlib.contextmanager
def literal(folder: pathlib.Path) -> Iterator[str]:
    """Yields a path of the folder that is no pattern, for as long as the context lasts.

    It is the folder's own path where that is no pattern, and Linux's path of an open folder where
    it is one. Nothing is written, so that a killed process leaves nothing.

    Raises:
      OSError: the folder cannot be opened.
    """
    if not has_magic(folder):
        yield str(folder)
        return
    number = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{number}"
    finally:
        os.close(number)


def warn_servers(folder: pathlib.Path) -> None:
    """Says that TensorFlow itself cannot load an export from where it is."""
    if has_magic(folder):
        log.warning(
            "export: the path %s holds one of the characters %s, and tf.saved_model.load takes "
            "that for a pattern; copy the export to a path without them before you serve it",
            folder,
            " ".join(sorted(MAGIC)),
        )
