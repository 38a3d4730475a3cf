import numpy as np
import pytest

from tfaccel.common.literal_path import has_magic, literal
from tfaccel.training.checkpoint.arrays import read_arrays, write_arrays
from tfaccel.training.checkpoint.store import Snapshot, Store


@pytest.mark.parametrize("name", ["lr=[0.1]", "a*b", "a?b", "back\\slash", "[", "ä [x] y"])
def test_what_is_written_below_any_name_is_read_again(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    write_arrays(folder / "arrays", {"a": np.arange(3.0), "b": np.float32(2)})
    found = read_arrays(folder / "arrays")
    np.testing.assert_array_equal(found["a"], np.arange(3.0))
    assert found["b"].shape == ()


def test_a_pattern_is_not_taken_for_its_match(tmp_path):
    for name, value in (("a[b]", 1.0), ("ab", 2.0)):
        (tmp_path / name).mkdir()
        write_arrays(tmp_path / name / "arrays", {"a": np.array(value)})
    assert read_arrays(tmp_path / "a[b]" / "arrays")["a"] == 1.0


def test_a_runs_checkpoints_are_found_below_brackets(tmp_path):
    store = Store(tmp_path / "lr=[0.1]" / "c", keep_last=2, keep_best=0, largest_is_best=True)
    for step in (1, 2, 3):
        store.write(Snapshot({"a": np.full(4, step, np.float32)}, {"step": step}))
    assert [each.name for each in store.steps()] == ["step-00000002", "step-00000003"]
    np.testing.assert_array_equal(store.newest().arrays["a"], np.full(4, 3, np.float32))


def test_a_plain_path_stays(tmp_path):
    with literal(tmp_path) as plain:
        assert plain == str(tmp_path)
    assert has_magic(tmp_path / "[")
    assert not has_magic(tmp_path / "{a} b%s")
