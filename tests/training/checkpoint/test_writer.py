"""Writing in the background: one at a time, waited for, and no error lost."""

import logging
import pathlib
import threading

import pytest
from conftest import in_new_process
from snapshots import assert_same, make_store, snapshot, warnings

from tfaccel.training.checkpoint.store import CheckpointError
from tfaccel.training.checkpoint.writer import Writer

HERE = pathlib.Path(__file__).parent


class SlowStore:
    """A store that writes when it is told to."""

    def __init__(self):
        self.may_write, self.written, self.at_once, self.most = threading.Event(), [], 0, 0

    def write(self, snapshot, *, fails=False):
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        assert self.may_write.wait(300)
        self.at_once -= 1
        if fails:
            raise CheckpointError(f"step {snapshot.step} does not fit")
        self.written.append(snapshot.step)


def test_training_goes_on_while_one_is_written_and_waits_for_it_at_the_next():
    store = SlowStore()
    writer = Writer(store, on_error="stop")
    writer.write(snapshot(1))
    assert store.written == []
    threading.Timer(0.2, store.may_write.set).start()
    writer.write(snapshot(2))
    assert store.written[0] == 1
    writer.wait()
    assert (store.written, store.most) == ([1, 2], 1)
    writer.wait()  # there is nothing left


def test_a_failed_write_is_raised_once_and_the_next_is_begun_all_the_same(caplog):
    store = SlowStore()
    writer = Writer(store, on_error="stop")
    writer.write(snapshot(1), fails=True)
    assert not writer.has_failed  # not yet
    store.may_write.set()
    writer.write(snapshot(2))
    assert writer.has_failed
    writer.write(snapshot(3), fails=True)
    with pytest.raises(CheckpointError, match="step 1 does not fit"):
        writer.wait()
    assert not writer.has_failed
    writer.wait()
    assert store.written == [2]
    assert warnings(caplog) == []


def test_a_failed_write_is_said_at_once_where_training_goes_on(caplog):
    store = SlowStore()
    store.may_write.set()
    writer = Writer(store, on_error="continue")
    for step in (1, 2, 3):
        writer.write(snapshot(step), fails=step != 2)
    writer.wait()
    assert not writer.has_failed
    assert store.written == [2]
    assert warnings(caplog) == [
        f"checkpoint: step {step} does not fit; training continues" for step in (1, 3)
    ]


@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_an_error_of_any_other_kind_is_raised(tmp_path, on_error):
    writer = Writer(make_store(tmp_path), on_error=on_error)
    unready = snapshot(1)
    unready.state["object"] = object()
    writer.write(unready)
    with pytest.raises(TypeError, match="not JSON serializable"):
        writer.wait()
    assert list(tmp_path.iterdir()) == []


def test_it_says_once_what_a_checkpoint_takes(tmp_path, caplog):
    caplog.set_level(logging.INFO, "tfaccel")
    writer = Writer(make_store(tmp_path / "checkpoints"), on_error="stop")
    for step in (1, 2):
        writer.write(snapshot(step, num_bytes=2**20), score=0.5)
    writer.wait()
    assert_same(make_store(tmp_path / "checkpoints").newest(), snapshot(2, num_bytes=2**20))
    (line,) = (each.getMessage() for each in caplog.records)
    assert line.startswith("checkpoint: step 1, 1 MiB in ")
    assert line.endswith("training waited 0.00 s")


def test_a_program_that_ends_waits_for_what_it_began(tmp_path):
    in_new_process(
        "import pathlib, sys, time, types\n"
        "sys.modules['tensorflow'] = types.ModuleType('tensorflow')  # which takes 4 s\n"
        "from tfaccel.training.checkpoint.store import Snapshot\n"
        "from tfaccel.training.checkpoint.writer import Writer\n"
        # It cannot be imported while the program ends.
        "assert 'tfaccel.training.checkpoint.arrays' in sys.modules\n"
        "class Slow:\n"
        "    def write(self, snapshot):\n"
        "        time.sleep(1)\n"
        f"        pathlib.Path({str(tmp_path)!r}, 'step').write_text(str(snapshot.step))\n"
        "Writer(Slow(), on_error='stop').write(Snapshot({}, {'step': 7}))\n"
    )
    assert (tmp_path / "step").read_text() == "7"


@pytest.mark.slow
def test_a_program_that_ends_has_written_what_it_began(tmp_path):
    in_new_process(
        f"import sys; sys.path.insert(0, {str(HERE)!r})\n"
        "from snapshots import make_store, snapshot\n"
        "from tfaccel.training.checkpoint.writer import Writer\n"
        f"writer = Writer(make_store({str(tmp_path)!r}), on_error='stop')\n"
        "writer.write(snapshot(7, num_bytes=2**25))\n"
    )
    assert_same(make_store(tmp_path).newest(), snapshot(7, num_bytes=2**25))
