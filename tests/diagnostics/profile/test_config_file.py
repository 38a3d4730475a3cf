"""A found setting as a config file: it loads, builds on its base, and keeps what the flags said."""

import dataclasses
import pathlib
import runpy

from tfaccel.config import parse
from tfaccel.diagnostics.profile import config_file
from tfaccel.diagnostics.profile.knobs import with_changes

DIGITS = pathlib.Path(__file__).parents[3] / "configs" / "digits.py"


def get_config(path, *size):
    return parse(runpy.run_path(str(path))["get_config"](*size))


def test_it_is_the_base_with_the_changes(tmp_path):
    base = get_config(DIGITS)
    flags = {"train.epochs": 3, "data.stored_size": (8, 8), "runtime.gpu_ids": ()}
    changed = with_changes(base, flags | {"dali.threads": 4, "data.loader": "cache"})
    path = tmp_path / "tuned.py"
    config_file.write(path, base=DIGITS, size="", config=changed, said="2.1 times")
    assert get_config(path) == changed
    assert len(path.read_text().splitlines()) < 30
    smoke = get_config(path, "smoke")
    assert smoke == dataclasses.replace(changed, train=smoke.train)


def test_the_size_that_was_profiled_is_its_default(tmp_path):
    smoke = get_config(DIGITS, "smoke")
    changed = with_changes(smoke, {"dali.prefetch_batches": 5})
    path = tmp_path / "tuned.py"
    config_file.write(path, base=DIGITS, size="smoke", config=changed, said="")
    assert get_config(path) == changed
    assert "train.epochs" not in path.read_text()
