"""Tells URLs of stores from paths, and joins a URL with what lies below it.

is_url("s3://bucket/photos")                # True
below("s3://bucket/photos", "training")     # "s3://bucket/photos/training"
"""

import re

from tfaccel.common.errors import UserError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")


def is_url(place: object) -> bool:
    """Returns whether a place is the URL of a store, as text. "file://" is none."""
    found = _SCHEME.match(place) if isinstance(place, str) else None
    return found is not None and found[1].lower() != "file"


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
