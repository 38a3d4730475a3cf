"""Keeps the old, documented paths of modules importable: importing one gives the moved module.

import tfaccel.presets        # is tfaccel.config.presets
"""

import importlib
import importlib.abc
import importlib.machinery
import sys

NOW = {
    "tfaccel.collectives": "tfaccel.runtime.collectives",
    "tfaccel.doctor": "tfaccel.diagnostics.doctor",
    "tfaccel.linter.padded_head": "tfaccel.diagnostics.lint.padded_head",
    "tfaccel.linter": "tfaccel.diagnostics.lint",
    "tfaccel.metrics": "tfaccel.experiment.metrics",
    "tfaccel.models.mirrored": "tfaccel.keras_internals.mirrored",
    "tfaccel.models": "tfaccel.experiment.models",
    "tfaccel.presets": "tfaccel.config.presets",
    "tfaccel.recipe.schedule": "tfaccel.experiment.recipe.schedule",
    "tfaccel.recipe": "tfaccel.experiment.recipe",
    "tfaccel.sources": "tfaccel.data.sources",
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a module by its old path."""

    def find_spec(self, name, path=None, target=None):
        if name in NOW:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return None  # Python makes a module, which exec_module replaces

    def exec_module(self, module):
        sys.modules[module.__name__] = importlib.import_module(NOW[module.__name__])


def keep() -> None:
    """Makes the old paths importable."""
    if not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.append(_Finder())
