"""Secrets, taken out of what is written down: configs, logs, error messages.

Takes text or a nest of values; gives the same with `***` in their place.

    redacted({"root": "https://me:pass@host/x", "api_token": "abc"})
    without_userinfo("cannot read s3://key:secret@bucket")
"""

import logging
import re
from typing import Any

# By whole words, so that `image_key`, a feature of a TFRecord, is none.
_SECRET_NAME = re.compile(
    r"(^|[_.-])((api|access|private|secret)_?key|tokens?|secrets?|passwords?|passwd|credentials?)$",
    re.IGNORECASE,
)
_USERINFO = re.compile(r"\b([a-z][a-z0-9+.-]*://)[^/\s@'\"]+@", re.IGNORECASE)
_SECRET_ARGUMENT = re.compile(
    r"([?&;](?:[\w-]*(?:token|secret|password|signature|sig|key))=)[^&;\s'\"]+", re.IGNORECASE
)


def without_userinfo(text: str) -> str:
    """Returns text whose URLs have no user, password or signed arguments."""
    return _SECRET_ARGUMENT.sub(r"\1***", _USERINFO.sub(r"\1***@", text))


def redacted(value: Any, name: str = "") -> Any:
    """Returns a nest of dicts, lists and tuples without secrets, by their names or by URL."""
    if isinstance(value, dict):
        return {key: redacted(each, str(key)) for key, each in value.items()}
    if value and _SECRET_NAME.search(name):
        return "***"
    if isinstance(value, list | tuple):
        return type(value)(redacted(each) for each in value)
    return without_userinfo(value) if isinstance(value, str) else value


class Redacted(logging.Formatter):
    """A log formatter whose lines, tracebacks included, have no userinfo."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line."""
        return without_userinfo(super().format(record))
