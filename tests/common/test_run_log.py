"""What a run says: in short on standard error, all of it in a file."""

import io
import logging

import pytest

from tfaccel.common import run_log
from tfaccel.common.tables import show_json

log = logging.getLogger("tfaccel")


class Screen(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def stderr(monkeypatch):
    """Standard error, of a program that has no handlers of its own."""
    stream = io.StringIO()
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "propagate", True)
    monkeypatch.delenv(run_log.VARIABLE, raising=False)
    level = log.level
    yield stream
    log.setLevel(level)


@pytest.fixture
def alone(monkeypatch, stderr):
    """Call it in the test: only then are pytest's own handlers and standard error there."""

    def alone():
        monkeypatch.setattr("sys.stderr", stderr)
        monkeypatch.setattr(logging.getLogger(), "handlers", [])

    return alone


def say():
    log.info("loader: memory, because it fits")
    run_log.summary("device: %s", "CPU")
    log.warning("checkpoint: damaged")


ALL = ["loader: memory, because it fits", "device: CPU", "checkpoint: damaged"]


@pytest.mark.parametrize(
    ("value", "speaks", "seen"),
    [(None, True, ALL[1:]), (None, False, ALL[2:]), ("1", True, ALL), ("0", True, ALL[1:])],
)
def test_what_matters_is_seen_and_all_where_it_is_asked_for(
    monkeypatch, stderr, alone, value, speaks, seen
):
    alone()
    if value is not None:
        monkeypatch.setenv(run_log.VARIABLE, value)
    run_log.show(speaks=speaks)
    run_log.show(speaks=speaks)  # as where a notebook's cell runs twice
    say()
    assert stderr.getvalue().splitlines() == [f"tfaccel: {each}" for each in seen]


def test_a_programs_own_handlers_have_all(stderr, alone):
    alone()
    own = io.StringIO()
    log.addHandler(logging.StreamHandler(own))
    run_log.show()
    say()
    assert own.getvalue().splitlines() == ALL
    assert stderr.getvalue() == ""


def test_the_file_has_all_also_from_before_it_was_known_and_is_added_to(stderr, alone, tmp_path):
    alone()
    path = tmp_path / "log.txt"
    for _ in range(2):
        with run_log.kept() as kept:
            run_log.show()
            say()
            kept.write_to(path)
            log.info("after")
    log.info("outside")
    lines = path.read_text().splitlines()
    assert [each.split(" ", 3)[3] for each in lines] == 2 * [*ALL, "after"]
    assert [each.split(" ", 3)[2] for each in lines[:3]] == ["INFO", "SUMMARY", "WARNING"]


def test_a_file_that_cannot_be_written_is_said_once_and_ends_nothing(stderr, alone, tmp_path):
    alone()
    with run_log.kept() as kept:
        run_log.show()
        kept.write_to(tmp_path / "none" / "log.txt")
        say()
        say()
    assert stderr.getvalue().count("log.txt cannot be written (No such file or directory)") == 1


@pytest.mark.parametrize("columns", [40, 80, 100])
def test_on_a_terminal_lines_break_between_words(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    path = "/a/" + "very-long-name/" * 8
    text = f"tfaccel: workdir: {path} holds one of many words and a --flag-that-has-parts " * 3
    assert run_log.wrapped(text, io.StringIO()) == text
    lines = run_log.wrapped(text, Screen()).split("\n")
    assert " ".join(lines).split() == text.split()
    assert all(len(each) <= columns or path in each for each in lines)


def test_json_is_one_line_and_on_a_narrow_terminal_several(monkeypatch, capsys):
    value = {"metrics": {"accuracy": 0.8114126920700073}, "export": "runs/a/export/1"}
    show_json(value)
    assert len(capsys.readouterr().out.splitlines()) == 1
    for columns, lines in ((60, 6), (200, 1)):
        monkeypatch.setenv("COLUMNS", str(columns))
        screen = Screen()
        monkeypatch.setattr("sys.stdout", screen)
        show_json(value)
        assert len(screen.getvalue().splitlines()) == lines
        assert max(map(len, screen.getvalue().splitlines())) <= columns
