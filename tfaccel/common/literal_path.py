"""A path of a folder that TensorFlow cannot take for a pattern.

TensorFlow 2.21 writes a checkpoint or a SavedModel to the path that it is given. But when it looks
for the files, it reads `[`, `*`, `?` and `\\` in the path as a pattern: it never finds what it
wrote to `runs/lr=[0.1]`.

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
    """Returns whether the path contains a character of a pattern."""
    return not MAGIC.isdisjoint(str(path))


@contextlib.contextmanager
def literal(folder: pathlib.Path) -> Iterator[str]:
    """Yields a path of the folder without pattern characters, which is valid within the context.

    This is the folder's own path, or Linux's path of an open folder if the own path has pattern
    characters. Nothing is written, so a killed process leaves nothing.

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
    """Warns if TensorFlow itself cannot load an export from this folder."""
    if has_magic(folder):
        log.warning(
            "export: the path %s contains one of the characters %s, and tf.saved_model.load reads "
            "it as a pattern; copy the export to a path without them before you serve it",
            folder,
            " ".join(sorted(MAGIC)),
        )
