"""Arms without TensorFlow, for the tests of tools/bench.py."""

import os
import sys

from loaded_tool import TOOLS

LIMIT_S = 300  # for arms that answer, which takes them a moment; the machine may be slow

# An arm without TensorFlow, which does as its settings say, and notes its turns.
FAKE = """
import os, sys, time
from bench_arms import protocol

def begin(settings):
    if "notes" in settings:
        print("at work", flush=True)
        protocol.write(protocol.pathlib.Path(settings["notes"]), {"id": os.getpid()})
    if settings.get("dies") == "at once":
        stack = "".join(f"    @     {address:#x}  (unknown)\\n" for address in range(50))
        sys.exit(f"something about a GPU\\n{stack}")
    time.sleep(settings.get("sleeps", 0))
    values = iter(settings.get("values", ()))

    def stretch():
        with open(settings["turns"], "a") as file:
            print(settings["name"], file=file)
        if settings.get("dies") == "later":
            sys.exit(3)
        return {settings.get("measure", "images_per_second"): next(values)} | more(settings)

    ready = {"settings": settings, "environment": {"python": "3"}, "seconds_to_first_step": 7.0}
    if "marks" in settings:
        ready["marks"] = settings["marks"]
    return protocol.Arm(ready, stretch)

def more(settings):
    steps = {"step_seconds": settings["steps"]} if "steps" in settings else {}
    return steps | settings.get("more", {})

protocol.serve(begin)
"""


def starter(bench, folder):
    """Returns what starts a fake arm; the folder gets its program, and the file of turns."""
    program = folder / "fake.py"
    program.write_text(FAKE)

    class Silent(bench.ArmProcess):
        """One that says nothing, for which a second stands for five minutes."""

        def _answer(self, name, limit_s):
            return super()._answer(name, limit_s / LIMIT_S)

    def start(name, settings, environment):
        own = {"name": name, "turns": str(folder / "turns")}
        return (Silent if "sleeps" in settings else bench.ArmProcess)(
            name,
            [sys.executable, str(program)],
            settings | own,
            environment=os.environ | {"PYTHONPATH": str(TOOLS)} | environment,
        )

    return start


def row(bench, ours=None, rivals=None, **fields):
    """Returns a row; by default of one arm each, which give numbers."""
    ours = ours or {"a": {"values": [3.0, 9.0, 4.0]}}
    rivals = rivals or {"b": {"values": [2.0, 2.0, 2.0]}}
    return bench.Row("S1", "a / b", 1.5, ours, rivals, **fields)
