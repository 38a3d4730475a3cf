"""The table: aligned in 80 columns, HTML with nothing of a user's in it unescaped, and JSON."""

import json

import pytest

from tfaccel.diagnostics.doctor.table import Table, error, ok, warning

pytestmark = pytest.mark.usefixtures("terminal")  # lines of 80 columns

FINE = ok("Python", "3.11.9")
LOW = warning("cores", "2 cores for 8 GPUs", "ask for more, e.g. `sbatch --cpus-per-task=32`")
BAD = error("DALI plugin", "libdali <script> & co. " * 8, "build it again")


def test_each_line_has_status_first_its_name_and_80_columns():
    lines = str(Table((FINE, LOW, BAD), left_out=("disk speed (give --data=FOLDER)",))).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "ok       Python       3.11.9"
    assert lines[1] == "warning  cores        2 cores for 8 GPUs"
    assert lines[2].strip() == "fix: ask for more, e.g. `sbatch --cpus-per-task=32`"
    # What goes on starts where the sentence did.
    assert len({len(each) - len(each.lstrip()) for each in lines[2:8]} - {0}) == 1
    assert lines[-1] == "1 error, 1 warning, 1 ok. Not checked: disk speed (give --data=FOLDER)."


def test_a_path_longer_than_the_line_stays_whole():
    path = "/mnt/" + "long/" * 20
    assert path in str(Table((warning("data", f"{path} is slow", "copy it"),)))


def test_a_sentence_of_several_lines_and_control_characters_is_one_line_of_text():
    text = str(Table((error("TensorFlow", "a\n\tb\x1b[31m c", "d"),)))
    assert "a b\\x1b[31m c" in text
    assert "\x1b" not in text


def test_a_notebook_gets_a_table_without_markup_of_the_findings():
    html = Table((FINE, LOW, BAD), left_out=("<b>",))._repr_html_()
    assert html.count("<tr>") == 3
    assert "<script>" not in html
    assert "<b>" not in html
    assert "libdali &lt;script&gt; &amp; co." in html


def test_json_has_what_was_found_and_the_counts():
    said = json.loads(Table((FINE, BAD), left_out=("x",)).as_json())
    assert said["checks"][0] == {"name": "Python", "status": "ok", "found": "3.11.9", "fix": ""}
    assert (said["errors"], said["warnings"], said["left_out"]) == (1, 0, ["x"])


@pytest.mark.parametrize(("findings", "code"), [((FINE, LOW), 0), ((FINE, BAD, LOW), 1), ((), 0)])
def test_only_an_error_gives_exit_code_1(findings, code):
    assert Table(findings).exit_code == code
