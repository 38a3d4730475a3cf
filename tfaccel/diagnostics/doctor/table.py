"""The report of the doctor: one line for each check, shown as text, HTML or JSON.

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
    """The result of one check.

    Attributes:
      name: the thing that was checked.
      status: "error" if training fails; "warning" if training is slower than it could be or does
        something unexpected.
      found: the state of the machine, and the expected state if it is different.
      fix: what to do; empty if nothing is wrong.
    """

    name: str
    status: Status
    found: str
    fix: str = ""

    @property
    def row(self) -> tuple[str, str, tuple[str, ...]]:
        """The columns of the report: status, name, and the sentences below each other."""
        return self.status, self.name, (self.found, self.fix and f"fix: {self.fix}")


def ok(name: str, found: str) -> Finding:
    """Returns the line of a check that found no fault."""
    return Finding(name, "ok", found)


def warning(name: str, found: str, fix: str) -> Finding:
    """Returns the line of a fault that makes training slower or different from what you expect."""
    return Finding(name, "warning", found, fix)


def error(name: str, found: str, fix: str) -> Finding:
    """Returns the line of a fault that makes training fail."""
    return Finding(name, "error", found, fix)


def merged(name: str, faults: Sequence[Finding], fine: str) -> Finding:
    """Merges the faults of one thing into one line; returns the line `fine` if there are none."""
    if not faults:
        return ok(name, fine)
    status = "error" if any(each.status == "error" for each in faults) else "warning"
    fixes = dict.fromkeys(each.fix for each in faults)  # in order, without repetitions
    return Finding(name, status, "; ".join(each.found for each in faults), "; ".join(fixes))


@dataclasses.dataclass(frozen=True, repr=False)
class Table(Report):
    """All findings, in the order of the checks.

    Attributes:
      findings: one line for each check.
      left_out: the checks that were skipped, each with the way to run it.
    """

    findings: tuple[Finding, ...]
    left_out: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """1 if there is an error, else 0."""
        return 1 if self._count("error") else 0

    def parts(self):
        """Yields one line for each finding, then the counts and the skipped checks."""
        yield Notes([each.row for each in self.findings])
        yield self._summary()

    def as_dict(self) -> dict:
        """Returns the findings, the counts and the skipped checks as values for JSON."""
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
        left_out = f" Not checked: {'; '.join(self.left_out)}." if self.left_out else ""
        return f"{errors}, {warnings}, {self._count('ok')} ok.{left_out}"
