"""Paths as users give them: of this machine's file systems, or refused with the cure.

local_path("~/data/training")    # pathlib.Path("/home/me/data/training")
local_path("s3://bucket/x")      # UserError: ... is a URL; tfaccel reads and writes files ...
"""

import os
import pathlib
import re

from tfaccel.common.errors import UserError
from tfaccel.common.redact import shown

# pathlib makes one slash of two. A scheme may stand behind a folder that it was joined to. Of one
# letter it is a drive of Windows.
_URL = re.compile(r"(?:^|/|::)([A-Za-z][A-Za-z0-9+.-]+):/")


def local_path(path: str | os.PathLike) -> pathlib.Path:
    """Returns the path, with the home folder in the place of `~`.

    Raises:
      UserError: it is no path, a URL, or a path that no file can have.
    """
    if not isinstance(path, str | os.PathLike) or isinstance(os.fspath(path), bytes):
        raise UserError(f"{path!r} is no path; give text, as '/data/training', or a pathlib.Path")
    text = os.fspath(path)
    if "\0" in text:
        raise UserError(f"{text!r} holds a zero byte, which no path may have; give another")
    found = _URL.search(text)
    if found and not os.path.exists(text):
        raise UserError(_refused(text[found.start(1) :], found[1]))
    try:
        return pathlib.Path(path).expanduser()
    except RuntimeError as error:  # there is no such user
        raise UserError(f"{text}: {error}; give the path in full") from None


def check_local(path: str | os.PathLike) -> None:
    """Raises UserError as `local_path` does."""
    local_path(path)


def _refused(url: str, scheme: str) -> str:
    rest = url[len(scheme) + 1 :].lstrip("/")
    said = shown(f"{scheme}://{rest}")
    if scheme.lower() == "file":
        rest = re.sub(r"^localhost(?=/)", "", rest)
        return f"{said} is a URL; give the path alone: /{rest.lstrip('/')}"
    return (
        f"{said} is a URL; tfaccel reads and writes files of this machine alone: copy them to a "
        "local folder first, or mount what is there as a folder and give its path"
    )
