"""A finding, and the table of findings.

table = Table(findings=(...), title="resnet50", remarks=())
print(table); len(table); [each.fix for each in table]; table.ok
"""

import dataclasses
from collections.abc import Iterator

from tfaccel.common.report import Notes, Report
from tfaccel.common.tables import counted

REMARKS = "remarks on what is fine, or could not be checked:"
SEVERITIES = ("error", "warning", "note")


@dataclasses.dataclass(frozen=True, repr=False)
class Finding(Report):
    """One fault, or one possible gain.

    Attributes:
      severity: "error" for a fault, "warning" for a large cost, "note" for everything else.
      where: a layer, the data, or a line of a script.
      what: the fault.
      why: why it matters.
      gain: what to expect from the fix, calculated from the facts.
      fix: what to do.
      change: the fix as a flag of `tfaccel train`; None if there is no such flag.
    """

    severity: str
    where: str
    what: str
    why: str
    gain: str
    fix: str
    change: str | None = None

    def parts(self):
        """Yields the finding as one note."""
        yield Notes([self.row])

    @property
    def row(self) -> tuple[str, tuple[str, ...]]:
        """The severity and the sentences."""
        said = {"why": self.why, "gain": self.gain, "fix": self.fix, "flag": self.change}
        rest = [f"{name}: {text}" for name, text in said.items() if text]
        return self.severity, (f"{self.where}: {self.what}", *rest)


@dataclasses.dataclass(frozen=True, repr=False)
class Table(Report):
    """All findings, the worst first.

    Attributes:
      findings: the findings.
      title: what was checked.
      remarks: sentences about things that look odd but are fine, and about things that could not be
        checked.
    """

    findings: tuple[Finding, ...]
    title: str = ""
    remarks: tuple[str, ...] = ()

    def __post_init__(self):
        """Sorts the findings by severity."""
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
        """The flags of `tfaccel train` that apply fixes, without repetitions."""
        return list(dict.fromkeys(each.change for each in self.findings if each.change))

    def __len__(self):
        """Returns the number of findings."""
        return len(self.findings)

    def __bool__(self):
        """Returns True, also for a table without findings; use `len` or `ok` to ask for those."""
        return True

    def __iter__(self) -> Iterator[Finding]:
        """Iterates over the findings, the worst first."""
        return iter(self.findings)

    @property
    def summary(self) -> str:
        """The number of findings of each severity, and what was checked."""
        numbers = [counted(number, each) for each, number in self._counts().items() if number]
        return f"lint: {', '.join(numbers) or 'no finding'}: {self.title}"

    def _counts(self) -> dict[str, int]:
        severities = [each.severity for each in self.findings]
        return {each: severities.count(each) for each in SEVERITIES}

    def parts(self):
        """Yields the summary, the findings and the remarks."""
        yield self.summary
        yield Notes([each.row for each in self.findings])
        if self.remarks:
            yield REMARKS
            yield Notes([(each,) for each in self.remarks])

    def as_dict(self) -> dict:
        """Returns the title, the findings, their counts and the remarks as values for JSON."""
        counts = {f"{each}s": number for each, number in self._counts().items()}
        findings = [dataclasses.asdict(each) for each in self.findings]
        return {"about": self.title, "findings": findings, **counts, "remarks": self.remarks}
