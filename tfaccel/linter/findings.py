"""A finding, and the table of them: for a terminal of 80 columns, a pipe and a notebook.

table = Table(findings=(...), title="resnet50", remarks=())
print(table); len(table); [each.fix for each in table]; table.ok
"""

import collections
import dataclasses
import html
import textwrap
from collections.abc import Iterator

SEVERITIES = ("error", "warning", "note")
WIDTH = 80


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing to mend.

    Attributes:
      severity: "error" for what is wrong, "warning" for what costs much, "note" for the rest.
      where: a layer, the data, or a place in a script.
      what: was found.
      why: it matters.
      gain: what to expect of the fix, as it follows from the facts.
      fix: what to do.
      change: the same as a flag of `tfaccel train`, where there is one.
    """

    severity: str
    where: str
    what: str
    why: str
    gain: str
    fix: str
    change: str | None = None

    def __str__(self):
        """Returns a few lines of at most 80 columns."""
        head = textwrap.wrap(
            f"{self.severity:<8} {self.where}: {self.what}", WIDTH, subsequent_indent=" " * 9
        )
        parts = [("why", self.why), ("gain", self.gain), ("fix", self.fix), ("flag", self.change)]
        body = [_part(name, text) for name, text in parts if text]
        return "\n".join([*head, *body])


def _part(name: str, text: str) -> str:
    # Flags and code are to be copied: they are never cut in two.
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=f"{'':9}{name:<5} ",
        subsequent_indent=" " * 15,
        break_long_words=False,
        break_on_hyphens=False,
    )


@dataclasses.dataclass(frozen=True)
class Table:
    """All findings, the worst first.

    Attributes:
      findings: what there is to mend.
      title: what was looked at.
      remarks: what is in order although it looks odd, and what could not be judged.
    """

    findings: tuple[Finding, ...]
    title: str = ""
    remarks: tuple[str, ...] = ()

    def __post_init__(self):
        """Sorts the findings."""
        worst_first = sorted(self.findings, key=lambda each: SEVERITIES.index(each.severity))
        object.__setattr__(self, "findings", tuple(worst_first))

    @property
    def ok(self) -> bool:
        """Whether there is no error."""
        return all(each.severity != "error" for each in self.findings)

    def __len__(self):
        """Returns how many findings there are."""
        return len(self.findings)

    def __bool__(self):
        """Returns True: a table without findings is a table too; ask `len` or `ok`."""
        return True

    def __iter__(self) -> Iterator[Finding]:
        """Returns the findings, the worst first."""
        return iter(self.findings)

    @property
    def summary(self) -> str:
        """How many findings there are of each severity, and of what."""
        numbers = collections.Counter(each.severity for each in self.findings)
        counted = [
            f"{numbers[each]} {each}{'s' if numbers[each] > 1 else ''}"
            for each in SEVERITIES
            if numbers[each]
        ]
        return f"lint: {', '.join(counted) or 'no finding'}: {self.title}"

    def __str__(self):
        """Returns all of it, at most 80 columns wide."""
        blocks = [textwrap.fill(self.summary, WIDTH), *map(str, self.findings)]
        if self.remarks:
            lines = [
                textwrap.fill(each, WIDTH, initial_indent="  ", subsequent_indent="    ")
                for each in self.remarks
            ]
            blocks.append("\n".join(["no findings, but looked at:", *lines]))
        return "\n\n".join(blocks)

    def __repr__(self):
        """Returns the same: it is what a prompt should show."""
        return str(self)

    def _repr_html_(self) -> str:
        """Returns it for a notebook."""
        names = ("severity", "where", "what", "why", "gain", "fix")
        head = "".join(f"<th style='text-align:left'>{name}</th>" for name in names)
        rows = "".join(
            "<tr>"
            + "".join(
                f"<td style='text-align:left;vertical-align:top'>{html.escape(getattr(each, name))}"
                + (f"<br><code>{html.escape(each.change)}</code>" if _has_flag(each, name) else "")
                + "</td>"
                for name in names
            )
            + "</tr>"
            for each in self.findings
        )
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        remarks = "".join(f"<li>{html.escape(each)}</li>" for each in self.remarks)
        return (
            f"<p>{html.escape(self.summary)}</p>{table if rows else ''}"
            f"{f'<p>no findings, but looked at:</p><ul>{remarks}</ul>' if remarks else ''}"
        )


def _has_flag(finding: Finding, name: str) -> bool:
    return name == "fix" and finding.change is not None
