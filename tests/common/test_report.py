"""A report: whole lines in a pipe, the terminal's width, aligned numbers, and nothing that acts."""

import dataclasses
import html.parser
import json
import subprocess
import sys

import pytest
from rich.cells import cell_len

from tfaccel.common.report import Code, Grid, Notes, Report, html_of, in_lines

PATH = "/mnt/" + "long-" * 20
GRID = Grid(("name", "MiB"), [("<b>", "1,000"), ("ウェブ", "5"), ("a|b\x1b[31m", "20")], right=(1,))
NOTES = Notes(
    [("ok", "Python", "3.11.9"), ("warning", "data", (f"{'word ' * 30}{PATH}", "", "fix: it"))]
)
COMMAND = f"tfaccel train \\\n    --out={PATH}"


@dataclasses.dataclass(frozen=True, repr=False)
class Example(Report):
    """One of all parts."""

    title: str = "a sentence " * 12

    def parts(self):
        yield self.title
        yield GRID
        yield NOTES
        yield Notes([])  # has nothing to say, and leaves no gap
        yield Code(COMMAND)


@dataclasses.dataclass(frozen=True, repr=False)
class Alone(Report):
    """One part."""

    part: object

    def parts(self):
        yield self.part


def test_in_a_file_or_a_pipe_a_line_is_whole():
    title, grid, notes, command = str(Example()).split("\n\n")
    assert title == ("a sentence " * 12).strip()
    assert len(grid.splitlines()) == 4
    assert notes.splitlines() == [
        "ok       Python  3.11.9",
        f"warning  data    {'word ' * 30}{PATH}",
        "                 fix: it",
    ]
    assert command == COMMAND
    wide = Grid(("a", "b"), [("word " * 100, "x" * 1000)])
    assert str(dataclasses.replace(Example(), title="")).count("\n\n") == 2
    assert len(str(Alone(wide)).splitlines()) == 2


@pytest.mark.parametrize("width", [40, 80, 120])
def test_on_a_terminal_it_is_as_wide_as_that_and_words_stay_whole(monkeypatch, width):
    monkeypatch.setattr("tfaccel.common.report.columns", lambda: width)
    lines = str(Example()).splitlines()
    longest = max(len(each) for each in lines if PATH not in each)
    assert width - len("sentence ") <= longest <= width
    assert sum(PATH in each for each in lines) == 2
    cells = Grid(("a", "b"), [(PATH, "5")], right=(1,))
    lines = str(Alone(cells)).splitlines()
    assert max(map(len, lines)) <= width
    assert "".join(line.split()[0] for line in lines[1:]) == PATH  # nothing is cut off


def test_numbers_end_below_each_other_also_behind_letters_of_two_columns():
    lines = str(Alone(GRID)).splitlines()
    assert len({cell_len(each) for each in lines}) == 1
    assert [each.split()[-1] for each in lines] == ["MiB", "1,000", "5", "20"]


def test_lines_hang_below_what_they_begin_with(terminal):
    lines = in_lines(f"{'word ' * 30}{PATH}", first="fix: ", rest="     ").splitlines()
    assert max(map(len, lines[:-1])) <= 80
    assert lines[-1] == f"     {PATH}"
    assert in_lines("a\n\tb\x1b[1m \x07c\x1b[0m\x1b[31m") == r"a b \x07c\x1b[31m"


class Tags(html.parser.HTMLParser):
    """The tags of a page that are open, those that there were, and the text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.all, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.all.append(tag)
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_a_page_has_no_markup_of_others():
    page = Tags(Example("<script>")._repr_html_())
    assert not page.open
    assert not {"script", "b"} & set(page.all)
    assert (page.all.count("table"), page.all.count("tr"), page.all.count("br")) == (2, 6, 1)
    assert COMMAND in page.text
    assert r"a|b\x1b[31m" in page.text
    assert "right;vertical-align:top'>1,000</td>" in html_of(GRID)
    assert html_of(Notes([])) == ""


def test_markdown():
    blocks = Example("title").as_markdown().split("\n\n")
    assert blocks[0] == "title"
    assert blocks[1].splitlines()[1:3] == ["| --- | --: |", "| <b> | 1,000 |"]
    assert r"| a\|b\x1b[31m | 20 |" in blocks[1]
    assert blocks[2].startswith("- **ok Python**: 3.11.9\n- **warning data**: word ")
    assert blocks[2].endswith(f"{PATH}<br>fix: it")
    assert blocks[3].startswith("    tfaccel train \\\n        --out=")


def test_secrets_are_in_no_form():
    secret = Notes([("data", "https://me:PASS@host/x")])
    grid, code = Grid(("a",), [(secret.rows[0][1],)]), Code(secret.rows[0][1])
    for part in (secret, grid, code, secret.rows[0][1]):
        alone = Alone(part)
        for said in (str(alone), alone._repr_html_(), alone.as_markdown()):
            assert "PASS" not in said
            assert "***@host/x" in said


def test_json_and_a_prompt():
    assert json.loads(Example("t").as_json()) == {"title": "t"}
    assert repr(Example()) == str(Example())


def test_rich_is_imported_for_a_table_alone():
    program = (
        "import sys, tfaccel.common.report as r; print(r.in_lines('a sentence'));"
        "sys.exit('rich' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
