"""What was found: a line for each check, and all of them as text, HTML and JSON.

print(Table((ok("Python", "3.11.9"), error("DALI", "not installed", "install it: pip ..."))))
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from tfaccel.common.report import Notes, Report
from tfaccel.common.tables import counted

Status = Literal["ok", "warning", "error"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One check's line.

    Attributes:
      name: of what was looked at.
      status: "error" is what training fails by, "warning" what it is slower or other by.
      found: what there is, and what was expected where that is something else.
      fix: what to do; empty where all is well.
    """

    name: str
    status: Status
    found: str
    fix: str = ""

    @property
    def row(self) -> tuple[str, str, tuple[str, ...]]:
        """Its status, its name and its sentences."""
        return self.status, self.name, (self.found, self.fix and f"fix: {self.fix}")


def ok(name: str, found: str) -> Finding:
    """Returns the line of something that fits."""
    return Finding(name, "ok", found)


def warning(name: str, found: str, fix: str) -> Finding:
    """Returns the line of something that makes training slower, or other than expected."""
    return Finding(name, "warning", found, fix)


def error(name: str, found: str, fix: str) -> Finding:
    """Returns the line of something that training fails by."""
    return Finding(name, "error", found, fix)


def worst(name: str, found: Sequence[Finding], fine: str) -> Finding:
    """Returns several faults of one thing as one line, or that it is fine."""
    if not found:
        return ok(name, fine)
    status = "error" if any(each.status == "error" for each in found) else "warning"
    fixes = dict.fromkeys(each.fix for each in found)  # each once, in order
    return Finding(name, status, "; ".join(each.found for each in found), "; ".join(fixes))


@dataclasses.dataclass(frozen=True, repr=False)
class Table(Report):
    """All findings, in the order in which they were looked for.

    Attributes:
      findings: a line each.
      left_out: what was not looked at, and how it would be.
    """

    findings: tuple[Finding, ...]
    left_out: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """1 if there is an error, else 0."""
        return 1 if self._count("error") else 0

    def parts(self):
        """Returns a line for each finding, then the counts and what was left out."""
        yield Notes([each.row for each in self.findings])
        yield self._summary()

    def as_dict(self) -> dict:
        """Returns what is ready for JSON: the checks, the counts and what was left out."""
        return {
            "checks": [dataclasses.asdict(each) for each in self.findings],
            "errors": self._count("error"),
            "warnings": self._count("warning"),
            "left_out": self.left_out,
        }

    def _count(self, status: Status) -> int:
        return sum(each.status == status for each in self.findings)

    def _summary(self) -> str:
        errors, warnings = (counted(self._count(each), each) for each in ("error", "warning"))
        left_out = f" Not looked at: {'; '.join(self.left_out)}." if self.left_out else ""
        return f"{errors}, {warnings}, {self._count('ok')} ok.{left_out}"
