import math

import pytest

from tfaccel.training.logs.csv import Csv, read


def record(epoch, **values):
    return {"step": 10 * epoch, "epoch": epoch, "seconds": 1.5, "loss": 1 / epoch, **values}


def test_a_row_for_each_epoch(tmp_path):
    path = tmp_path / "metrics.csv"
    writer = Csv(path)
    writer.epoch(record(1))
    assert path.read_text() == "epoch,step,seconds,loss\n1,10,1.5,1.0\n"
    writer.epoch(record(2))
    assert read(path) == [record(1), record(2)]


def test_a_column_that_comes_later_finds_its_place(tmp_path):
    path = tmp_path / "metrics.csv"
    writer = Csv(path)
    writer.epoch(record(1))
    writer.epoch(record(2, val_loss=math.nan))
    writer.epoch(record(3))
    first, second, third = read(path)
    assert math.isnan(second["val_loss"])
    assert (first, third) == (record(1), record(3))


def test_a_resume_drops_what_comes_again(tmp_path):
    path = tmp_path / "metrics.csv"
    writer = Csv(path)
    for epoch in (1, 2, 3):
        writer.epoch(record(epoch))
    again = Csv(path)
    again.resume_at(step=25, epoch=2)
    assert read(path) == [record(1), record(2)]
    again.epoch(record(3, loss=7.0))
    assert read(path) == [record(1), record(2), record(3, loss=7.0)]
    Csv(path).epoch(record(1))
    assert read(path) == [record(1)]


def test_rows_that_could_not_be_written_come_with_the_next(tmp_path, monkeypatch):
    path = tmp_path / "metrics.csv"
    writer = Csv(path)
    writer.epoch(record(1))
    with monkeypatch.context() as full:
        full.setattr("tfaccel.training.logs.csv.replace", _no_space)
        with pytest.raises(OSError, match="No space"):
            writer.epoch(record(2))
    writer.epoch(record(3))
    assert read(path) == [record(1), record(2), record(3)]


def _no_space(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("damaged", ["x,1,2,3", "2,20,1.5,0.5,9", "2,20", ",20,1.5,0.5"])
def test_damaged_rows_are_named_and_left_out(damaged, tmp_path, caplog):
    path = tmp_path / "metrics.csv"
    writer = Csv(path)
    writer.epoch(record(1))
    path.write_text(path.read_text() + damaged + "\n")
    assert read(path) == [record(1)]
    assert "line 3 is damaged" in caplog.text
