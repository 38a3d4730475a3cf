"""A file in pieces: whatever stops its writer, the next one ends with the same bytes."""

import csv
import os
import signal
import subprocess
import sys

import pytest

from tfaccel.common.errors import RunError, UserError
from tfaccel.experiment.pieces import Pieces
from tfaccel.experiment.row_files import Column, form_of

COLUMNS = (Column("image", str), Column("class", str), Column("number", float))
ROWS = [
    (f"photos/{index}, or so.png", f'"{index % 3}"\n', None if index % 4 else index / 8)
    for index in range(23)
]


def pieces_of(path, *, num_rows=23, settings=None, rows_per_piece=5, columns=COLUMNS):
    return Pieces(
        path,
        columns,
        form_of(path),
        num_rows=num_rows,
        settings=settings or {"files": "a1"},
        rows_per_piece=rows_per_piece,
    )


def read(path):
    """The names of the columns, and the rows."""
    if path.suffix == ".csv":
        with open(path, newline="") as file:
            heads, *rows = csv.reader(file)
        rows = [(*texts, float(number) if number else None) for *texts, number in rows]
    else:
        table = pytest.importorskip("pyarrow.parquet").read_table(path)
        heads, rows = table.column_names, [tuple(each.values()) for each in table.to_pylist()]
    return tuple(heads), rows


def write(path, *, stop_after=None, **others):
    """Writes the rows that are missing, or so many of them; returns the first one's number."""
    with pieces_of(path, **others).held() as pieces:
        first = pieces.start
        for number, row in enumerate(ROWS[first:]):
            if number == stop_after:
                raise KeyboardInterrupt
            pieces.add(row)
        pieces.join()
    return first


@pytest.fixture(params=["csv", "parquet"])
def path(request, tmp_path):
    """The file to write."""
    if request.param == "parquet":
        pytest.importorskip("pyarrow", reason="Parquet needs the extra `parquet`")
    return tmp_path / f"answers.{request.param}"


@pytest.fixture
def whole(path):
    """The bytes of a file that was written without a stop."""
    write(path)
    found = path.read_bytes()
    path.unlink()
    return found


def test_the_file_has_each_row_once_and_nothing_else_stays(path):
    write(path)
    assert read(path) == (("image", "class", "number"), ROWS)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("stop_after", [0, 1, 5, 12, 22])
def test_a_stopped_writer_is_continued_with_the_same_bytes(path, whole, stop_after):
    with pytest.raises(KeyboardInterrupt):
        write(path, stop_after=stop_after)
    assert not path.exists()
    assert write(path) == stop_after // 5 * 5
    assert path.read_bytes() == whole


def test_a_writer_that_is_stopped_again_and_again_ends_alike(path, whole):
    firsts = []
    while not path.exists():
        try:
            firsts.append(write(path, stop_after=6))
        except KeyboardInterrupt:
            with pieces_of(path).held() as pieces:
                firsts.append(pieces.start)
    assert firsts == [5, 10, 15, 20, 20]
    assert path.read_bytes() == whole


def test_a_killed_process_is_continued_with_the_same_bytes(path, whole):
    program = (
        "import os, pathlib, signal\n"
        "from tfaccel.experiment.pieces import Pieces\n"
        "from tfaccel.experiment.row_files import Column, form_of\n"
        f"path, kinds = pathlib.Path({str(path)!r}), {{'str': str, 'float': float}}\n"
        f"columns = [Column(n, kinds[k]) for n, k in {[(n, k.__name__) for n, k in COLUMNS]}]\n"
        "pieces = Pieces(path, columns, form_of(path), num_rows=23,\n"
        "    settings={'files': 'a1'}, rows_per_piece=5)\n"
        "with pieces.held():\n"
        f"    for row in {ROWS[:13]!r}: pieces.add(row)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program])
    assert done.returncode == -signal.SIGKILL
    folder = path.with_name(f"{path.name}.pieces")
    for name in (f"00000002{path.suffix}", "settings.json"):
        (folder / f".{name}.77.0a0b0c0d").write_bytes(b"half a row")
    assert write(path) == 10
    assert path.read_bytes() == whole
    assert not folder.exists()


def test_a_stop_while_the_pieces_are_joined_loses_nothing(path, whole, monkeypatch):
    rename = os.replace

    def stop(source, target):
        if str(target) == str(path):
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", stop)
        with pytest.raises(KeyboardInterrupt):
            write(path)
    assert write(path) == 23
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"settings": {"files": "b2"}}, "its files differ"),
        ({"num_rows": 22}, "its rows differ"),
        ({"rows_per_piece": 6}, "its rows_per_piece differ"),
        ({"columns": (*COLUMNS[:2], Column("label", float))}, "its columns differ"),
    ],
)
def test_pieces_of_other_rows_are_not_continued(path, changes, said):
    with pytest.raises(KeyboardInterrupt):
        write(path, stop_after=7)
    with pytest.raises(UserError, match=said):
        write(path, **changes)


def test_a_file_that_exists_and_a_folder_of_others_stay(tmp_path):
    path = tmp_path / "whole.csv"
    path.write_text("mine")
    with pytest.raises(UserError, match="exists; give a new file"):
        write(path)
    assert path.read_text() == "mine"
    (tmp_path / "mine.csv.pieces").mkdir()
    (tmp_path / "mine.csv.pieces" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match=r"holds thesis\.txt, which is no piece"):
        write(tmp_path / "mine.csv")
    assert (tmp_path / "mine.csv.pieces" / "thesis.txt").read_text() == "years of work"


def test_two_writers_of_one_file_are_kept_apart(tmp_path):
    path = tmp_path / "answers.csv"
    with pieces_of(path).held(), pytest.raises(RunError, match="another process writes"):
        write(path)


def test_rows_of_earlier_writers_are_counted_too(path):
    with pytest.raises(KeyboardInterrupt):
        write(path, stop_after=12)
    with pieces_of(path).held() as pieces:
        assert pieces.count(index=2) == 3


def test_csv_keeps_the_bytes_of_names_and_the_digits_of_float32(tmp_path):
    path = tmp_path / "answers.csv"
    with pieces_of(path, num_rows=1).held() as pieces:
        pieces.add((os.fsdecode(b"caf\xe9.png"), "a", 1 / 3))
        pieces.join()
    assert path.read_bytes() == b"image,class,number\ncaf\xe9.png,a,0.3333333\n"
