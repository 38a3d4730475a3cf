import os
import signal
import subprocess
import sys

import pytest

from tfaccel.common import temporary
from tfaccel.runtime import compile_cache

CHILD = """
import sys, time
from tfaccel.common import temporary
held = temporary.Held("xla")
(held.path / "entries").symlink_to(held.path)
print(held.path, flush=True)
time.sleep(60)
"""


@pytest.fixture
def temp(tmp_path, monkeypatch):
    """A temp folder of this test alone."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def _names(folder):
    return sorted(each.name for each in folder.iterdir())


def test_a_folder_goes_with_its_context(temp):
    with temporary.folder("export") as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "file").write_text("x")
    assert _names(temp) == []


def test_only_what_a_dead_process_left_is_removed(temp):
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdout=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(temp)},
        text=True,
    )
    path = child.stdout.readline().strip()
    for name in ("tfaccel-xla-12345678", "tfaccel-xla-12345678.held.mine", "other"):
        (temp / name).mkdir()
    others = _names(temp)
    temporary.remove_left()
    assert _names(temp) == others  # that one is alive
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert os.path.isdir(path)
    temporary.remove_left()
    assert _names(temp) == sorted(set(others) - {os.path.basename(path)})


def test_a_link_with_such_a_name_is_left(temp, tmp_path_factory):
    target = tmp_path_factory.mktemp("target")
    (target / "file").write_text("precious")
    (temp / "tfaccel-xla-12345678.held").symlink_to(target)
    temporary.remove_left()
    assert (target / "file").read_text() == "precious"


def test_a_forked_child_neither_removes_nor_holds(temp):
    held = temporary.Held("shards")
    child = os.fork()
    if not child:
        held.remove()
        os._exit(0)
    os.waitpid(child, 0)
    assert held.path.is_dir()
    held.remove()
    held.remove()
    assert _names(temp) == []


def test_each_start_clears_up_after_those_that_were_killed(temp, monkeypatch):
    (temp / "tfaccel-shards-12345678.held").mkdir()
    monkeypatch.setattr(compile_cache, "_is_prepared", lambda: False)
    monkeypatch.setattr(compile_cache, "devices_are_known", lambda: False)
    monkeypatch.setenv("TF_XLA_FLAGS", "")
    compile_cache.prepare(wanted=False)
    assert _names(temp) == []
