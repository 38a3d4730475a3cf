"""Reads the names of classes that a config or the command line gives.

class_list(("dog", "cat")), class_list("dog,cat"), class_list("pets.txt")    # ("dog", "cat")
"""

from collections.abc import Sequence

from tfaccel.common.errors import UserError
from tfaccel.common.local_path import local_path
from tfaccel.common.regular_file import read_regular

SUFFIX = ".txt"  # of a file of names
EXPECTED = "expected names such as dog,cat, or a .txt file with one name on each line"


def class_list(given: str | Sequence[str | int]) -> tuple[str, ...]:
    """Returns the names of classes, each once, in the order in which they are given.

    Args:
      given: names; or a text of names with commas between them; or the path of a .txt file, below
        the working folder, with one name on each line. A whole number stands for its digits.

    Raises:
      UserError: there are fewer than two names, a name is no text, is empty or occurs twice, or the
        file cannot be read.
    """
    names, of = given, f"classes={given!r}"
    if isinstance(given, str) and given.strip().lower().endswith(SUFFIX):
        names, of = _lines(given.strip()), f"the file of classes={given!r}"
    elif isinstance(given, str):
        names = [each.strip() for each in given.split(",")]
    elif _is_number(given):
        names = [given]
    if not isinstance(names, Sequence):
        raise UserError(f"{of}; {EXPECTED}")
    names = tuple(str(each) if _is_number(each) else each for each in names)
    seen = set()
    for place, name in enumerate(names):
        if not isinstance(name, str) or not name:
            raise UserError(f"{of}: name {place + 1} is {name!r}; {EXPECTED}")
        if name in seen:
            raise UserError(f"{of} has '{name}' twice; give each class once")
        seen.add(name)
    if len(names) < 2:
        raise UserError(f"{of} has fewer than two classes; {EXPECTED}")
    return names


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _lines(file: str) -> list[str]:
    path = local_path(file)
    try:
        text = read_regular(path).decode("utf-8-sig")
    except OSError as error:
        why = error.strerror or error
        raise UserError(f"classes={file!r} cannot be read ({why}); {EXPECTED}") from None
    except UnicodeDecodeError:
        raise UserError(f"classes={file!r} is not text in UTF-8; {EXPECTED}") from None
    return [line.strip() for line in text.splitlines() if line.strip()]
