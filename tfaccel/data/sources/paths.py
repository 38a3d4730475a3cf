"""Makes paths from users absolute, and gives a hint for paths that do not exist.

absolute("~/data/training"), nearest(path, kind="folder", wanted="one folder per class")
"""

import os
import pathlib

from tfaccel.common.errors import did_you_mean
from tfaccel.common.local_path import local_path
from tfaccel.data.stores.urls import check_spelled

MOST_NAMES = 1000  # names that are compared with the path: a folder may hold millions


def absolute(path: str | os.PathLike) -> pathlib.Path:
    """Returns the absolute path, without resolving links.

    Raises:
      UserError: the text is not a path, is a URL, or is a path that no file can have.
    """
    check_spelled(path)
    return local_path(path).absolute()


def nearest(path: pathlib.Path, *, kind: str, wanted: str) -> str:
    """Returns the end of an error message which says that a path does not exist.

    Args:
      path: the absolute path.
      kind: "folder" or "file": which of its neighbours the user could have meant.
      wanted: what the path should lead to.
    """
    parent = path.parent
    if not parent.is_dir():
        return f", nor does {parent}; give the path of {wanted}"
    with os.scandir(parent) as entries:
        siblings = [each.name for each in entries if each.is_dir() == (kind == "folder")]
    if not siblings:
        return f"; {parent} holds no {kind}s"
    hint = did_you_mean(path.name, siblings[:MOST_NAMES])
    return hint if len(hint) < 400 else f"; {parent} holds {len(siblings)} {kind}s of other names"
