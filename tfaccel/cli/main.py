"""The `tfaccel` command: the flags of each of its commands, checked, then the room that does it.

Exit codes: 0 done or help, 1 the run failed, 2 a mistake in the call, 130 interrupted, 143 ended by
SIGTERM, and of a training run that a signal made save and stop what its config says: 143.
"""

import dataclasses
import datetime
import difflib
import gc
import importlib.machinery
import importlib.util
import itertools
import json
import os
import pathlib
import re
import shlex
import sys
import tempfile
import traceback
import types
from collections.abc import Mapping
from typing import NoReturn

import ml_collections
from absl import flags
from ml_collections import config_flags

from tfaccel.cli import help as help_texts
from tfaccel.cli import pages
from tfaccel.common import meant, run_log
from tfaccel.common.disk_errors import OF_DISKS, cure
from tfaccel.common.errors import RunError, UserError, did_you_mean, tell
from tfaccel.common.local_path import check_local, local_path
from tfaccel.common.redact import shown
from tfaccel.common.regular_file import NOT_REGULAR, is_special
from tfaccel.common.tables import show, show_json
from tfaccel.common.version import __version__
from tfaccel.config import (
    CHECKPOINTS,
    COMPUTES_IN,
    LOADERS,
    PIXEL_DTYPES,
    WEIGHTS,
    Config,
    ExportConfig,
    RuntimeConfig,
    check_is_config,
    default_config,
    parse,
)
from tfaccel.diagnostics.lint.script_text import read_text
from tfaccel.process import start_noise
from tfaccel.process.signals import exiting_on_sigterm
from tfaccel.runtime.cluster import Cluster, find
from tfaccel.runtime.cluster.ray import undo_legacy_keras
from tfaccel.training.workdir import (
    RESUMES,
    check_no_other,
    check_usable,
    finished,
    read_config,
    workdir_of,
    workdirs_in,
)

HELP_FLAGS = {"--help", "-h", "--helpfull", "--helpshort"}


def cli() -> None:
    """Runs the command line's command and exits with its code."""
    try:
        sys.exit(main(sys.argv[1:]))
    except (UserError, RunError) as error:
        sys.exit(tell(error))
    except OSError as error:
        if error.errno not in OF_DISKS:
            _end_with_traceback()
        where = error.filename or os.getcwd()
        sentence = f"{where} cannot be used ({error.strerror}): {cure(error, pathlib.Path(where))}"
        sys.exit(tell(RunError(sentence)))
    except KeyboardInterrupt:
        print("tfaccel: interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception:  # a fault of tfaccel's, or of a library's
        _end_with_traceback()


def _end_with_traceback() -> NoReturn:
    """Prints the traceback of what is being handled, as Python would, but without secrets."""
    print(shown(traceback.format_exc()), end="", file=sys.stderr)
    sys.exit(1)


def main(arguments: list[str]) -> int:
    """Runs one command and returns the exit code.

    Raises:
      UserError: a mistake in the call, or one that the run found.
    """
    command, *rest = arguments or ["--help"]
    if command == "help" and rest:
        print(pages.page(rest[0]), end="")
        return 0
    if command in ("--help", "-h", "help"):
        print(help_texts.ALL + pages.TOPICS, end="")
        return 0
    if command == "--version":
        print(__version__)
        return 0
    if command not in COMMANDS:
        raise UserError(f"there is no command '{command}'{meant.command(command, COMMANDS)}")
    if command in HELP and (topic := _topic(rest)) is not None:
        print(_help(command, topic), end="")
        return 0
    if command not in ("doctor", "launch"):  # which start others, in an environment of their own
        # TensorFlow reads this when it is imported, and then says less at its start.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    return COMMANDS[command](rest)


def _start_tensorflow() -> None:
    """Imports it, without the lines that it prints at its start and that say nothing.

    What it makes is there until the command ends. To look through it in vain would take Python's
    collector 0.4 s meanwhile and 0.8 s at the end (2 CPU cores, 2026-11-27).
    """
    if "tensorflow" in sys.modules:  # by who runs a command within a program of his own
        return
    gc.disable()
    try:
        with start_noise.left_out():
            import keras  # noqa: F401  and TensorFlow with it
        gc.freeze()
    finally:
        gc.enable()


def _is_help(argument: str) -> bool:
    return argument in HELP_FLAGS or argument.startswith("--help=")


def _topic(arguments: list[str]) -> str | None:
    """Returns what help is asked for: "" for the common part; None where none is."""
    asked = [each for each in arguments if _is_help(each)]
    return asked[-1].partition("=")[2] if asked else None


def _help(command: str, topic: str) -> str:
    """Returns the help of a command, or of a section of the config that it takes."""
    takes_config = "--config=FILE" in HELP[command]
    help_texts.check_topic(topic, help_texts.TOPICS if takes_config else ("all",))
    if topic in ("", "all"):
        fields = help_texts.of_fields(default_config()) if topic and takes_config else ""
        return HELP[command] + fields
    return help_texts.of_fields(default_config(), topic)


def train(arguments: list[str]) -> int:
    """Trains what the flags say and prints the result as one JSON line."""
    if (topic := _topic(arguments)) is not None:
        show(_train_help([each for each in arguments if not _is_help(each)], topic), end="")
        return 0
    values, file = _parse_config_flags("train", arguments, paths=("workdir",), trains=True)
    config, workdir = parse(values.config), values.workdir
    if values.resume == "required" and not workdir:
        raise UserError("--resume=required without --workdir; say which run to go on with")
    undo_legacy_keras(os.environ)
    dry, index = values["dry-run"].value, values["worker-index"].value
    cluster = find(os.environ, workers=values.workers, worker_index=index)
    if not workdir and cluster.num_workers > 1:
        raise UserError(
            f"no --workdir with {cluster.num_workers} workers ({cluster.source}); give all the "
            "same, which they share"
        )
    time = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    name = pathlib.Path(file.partition(":")[0]).stem
    workdir = check_usable(pathlib.Path(workdir or f"runs/{name}-{time}"), resume=values.resume)
    if dry:
        _look_at(config)
        return _train_dry(config, workdir, cluster)
    _look_at_run(config, workdir)
    _start_tensorflow()
    from tfaccel.experiment import train as train_room

    result = train_room.run(
        config,
        workdir=workdir,
        cluster=cluster,
        resume=values.resume,
        accept_changes=values.accept_changes,
    )
    if cluster.is_chief:  # the others would say the same
        show_json(result)
    return 0


def _look_at(config: Config) -> None:
    from tfaccel.cli.asked_experiment import look_at  # not of all commands: it imports NumPy

    look_at(config)


def _look_at_run(config: Config, workdir: pathlib.Path) -> None:
    """Raises UserError for what is known to be wrong with a run before TensorFlow starts."""
    values = dataclasses.asdict(config)
    if finished(workdir, values) is None:  # one that has ended needs its data no more
        check_no_other(workdir, values)
        _look_at(config)


def _train_dry(config: Config, workdir: pathlib.Path, cluster: Cluster) -> int:
    _start_tensorflow()
    from tfaccel.experiment.dry_run import dry_run

    # In one piece: other workers may write to the same terminal.
    show(dry_run(config, workdir=workdir, cluster=cluster), end="")
    return 0


def audit(arguments: list[str]) -> int:
    """Audits the data that the flags name and returns 1 if something is wrong."""
    values, _ = _parse_config_flags("audit", arguments, paths=("report", "contact-sheet"))
    report, sheet = (_new_file(name, values[name].value) for name in ("report", "contact-sheet"))
    if sheet and sheet.suffix.lower() != ".png":
        raise UserError(f"contact-sheet {sheet} becomes a PNG; give a file that ends in .png")
    if sheet and sheet == report:
        raise UserError(f"report and contact-sheet are both {sheet}; give two files")
    config = _experiment(values)
    _start_tensorflow()
    from tfaccel.diagnostics.audit.run import run

    return 0 if run(config, report=report, sheet=sheet) else 1


def _experiment(values: flags.FlagValues) -> Config:
    """Returns what the config flags say, checked as far as it can be without TensorFlow."""
    config = parse(values.config)
    _look_at(config)
    return config


def _new_file(name: str, given: str | None) -> pathlib.Path | None:
    """Returns the absolute path of a file that can be written, or None for none.

    Raises:
      UserError: it exists, or its folder does not or cannot be written to.
    """
    path = local_path(given).absolute() if given else None
    if path and path.exists():
        raise UserError(f"{name} {path} exists; give a new file")
    if path:
        try:
            tempfile.TemporaryFile(dir=path.parent).close()
        except OSError as error:
            raise UserError(
                f"{name} {path} cannot be written ({error.strerror}); give another folder"
            ) from error
    return path


def _folder_to_be(name: str, given: str) -> pathlib.Path:
    """Returns the path of a folder that is there, or can be made.

    Raises:
      UserError: something else is there, or above it.
    """
    path = local_path(given)
    there = next(each for each in (path, *path.absolute().parents) if os.path.exists(each))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "may not be written to" if there.is_dir() else "is a file"
        raise UserError(f"{name} {path} cannot be written, because {there} {why}; give a folder")
    return path


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
    if _topic(arguments) is not None:
        described = values.get_help(include_special_flags=False).splitlines()
        print("\n".join([help_texts.SELFTEST, *described[2:]]))  # without the module's name
        return 0
    _parse_own_flags("selftest", values, arguments)
    config = RuntimeConfig(gpu_ids=values.gpu_ids)
    if not values.precision:
        raise UserError("--precision names none; give at least one, e.g. --precision=float32")
    precisions = tuple(RuntimeConfig(precision=each).precision for each in values.precision)
    output = _new_file("output", values.output)
    _start_tensorflow()
    from tfaccel.diagnostics import selftest as selftest_room

    for each in precisions:
        if each not in selftest_room.SMALL:
            known = ", ".join(selftest_room.SMALL)
            raise UserError(f"precision={each!r} has no limits to test by; give some of {known}")
    xla = {"both": (False, True), "on": (True,), "off": (False,)}[values.xla]
    return selftest_room.report(config, precisions=precisions, xla=xla, output=output)


def plot(arguments: list[str]) -> int:
    """Draws the runs whose workdirs are given, and prints the picture's path."""
    values = flags.FlagValues()
    values.set_gnu_getopt(True)  # flags may follow the workdirs
    flags.DEFINE_string("output", "plot.png", "A new PNG or HTML file.", flag_values=values)
    given = _parse_own_flags("plot", values, arguments, takes_paths=True)
    if not given:
        raise UserError("no workdir; name one or more, e.g. `tfaccel plot runs/a runs/b`")
    output = local_path(values.output)
    from tfaccel.diagnostics import plot as plot_room

    plot_room.plot([each for path in given for each in workdirs_in(path)], output)
    show(output)
    return 0


def autobatch(arguments: list[str]) -> int:
    """Finds the largest batch that fits, or the parts in which one does; prints it with its flag.

    One JSON line.
    """
    values, _ = _parse_config_flags("autobatch", arguments, paths=(), switches=("keep-batch",))
    config = _experiment(values)
    _start_tensorflow()
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
    _parse_own_flags("doctor", values, arguments)
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
    values, _ = _parse_config_flags("lint", arguments, paths=("script",), switches=switches)
    if values.script == "":
        raise UserError("--script= names no file; give a Python file, or leave the flag out")
    script = local_path(values.script) if values.script else None
    if script:
        read_text(script)  # a file that cannot be read is told at once
    config = _experiment(values)
    _start_tensorflow()
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


def export(arguments: list[str]) -> int:
    """Exports the run in the workdir that is named, and prints the folder of the export."""
    values = flags.FlagValues()
    flags.DEFINE_string("workdir", None, "Of the run.", flag_values=values)
    flags.DEFINE_string("out", None, "A folder of versions.", flag_values=values)
    flags.DEFINE_string("root", None, "Of the data.", flag_values=values)
    flags.DEFINE_enum("loader", None, LOADERS, "Of test images.", flag_values=values)
    flags.DEFINE_enum("checkpoint", None, CHECKPOINTS, "Which.", flag_values=values)
    flags.DEFINE_enum("weights", None, WEIGHTS, "Which.", flag_values=values)
    flags.DEFINE_enum("pixel-dtype", "float32", PIXEL_DTYPES, "Of pixels.", flag_values=values)
    flags.DEFINE_enum("computes-in", "policy", COMPUTES_IN, "Precision.", flag_values=values)
    flags.DEFINE_integer("samples", 256, "Images to compare.", flag_values=values)
    for switch in ("xla", "onnx"):
        flags.DEFINE_bool(switch, False, "Off by default.", flag_values=values)
    values.set_gnu_getopt(True)  # flags may follow the workdir
    given = _parse_own_flags("export", values, arguments, takes_paths=True)
    if given and (values.workdir or len(given) > 1):
        raise UserError(
            f"'{given[-1]}' is no flag of export, which takes one workdir: see `tfaccel export "
            "--help`"
        )
    given = given or [values.workdir]
    if not given[0]:
        raise UserError("no workdir; name the run, e.g. `tfaccel export --workdir=runs/a`")
    workdir = workdir_of(given[0])
    trained = read_config(workdir)
    averages = trained.train.ema_momentum is not None
    config = ExportConfig(
        samples=values.samples,
        pixel_dtype=values["pixel-dtype"].value,
        computes_in=values["computes-in"].value,
        weights=values.weights or ("average" if averages else "trained"),
        xla=values.xla,
        onnx=values.onnx,
    )
    if values.weights == "average" and not averages:
        raise UserError(
            f"--weights=average, but the run in {workdir} kept no average of its weights "
            "(train.ema_momentum); leave out --weights"
        )
    out = _folder_to_be("out", values.out or str(workdir / "export"))
    if not any((workdir / "checkpoints").glob("step-*")):
        raise UserError(
            f"{workdir / 'checkpoints'} has no checkpoint; give the workdir of a run that has "
            "saved one"
        )
    from tfaccel.data.there import check_there  # it imports NumPy

    moved = {"root": values.root, "loader": values.loader}
    changes = {name: each for name, each in moved.items() if each}
    for split in ("train", "test"):
        check_there(dataclasses.replace(trained.data, **changes), split)
    _start_tensorflow()
    from tfaccel.experiment.export_run import export_run

    show(export_run(workdir, out, config, checkpoint=values.checkpoint, **moved))
    return 0


def predict(arguments: list[str]) -> int:
    """Prints the classes of the image files that are named; returns 1 if one cannot be read."""
    values = flags.FlagValues()
    values.set_gnu_getopt(True)  # flags may follow the files
    flags.DEFINE_string("model", None, "An export.", flag_values=values)
    flags.DEFINE_integer("top", 3, "Classes for each.", lower_bound=1, flag_values=values)
    flags.DEFINE_bool("json", False, "A line of JSON for each.", flag_values=values)
    paths = _parse_own_flags("predict", values, arguments, takes_paths=True)
    if not values.model or not paths:
        missing = "files" if values.model else "model"
        raise UserError(f"no {missing}; e.g. `tfaccel predict --model=runs/a cat.jpg`")
    # All that can be known without TensorFlow, which takes seconds to start.
    for each in (values.model, *paths):
        check_local(each)
    from tfaccel.export.asked_images import find_export, image_files

    folder, paths = find_export(pathlib.Path(values.model)), image_files(paths)
    _start_tensorflow()
    from tfaccel.export.predict import Predictor

    predictor, failed = Predictor(folder), False
    for each in predictor(paths):
        failed |= each.error is not None
        if values.json:
            show_json(each.as_dict(predictor.class_names, values.top))
        else:
            show(each.line(predictor.class_names, values.top))
    return int(failed)


def profile(arguments: list[str]) -> int:
    """Measures what bounds the config that is named, and searches for settings if asked to."""
    values, file = _parse_config_flags(
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
        out=_new_file("out", values.out),
    )
    if options.trace:
        _folder_to_be("trace", options.trace)
    config = _experiment(values)
    _start_tensorflow()
    from tfaccel.diagnostics.profile import command

    return command.report(config, options)


def compare(arguments: list[str]) -> int:
    """Measures the config in every way that this machine has, and returns 1 if none of them ran."""
    values, file = _parse_config_flags(
        "compare",
        arguments,
        paths=("out",),
        switches=("grid", "json"),
        numbers={"steps": 50, "repeats": 5, "minutes": 60},
    )
    from tfaccel.diagnostics.compare import run

    config = _experiment(values)
    overrides = config_flags.get_override_values(values["config"]).items()
    with exiting_on_sigterm():
        comparison = run.compare(
            config,
            steps=_whole(values.steps),
            repeats=_whole(values.repeats),
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


def _whole(number: float) -> float:
    """Returns a flag's number as an int if it is one."""
    return int(number) if number.is_integer() else number


def launch(arguments: list[str]) -> int:
    """Runs a command in many processes and returns the job's exit code."""
    from tfaccel import launch as launch_room
    from tfaccel.launch import options

    own, command = _before_command(arguments, options.make_flags())
    if (topic := _topic(own)) is not None:
        help_texts.check_topic(topic, ("all",))
        print(help_texts.of_launch(whole=topic == "all"), end="")
        return 0
    asked, command = options.parse([*own, *command], os.environ)
    if asked.engine == "local" and command[0] == "train" and _topic(command[1:]) is None:
        # Told once and now, not by each rank when TensorFlow has started.
        values, _ = _parse_config_flags("train", command[1:], paths=("workdir",), trains=True)
        _look_at_run(
            parse(values.config),
            check_usable(pathlib.Path(values.workdir), resume=values.resume),
        )
    return launch_room.launch(asked, command)


def _before_command(arguments: list[str], values: flags.FlagValues) -> tuple[list[str], list[str]]:
    """Returns a launcher's flags, spelled as they are defined, and the command as it was given."""
    spelled = _spelled(arguments, values)
    # Of these absl leaves unknown flags, as --help, and all from the first word that is no flag.
    left = _parsed("launch", values, spelled, known_only=True)
    num_own = len(arguments) - len([*itertools.dropwhile(lambda each: each[:1] == "-", left)])
    return spelled[:num_own], arguments[num_own:]


COMMANDS = {
    "train": train,
    "launch": launch,
    "plot": plot,
    "audit": audit,
    "lint": lint,
    "profile": profile,
    "compare": compare,
    "export": export,
    "predict": predict,
    "autobatch": autobatch,
    "selftest": selftest,
    "doctor": doctor,
}
# Of those whose help is text alone.
HELP = {
    "audit": help_texts.AUDIT,
    "autobatch": help_texts.AUTOBATCH,
    "compare": help_texts.COMPARE,
    "doctor": help_texts.DOCTOR,
    "export": help_texts.EXPORT,
    "lint": help_texts.LINT,
    "plot": help_texts.PLOT,
    "predict": help_texts.PREDICT,
    "profile": help_texts.PROFILE,
}


def _parse_own_flags(
    command: str, values: flags.FlagValues, arguments: list[str], *, takes_paths: bool = False
) -> list[str]:
    """Sets the flags of a command that takes no config, and returns the paths among them.

    Raises:
      UserError: a flag is not one of them, or not what it may be.
    """
    paths = _parsed(command, values, _spelled(arguments, values))
    if paths and not takes_paths:
        cure = f"see `tfaccel {command} --help`"
        if os.path.isdir(paths[0]) and "data" in values:
            cure = f"did you mean --data={paths[0]}?"
        raise UserError(f"'{paths[0]}' is no flag of {command}; {cure}")
    return paths


# How absl passes on what Python says of a flag's value, and what it should say.
EXPECTED = {
    r"invalid literal for int\(\).*": "expected a whole number",
    r"could not convert string to float.*": "expected a number",
    r"\('Non-boolean argument to boolean flag.*": "expected true or false",
}


def _parsed(
    command: str, values: flags.FlagValues, arguments: list[str], *, known_only: bool = False
) -> list[str]:
    """Sets flags and returns what is left of the arguments.

    Raises:
      UserError: a flag is unknown, unless `known_only`, or not what it may be.
    """
    try:
        return values([f"tfaccel {command}", *arguments], known_only=known_only)[1:]
    except flags.UnrecognizedFlagError as error:
        raise meant.unknown_flag(command, error.flagname, values) from error
    except flags.Error as error:
        sentence = str(error)
        for said, expected in EXPECTED.items():
            sentence = re.sub(said, expected, sentence)
        raise UserError(sentence) from error


def _parse_config_flags(
    command: str,
    arguments: list[str],
    *,
    paths: tuple[str, ...],
    switches: tuple[str, ...] = (),
    numbers: Mapping[str, float | None] = types.MappingProxyType({}),
    trains: bool = False,
):
    """Returns the flags, `config` with its overrides among them, and what --config names.

    Args:
      command: whose flags these are.
      arguments: the command line after it.
      paths: the command's own flags, each of a path.
      switches: and those that are on or off.
      numbers: and those of a number, with its default.
      trains: whether the command has the flags of training: resuming and workers.
    """
    values = flags.FlagValues()
    for path in paths:
        flags.DEFINE_string(path, None, "A new one.", flag_values=values)
    for switch in switches:
        flags.DEFINE_bool(switch, False, "Off by default.", flag_values=values)
    for number, default in numbers.items():
        flags.DEFINE_float(number, default, "A number.", flag_values=values)
    flags.DEFINE_bool("verbose", False, "Every choice and its reason.", flag_values=values)
    if trains:
        flags.DEFINE_enum("resume", "auto", RESUMES, "Where to begin.", flag_values=values)
        flags.DEFINE_bool("accept_changes", False, "Of a resumed run.", flag_values=values)
        flags.DEFINE_bool("dry-run", False, "Two steps alone.", flag_values=values)
        flags.DEFINE_list("workers", None, "host:port of each.", flag_values=values)
        flags.DEFINE_integer("worker-index", None, "This one's.", flag_values=values)
    given, others = _config_apart(arguments)
    file = _one_file(command, given, others)
    _check_overrides(others)
    # Loaded here, so that its errors are told from those of the flags.
    _define_config(file, _load(file), values, others)
    unparsed = _parsed(command, values, _spelled(others, values))
    if unparsed:
        raise UserError(f"'{unparsed[0]}' is no flag; expected --config.SECTION.FIELD=VALUE")
    if values.verbose:
        os.environ[run_log.VARIABLE] = "1"  # of this process's children, too
    return values, file


def _define_config(
    file: str, config: ml_collections.ConfigDict, values: flags.FlagValues, arguments: list[str]
) -> None:
    """Makes flags of the config's fields that the command line changes."""
    argv = ["tfaccel", *arguments]
    try:
        config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=argv)
    except (AttributeError, KeyError) as error:
        raise UserError(
            f"config file {file} lacks a field that the command line changes ({error}); let it "
            "start from tfaccel.config.default_config()"
        ) from error
    except flags.Error as error:
        raise UserError(str(error)) from error


def _spelled(arguments: list[str], values: flags.FlagValues) -> list[str]:
    """Returns the arguments with flags' names as they are defined, be it with "-" or with "_"."""
    known = {name.replace("-", "_"): name for name in values}

    def spelled(argument):
        match = re.fullmatch(r"(--?)([^=.]+)(=.*)?", argument, flags=re.DOTALL)
        name = match and known.get(match[2].replace("-", "_"))
        return f"{match[1]}{name}{match[3] or ''}" if name else argument

    return [spelled(each) for each in arguments]


def _config_apart(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Returns what each --config names, and the other arguments."""
    given, others, words = [], [], iter(arguments)
    for word in words:
        if re.fullmatch(r"--?config(=.*)?", word, flags=re.DOTALL):
            given.append(word.partition("=")[2] if "=" in word else next(words, ""))
        else:
            others.append(word)
    return given, others


def _one_file(command: str, given: list[str], others: list[str]) -> str:
    """Returns the one that --config names: a file, perhaps with an argument after a colon."""
    if not any(given):
        _check_spelling(others)
        files = [each for each in others if ".py" in each and not each.startswith("-")]
        meant = next(iter(files), "configs/digits.py")
        raise UserError(f"no config; give one, e.g. `tfaccel {command} --config={meant}`")
    if len(given) > 1:
        raise UserError(f"--config names {' and '.join(given)}; expected one config file")
    check_local(given[0])
    file = pathlib.Path(given[0].partition(":")[0])
    if not file.is_file() and not (file / "config.json").is_file():
        folder = file if file.is_dir() else file.parent
        there = [str(each) for each in folder.glob("*.py")]
        wrong = "is a folder" if file.is_dir() else "does not exist"
        wrong = f"is {NOT_REGULAR}" if is_special(file) else wrong
        cure = did_you_mean(str(file), there) or "; give a Python file, or the workdir of a run"
        raise UserError(f"config file {file} {wrong}{cure}")
    return given[0]


def _check_spelling(arguments: list[str]) -> None:
    """Raises UserError for a --config that is spelled otherwise."""
    for each in arguments:
        name = each.partition("=")[0]
        near = difflib.get_close_matches(name.strip("-"), ["config"], cutoff=0.8)
        if name.startswith("-") and (near or name.strip("-") in ("cfg", "c", "conf", "yaml")):
            raise UserError(f"there is no flag {name}; did you mean --config?")


def _load(given: str) -> ml_collections.ConfigDict:
    """Returns what the file's get_config() does, of what stands after the colon.

    Of a run's workdir, or of the config.json in one, it is what the run was trained by.

    Raises:
      UserError: the file fails, or has no get_config().
    """
    file, colon, size = given.partition(":")
    if os.path.isdir(file) or os.path.basename(file) == "config.json":
        if colon:
            raise UserError(f"config {file} is of a run, and takes no ':{size}'; leave that out")
        return _as_trained(workdir_of(file))
    try:
        get_config = getattr(_imported(file), "get_config", None)
        if get_config is None:
            raise UserError("it has no get_config(); let it return default_config(), changed")
        config = get_config(*([size] if colon else []))
        check_is_config(config)
    except UserError as error:
        raise UserError(f"{file}: {error}") from error
    except (Exception, SystemExit) as error:  # whatever else the user's file raises
        lines = [
            each.lineno
            for each in traceback.extract_tb(error.__traceback__)
            if each.filename == file
        ]
        where = f"{file}, line {lines[-1]}" if lines else file
        cure = "" if file.endswith(".py") else "; expected a Python file that has get_config()"
        raise UserError(f"{where}: {type(error).__name__}: {error}{cure}") from error
    return config


def _as_trained(workdir: pathlib.Path) -> ml_collections.ConfigDict:
    """Returns the config of a run, with fields that flags can change as in a config file."""
    config = default_config()
    with config.ignore_type():
        for section, fields in dataclasses.asdict(read_config(workdir)).items():
            config[section].update(fields)
    return config


def _imported(file: str) -> types.ModuleType:
    """Returns the file as a module, whatever its name ends in."""
    loader = importlib.machinery.SourceFileLoader("config_file", file)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    sys.modules[loader.name] = module  # where dataclasses look for theirs
    loader.exec_module(module)
    return module


def _check_overrides(arguments: list[str]) -> None:
    """Raises UserError for a --config.SECTION.FIELD that no config has."""
    valid = default_config()
    names = [f"{section}.{name}" for section in valid for name in valid[section]]
    for argument in arguments:
        override = re.match(r"--?(?:no)?config\.([^=]*)", argument)
        name = override[1] if override else None
        if name and name not in names:
            raise UserError(f"config has no field '{name}'{meant.field(name)}")


def _train_help(arguments: list[str], topic: str) -> str:
    """Returns the help, with the values of the config file and flags that are given, if one is."""
    if not _config_apart(arguments)[0]:
        return help_texts.of_train(default_config(), "they are by default", topic)
    values, file = _parse_config_flags("train", arguments, paths=("workdir",), trains=True)
    changed = config_flags.get_override_values(values["config"])
    source = f"{file} and the other flags say" if changed else f"{file} says"
    return help_texts.of_train(values.config, source, topic)
