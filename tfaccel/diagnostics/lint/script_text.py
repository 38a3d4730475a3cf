"""Reads a script's text without Keras, so that a wrong path is reported at once.

text = read_text(pathlib.Path("train.py"))
"""

import pathlib

from tfaccel.common.errors import UserError
from tfaccel.common.regular_file import read_regular


def read_text(path: pathlib.Path) -> str:
    """Returns the text of a script.

    Raises:
      UserError: the script cannot be read, or is not text.
    """
    try:
        return read_regular(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise UserError(
            f"script={str(path)!r} cannot be read ({cause}); pass a Python file, or its text"
        ) from error
