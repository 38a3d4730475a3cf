"""Each private name of Keras and TensorFlow that tfaccel touches has its canary."""

import pathlib
import re

from private_names import private_names
from test_canaries import CANARIES

import tfaccel

ROOT = pathlib.Path(tfaccel.__file__).parent


def names_in(*places):
    files = [each for place in places for each in sorted(ROOT.glob(place))]
    return {name: each for each in files for name in private_names(each.read_text())}


def test_every_private_name_has_its_canary():
    names = names_in("keras_internals/*.py")
    has_canary = set(re.findall(r"\w+", " ".join(f"{name} {does}" for name, does in CANARIES)))
    assert names.keys() > {"_value", "BaseOptimizer", "_pop_per_thread_mode", "_launchers"}
    lacking = [f"{name} ({names[name].name})" for name in names if name not in has_canary]
    assert not lacking, f"no canary in test_canaries.py for {', '.join(lacking)}"


def test_private_names_are_found_however_they_are_reached():
    text = """
from keras.src import backend
from keras.src.optimizers.base_optimizer import BaseOptimizer as Base
def f(model, _given):
    self._own = model._value
    isinstance(model, Base), backend.get(), tf.__internal__.FuncGraph
    getattr(model, "_by_text"), vars(model).pop("_popped"), having(model, _keyword=1)
    found._replace(a=1), other._own, _given, model.__class__
"""
    wanted = {"_value", "BaseOptimizer", "get", "FuncGraph", "_by_text", "_popped", "_keyword"}
    assert set(private_names(text)) == wanted
