"""A finding, and the table of them: for a terminal of 80 columns, a pipe, JSON and a notebook.

table = Table(findings=(...), title="resnet50", remarks=())
print(table); len(table); [each.fix for each in table]; table.ok
"""

import dataclasses
from collections.abc import Iterator

from tfaccel.common.tables import as_html, counted, in_lines

REMARKS = "looked at, and in order or not to be judged:"
SEVERITIES = ("error", "warning", "note")
COLUMNS = ("severity", "where", "what", "why", "gain", "fix")
LEFT = "style='text-align:left;vertical-align:top'"  # notebooks center what says nothing


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
        head = in_lines(f"{self.where}: {self.what}", first=f"{self.severity:8} ", rest=" " * 9)
        parts = [("why", self.why), ("gain", self.gain), ("fix", self.fix), ("flag", self.change)]
        body = [
            in_lines(text, first=f"{'':9}{name:5} ", rest=" " * 15) for name, text in parts if text
        ]
        return "\n".join([head, *body])


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

    @property
    def exit_code(self) -> int:
        """0 if there is no error, else 1."""
        return 0 if self.ok else 1

    @property
    def changes(self) -> list[str]:
        """Flags of `tfaccel train` that mend what a flag can mend, each once."""
        return list(dict.fromkeys(each.change for each in self.findings if each.change))

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
        numbers = [counted(number, each) for each, number in self._counts().items() if number]
        return f"lint: {', '.join(numbers) or 'no finding'}: {self.title}"

    def _counts(self) -> dict[str, int]:
        severities = [each.severity for each in self.findings]
        return {each: severities.count(each) for each in SEVERITIES}

    def __str__(self):
        """Returns all of it, at most 80 columns wide."""
        blocks = [in_lines(self.summary), *map(str, self.findings)]
        if self.remarks:
            lines = [in_lines(each, first="  ", rest="    ") for each in self.remarks]
            blocks.append("\n".join([REMARKS, *lines]))
        return "\n\n".join(blocks)

    def __repr__(self):
        """Returns the same: it is what a prompt should show."""
        return str(self)

    def as_dict(self) -> dict:
        """Returns what is ready for JSON: what was looked at, the findings, counts, remarks."""
        counts = {f"{each}s": number for each, number in self._counts().items()}
        findings = [dataclasses.asdict(each) for each in self.findings]
        return {"about": self.title, "findings": findings, **counts, "remarks": self.remarks}

    def _repr_html_(self) -> str:
        """Returns it for a notebook."""
        head = "".join(f"<th {LEFT}>{name}</th>" for name in COLUMNS)
        rows = "".join(f"<tr>{_html_cells(each)}</tr>" for each in self.findings)
        remarks = "".join(f"<li>{as_html(each)}</li>" for each in self.remarks)
        return (
            f"<p>{as_html(self.summary)}</p>"
            + (f"<table><thead><tr>{head}</tr></thead>{rows}</table>" if rows else "")
            + (f"<p>{REMARKS}</p><ul>{remarks}</ul>" if remarks else "")
        )


def _html_cells(finding: Finding) -> str:
    texts = {name: as_html(getattr(finding, name)) for name in COLUMNS}
    if finding.change:
        texts["fix"] += f"<br><code>{as_html(finding.change)}</code>"
    return "".join(f"<td {LEFT}>{text}</td>" for text in texts.values())
