"""What each field of a config means: the text that stands below the field in its class.

Takes a class, whose source it reads; gives the texts, for `--help` and for Python's `help`.

    @documented
    @dataclasses.dataclass(frozen=True)
    class RecipeConfig:
        epochs: int = 1
        \"""Passes over the training images.\"""

    meanings(RecipeConfig)["epochs"]     # "Passes over the training images."
    help(RecipeConfig)                   # the class's text, and then each field's
"""

import ast
import functools
import inspect
import itertools
import re
import textwrap
import types


@functools.cache
def meanings(kind: type) -> dict[str, str]:
    """Returns the text of each field of a class, inherited ones too, without line breaks."""
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
    """Returns what stands before the first full stop, of a field that is changed often a few words.

    The stop of "e.g. mixed_float16" is none: a capital letter, a quote or a bracket follows one.
    """
    return re.split(r"\.(?:\s+(?=[A-Z\"(])|$)", text, maxsplit=1)[0]


class _Text:
    """A class's `__doc__`, which reads the source when somebody asks for it, and not before."""

    def __init__(self, of_class: str):
        self.of_class = of_class

    def __get__(self, instance, kind: type) -> str:
        try:
            fields = meanings(kind)
        except (OSError, TypeError):  # without its source, as in a frozen program
            return self.of_class
        indents = {"initial_indent": "  ", "subsequent_indent": "    "}
        lines = [textwrap.fill(f"{name}: {text}", 90, **indents) for name, text in fields.items()]
        return "\n".join([self.of_class.rstrip(), "", "Attributes:", *lines])


def documented(kind: type) -> type:
    """Lets `help` of a class show the text of its fields, too."""
    kind.__doc__ = _Text(inspect.cleandoc(kind.__doc__))
    return kind
