import json
import logging
import math

import pytest

from tfaccel.training.logs.json_lines import JsonLines, read


def lines_of(path):
    return [json.loads(each) for each in path.read_text().splitlines()]


def write(path, records):
    """Writes (kind, step, epoch) of a run of ten steps an epoch, and leaves the file open."""
    writer = JsonLines(path)
    for kind, step, epoch in records:
        getattr(writer, kind)({"step": step, "epoch": epoch, "loss": 1 / step})
    return writer


RUN = [("steps", 4, 1), ("steps", 8, 1), ("epoch", 10, 1), ("steps", 14, 2), ("steps", 18, 2)]


def kept(path):
    return [(each["record"], each["step"], each["epoch"]) for each in lines_of(path)]


def test_each_record_is_a_line_that_is_there_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonLines(path)
    writer.steps({"step": 1, "epoch": 1, "loss": math.nan, "accuracy": 0.5})
    assert lines_of(path) == [
        {"record": "steps", "step": 1, "epoch": 1, "loss": None, "accuracy": 0.5}
    ]
    writer.epoch({"step": 2, "epoch": 1, "loss": math.inf})
    assert lines_of(path)[1] == {"record": "epoch", "step": 2, "epoch": 1, "loss": None}
    assert math.isnan(read(path)[0]["loss"])


def test_a_new_run_begins_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, RUN).close()
    write(path, RUN[:1])
    assert kept(path) == RUN[:1]


@pytest.mark.parametrize(
    ("step", "epoch", "wanted"),
    [
        (18, 1, RUN),
        (16, 1, RUN[:4]),
        (10, 1, RUN[:3]),
        (10, 0, RUN[:2]),  # its steps are done, its validation is not
        (4, 0, RUN[:1]),
    ],
)
def test_a_resume_drops_what_comes_again(step, epoch, wanted, tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, RUN)
    writer = JsonLines(path)
    writer.resume_at(step=step, epoch=epoch)
    assert kept(path) == wanted
    writer.steps({"step": step + 1, "epoch": epoch + 1})
    assert kept(path) == [*wanted, ("steps", step + 1, epoch + 1)]


def test_a_resume_in_the_same_process_goes_on_too(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = write(path, RUN)
    writer.resume_at(step=12, epoch=1)
    writer.steps({"step": 15, "epoch": 2})
    assert kept(path) == [*RUN[:3], ("steps", 15, 2)]


def test_a_torn_last_line_is_dropped(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    write(path, RUN)
    path.write_bytes(path.read_bytes()[:-10])
    with caplog.at_level(logging.INFO, "tfaccel"):
        JsonLines(path).resume_at(step=100, epoch=10)
    assert kept(path) == RUN[:-1]
    assert "the last line is incomplete" in caplog.text


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"{",
        b"[]",
        b"1",
        b'{"step": 1, "epoch": 1}',
        b'{"record": "steps", "epoch": 1}',
        b'{"record": "steps", "step": "1", "epoch": 1}',
        b'{"record": [], "step": 1, "epoch": 1}',
        b"\xff\xfe",
    ],
)
def test_damaged_lines_are_named_and_left_out(damaged, tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    write(path, RUN)
    first, *others = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([first, damaged, *others, b""]))
    assert len(read(path)) == len(RUN)
    assert ("line 2 is damaged" in caplog.text) == (damaged != b"")


def test_a_resume_without_a_file_begins_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonLines(path)
    writer.resume_at(step=10, epoch=1)
    assert not path.exists()
    writer.steps({"step": 11, "epoch": 2})
    assert kept(path) == [("steps", 11, 2)]
