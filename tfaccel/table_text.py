"""What tables for people share: lines of 80 columns, HTML, counts, a pipe that may be gone.

print(in_lines("a sentence of any length", first="ok    ", rest="      "))
"""

import html
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Container, Iterable, Sequence

from tfaccel.redact import shown

WIDTH = 80  # columns, also of a wide terminal: what goes into an issue is read everywhere
BOLD = re.compile(r"\x1b\[[01]m")  # Keras writes its errors so


def in_lines(text: str, *, first: str = "", rest: str = "") -> str:
    """Returns text wrapped; words (paths, flags, commands) stay whole, to be copied.

    Args:
      text: of any length, and of anybody: paths, last words of a process.
      first: what the first line begins with.
      rest: what the others begin with.
    """
    return textwrap.fill(
        cleaned(text),
        WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def html_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, right: Container[int] = ()
) -> str:
    """Returns texts as a table for a page, with nothing in them that is markup.

    Args:
      heads: of the columns.
      rows: of as many texts each.
      right: the indices of columns that end at the right, as numbers do. (The others begin at the
        left: notebooks center what says nothing.)
    """

    def row(tag: str, texts: Sequence[str]) -> str:
        cells = (
            f"<{tag} style='text-align:{'right' if index in right else 'left'};"
            f"vertical-align:top'>{as_html(text)}</{tag}>"
            for index, text in enumerate(texts)
        )
        return f"<tr>{''.join(cells)}</tr>"

    body = "".join(row("td", each) for each in rows)
    return f"<table><thead>{row('th', heads)}</thead><tbody>{body}</tbody></table>"


def as_html(text: str) -> str:
    """Returns text for a page, with nothing in it that is markup."""
    return html.escape(cleaned(text))


def cleaned(text: str) -> str:
    """Returns text as one line without secrets, its control characters escaped.

    Keras's marks of bold letters are taken out.
    """
    return shown(" ".join(BOLD.sub("", text).split()), keep="")


def counted(number: int, noun: str) -> str:
    """Returns a number and its noun: 1 layer, 2 layers."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def show_json(value: object) -> None:
    """Prints a value as one line of JSON; on a terminal that is narrower, as an indented one.

    So a program reads a line, and a person's terminal breaks nothing in the middle of a word.
    """
    line = json.dumps(value)
    if sys.stdout is not None and sys.stdout.isatty():
        columns = shutil.get_terminal_size().columns
        line = line if len(line) <= columns else json.dumps(value, indent=2)
    show(line)


def show(text: object, *, end: str = "\n") -> None:
    """Prints without secrets or control characters of others: the text's own lines stay.

    Also where the reader of a pipe has gone, as of `| head`.
    """
    try:
        print(shown(str(text)), end=end, flush=True)
    except BrokenPipeError:  # what Python writes at its end shall not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
