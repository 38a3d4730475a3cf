"""The records of the arms of a row, and what becomes of them when an arm fails.

with out_if_it_fails(arm, record):
    record |= as_recorded(arm.ready(limit_s=60))
check_any_is_left(side)
"""

import contextlib
import sys
from collections.abc import Iterator, Mapping

from bench_arms.arm_process import ArmError, ArmProcess

OUT = {"failed", "left out"}  # the record of an arm without further turns has one of these keys

# The records of our arms and of the rival's arms, by name.
Sides = tuple[dict[str, dict], dict[str, dict]]


def as_recorded(ready: dict) -> dict:
    """Returns an arm's answer for its record, without the time at which it started."""
    settings = {name: value for name, value in ready["settings"].items() if name != "started"}
    return ready | {"settings": settings}


@contextlib.contextmanager
def out_if_it_fails(arm: ArmProcess, record: dict) -> Iterator[None]:
    """Ends an arm that fails in this context, and records why."""
    try:
        yield
    except ArmError as error:
        print(f"bench: {error}", file=sys.stderr, flush=True)
        record["failed"] = str(error)
        arm.kill()


def check_any_is_left(side: Mapping[str, dict]) -> None:
    """Raises ArmError if an arm of this side has failed and no arm is left."""
    failures = [each["failed"] for each in side.values() if "failed" in each]
    if failures and all(OUT & each.keys() for each in side.values()):
        raise ArmError("\n".join(failures))
