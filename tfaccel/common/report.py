"""The result of a command as a list of parts, shown as text, HTML, Markdown or JSON.

A subclass yields sentences, tables, notes and commands. `print`, a notebook, a README and a program
read the same parts. rich draws the tables of the text and is imported only then.

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

ENDLESS = 10**6  # width of a table in a file or a pipe, where programs (grep, awk) read lines
NARROWEST = 20  # columns that a sentence has at least, however far it is indented

Cell = str | tuple[str, ...]  # a tuple's non-empty texts stand below each other


@dataclasses.dataclass(frozen=True)
class Grid:
    """A table with headings.

    Attributes:
      heads: the headings of the columns.
      rows: the texts of the rows, one text per column.
      right: the indices of right-aligned columns, such as numbers.
      gap: spaces between columns in text.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Container[int] = ()
    gap: int = 2


@dataclasses.dataclass(frozen=True)
class Notes:
    """Sentences of any length, each after its labels. All rows have the same number of labels."""

    rows: Sequence[tuple[*tuple[str, ...], Cell]]


@dataclasses.dataclass(frozen=True)
class Code:
    """Lines to copy, which are never wrapped."""

    text: str


Part = str | Grid | Notes | Code  # a str is one or more sentences


class Report:
    """The base of all reports: frozen dataclasses with `repr=False` that define `parts`."""

    def parts(self) -> Iterable[Part]:
        """Returns the parts in order. Empty parts are not shown."""
        raise NotImplementedError

    def as_dict(self) -> dict:
        """Returns the report as values for JSON."""
        return dataclasses.asdict(self)

    def as_json(self) -> str:
        """Returns the report as one JSON object, which `--json` prints."""
        return json.dumps(self.as_dict(), indent=2)

    def as_markdown(self) -> str:
        """Returns the report for a README."""
        return "\n\n".join(filter(None, map(_markdown, self.parts()))) + "\n"

    def __str__(self) -> str:
        """Returns the report at the terminal's width; in a file or a pipe, no line is wrapped."""
        return "\n\n".join(filter(None, map(_text, self.parts())))

    def __repr__(self) -> str:
        """Returns the same text, because a prompt shows it."""
        return str(self)

    def _repr_html_(self) -> str:
        """Returns the report for a notebook."""
        return "".join(map(html_of, self.parts()))


def in_lines(text: str, *, first: str = "", rest: str = "") -> str:
    """Returns text in lines of the terminal's width, or as one line in a file or a pipe.

    Words such as paths, flags and commands are never broken, so that they can be copied.

    Args:
      text: text of any length from anywhere, such as paths or a process's last lines.
      first: the beginning of the first line.
      rest: the beginning of the other lines.
    """
    text = cleaned(text)
    if not columns():
        return (first + text).rstrip()
    whole_words = {"break_long_words": False, "break_on_hyphens": False}  # rich would break a path
    width = max(columns(), len(rest) + NARROWEST)
    return textwrap.fill(text, width, initial_indent=first, subsequent_indent=rest, **whole_words)


def html_of(part: Part) -> str:
    """Returns a part as escaped HTML, or "" for an empty part."""
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
    # Notebooks center cells without a text-align.
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
    """Returns aligned columns. On a narrow terminal, a long cell is wrapped into several lines."""
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
    """Returns lines in which the labels are aligned, and so are the sentences."""
    widths = [2 + max(map(len, each)) for each in zip(*(row[:-1] for row in rows), strict=True)]
    rest, blocks = " " * sum(widths), []
    for *labels, cell in rows:
        first = "".join(f"{each:{width}}" for each, width in zip(labels, widths, strict=True))
        said, *more = _texts(cell)
        lines = [in_lines(each, first=rest, rest=f"{rest}  ") for each in more]
        blocks.append("\n".join([in_lines(said, first=first, rest=rest or "  "), *lines]))
    # An empty line between notes makes notes of several lines easier to tell apart.
    return ("\n\n" if any(len(_texts(cell)) > 2 for *_, cell in rows) else "\n").join(blocks)


def _texts(cell: Cell) -> list[str]:
    return [cell] if isinstance(cell, str) else [*filter(None, cell)]
