"""Paths as users give them: made absolute, and what to say of one that leads nowhere.

absolute("~/data/training"), nearest(path, kind="folder", wanted="one folder per class")
"""

import os
import pathlib

from tfaccel.common.errors import did_you_mean
from tfaccel.common.local_path import local_path

MOST_NAMES = 1000  # looked through for one like it: a folder may hold millions


def absolute(path: str | os.PathLike) -> pathlib.Path:
    """Returns the path from the root, links and all.

    Raises:
      UserError: it is no path, a URL, or a path that no file can have.
    """
    return local_path(path).absolute()


def nearest(path: pathlib.Path, *, kind: str, wanted: str) -> str:
    """Returns how the sentence ends that says that a path does not exist.

    Args:
      path: absolute.
      kind: "folder" or "file": which of its neighbours could have been meant.
      wanted: what the path should lead to.
    """
    parent = path.parent
    if not parent.is_dir():
        return f", nor does {parent}; give the path of {wanted}"
    with os.scandir(parent) as entries:
        siblings = [each.name for each in entries if each.is_dir() == (kind == "folder")]
    if not siblings:
        return f"; {parent} holds no {kind}s at all"
    cure = did_you_mean(path.name, siblings[:MOST_NAMES])
    return cure if len(cure) < 400 else f"; {parent} holds {len(siblings)} {kind}s of other names"
