"""A wrong field in a user's file is one sentence, and not a list of all fields."""

import types

import ml_collections
import pytest

from tfaccel.config import default_config
from tfaccel.config.file_errors import in_file


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("config.train.learning_rat = 1", "config.train has no field 'learning_rat'; did you mean"),
        ("config.train.lr.x = 1", "config.train has no field 'lr'; did you mean 'learning_rate'?"),
        ("config.train['epoch']", "config.train has no field 'epoch'; did you mean 'epochs'?"),
        ("config.trai.epochs = 1", "config has no section 'trai'; did you mean 'train'?"),
        ("config.lr = 1", "config has no section 'lr'; did you mean 'train.learning_rate'?"),
        ("own.b", """AttributeError: "'b'\""""),
        ("own['b']", """KeyError: "'b'\""""),
        ("plain.b", "AttributeError: 'types.SimpleNamespace' object has no attribute 'b'"),
        ("{}['b']", "KeyError: 'b'"),
    ],
)
def test_a_wrong_field_is_one_sentence(line, words):
    config = default_config().lock()
    names = {"config": config, "own": ml_collections.ConfigDict(), "plain": types.SimpleNamespace()}
    try:
        exec(compile(f"\n{line}", "space.py", "exec"), names)
    except Exception as error:
        said = in_file(error, "space.py")
    assert said.startswith(f"space.py, line 2: {words}")
    assert len(said) < 200
