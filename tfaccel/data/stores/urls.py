"""Tells URLs of stores from paths, and joins a URL with what lies below it.

is_url("s3://bucket/photos")                # True
below("s3://bucket/photos", "training")     # "s3://bucket/photos/training"
"""

import os
import re

from tfaccel.common.errors import UserError
from tfaccel.common.redact import shown

_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(?!/)")
_WITH_ONE_SLASH = ("dbfs", "file")  # which local_path refuses
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")


def is_url(place: object) -> bool:
    """Returns whether a place is the URL of a store, as text. "file://" is none."""
    found = _SCHEME.match(place) if isinstance(place, str) else None
    return found is not None and found[1].lower() != "file"


def check_spelled(place: object, name: str = "") -> None:
    """Checks that a text such as "s3:/bucket" or "S3://bucket" is not meant as a URL.

    Args:
      place: a path, a URL, or anything else.
      name: of the argument, for the message: "data.root".

    Raises:
      UserError: it seems to be a misspelled URL.
    """
    if not isinstance(place, str):
        return
    found = _ONE_SLASH.match(place) or _SCHEME.match(place)
    if found is None or found[1].lower() in _WITH_ONE_SLASH or os.path.exists(place):
        return
    meant = f"{found[1].lower()}://{place[found.end() :]}"
    if meant != place:
        said = f"{name}={shown(place)!r}" if name else repr(shown(place))
        raise UserError(f"{said}; did you mean {shown(meant)!r}?")


def below(url: str, path: str) -> str:
    """Returns the URL of a path below a URL; "." and "" are the URL itself.

    Raises:
      UserError: the path is absolute or has "..", which leads out of the URL.
    """
    parts = [each for each in path.split("/") if each not in ("", ".")]
    if path.startswith("/") or ".." in parts:
        raise UserError(f"{path!r} is no path below {url}; give one without '..' and '/' before it")
    return "/".join([url.rstrip("/"), *parts])


def parent(url: str) -> str:
    """Returns the URL of the folder that holds a file."""
    return url.rstrip("/").rpartition("/")[0]


def scheme(url: str) -> str:
    """Returns the scheme of a URL in lowercase: "s3"."""
    return _SCHEME.match(url)[1].lower()
