"""Private names of Keras and TensorFlow are touched in two places, and each has its canary."""

import pathlib
import re

import pytest
from private_names import hidden_texts, private_names
from test_canaries import CANARIES

import tfaccel

ROOT = pathlib.Path(tfaccel.__file__).parent
# Rooms below keras_internals take their few private names from a file that they may import.
PLACES = {*ROOT.glob("keras_internals/*.py"), ROOT / "runtime/private_names.py"}
# Names that look private and are no names of Keras or TensorFlow.
OTHERS = {
    "data/user_pipeline.py": {"_is_pipeline_def", "_graph_out"},  # of DALI
}
OUR_TEXTS = {"_tfaccel_around", "_tfaccel_states", "_tfaccel_stream"}


def test_private_names_are_touched_in_two_places_alone():
    found = []
    for path in sorted({*ROOT.rglob("*.py")} - PLACES):
        name = str(path.relative_to(ROOT))
        touched = private_names(path.read_text())
        found += [
            f"{name}:{line} touches {each}"
            for each, line in touched.items()
            if each not in OTHERS.get(name, ())
        ]
    told = "; ".join(found)
    assert not found, f"{told}: move it to keras_internals/, or below it runtime/private_names.py"


def test_every_private_name_has_its_canary():
    names = {}  # and the file that has it
    for path in PLACES:
        text = path.read_text()
        names |= dict.fromkeys([*private_names(text), *hidden_texts(text) - OUR_TEXTS], path.name)
    has_canary = set(re.findall(r"\w+", " ".join(f"{name} {does}" for name, does in CANARIES)))
    assert names.keys() > {"_value", "BaseOptimizer", "_physical_devices", "_inference_name"}
    lacking = sorted(f"{each} ({file})" for each, file in names.items() if each not in has_canary)
    assert not lacking, f"no canary in test_canaries.py for {', '.join(lacking)}"


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("from keras.src import backend\nbackend.get()", "get"),
        ("from keras.src.losses.loss import Loss as Base\nisinstance(x, Base)", "Loss"),
        ("import tensorflow.python.eager", "tensorflow.python.eager"),
        ("tf.__internal__.FuncGraph", "FuncGraph"),
        ("keras.src.backend", "backend"),
        ("self._own = model._value", "_value"),
        ("getattr(model, '_by_text', None)", "_by_text"),
        ("vars(model).pop('_popped')", "_popped"),
        ("having(model, _keyword=1)", "_keyword"),
    ],
)
def test_a_private_name_is_found_however_it_is_reached(line, name):
    assert [*private_names(line)] == [name]


@pytest.mark.parametrize(
    "line",
    [
        "self._own = 1\nother._own",
        "def _f(_given): ...\nmodule._f(_given)",
        "variant._replace(a=1), model.__class__, keras.Model",
    ],
)
def test_a_name_of_the_module_itself_is_not_private(line):
    assert private_names(line) == {}
