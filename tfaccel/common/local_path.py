"""Checks that a user's path is on a local file system. A URL raises an error with the fix.

local_path("~/data/training")    # pathlib.Path("/home/me/data/training")
local_path("s3://bucket/x")      # UserError: ... is a URL; tfaccel reads and writes files ...
"""

import os
import pathlib
import re

from tfaccel.common.errors import UserError
from tfaccel.common.redact import shown

# pathlib turns `//` into `/`. A URL may be joined to a folder. A scheme of one letter is a drive of
# Windows.
_URL = re.compile(r"(?:^|/|::)([A-Za-z][A-Za-z0-9+.-]+):/")


def local_path(path: str | os.PathLike) -> pathlib.Path:
    """Returns the path, with the home folder in place of `~`.

    Raises:
      UserError: the value is no path, is a URL, or contains a zero byte.
    """
    if not isinstance(path, str | os.PathLike) or isinstance(os.fspath(path), bytes):
        raise UserError(f"{path!r} is no path; give a str like '/data/training', or a pathlib.Path")
    text = os.fspath(path)
    if "\0" in text:
        raise UserError(f"{text!r} contains a zero byte, which no path can have; remove it")
    found = _URL.search(text)
    if found and not os.path.exists(text):
        raise UserError(_refused(text[found.start(1) :], found[1]))
    try:
        return pathlib.Path(path).expanduser()
    except RuntimeError as error:  # there is no such user
        raise UserError(f"{text}: {error}; give the path in full") from None


def _refused(url: str, scheme: str) -> str:
    rest = url[len(scheme) + 1 :].lstrip("/")
    said = shown(f"{scheme}://{rest}")
    if scheme.lower() == "file":
        rest = re.sub(r"^localhost(?=/)", "", rest)
        return f"{said} is a URL; give only the path: /{rest.lstrip('/')}"
    return (
        f"{said} is a URL; tfaccel reads and writes only files of this machine: copy the files to "
        "a local folder first, or mount their place as a folder and give its path; only images are "
        "read from a URL, as text: data.root, sources.class_folders and others"
    )
