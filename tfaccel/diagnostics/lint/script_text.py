"""A script's text, read before anything that needs Keras, so that a wrong path is told at once.

text = read_text(pathlib.Path("train.py"))
"""

import pathlib

from tfaccel.common.errors import UserError
from tfaccel.common.regular_file import read_regular


def read_text(path: pathlib.Path) -> str:
    """Returns the text of a script.

    Raises:
      UserError: it cannot be read, or is no text.
    """
    try:
        return read_regular(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or "it is no text in UTF-8"
        raise UserError(
            f"script={str(path)!r} cannot be read ({cause}); give a Python file, or its text"
        ) from error
