"""Reads the meaning of each config field: the text below the field in its class.

`meanings` reads the source of a class and returns the texts, for `--help` and Python's `help`.

    @documented
    @dataclasses.dataclass(frozen=True)
    class RecipeConfig:
        epochs: int = 1
        \"""Passes over the training images.\"""

    meanings(RecipeConfig)["epochs"]     # "Passes over the training images."
    help(RecipeConfig)                   # the class's docstring, then each field's text
"""

import ast
import dataclasses
import functools
import inspect
import itertools
import re
import textwrap
import types
from collections.abc import Callable

from tfaccel.common.checks import check_names


@functools.cache
def meanings(kind: type) -> dict[str, str]:
    """Returns the text of each field of a class and its base classes, without line breaks."""
    found = {}
    for each in reversed(kind.__mro__[:-1]):
        body = _classes(inspect.getmodule(each))[each.__name__].body
        for field, below in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                found[field.target.id] = " ".join(ast.literal_eval(below.value).split())
    return found


@functools.cache
def _classes(module: types.ModuleType) -> dict[str, ast.ClassDef]:
    nodes = ast.parse(inspect.getsource(module)).body
    return {each.name: each for each in nodes if isinstance(each, ast.ClassDef)}


def first_sentence(text: str) -> str:
    """Returns the text before the first full stop. `--help` shows only this of the common fields.

    The full stop of "e.g. mixed_float16" ends no sentence: no capital letter, quote or bracket
    follows it.
    """
    return re.split(r"\.(?:\s+(?=[A-Z\"(])|$)", text, maxsplit=1)[0]


class _Text:
    """A class's `__doc__`, which reads the source only when `__doc__` is read."""

    def __init__(self, class_text: str):
        self.class_text = class_text

    def __get__(self, instance, kind: type) -> str:
        try:
            fields = meanings(kind)
        except (OSError, TypeError):  # the source is missing, as in a frozen program
            return self.class_text
        indents = {"initial_indent": "  ", "subsequent_indent": "    "}
        lines = [textwrap.fill(f"{name}: {text}", 90, **indents) for name, text in fields.items()]
        return "\n".join([self.class_text.rstrip(), "", "Attributes:", *lines])


def documented(kind: type) -> type:
    """Decorates a class so that `help` shows the texts of its fields, and names are checked.

    A keyword that is no field raises UserError, which names the field that was probably meant.
    """
    kind.__doc__ = _Text(inspect.cleandoc(kind.__doc__))
    if dataclasses.is_dataclass(kind):
        kind.__init__ = _with_known_names(kind)
    return kind


def _with_known_names(kind: type) -> Callable:
    direct, names = kind.__init__, [each.name for each in dataclasses.fields(kind)]

    @functools.wraps(direct)
    def init(self, *args, **values):
        check_names(kind.__name__, values, names)
        direct(self, *args, **values)

    return init
