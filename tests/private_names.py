"""Finds the private names of Keras and TensorFlow that a module of tfaccel touches."""

import ast

PACKAGES = (
    "keras.src",
    "tensorflow.python",
    "tensorflow.core",
    "tensorflow.compiler",
    "tfaccel.keras_internals.moved",  # names of these packages
)
OPENLY = (*PACKAGES, "tf.__internal__")  # what may be reached as an attribute
OF_PYTHON = {"_replace", "_asdict", "_fields", "_exit"}  # of named tuples and of `os`
BY_TEXT = {"getattr", "hasattr", "setattr", "delattr"}


def private_names(text: str) -> dict[str, int]:
    """Returns each private name in the text of a module, with the first line that has it.

    A name is private if it is imported from a private package, or if it is an attribute that begins
    with an underscore and that the module does not define itself. Of a private module that is
    imported, the names are the attributes that are used.
    """
    tree = ast.parse(text)
    own, found = _defined(tree), []
    imported = {}  # from the name in this module to the name in the private package
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and _is_private(node.module or ""):
            imported |= {each.asname or each.name: each.name for each in node.names}
        elif isinstance(node, ast.Import):
            found += [(each.name, node.lineno) for each in node.names if _is_private(each.name)]
    of_attributes = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id in imported:
                of_attributes.add(id(node.value))
                found.append((node.attr, node.lineno))
            elif ast.unparse(node.value) in OPENLY or _is_hidden(node.attr, own):
                found.append((node.attr, node.lineno))
        elif isinstance(node, ast.Call):
            found += [(each, node.lineno) for each in _by_text(node) if _is_hidden(each, own)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in imported and id(node) not in of_attributes:
            found.append((imported[node.id], node.lineno))
    return dict(sorted(found, key=lambda each: -each[1]))


def hidden_texts(text: str) -> set[str]:
    """Returns the strings in a module that may be names of private attributes: "_kernel"."""
    tree = ast.parse(text)
    own = _defined(tree)
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    return {
        each
        for each in strings
        if isinstance(each, str) and each.isidentifier() and _is_hidden(each, own)
    }


def _is_private(module: str) -> bool:
    return f"{module}.".startswith(tuple(f"{each}." for each in PACKAGES))


def _is_hidden(name: str, own: set[str]) -> bool:
    is_special = name.startswith("__") and name.endswith("__")
    return (
        name.strip("_") != ""
        and name.startswith("_")
        and not is_special
        and name not in own | OF_PYTHON
    )


def _by_text(call: ast.Call) -> list[str]:
    """Returns the attributes that a call names: in a string, or as a keyword."""
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    given = call.args[1:2] if name in BY_TEXT else []
    if isinstance(call.func, ast.Attribute) and call.func.attr in ("get", "pop"):
        given = call.args[:1]
    texts = [each.value for each in given if isinstance(each, ast.Constant)]
    return [each for each in texts if isinstance(each, str)] + [
        each.arg for each in call.keywords if each.arg
    ]


def _defined(tree: ast.AST) -> set[str]:
    """Returns the functions, classes, variables and attributes of `self` that a module defines."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and _is_made_here(node):
            found.add(node.attr)
    return found


def _is_made_here(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store) and ast.unparse(node.value) in ("self", "cls")
