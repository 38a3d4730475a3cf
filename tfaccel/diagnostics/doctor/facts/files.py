"""Reads small files of the kernel, whose absence is no error.

text(file), number(text(file)), entries(folder)
"""

import pathlib

ROOT = pathlib.Path("/")  # of /sys, /proc, /dev and /etc, for which a test has another folder


def text(file: pathlib.Path) -> str:
    """Returns the stripped text of a file; "" if it cannot be read."""
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


def number(digits: str, base: int = 10) -> int:
    """Returns the number that a text stands for; 0 if it stands for none."""
    try:
        return int(digits, base)
    except ValueError:
        return 0


def entries(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns what a folder has, by name; nothing if it cannot be read."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
