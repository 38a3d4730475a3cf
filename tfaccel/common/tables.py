"""Helpers for text that people read: numbers, safe text, the terminal's width, broken pipes.

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

# Numbers between these have no exponent: 2,520 and 0.00000006, not 2.52e+03 and 6e-08.
LEAST_WRITTEN, MOST_WRITTEN = 1e-9, 1e15
BOLD = re.compile(r"\x1b\[[01]m")  # in Keras's error messages


def columns() -> int | None:
    """Returns the terminal's width, or None for a file, a pipe or a notebook."""
    try:
        return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    except (AttributeError, ValueError):  # there is no standard output, or it is closed
        return None


def as_html(text: str) -> str:
    """Returns text with HTML's special characters escaped."""
    return html.escape(cleaned(text))


def cleaned(text: str) -> str:
    """Returns text as one line, without secrets and Keras's marks for bold letters.

    Control characters are escaped.
    """
    return shown(" ".join(BOLD.sub("", text).split()), keep="")


def counted(number: int, noun: str) -> str:
    """Returns a number and its noun: 1 layer, 2 layers."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def in_figures(value: float, digits: int = 3, *, zeros: bool = False) -> str:
    """Returns a number as people write it, without an exponent: 2,520, 0.0012 or 32,768.

    All digits before the decimal point are shown. Numbers outside `LEAST_WRITTEN` and
    `MOST_WRITTEN` have an exponent, such as 1.2e-12.

    Args:
      value: the number. Infinity and NaN become "inf" and "nan".
      digits: the smallest number of significant digits to show.
      zeros: whether to keep zeros at the end of the decimals.
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
    """Prints a value as one line of JSON, for programs.

    On a terminal that is too narrow for the line, the JSON is indented.
    """
    line = json.dumps(value)
    width = columns()
    show(line if not width or len(line) <= width else json.dumps(value, indent=2))


def show(text: object, *, end: str = "\n") -> None:
    """Prints text without secrets and control characters. Its line breaks stay.

    A reader of a pipe that has gone, such as `| head`, is no error.
    """
    try:
        print(shown(str(text)), end=end, flush=True)
    except BrokenPipeError:  # Python's flush at exit must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
