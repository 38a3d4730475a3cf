"""The programs of tools/ as modules, for the tests of them."""

import contextlib
import importlib.util
import pathlib
import sys
import types
from collections.abc import Iterator

TOOLS = pathlib.Path(__file__).parents[2] / "tools"


@contextlib.contextmanager
def loaded(name: str) -> Iterator[types.ModuleType]:
    """Imports tools/<name>.py anew. Within the context, Python finds the modules beside it."""
    sys.path.insert(0, str(TOOLS))
    try:
        spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(TOOLS))
