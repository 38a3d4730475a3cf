"""Removes secrets and control characters from configs, logs, errors and tables.

Secrets become `***`. Characters that a terminal would act on instead of showing become escapes.

    redacted({"root": "https://me:pass@host/x", "api_token": "abc"})
    without_userinfo("cannot read s3://key:secret@bucket")
    escaped("a\\x1b[2J.png")       # a\\\\x1b[2J.png: readable, and harmless in a terminal
    shown(text)                    # without secrets, and escaped
"""

import logging
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

# The names are whole words, so that `image_key`, a feature of a TFRecord, does not match.
_SECRET_NAME = re.compile(
    r"(^|[_.-])((api|access|private|secret)_?key|tokens?|secrets?|passwords?|passwd|credentials?)$",
    re.IGNORECASE,
)
# `//`, or `/` as pathlib writes it, or `\/` as some JSON writers write it.
_SCHEME = r"\b([a-z][a-z0-9+.-]*:(?:\\?/)+)"
_USERINFO = (
    # A password may contain "/" or "@" by mistake. A port is no password: https://host:80/x@2.
    re.compile(rf"{_SCHEME}[^\s/@:'\"\\]+:(?!\d+[/\s])[^\s'\"\\]*@", re.IGNORECASE),
    re.compile(rf"{_SCHEME}[^/\s'\"\\]+@", re.IGNORECASE),
)
_SECRET_ARGUMENT = re.compile(
    r"([?&;](?:[\w-]*(?:token|secret|password|signature|sig|key))=)[^&;\s'\"]+", re.IGNORECASE
)
# Categories of control characters, of characters that are invisible or reverse text, of lone
# surrogates, and of line separators.
_OBEYED = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
_PLAIN = re.compile(r"[ -~]*")


def without_userinfo(text: str) -> str:
    """Returns the text without users, passwords and signatures in its URLs."""
    for each in _USERINFO:
        text = each.sub(r"\1***@", text)
    return _SECRET_ARGUMENT.sub(r"\1***", text)


def escaped(text: str, *, keep: str = "") -> str:
    r"""Returns the text without characters that a terminal or a viewer would act on.

    Each of them becomes Python's escape: \x1b, \r, \u202e. A byte of a file name that is not valid
    text becomes \x and two digits.

    Args:
      text: text from anywhere: names of files, classes and layers, output of other programs.
      keep: characters that stay, such as "\n" in a text of several lines.
    """
    if _PLAIN.fullmatch(text):
        return text
    return "".join(
        _escape(each) if unicodedata.category(each) in _OBEYED and each not in keep else each
        for each in text
    )


def shown(text: str, *, keep: str = "\n\t") -> str:
    """Returns the text without secrets and control characters, so that it can be shown."""
    return escaped(without_userinfo(text), keep=keep)


def redacted(value: Any, name: str = "") -> Any:
    """Returns nested dicts, lists and tuples without secrets, found by their names or in URLs."""
    if isinstance(value, dict):
        return {key: redacted(each, str(key)) for key, each in value.items()}
    if value and _SECRET_NAME.search(name):
        return "***"
    if isinstance(value, list | tuple):
        return type(value)(redacted(each) for each in value)
    return without_userinfo(value) if isinstance(value, str) else value


def redacted_command(arguments: Sequence[str]) -> list[str]:
    """Returns a command's arguments without secrets, also for `--token=abc` and `--token abc`."""
    said, flag = [], ""  # the last flag, if its value may follow
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
    """A log formatter that removes secrets and control characters, from tracebacks too.

    It indents every line of a record after the first, so that a name with a line break cannot look
    like a line of the log.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Returns the lines of the record."""
        first, *rest = shown(super().format(record)).split("\n")
        return "\n".join((first, *(f"  {each}" if each[:1].strip() else each for each in rest)))


class Shown(logging.Filter):
    """Removes secrets and control characters from every record's message, for all handlers."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Changes the record and returns True."""
        try:
            message = record.getMessage()
        except (TypeError, ValueError):  # a wrong call of log: the handler reports it
            return True
        said = shown(message)
        if said != message:
            record.msg, record.args = said, None
        return True


# A program may have its own log handlers, which must not get secrets either.
logging.getLogger("tfaccel").addFilter(Shown())


def _escape(character: str) -> str:
    number = ord(character)
    if 0xDC80 <= number <= 0xDCFF:  # a byte that os.fsdecode could not decode
        return f"\\x{number - 0xDC00:02x}"
    return character.encode("unicode_escape", "surrogatepass").decode()
