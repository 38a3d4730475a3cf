"""The rooms of the package import in one direction, modules import each other in no circle, and the
root of the package stays short."""

import ast
import graphlib
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


def circle(files):
    """Returns the modules of a circle of imports, in order; none where there is no circle."""
    names = {".".join(("tfaccel", *path.with_suffix("").parts)): path for path in files}
    names = {name.removesuffix(".__init__"): path for name, path in names.items()}
    graph = {name: set() for name in names}
    for name, path in names.items():
        for imported in imports_of(files[path]):
            # `from tfaccel.step import totals` imports a module, or else a name of the package.
            known = [each for each in (imported, imported.rpartition(".")[0]) if each in names]
            graph[name].update(known[:1])
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1][::-1]
    return []


def all_files():
    return {each.relative_to(ROOT): each.read_text() for each in ROOT.rglob("*.py")}


def test_no_room_imports_one_that_comes_before_it():
    assert upward(all_files()) == []


def test_no_modules_import_each_other_in_a_circle():
    found = circle(all_files())
    assert not found, f"these import each other: {' imports '.join(found)}"


def test_an_import_that_runs_up_is_found_also_within_a_function():
    files = {
        pathlib.Path("step/totals.py"): "def f():\n    from tfaccel.training import methods",
        pathlib.Path("data/feed.py"): "from tfaccel.common import errors\nimport tfaccel.runtime",
    }
    (said,) = upward(files)
    assert said.startswith("step/totals.py imports tfaccel.training.methods: ")


def test_a_circle_is_found_also_by_an_import_within_a_function():
    files = {
        "training/logs/__init__.py": "def f():\n    from tfaccel.training.logs.csv import Csv",
        "training/logs/csv.py": "from tfaccel.training.logs import Writer",
        "training/methods.py": "from tfaccel.training import logs",
    }
    files = {pathlib.Path(path): text for path, text in files.items()}
    found = circle(files)
    assert found[0] == found[-1]
    assert {*found} == {"tfaccel.training.logs", "tfaccel.training.logs.csv"}
    only_for_types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "
    files[pathlib.Path("training/logs/csv.py")] = f"{only_for_types}import tfaccel.training.logs"
    assert circle(files) == []


def test_every_room_has_its_place_and_there_are_14_at_most():
    entries = {
        each.name.removesuffix(".py")
        for each in ROOT.iterdir()
        if each.name not in ("__init__.py", "__main__.py", "__pycache__")
    }
    assert entries == {*ORDER} - {"__main__"}
    assert len(entries) <= 14
