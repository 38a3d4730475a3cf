"""The rooms of the package import in one direction, and its root stays short."""

import ast
import pathlib

import tfaccel

ROOT = pathlib.Path(tfaccel.__file__).parent
# From the top down: a room imports itself and those behind it in this list.
ORDER = (
    "__main__",
    "cli",
    "diagnostics",
    "experiment",
    "run",
    "export",
    "training",
    "step",
    "keras_internals",
    "data",
    "launch",
    "runtime",
    "process",
    "config",
    "common",
)


def imports_of(text):
    """Yields the modules of tfaccel that a module imports, also within functions."""
    waiting = [ast.parse(text)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue  # for type checkers alone
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tfaccel":
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.split(".")[0] == "tfaccel")
        waiting += ast.iter_child_nodes(node)


def upward(files):
    """Returns a sentence for each import of a room that comes before the module's own."""
    found = []
    for path, text in files.items():
        own = path.parts[0].removesuffix(".py")
        for module in imports_of(text):
            room = module.split(".")[1]
            if own in ORDER and room in ORDER and ORDER.index(room) < ORDER.index(own):
                found.append(f"{path} imports {module}: {own} comes after {room} in the order")
    return found


def test_no_room_imports_one_that_comes_before_it():
    files = {each.relative_to(ROOT): each.read_text() for each in ROOT.rglob("*.py")}
    assert upward(files) == []


def test_an_import_that_runs_up_is_found_also_within_a_function():
    files = {
        pathlib.Path("step/totals.py"): "def f():\n    from tfaccel.training import methods",
        pathlib.Path("data/feed.py"): "from tfaccel.common import errors\nimport tfaccel.runtime",
    }
    (said,) = upward(files)
    assert said.startswith("step/totals.py imports tfaccel.training.methods: ")


def test_every_room_has_its_place_and_there_are_14_at_most():
    entries = {
        each.name.removesuffix(".py")
        for each in ROOT.iterdir()
        if each.name not in ("__init__.py", "__main__.py", "__pycache__")
    }
    assert entries == {*ORDER} - {"__main__"}
    assert len(entries) <= 14
