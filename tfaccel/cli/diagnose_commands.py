"""The commands that look at data, model, speed and the machine, and train nothing to keep."""

import json
import pathlib
import shlex
import sys

from absl import flags
from ml_collections import config_flags

from tfaccel.cli import help as help_texts
from tfaccel.cli.asked_experiment import checked
from tfaccel.cli.flags import (
    folder_to_be,
    new_file,
    parse_config_flags,
    parse_own_flags,
    topic,
    whole,
)
from tfaccel.common.errors import UserError
from tfaccel.common.local_path import local_path
from tfaccel.common.tables import show, show_json
from tfaccel.config import (
    RuntimeConfig,
)
from tfaccel.diagnostics.lint.script_text import read_text
from tfaccel.process.signals import exiting_on_sigterm
from tfaccel.process.start_noise import start_tensorflow


def audit(arguments: list[str]) -> int:
    """Audits the data that the flags name and returns 1 if something is wrong."""
    values, _ = parse_config_flags("audit", arguments, paths=("report", "contact-sheet"))
    report, sheet = (new_file(name, values[name].value) for name in ("report", "contact-sheet"))
    if sheet and sheet.suffix.lower() != ".png":
        raise UserError(f"contact-sheet {sheet} becomes a PNG; give a file that ends in .png")
    if sheet and sheet == report:
        raise UserError(f"report and contact-sheet are both {sheet}; give two files")
    config = checked(values.config)
    start_tensorflow()
    from tfaccel.diagnostics.audit.run import run

    return 0 if run(config, report=report, sheet=sheet) else 1


def selftest(arguments: list[str]) -> int:
    """Checks the replicas, prints a row for each check, and returns 1 if any failed."""
    values = flags.FlagValues()
    flags.DEFINE_string(
        "gpu_ids",
        None,
        "GPUs to test, e.g. 0,1; empty for two CPU devices; all by default.",
        flag_values=values,
    )
    flags.DEFINE_list(
        "precision",
        ["float32", "mixed_float16", "mixed_bfloat16"],
        "Keras dtype policies.",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "xla",
        "both",
        ["both", "on", "off"],
        "Steps with XLA, without, or both.",
        flag_values=values,
    )
    flags.DEFINE_string("output", None, "A new JSON file for the figures.", flag_values=values)
    if topic(arguments) is not None:
        described = values.get_help(include_special_flags=False).splitlines()
        print("\n".join([help_texts.SELFTEST, *described[2:]]))  # without the module's name
        return 0
    parse_own_flags("selftest", values, arguments)
    config = RuntimeConfig(gpu_ids=values.gpu_ids)
    if not values.precision:
        raise UserError("--precision names none; give at least one, e.g. --precision=float32")
    precisions = tuple(RuntimeConfig(precision=each).precision for each in values.precision)
    output = new_file("output", values.output)
    start_tensorflow()
    from tfaccel.diagnostics import selftest as selftest_room

    for each in precisions:
        if each not in selftest_room.SMALL:
            known = ", ".join(selftest_room.SMALL)
            raise UserError(f"precision={each!r} has no limits to test by; give some of {known}")
    xla = {"both": (False, True), "on": (True,), "off": (False,)}[values.xla]
    return selftest_room.report(config, precisions=precisions, xla=xla, output=output)


def autobatch(arguments: list[str]) -> int:
    """Finds the largest batch that fits, or the parts in which one does; prints it with its flag.

    One JSON line.
    """
    values, _ = parse_config_flags("autobatch", arguments, paths=(), switches=("keep-batch",))
    config = checked(values.config)
    start_tensorflow()
    from tfaccel.diagnostics import auto_batch

    if values["keep-batch"].value:
        parts = auto_batch.auto_parts(config)
        flag = f"--config.step.accumulation_steps={parts}"
        show_json({"accumulation_steps": parts, "flag": flag})
        return 0
    batch = auto_batch.auto_batch(config)
    flag = f"--config.data.global_batch_size={batch}"
    if config.data.batch_per_replica is not None:
        flag += " --config.data.batch_per_replica=None"
    show_json({"global_batch_size": batch, "flag": flag})
    return 0


def doctor(arguments: list[str]) -> int:
    """Looks at this machine, prints a line for each check, and returns 1 if one is an error."""
    values = flags.FlagValues()
    flags.DEFINE_bool("quick", False, "Start neither TensorFlow nor DALI.", flag_values=values)
    flags.DEFINE_bool("json", False, "Print one JSON object.", flag_values=values)
    flags.DEFINE_string("data", None, "A folder to time the reading of.", flag_values=values)
    parse_own_flags("doctor", values, arguments)
    if values.data == "":
        raise UserError("--data= names no folder; give one, or leave the flag out")
    from tfaccel.diagnostics import doctor as doctor_room

    if not values.quick:
        _say_wait("starting TensorFlow and DALI, about ten seconds")
    table = doctor_room.examine(quick=values.quick, data=values.data)
    show(table.as_json() if values.json else table)
    return table.exit_code


def _say_wait(what_for: str) -> None:
    if sys.stderr.isatty():
        print(f"tfaccel: {what_for}", file=sys.stderr)


def lint(arguments: list[str]) -> int:
    """Judges model, data and step of the config that is named; returns 1 if one is wrong."""
    switches = ("fix", "json")
    values, _ = parse_config_flags("lint", arguments, paths=("script",), switches=switches)
    if values.script == "":
        raise UserError("--script= names no file; give a Python file, or leave the flag out")
    script = local_path(values.script) if values.script else None
    if script:
        read_text(script)  # a file that cannot be read is told at once
    config = checked(values.config)
    start_tensorflow()
    from tfaccel.diagnostics.lint.run import run

    table = run(config, script=script)
    if values.json:
        fixed = {"fix": table.fix().as_dict()} if values.fix else {}
        show(json.dumps(table.as_dict() | fixed, indent=2))
        return table.exit_code
    show(table)
    if values.fix:
        _say_wait("compiling and timing steps, before and after")
        show(f"\n{table.fix()}")
        flags_of_rest = "".join(f"\n  {each}" for each in table.changes)
        if flags_of_rest:
            show(f"\nflags of `tfaccel train` for the rest; nothing was written:{flags_of_rest}")
    return table.exit_code


def profile(arguments: list[str]) -> int:
    """Measures what bounds the config that is named, and searches for settings if asked to."""
    values, file = parse_config_flags(
        "profile",
        arguments,
        paths=("trace", "out"),
        switches=("search", "json"),
        numbers={"seconds": 5.0, "minutes": None, "memory-mib": None},
    )
    from tfaccel.diagnostics.profile.options import Options

    options = Options(
        config_file=file,
        trace=values.trace,
        search=values.search,
        json=values.json,
        seconds=values.seconds,
        minutes=values.minutes,
        memory_mib=values["memory-mib"].value,
        out=new_file("out", values.out),
    )
    if options.trace:
        folder_to_be("trace", options.trace)
    config = checked(values.config)
    start_tensorflow()
    from tfaccel.diagnostics.profile import command

    return command.report(config, options)


def compare(arguments: list[str]) -> int:
    """Measures the config in every way that this machine has, and returns 1 if none of them ran."""
    values, file = parse_config_flags(
        "compare",
        arguments,
        paths=("out",),
        switches=("grid", "json"),
        numbers={"steps": 50, "repeats": 5, "minutes": 60},
    )
    from tfaccel.diagnostics.compare import run

    config = checked(values.config)
    overrides = config_flags.get_override_values(values["config"]).items()
    with exiting_on_sigterm():
        comparison = run.compare(
            config,
            steps=whole(values.steps),
            repeats=whole(values.repeats),
            minutes=values.minutes,
            grid=values.grid,
            out=values.out,
            command=shlex.join(
                ["tfaccel", "train", f"--config={file}"]
                + [f"--config.{name}={value}" for name, value in overrides]
            ),
            name=file,
        )
    show(json.dumps(comparison.as_dict(), indent=1) if values.json else comparison)
    if values.out and not values.json:
        show(f"\n{pathlib.Path(values.out) / 'report.html'}")
    return comparison.exit_code
