"""A file in pieces: whatever stops its writer, the next one ends with the same bytes."""

import csv
import os
import signal
import subprocess
import sys

import pytest

from tfaccel.common.errors import RunError, UserError
from tfaccel.experiment.pieces import Pieces

HEADS = ("image", "class")
ROWS = [(f"photos/{index}, or so.png", f'"{index % 3}"\n') for index in range(23)]


def pieces_of(path, *, num_rows=23, settings=None, rows_per_piece=5, heads=HEADS):
    settings = settings or {"files": "a1"}
    return Pieces(path, heads, num_rows=num_rows, settings=settings, rows_per_piece=rows_per_piece)


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


@pytest.fixture
def whole(tmp_path):
    write(tmp_path / "whole.csv")
    return (tmp_path / "whole.csv").read_bytes()


def test_the_file_has_each_row_once_and_nothing_else_stays(tmp_path, whole):
    with open(tmp_path / "whole.csv", newline="") as file:
        assert [tuple(each) for each in csv.reader(file)] == [HEADS, *ROWS]
    assert [each.name for each in tmp_path.iterdir()] == ["whole.csv"]


@pytest.mark.parametrize("stop_after", [0, 1, 5, 12, 22])
def test_a_stopped_writer_is_continued_with_the_same_bytes(tmp_path, whole, stop_after):
    path = tmp_path / "answers.csv"
    with pytest.raises(KeyboardInterrupt):
        write(path, stop_after=stop_after)
    assert not path.exists()
    assert write(path) == stop_after // 5 * 5
    assert path.read_bytes() == whole


def test_a_writer_that_is_stopped_again_and_again_ends_alike(tmp_path, whole):
    path, firsts = tmp_path / "answers.csv", []
    while not path.exists():
        try:
            firsts.append(write(path, stop_after=6))
        except KeyboardInterrupt:
            with pieces_of(path).held() as pieces:
                firsts.append(pieces.start)
    assert firsts == [5, 10, 15, 20, 20]
    assert path.read_bytes() == whole


def test_a_killed_process_is_continued_with_the_same_bytes(tmp_path, whole):
    path = tmp_path / "answers.csv"
    program = (
        "import os, pathlib, signal\n"
        "from tfaccel.experiment.pieces import Pieces\n"
        f"pieces = Pieces(pathlib.Path({str(path)!r}), {HEADS!r}, num_rows=23,\n"
        "    settings={'files': 'a1'}, rows_per_piece=5)\n"
        "with pieces.held():\n"
        f"    for row in {ROWS[:13]!r}: pieces.add(row)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program])
    assert done.returncode == -signal.SIGKILL
    (tmp_path / "answers.csv.pieces" / ".00000002.csv.77.0a0b0c0d").write_bytes(b"half a row")
    assert write(path) == 10
    assert path.read_bytes() == whole
    assert [each.name for each in tmp_path.iterdir() if "pieces" in each.name] == []


def test_a_stop_while_the_pieces_are_joined_loses_nothing(tmp_path, whole, monkeypatch):
    path, rename = tmp_path / "answers.csv", os.replace

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
        ({"heads": ("image", "label")}, "its columns differ"),
    ],
)
def test_pieces_of_other_rows_are_not_continued(tmp_path, changes, said):
    path = tmp_path / "answers.csv"
    with pytest.raises(KeyboardInterrupt):
        write(path, stop_after=7)
    with pytest.raises(UserError, match=said):
        write(path, **changes)


def test_a_file_that_exists_and_a_folder_of_others_stay(tmp_path, whole):
    path = tmp_path / "whole.csv"
    with pytest.raises(UserError, match="exists; give a new file"):
        write(path)
    assert path.read_bytes() == whole
    (tmp_path / "mine.csv.pieces").mkdir()
    (tmp_path / "mine.csv.pieces" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match=r"holds thesis\.txt, which is no piece"):
        write(tmp_path / "mine.csv")
    assert (tmp_path / "mine.csv.pieces" / "thesis.txt").read_text() == "years of work"


def test_two_writers_of_one_file_are_kept_apart(tmp_path):
    path = tmp_path / "answers.csv"
    with pieces_of(path).held(), pytest.raises(RunError, match="another process writes"):
        write(path)


def test_rows_of_earlier_writers_are_counted_too(tmp_path):
    path = tmp_path / "answers.csv"
    with pytest.raises(KeyboardInterrupt):
        write(path, stop_after=12)
    with pieces_of(path).held() as pieces:
        assert pieces.count(lambda row: row[1] == '"1"\n') == 3


def test_names_keep_their_bytes(tmp_path):
    path = tmp_path / "answers.csv"
    with pieces_of(path, num_rows=1).held() as pieces:
        pieces.add((os.fsdecode(b"caf\xe9.png"), "a"))
        pieces.join()
    assert path.read_bytes() == b"image,class\ncaf\xe9.png,a\n"
