"""A finding, and the table of them.

table = Table(findings=(...), title="resnet50", remarks=())
print(table); len(table); [each.fix for each in table]; table.ok
"""

import dataclasses
from collections.abc import Iterator

from tfaccel.common.report import Notes, Report
from tfaccel.common.tables import counted

REMARKS = "looked at, and in order or not to be judged:"
SEVERITIES = ("error", "warning", "note")


@dataclasses.dataclass(frozen=True, repr=False)
class Finding(Report):
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

    def parts(self):
        """Returns what there is to know of it, and what to do."""
        yield Notes([self.row])

    @property
    def row(self) -> tuple[str, tuple[str, ...]]:
        """Its severity, and its sentences."""
        said = {"why": self.why, "gain": self.gain, "fix": self.fix, "flag": self.change}
        rest = [f"{name}: {text}" for name, text in said.items() if text]
        return self.severity, (f"{self.where}: {self.what}", *rest)


@dataclasses.dataclass(frozen=True, repr=False)
class Table(Report):
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

    def parts(self):
        """Returns the counts, the findings and the remarks."""
        yield self.summary
        yield Notes([each.row for each in self.findings])
        if self.remarks:
            yield REMARKS
            yield Notes([(each,) for each in self.remarks])

    def as_dict(self) -> dict:
        """Returns what is ready for JSON: what was looked at, the findings, counts, remarks."""
        counts = {f"{each}s": number for each, number in self._counts().items()}
        findings = [dataclasses.asdict(each) for each in self.findings]
        return {"about": self.title, "findings": findings, **counts, "remarks": self.remarks}
