"""What all that people read shares: numbers, text that is safe to show, a terminal, a broken pipe.

show(f"{in_figures(2520.4)} images/s, {counted(8, 'GPU')}: {cleaned(name)}")
"""

import html
import json
import math
import os
import re
import shutil
import sys

from tfaccel.common.redact import shown

# Between these, a number is written out: 2,520 and 0.00000006, not 2.52e+03 and 6e-08.
LEAST_WRITTEN, MOST_WRITTEN = 1e-9, 1e15
BOLD = re.compile(r"\x1b\[[01]m")  # Keras writes its errors so


def columns() -> int | None:
    """Returns how wide the terminal is that shows what is printed.

    None for a file, a pipe or a notebook.
    """
    try:
        return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    except (AttributeError, ValueError):  # there is no standard output, or it is closed
        return None


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


def in_figures(value: float, digits: int = 3, *, zeros: bool = False) -> str:
    """Returns a number as people write it: 2,520, 0.0012 or 32,768, with no exponent.

    The digits before the point are all shown. Beyond `LEAST_WRITTEN` and `MOST_WRITTEN`, where
    zeros could only be counted, it is 1.2e-12.

    Args:
      value: of any size; one that is infinite or NaN is "inf" or "nan".
      digits: that count, at least: from the first that is not 0.
      zeros: whether zeros at the end of what follows the point are kept.
    """
    value = float(value)
    if not math.isfinite(value):
        return f"{value:g}"
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    if value and not LEAST_WRITTEN <= abs(value) < MOST_WRITTEN:
        return f"{mantissa if zeros else _without_zeros(mantissa)}e{int(exponent)}"
    text = f"{value + 0.0:,.{max(0, digits - 1 - int(exponent))}f}"  # + 0.0 makes 0 of -0
    return text if zeros else _without_zeros(text)


def _without_zeros(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text


def show_json(value: object) -> None:
    """Prints a value as one line of JSON; on a terminal that is narrower, as an indented one.

    So a program reads a line, and a person's terminal breaks nothing in the middle of a word.
    """
    line = json.dumps(value)
    width = columns()
    show(line if not width or len(line) <= width else json.dumps(value, indent=2))


def show(text: object, *, end: str = "\n") -> None:
    """Prints without secrets or control characters of others: the text's own lines stay.

    Also where the reader of a pipe has gone, as of `| head`.
    """
    try:
        print(shown(str(text)), end=end, flush=True)
    except BrokenPipeError:  # what Python writes at its end shall not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
