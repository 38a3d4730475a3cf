"""Secrets and control characters, taken out of what is written down: configs, logs, errors, tables.

Takes text or a nest of values; gives the same with `***` in the place of secrets, and with escapes
in the place of characters that a terminal would obey instead of showing them.

    redacted({"root": "https://me:pass@host/x", "api_token": "abc"})
    without_userinfo("cannot read s3://key:secret@bucket")
    escaped("a\\x1b[2J.png")       # a\\\\x1b[2J.png: the name, readable, and not obeyed
    shown(text)                    # both
"""

import logging
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

# By whole words, so that `image_key`, a feature of a TFRecord, is none.
_SECRET_NAME = re.compile(
    r"(^|[_.-])((api|access|private|secret)_?key|tokens?|secrets?|passwords?|passwd|credentials?)$",
    re.IGNORECASE,
)
# One slash, as pathlib leaves of two; or more; or each behind a backslash, as some JSON has them.
_SCHEME = r"\b([a-z][a-z0-9+.-]*:(?:\\?/)+)"
_USERINFO = (
    # A password may hold a slash or an @ by mistake. A port is none, as in https://host:80/x@2.
    re.compile(rf"{_SCHEME}[^\s/@:'\"\\]+:(?!\d+[/\s])[^\s'\"\\]*@", re.IGNORECASE),
    re.compile(rf"{_SCHEME}[^/\s'\"\\]+@", re.IGNORECASE),
)
_SECRET_ARGUMENT = re.compile(
    r"([?&;](?:[\w-]*(?:token|secret|password|signature|sig|key))=)[^&;\s'\"]+", re.IGNORECASE
)
# Control characters, those that turn text around or are not seen, lone halves of surrogates, and
# other ends of lines.
_OBEYED = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
_PLAIN = re.compile(r"[ -~]*")


def without_userinfo(text: str) -> str:
    """Returns text whose URLs have no user, password or signed arguments."""
    for each in _USERINFO:
        text = each.sub(r"\1***@", text)
    return _SECRET_ARGUMENT.sub(r"\1***", text)


def escaped(text: str, *, keep: str = "") -> str:
    r"""Returns text without characters that a terminal or a viewer would obey.

    Each of them becomes what Python writes for it: \x1b, \r, \u202e. A byte of a file's name that
    is no text becomes \x and its two digits.

    Args:
      text: of anybody: names of files, classes and layers, words of other programs.
      keep: characters that stay, as "\n" of a text of several lines.
    """
    if _PLAIN.fullmatch(text):
        return text
    return "".join(
        _escape(each) if unicodedata.category(each) in _OBEYED and each not in keep else each
        for each in text
    )


def shown(text: str, *, keep: str = "\n\t") -> str:
    """Returns text as it may be shown to anybody: without secrets, and `escaped`."""
    return escaped(without_userinfo(text), keep=keep)


def redacted(value: Any, name: str = "") -> Any:
    """Returns a nest of dicts, lists and tuples without secrets, by their names or by URL."""
    if isinstance(value, dict):
        return {key: redacted(each, str(key)) for key, each in value.items()}
    if value and _SECRET_NAME.search(name):
        return "***"
    if isinstance(value, list | tuple):
        return type(value)(redacted(each) for each in value)
    return without_userinfo(value) if isinstance(value, str) else value


def redacted_command(arguments: Sequence[str]) -> list[str]:
    """Returns a command's arguments without secrets: of `--token=abc` and of `--token abc`."""
    said, flag = [], ""  # the one that a value follows
    for each in arguments:
        name, sign, value = each.partition("=")
        if flag and not each.startswith("-"):
            said.append(redacted(each, flag))
            flag = ""
        else:
            flag = name.lstrip("-").replace("-", "_")
            said.append(name + sign + redacted(value, flag))
            flag = "" if sign or not each.startswith("-") else flag
    return list(map(without_userinfo, said))


class Redacted(logging.Formatter):
    """A log formatter whose lines, tracebacks included, are `shown`.

    A line that follows the first begins with a blank: a name with an end of line in it cannot pass
    for a line of the log.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line."""
        first, *rest = shown(super().format(record)).split("\n")
        return "\n".join((first, *(f"  {each}" if each[:1].strip() else each for each in rest)))


class Shown(logging.Filter):
    """Lets every record pass, and has its message `shown`, whoever handles it."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns True."""
        try:
            message = record.getMessage()
        except (TypeError, ValueError):  # a mistake in the call, which the handler will say
            return True
        said = shown(message)
        if said != message:
            record.msg, record.args = said, None
        return True


# A program may have handlers of its own: what they are given has no secrets either.
logging.getLogger("tfaccel").addFilter(Shown())


def _escape(character: str) -> str:
    number = ord(character)
    if 0xDC80 <= number <= 0xDCFF:  # a byte, as os.fsdecode keeps it
        return f"\\x{number - 0xDC00:02x}"
    return character.encode("unicode_escape", "surrogatepass").decode()
