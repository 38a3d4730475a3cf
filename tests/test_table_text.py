"""Text of tables: 80 columns, whole words, nothing of others that acts, and a pipe that is gone."""

import subprocess
import sys

from tfaccel.table_text import as_html, counted, html_table, in_lines


def test_lines_are_narrow_on_a_terminal_and_words_stay_whole(terminal):
    path = "/mnt/" + "long-" * 20
    lines = in_lines(f"{'word ' * 30}{path}", first="fix: ", rest="     ").splitlines()
    assert max(map(len, lines[:-1])) <= 80
    assert lines[-1] == f"     {path}"
    assert in_lines("a\n\tb\x1b[1m \x07c\x1b[0m\x1b[31m") == r"a b \x07c\x1b[31m"


def test_in_a_file_or_a_pipe_a_line_is_whole():
    sentence = f"{'word ' * 60}/a/path"
    assert in_lines(sentence, first="fix: ", rest="     ") == f"fix: {sentence}"


def test_html_and_counts():
    assert as_html("<b>\x00&") == r"&lt;b&gt;\x00&amp;"
    assert (counted(1, "note"), counted(1000, "note")) == ("1 note", "1,000 notes")


def test_a_table_for_a_page():
    table = html_table(("name", "MiB"), [("<b>", "1,000")], right=(1,))
    assert table.count("<tr>") == 2
    assert "left;vertical-align:top'>&lt;b&gt;</td>" in table
    assert "right;vertical-align:top'>1,000</td>" in table


def test_a_reader_that_has_gone_is_no_failure():
    program = (
        "import sys; from tfaccel.table_text import show; sys.stdin.read(); show('x'); show('y')"
    )
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as process:
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
