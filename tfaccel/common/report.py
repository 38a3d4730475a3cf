"""What a command found, stated once by its parts: as text, HTML, Markdown and JSON.

Takes sentences, tables, notes and commands; gives what `print`, a notebook, a README and a program
read. rich lays out a table's text, and is imported when there is one.

    class Profile(Report):
        def parts(self):
            yield "profile: resnet50 on 8 GPUs"
            yield Grid(("", "images/s"), [("step", "2,520")], right=(1,))
            yield Notes([("verdict", "the step bounds"), ("to do", "use a larger batch")])
            yield Code("tfaccel train --config=...")
"""

import dataclasses
import html
import io
import json
import textwrap
from collections.abc import Container, Iterable, Sequence

from tfaccel.common.redact import shown
from tfaccel.common.tables import as_html, cleaned, columns

ENDLESS = 10**6  # columns of a file or a pipe: programs take lines apart there (grep, awk)
NARROWEST = 20  # columns: however far a sentence is indented, it keeps so many

Cell = str | tuple[str, ...]  # several texts stand below each other, without those that are empty


@dataclasses.dataclass(frozen=True)
class Grid:
    """A table with headings.

    Attributes:
      heads: of the columns.
      rows: of as many texts each.
      right: the indices of columns that end at the right, as numbers do.
      gap: spaces between columns, in text.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Container[int] = ()
    gap: int = 2


@dataclasses.dataclass(frozen=True)
class Notes:
    """Sentences of any length, each behind labels; every row has as many, which may be none."""

    rows: Sequence[tuple[*tuple[str, ...], Cell]]


@dataclasses.dataclass(frozen=True)
class Code:
    """Lines to copy, which are never broken."""

    text: str


Part = str | Grid | Notes | Code  # a str is a sentence, or several


class Report:
    """What all reports share: each is a frozen dataclass with `repr=False`, and has its `parts`."""

    def parts(self) -> Iterable[Part]:
        """Returns what there is to say, in order; parts that are empty are left out."""
        raise NotImplementedError

    def as_dict(self) -> dict:
        """Returns what is ready for JSON."""
        return dataclasses.asdict(self)

    def as_json(self) -> str:
        """Returns one JSON object, as `--json` prints it."""
        return json.dumps(self.as_dict(), indent=2)

    def as_markdown(self) -> str:
        """Returns it for a README."""
        return "\n\n".join(filter(None, map(_markdown, self.parts()))) + "\n"

    def __str__(self) -> str:
        """Returns it as wide as the terminal; in a file or a pipe, no sentence is broken."""
        return "\n\n".join(filter(None, map(_text, self.parts())))

    def __repr__(self) -> str:
        """Returns the same: it is what a prompt should show."""
        return str(self)

    def _repr_html_(self) -> str:
        """Returns it for a notebook."""
        return "".join(map(html_of, self.parts()))


def in_lines(text: str, *, first: str = "", rest: str = "") -> str:
    """Returns text in lines as wide as the terminal, and as one line in a file or a pipe.

    Words (paths, flags, commands) stay whole on a terminal too, to be copied.

    Args:
      text: of any length, and of anybody: paths, last words of a process.
      first: what the first line begins with.
      rest: what the others begin with.
    """
    text = cleaned(text)
    if not columns():
        return (first + text).rstrip()
    whole_words = {"break_long_words": False, "break_on_hyphens": False}  # rich would break a path
    width = max(columns(), len(rest) + NARROWEST)
    return textwrap.fill(text, width, initial_indent=first, subsequent_indent=rest, **whole_words)


def html_of(part: Part) -> str:
    """Returns a part for a page, with nothing in it that is markup; "" for one that is empty."""
    match part:
        case Grid(heads, rows, right):
            head = f"<thead>{_html_row('th', heads, right)}</thead>"
        case Notes(rows):
            head, right = "", ()
        case Code(text):
            return f"<pre>{html.escape(shown(text))}</pre>"
        case text:
            return f"<p>{as_html(text)}</p>"
    body = "".join(_html_row("td", each, right) for each in rows)
    return f"<table>{head}<tbody>{body}</tbody></table>" if head or body else ""


def _html_row(tag: str, cells: Sequence[Cell], right: Container[int]) -> str:
    # Notebooks center what says nothing of its side.
    row = (
        f"<{tag} style='text-align:{'right' if index in right else 'left'};vertical-align:top'>"
        f"{'<br>'.join(map(as_html, _texts(cell)))}</{tag}>"
        for index, cell in enumerate(cells)
    )
    return f"<tr>{''.join(row)}</tr>"


def _markdown(part: Part) -> str:
    match part:
        case Grid(heads, rows, right):
            rule = ["--:" if index in right else "---" for index in range(len(heads))]
            cells = ([cleaned(each).replace("|", "\\|") for each in row] for row in (heads, *rows))
            head, *body = (f"| {' | '.join(each)} |" for each in cells)
            return "\n".join([head, f"| {' | '.join(rule)} |", *body])
        case Notes(rows):
            labels = [cleaned(" ".join(labels)) for *labels, _ in rows]
            said = ["<br>".join(map(cleaned, _texts(cell))) for *_, cell in rows]
            both = zip((each and f"**{each}**" for each in labels), said, strict=True)
            return "\n".join(f"- {': '.join(filter(None, each))}" for each in both)
        case Code(text):
            return textwrap.indent(shown(text), "    ")
        case text:
            return cleaned(text)


def _text(part: Part) -> str:
    match part:
        case Grid():
            return _columns(part)
        case Notes(rows):
            return _hanging(rows)
        case Code(text):
            return shown(text)
        case text:
            return in_lines(text)


def _columns(grid: Grid) -> str:
    """Returns aligned columns; on a narrow terminal, a long cell takes several lines."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, grid.gap, 0, 0))
    for index, head in enumerate(grid.heads):
        side = "right" if index in grid.right else "left"
        table.add_column(Text(cleaned(head)), justify=side, overflow="fold")
    for row in grid.rows:
        table.add_row(*(Text(cleaned(each)) for each in row))
    drawn = io.StringIO()
    plain = {"color_system": None, "force_terminal": False, "force_jupyter": False}
    Console(file=drawn, width=columns() or ENDLESS, **plain).print(table)
    return "\n".join(each.rstrip() for each in drawn.getvalue().splitlines())


def _hanging(rows: Sequence) -> str:
    """Returns lines: labels stand below each other, and so do sentences."""
    widths = [2 + max(map(len, each)) for each in zip(*(row[:-1] for row in rows), strict=True)]
    rest, blocks = " " * sum(widths), []
    for *labels, cell in rows:
        first = "".join(f"{each:{width}}" for each, width in zip(labels, widths, strict=True))
        said, *more = _texts(cell)
        lines = [in_lines(each, first=rest, rest=f"{rest}  ") for each in more]
        blocks.append("\n".join([in_lines(said, first=first, rest=rest or "  "), *lines]))
    # What takes several lines is easier to tell apart with an empty one between.
    return ("\n\n" if any(len(_texts(cell)) > 2 for *_, cell in rows) else "\n").join(blocks)


def _texts(cell: Cell) -> list[str]:
    return [cell] if isinstance(cell, str) else [*filter(None, cell)]
