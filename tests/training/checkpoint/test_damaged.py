"""P4: a damaged newest checkpoint is named, and the one before is used. P11: old ones are read."""

import hashlib
import json
import pathlib
import re
import shutil

import ml_dtypes
import numpy as np
import pytest
from snapshots import assert_same, make_store, names, snapshot, warnings

from tfaccel.training.checkpoint.manifest import verify
from tfaccel.training.checkpoint.store import FORMAT_VERSION, CheckpointError, Snapshot

DATA, INDEX = "arrays.data-00000-of-00001", "arrays.index"
GOLDEN = pathlib.Path(__file__).parent / "golden"


def truncated(path):
    path.write_bytes(path.read_bytes()[:-1])


def longer(path):
    path.write_bytes(path.read_bytes() + b"\0")


def flipped(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def emptied(path):
    path.write_bytes(b"")


def removed(path):
    path.unlink()


def not_json(path):
    path.write_text("{'format':")


def foreign(path):
    path.write_text('["another program\'s"]')


def changed(**fields):
    def change(path):
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def consistent(**fields):
    """What only a mistaken program writes: state.json is another, and the manifest knows."""

    def change(path):
        state = path.with_name("state.json")
        content = json.dumps(json.loads(state.read_text()) | fields).encode()
        state.write_bytes(content)
        manifest = json.loads(path.read_text())
        measured = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        manifest["files"]["state.json"] = measured
        path.write_text(json.dumps(manifest))

    return change


@pytest.mark.parametrize(
    ("name", "damage", "wrong"),
    [
        (DATA, truncated, "arrays.data-00000-of-00001 has .* bytes, but was written with"),
        (DATA, longer, "arrays.data-00000-of-00001 has .* bytes, but was written with"),
        (DATA, flipped, "arrays.data-00000-of-00001 has changed since it was written"),
        (DATA, emptied, "arrays.data-00000-of-00001 has 0 bytes"),
        (DATA, removed, "arrays.data-00000-of-00001 is missing"),
        (INDEX, truncated, "arrays.index has .* bytes"),
        (INDEX, flipped, "arrays.index has changed since it was written"),
        (INDEX, emptied, "arrays.index has 0 bytes"),
        (INDEX, removed, "arrays.index is missing"),
        ("state.json", truncated, "state.json has .* bytes"),
        ("state.json", flipped, "state.json has changed since it was written"),
        ("state.json", not_json, "state.json has 10 bytes"),
        ("state.json", removed, "state.json is missing"),
        ("MANIFEST.json", truncated, "MANIFEST.json is not JSON"),
        ("MANIFEST.json", flipped, "is"),
        ("MANIFEST.json", emptied, "MANIFEST.json is not JSON"),
        ("MANIFEST.json", removed, "MANIFEST.json is missing"),
        ("MANIFEST.json", foreign, "MANIFEST.json is not the manifest of a tfaccel checkpoint"),
        (
            "MANIFEST.json",
            changed(format_version=2),
            "a newer tfaccel made it, in format version 2",
        ),
        ("MANIFEST.json", changed(format_version=0), "format version 0, which does not exist"),
        ("MANIFEST.json", changed(files={}), "MANIFEST.json does not list a checkpoint's files"),
        ("MANIFEST.json", consistent(step=7), "it holds step 7, but its name has another step"),
        ("MANIFEST.json", consistent(state=None, step=None), "it holds step None"),
    ],
)
def test_p4_a_damaged_newest_is_named_and_the_one_before_is_used(
    tmp_path, caplog, name, damage, wrong
):
    store = make_store(tmp_path)
    store.write(snapshot(1))
    newest = store.write(snapshot(2))
    damage(newest / name)
    assert_same(store.newest(), snapshot(1))
    (line,) = warnings(caplog)
    assert re.match(f"checkpoint {newest} is skipped: .*{wrong}", line)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]  # it may yet be mended


def test_p4_every_bit_of_every_file_counts(tmp_path):
    folder = make_store(tmp_path).write(snapshot(1, num_bytes=4))
    verify(folder)
    num_bits = 0
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        for position in range(0, 8 * len(content), 3):  # a third of them, at each place in a byte
            damaged = bytearray(content)
            damaged[position // 8] ^= 1 << position % 8
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError):
                verify(folder)
            num_bits += 1
        path.write_bytes(content)
    verify(folder)
    assert num_bits > 1000


def test_p4_where_all_are_damaged_each_is_named_and_nothing_starts_anew(tmp_path):
    store = make_store(tmp_path)
    for step, name in ((1, DATA), (2, "MANIFEST.json")):
        removed(store.write(snapshot(step)) / name)
    with pytest.raises(CheckpointError) as raised:
        store.newest()
    assert "step-00000002 (MANIFEST.json is missing); step-00000001 (arrays.data" in str(
        raised.value
    )


@pytest.mark.parametrize(
    ("name", "damage"), [(DATA, flipped), ("MANIFEST.json", removed), (INDEX, emptied)]
)
def test_p4_a_damaged_best_is_named_and_the_next_best_is_used(tmp_path, caplog, name, damage):
    store = make_store(tmp_path)
    for step, score in ((1, 0.7), (2, 0.9), (3, 0.5)):
        store.write(snapshot(step), score=score)
    damage(tmp_path / "step-00000002" / name)
    assert_same(store.best(), snapshot(1))
    (line,) = warnings(caplog)
    assert line.startswith(f"checkpoint {tmp_path / 'step-00000002'} is skipped: ")
    assert_same(store.newest(), snapshot(3))  # which nothing is wrong with


def test_p4_a_best_whose_score_cannot_be_read_is_none_of_the_best(tmp_path, caplog):
    store = make_store(tmp_path)
    for step, score in ((1, 0.7), (2, 0.9)):
        store.write(snapshot(step), score=score)
    not_json(tmp_path / "step-00000002" / "state.json")
    assert_same(store.best(), snapshot(1))
    assert warnings(caplog) == []


def test_p4_where_all_that_have_a_score_are_damaged_each_is_named(tmp_path):
    store = make_store(tmp_path)
    for step, score in ((1, 0.7), (2, 0.9), (3, None)):
        removed(store.write(snapshot(step), score=score) / INDEX)
    with pytest.raises(CheckpointError) as raised:
        store.best()
    assert "can be used: step-00000002 (arrays.index is missing); step-00000001 (" in str(
        raised.value
    )


def test_p4_an_array_with_another_checksum_is_passed_over(tmp_path, caplog):
    store = make_store(tmp_path)
    store.write(snapshot(1))
    newest = store.write(snapshot(2))
    flipped(newest / DATA)
    content = (newest / DATA).read_bytes()
    manifest = json.loads((newest / "MANIFEST.json").read_text())
    manifest["files"][DATA]["sha256"] = hashlib.sha256(content).hexdigest()
    (newest / "MANIFEST.json").write_text(json.dumps(manifest))
    assert_same(store.newest(), snapshot(1))
    assert "array 'model/" in warnings(caplog)[0]


def golden_snapshot():
    """What the committed checkpoint of format version 1 holds.

    It was made, once and for all, by
    `make_store(GOLDEN / "v1").write(golden_snapshot(), score=0.5)`.
    A new format version gets a folder of its own beside it, and this one stays.
    """
    arrays = {
        "variable/00000/dense/kernel": np.arange(12, dtype=np.float32).reshape(3, 4) / 7,
        "variable/00001/half": np.array([1.5, -0.25], np.float16),
        "variable/00002/brain": np.array([[3.0], [-1e30]], ml_dtypes.bfloat16),
        "variable/00003/double": np.array(np.pi),
        "variable/00004/iteration": np.array(2**40 + 3, np.int64),
        "variable/00005/seed": np.array([2**32 - 1, 0], np.uint32),
        "variable/00006/flag": np.array([True, False, True]),
        "variable/00007/empty": np.zeros((0, 2), np.float32),
        "variable/00008/bytes": np.arange(-3, 3, dtype=np.int8),
    }
    state = {
        "step": 3,
        "epoch": 1,
        "history": {"loss": [0.1, 2.5e-17]},
        "name": "\u00e4",
        "best": None,
    }
    return Snapshot(arrays, state)


@pytest.mark.parametrize("version", range(1, FORMAT_VERSION + 1))
def test_p11_checkpoints_of_every_format_version_are_read(version, tmp_path):
    folder = shutil.copytree(GOLDEN / f"v{version}", tmp_path / "checkpoints")
    assert names(folder) == ["step-00000003"]
    manifest = json.loads((folder / "step-00000003" / "MANIFEST.json").read_text())
    assert manifest["format_version"] == version
    assert_same(make_store(folder).newest(), golden_snapshot())


def test_p11_the_newest_golden_checkpoint_is_what_is_written_now(tmp_path):
    written = make_store(tmp_path).write(golden_snapshot(), score=0.5)
    golden = GOLDEN / f"v{FORMAT_VERSION}" / "step-00000003"
    assert names(written) == names(golden)
    for name in ("state.json", DATA):
        assert (written / name).read_bytes() == (golden / name).read_bytes()
