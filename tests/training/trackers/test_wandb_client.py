"""Weights & Biases without a network: the records that it would send are read from its files."""

import json
import struct

import pytest

from tfaccel.common.errors import UserError
from tfaccel.training.callbacks.checkpoints import Stopped
from tfaccel.training.trackers.tracked import Tracked
from tfaccel.training.trackers.wandb import WandB

wandb = pytest.importorskip("wandb", reason="needs the extra wandb")
wandb_internal_pb2 = pytest.importorskip("wandb.proto.wandb_internal_pb2")


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_DIR", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    wandb.teardown()  # it reads the environment once
    yield
    wandb.teardown()


BLOCK, HEADER = 32768, 7  # bytes; the file is a log of LevelDB after a header of its own


def records_in(data):
    """Yields the records of an offline run's file, each of which may lie in several pieces."""
    place, record = HEADER, b""
    while place + HEADER <= len(data):
        if BLOCK - place % BLOCK < HEADER:
            place += BLOCK - place % BLOCK  # no piece begins in the last bytes of a block
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        record += data[place + HEADER : place + HEADER + size]
        place += HEADER + size
        if kind in (1, 4):  # a whole record, or the last piece of one
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


def sent(folder):
    """Returns each start's records: a dict of lists, by their kind."""
    wandb.teardown()  # so that all of it is written
    starts = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        kinds = {}
        for record in records_in(file.read_bytes()):
            kind = record.WhichOneof("record_type")
            kinds.setdefault(kind, []).append(getattr(record, kind))
        starts.append(kinds)
    return starts


def values(items):
    return {each.key or "/".join(each.nested_key): json.loads(each.value_json) for each in items}


def tracked_in(folder):
    return Tracked([WandB(project="flowers")], folder, name="a")


def record(step, loss):
    return {"step": step, "epoch": step // 10, "loss": loss, "loss_scale": 2.0, "eta_s": 3.0}


def track_an_epoch(folder, config, *, error):
    with tracked_in(folder) as tracked:
        tracked.begin(config, continues=False)
        tracked.epoch(record(10, 0.5))
        raise error


def test_a_run_is_stopped_and_goes_on_without_a_network(tmp_path):
    export = tmp_path / "export" / "1"
    export.mkdir(parents=True)
    (export / "model.keras").write_bytes(b"weights")
    with pytest.raises(Stopped):
        track_an_epoch(tmp_path, {"train": {"epochs": 3}}, error=Stopped(143))
    with tracked_in(tmp_path) as tracked:
        tracked.begin({"train": {"epochs": 4}}, continues=True)
        for step in (10, 20):
            tracked.epoch(record(step, 0.25))
        tracked.export(export)
    first, second = sent(tmp_path)
    assert first["run"][0].run_id == second["run"][0].run_id
    assert (first["run"][0].project, first["run"][0].display_name) == ("flowers", "a")
    assert values(first["run"][0].config.update)["train"] == {"epochs": 3}
    rows = [values(each.item) for kinds in (first, second) for each in kinds["history"]]
    wanted = {"step", "epoch", "loss", "loss_scale"}
    assert [{key: each[key] for key in wanted} for each in rows] == [
        {"step": 10, "epoch": 1, "loss": 0.5, "loss_scale": 2.0},
        {"step": 20, "epoch": 2, "loss": 0.25, "loss_scale": 2.0},
    ]
    assert [each["exit"][0].exit_code for each in (first, second)] == [143, 0]
    assert "preempting" in first
    assert "preempting" not in second
    (artifact,) = second["artifact"]
    assert (artifact.type, artifact.manifest.contents[0].path) == ("model", "model.keras")
    assert wandb.run is None


def test_a_failed_run_is_marked_so(tmp_path):
    with pytest.raises(ZeroDivisionError):
        track_an_epoch(tmp_path, {}, error=ZeroDivisionError())
    (start,) = sent(tmp_path)
    assert start["exit"][0].exit_code == 1


def test_a_run_that_the_script_began_stays_open(tmp_path):
    with wandb.init(dir=str(tmp_path)) as theirs:
        with tracked_in(tmp_path) as tracked:
            tracked.begin({"seed": 1}, continues=False)
            tracked.epoch(record(10, 0.5))
        assert wandb.run is theirs
        assert theirs.summary["loss"] == 0.5


def test_without_a_login_a_sentence_and_no_question(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(tmp_path))
    wandb.teardown()
    words = "has no key of yours; call `wandb login`"
    with pytest.raises(UserError, match=words), tracked_in(tmp_path) as tracked:
        tracked.begin({}, continues=False)
