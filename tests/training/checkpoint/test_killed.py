"""P1: any kill leaves a loadable checkpoint, of the last announced step or a later one.

Once at every point by an exception that nothing handles, in place of the kill; and by SIGKILL at
random moments.
"""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from snapshots import assert_same, make_store, names, snapshot

from tfaccel.training.checkpoint.store import Snapshot


class Killed(BaseException):
    """Ends a write as SIGKILL would: nothing is cleaned up."""


def killed_at(monkeypatch, point, write):
    """Calls `write` and ends it at that point; returns whether there was such a point."""
    passed = 0

    def patched(call):
        def count(*args, **kwargs):
            nonlocal passed
            passed += 1
            if passed == point:
                raise Killed
            return call(*args, **kwargs)

        return count

    with monkeypatch.context() as patch:
        for name in ("rename", "fsync", "unlink", "rmdir", "mkdir", "listdir"):
            patch.setattr(os, name, patched(getattr(os, name)))
        for name in ("arrays.write_arrays", "folder.write_manifest"):
            module, _, function = name.partition(".")
            module = sys.modules[f"tfaccel.training.checkpoint.{module}"]
            patch.setattr(module, function, patched(getattr(module, function)))
        try:
            write()
        except Killed:
            return True
    return False


def test_p1_at_every_point_of_a_new_step(tmp_path, monkeypatch):
    num_points = 0
    for point in range(1, 100):
        folder = tmp_path / str(point)
        make_store(folder, keep_last=1).write(snapshot(1))
        store = make_store(folder, keep_last=1)
        if not killed_at(monkeypatch, point, lambda store=store: store.write(snapshot(2))):
            break
        num_points = point
        received = make_store(folder).newest()
        assert_same(received, snapshot(received.step))
        store = make_store(folder, keep_last=1)
        store.remove_unfinished()
        assert_same(store.newest(), received)
        assert not [each for each in names(folder) if "." in each]
        store.write(snapshot(3))
        assert names(folder) == ["step-00000003"]
    assert num_points > 15


@pytest.mark.parametrize("earlier_is_damaged", [False, True])
def test_p1_at_every_point_of_a_step_that_is_written_again(
    tmp_path, monkeypatch, earlier_is_damaged
):
    again = Snapshot({"model/0": np.ones(3)}, {"step": 2})
    num_points = 0
    for point in range(1, 100):
        folder = tmp_path / str(point)
        store = make_store(folder)
        store.write(snapshot(1))
        earlier = store.write(snapshot(2))
        if earlier_is_damaged:
            (earlier / "arrays.index").write_bytes(b"")
        if not killed_at(monkeypatch, point, lambda store=store: store.write(again)):
            break
        num_points = point
        received = make_store(folder).newest()
        if received.state != again.state:
            assert_same(received, snapshot(1 if earlier_is_damaged else 2))
        store = make_store(folder)
        store.remove_unfinished()
        assert_same(store.newest(), received)
        assert not [each for each in names(folder) if "." in each]
        store.write(again)
        assert_same(make_store(folder).newest(), again)
        assert names(folder) == ["step-00000001", "step-00000002"]
    assert num_points > 15


def test_p1_at_every_point_of_clearing_away(tmp_path, monkeypatch):
    for point in range(1, 100):
        folder = tmp_path / str(point)
        store = make_store(folder)
        for step in (1, 2, 3):
            store.write(snapshot(step))
        os.rename(folder / "step-00000003", folder / "step-00000003.old-0")
        os.rename(folder / "step-00000002", folder / "step-00000002.tmp-1")
        assert_same(store.newest(), snapshot(3))
        killed = killed_at(monkeypatch, point, store.remove_unfinished)
        assert_same(store.newest(), snapshot(3))
        if not killed:
            break
    assert point > 5
    assert names(folder) == ["step-00000001", "step-00000003"]


def test_p1_all_is_on_the_disk_itself_before_it_has_its_name(tmp_path, monkeypatch):
    events = []
    fsync, rename = os.fsync, os.rename

    def see_fsync(descriptor):
        fsync(descriptor)
        events.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))

    def see_rename(source, target):
        rename(source, target)
        events.append("rename")

    monkeypatch.setattr(os, "fsync", see_fsync)
    monkeypatch.setattr(os, "rename", see_rename)
    make_store(tmp_path / "checkpoints").write(snapshot(1))
    unfinished = f"checkpoints/step-00000001.tmp-{os.getpid()}"
    files = ("arrays.index", "arrays.data-00000-of-00001", "state.json", "MANIFEST.json")
    assert events == [
        *(".", *(f"{unfinished}/{each}" for each in files), unfinished),
        *("rename", "checkpoints"),
    ]


# TensorFlow is imported once, and each attempt is a fork of that process before it has threads.
# Python's collector would take a third of the import's time, and as much at the end.
SAVES_UNTIL_KILLED = """
import gc, os, pathlib, random, signal, sys, time
import numpy as np
gc.disable()
import tfaccel.training.checkpoint.arrays
gc.freeze()
gc.enable()
from tfaccel.training.checkpoint.store import Snapshot, Store

NUM_KILLS, NUM_MB, FOLDER = int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3])
BASE = np.random.default_rng(0).integers(0, 2**20, (10, NUM_MB * 25_000)).astype(np.float32)

def store(folder=FOLDER):
    return Store(folder, keep_last=1, keep_best=0, largest_is_best=True)

def arrays(step):
    return {f"model/{index}": each + np.float32(step) for index, each in enumerate(BASE)}

def save(pipe):
    # TensorFlow starts its devices at the first, which takes longer.
    store(FOLDER.with_name("first")).write(Snapshot({"weights": BASE[0, :9]}, {"step": 1}))
    store().remove_unfinished()
    newest = store().newest()
    step = newest.step if newest else 0
    while True:
        step += 1
        snapshot = Snapshot(arrays(step), {"step": step})
        os.write(pipe, b"begin\\n")
        store().write(snapshot)
        os.write(pipe, f"{step}\\n".encode())

def load():
    left = sorted(each.name for each in FOLDER.iterdir())
    newest = store().newest()
    expected = arrays(newest.step)
    same = expected.keys() == newest.arrays.keys() and all(
        np.array_equal(expected[name], newest.arrays[name]) for name in expected)
    print("loaded", newest.step, same, *left, flush=True)

def forked(function, *args):
    pid = os.fork()
    if pid:
        return pid
    try:
        function(*args)
    except BaseException as error:
        print("failed", repr(error), flush=True)
    os._exit(0)

kills = 0
while kills < NUM_KILLS:
    reading, writing = os.pipe()
    pid = forked(save, writing)
    os.close(writing)
    lines = os.fdopen(reading)
    assert lines.readline() == "begin\\n"
    began = time.monotonic()
    announced = int(lines.readline())
    duration_s = time.monotonic() - began
    assert lines.readline() == "begin\\n"
    time.sleep(random.uniform(0, duration_s))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    rest = [each for each in lines.read().split()]
    inside = len(rest) % 2 == 0  # none, or a number and the next "begin"
    announced = max([announced, *(int(each) for each in rest if each != "begin")])
    kills += inside
    print("killed", announced, inside, flush=True)
    os.waitpid(forked(load), 0)
"""


@pytest.mark.parametrize(
    ("num_kills", "num_mb"), [(2, 10), pytest.param(20, 108, marks=pytest.mark.slow)]
)
def test_p1_sigkill_inside_a_save(tmp_path, num_kills, num_mb):
    arguments = (str(num_kills), str(num_mb), str(tmp_path / "killed"))
    done = subprocess.run(
        [sys.executable, "-c", SAVES_UNTIL_KILLED, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    lines = [each.split() for each in done.stdout.splitlines()]
    pairs = list(zip(lines[::2], lines[1::2], strict=True))
    assert sum(killed[2] == "True" for killed, _ in pairs) == num_kills
    for killed, loaded in pairs:
        assert (killed[0], loaded[0], loaded[2]) == ("killed", "loaded", "True"), done.stdout
        assert int(loaded[1]) >= int(killed[1]), done.stdout
    assert pathlib.Path(tmp_path, "killed", f"step-{int(pairs[-1][1][1]):08d}").is_dir()
