"""What a worker of Ray's runs; tests/engines/ has a real cluster."""

import json
import sys

import pytest

from tfaccel.common.errors import RunError, UserError
from tfaccel.launch import options, ray


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """Runs a job's launcher as the trainer's worker 0 of 1 does; returns its exit code."""

    def worker(program):
        script = tmp_path / "script.py"
        script.write_text(program)
        task = {"cluster": {"worker": ["127.0.0.1:20000"]}, "task": {"type": "worker", "index": 0}}
        monkeypatch.setenv("TF_CONFIG", json.dumps(task))
        monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
        job = {"folder": str(tmp_path), "token": "a", "command": ["script.py"]}
        return ray._launch(job | {"flags": [f"--log-dir={tmp_path / 'launch'}"]})

    return worker


def test_ranks_do_not_hear_of_keras_2(worker, tmp_path):
    assert worker("import json, os; json.dump(dict(os.environ), open('seen', 'w'))") == 0
    seen = json.loads((tmp_path / "seen").read_text())
    assert not {"TF_USE_LEGACY_KERAS", "TF_CONFIG"} & seen.keys()


@pytest.mark.parametrize("code", [2, 130])
def test_what_would_come_again_is_not_begun_again(code, worker):
    assert worker(f"raise SystemExit({code})") == code


@pytest.mark.parametrize("code", [1, 3, 143])
def test_what_may_go_well_another_time_is(code, worker):
    with pytest.raises(RunError, match=f"launcher ended with exit code {code}$"):
        worker(f"raise SystemExit({code})")


def test_without_ray_it_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    parsed = options.parse(["--engine=ray", "train", f"--workdir={tmp_path}"], {})
    with pytest.raises(UserError, match=r"install the extra: pip install 'tfaccel\[ray\]'"):
        ray.run(*parsed)
