"""The commands that look at data, model, speed and the machine, and train nothing to keep."""

import json
import pathlib
import shlex
import sys

from absl import flags
from ml_collections import config_flags

from tfaccel.cli.asked_experiment import checked
from tfaccel.cli.command import OF_CONFIG, command
from tfaccel.cli.flags import folder_to_be, new_file, whole
from tfaccel.common.errors import UserError
from tfaccel.common.flags import Flag
from tfaccel.common.local_path import local_path
from tfaccel.common.tables import show, show_json
from tfaccel.config import RuntimeConfig
from tfaccel.diagnostics.lint.script_text import read_text
from tfaccel.process.signals import exiting_on_sigterm
from tfaccel.process.start_noise import start_tensorflow


@command(
    summary="look through an experiment's images, and prove what its loader gives each replica",
    takes=OF_CONFIG,
    about="""
        Decodes every image once, in parallel, and lists those that cannot be trained on: missing,
        unreadable, empty, cut short, no image, animated and more. A second audit looks at changed
        files alone. Then runs two dry epochs through the real loader on this machine's replicas:
        whether each image comes once, in a new order, and whether replicas draw different random
        numbers. Trains nothing. Exit code 1 if there is a bad file (unless bad_files=skip leaves it
        out) or the loader is at fault.""",
    flags=(
        Flag(
            "report",
            None,
            "a new text file for the list: severity, kind, path, cause; in the cache folder by "
            "default",
            shown="FILE",
        ),
        Flag(
            "contact-sheet",
            None,
            "a new picture of augmented training images with their labels",
            shown="FILE.png",
        ),
    ),
    examples=(
        "tfaccel audit --config=configs/digits.py",
        "tfaccel audit --config=configs/digits.py --contact-sheet=digits.png",
    ),
)
def audit(values: flags.FlagValues, _: str) -> int:
    """Audits the data that the flags name and returns 1 if something is wrong."""
    report, sheet = (new_file(name, values[name].value) for name in ("report", "contact-sheet"))
    if sheet and sheet.suffix.lower() != ".png":
        raise UserError(f"contact-sheet {sheet} becomes a PNG; give a file that ends in .png")
    if sheet and sheet == report:
        raise UserError(f"report and contact-sheet are both {sheet}; give two files")
    config = checked(values.config)
    start_tensorflow()
    from tfaccel.diagnostics.audit.run import run

    return 0 if run(config, report=report, sheet=sheet) else 1


@command(
    summary="check that this machine's replicas train as one device does",
    about="""
        Trains small models on this machine's replicas and, by plain Keras, on one device, and
        compares: loss, weights, clipping, accumulation, batch norm, a partial batch, overflow on
        each replica, save and load, XLA. Prints a row for each; exit code 1 if any failed. Minutes,
        most of it compilation.""",
    flags=(
        Flag(
            "gpu_ids",
            None,
            "GPUs to test, e.g. 0,1; empty for two CPU devices; all by default",
            shown="IDS",
        ),
        Flag("precision", ("float32", "mixed_float16", "mixed_bfloat16"), "Keras dtype policies"),
        Flag(
            "xla",
            "both",
            "steps with XLA (on), without (off), or both",
            choices=("both", "on", "off"),
        ),
        Flag("output", None, "a new JSON file for the figures", shown="FILE"),
    ),
    examples=("tfaccel selftest", "tfaccel selftest --precision=mixed_float16 --xla=on"),
)
def selftest(values: flags.FlagValues, _: list[str]) -> int:
    """Checks the replicas, prints a row for each check, and returns 1 if any failed."""
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


@command(
    summary="find the largest batch that fits in the GPUs' memory",
    takes=OF_CONFIG,
    about="""
        Finds the largest global batch, a multiple of 8, that fits in the GPUs' memory: trains a few
        steps on one size after another, each in a process of its own, DALI's memory and 5% to spare
        counted. Prints it, and the flag to use, as JSON. A try takes about as long as a run to its
        first steps.""",
    flags=(
        Flag(
            "keep-batch",
            False,
            "find instead the fewest parts (accumulation_steps) in which the config's batch fits: "
            "the same mathematics but for batch norm, which sees a part at a time",
        ),
    ),
    examples=("tfaccel autobatch --config=configs/mnist.py \\\n  --config.data.root=/data/mnist",),
)
def autobatch(values: flags.FlagValues, _: str) -> int:
    """Finds the largest batch that fits, or the parts in which one does; prints it with its flag.

    One JSON line.
    """
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


@command(
    summary="look at what is installed and at the machine, and say whether it fits",
    about="""
        Looks at Python, TensorFlow, Keras, DALI and its plugin, driver, CUDA libraries, GPUs, who
        holds their memory, links between them, cores, memory, limits, disks, GPUDirect Storage and
        variables, and prints a line for each: ok, warning or error, with what was expected and the
        fix. Exit code 1 if there is an error. TensorFlow and DALI are started in a process of their
        own, so that an abort is a line too.""",
    flags=(
        Flag("quick", False, "look for a few seconds, and start neither TensorFlow nor DALI"),
        Flag(
            "json",
            False,
            "print one JSON object, "
            '{"checks": [{"name", "status", "found", "fix"}, ...], "errors", '
            '"warnings", "left_out"}',
        ),
        Flag(
            "data",
            None,
            "time the reading of files there too, up to 256 MiB in 5 seconds",
            shown="FOLDER",
        ),
    ),
    examples=("tfaccel doctor", "tfaccel doctor --quick", "tfaccel doctor --data=/data/imagenet"),
)
def doctor(values: flags.FlagValues, _: list[str]) -> int:
    """Looks at this machine, prints a line for each check, and returns 1 if one is an error."""
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


@command(
    summary="say what in model, data and step is wrong, or keeps Tensor Cores or the input idle",
    takes=OF_CONFIG,
    about="""
        Builds the model and opens the data, decodes and trains nothing, and says what is wrong, or
        keeps Tensor Cores or the input idle: sizes that are no multiple of 8 (16 in int8), a short
        last batch, outputs in float16, NCHW, layers without activations between them, inputs and
        outputs that do not suit the data, layers outside the scope, no shuffling, no XLA, waits for
        Python, batch norm of few rows. For each: where, why, the gain to expect, as a part of the
        model's arithmetic, and the fix. Exit code 1 if there is an error; 0 where there are
        warnings and notes alone.

        In a script or a notebook: tfaccel.lint(model, dataset), for any Keras model.""",
    flags=(
        Flag(
            "script",
            None,
            "look through a Python file too, which is not run: a loader passed to a model, waits "
            "for the device in a loop, what Python cannot read",
            shown="FILE",
        ),
        Flag(
            "fix",
            False,
            "pad a Dense head to whole tiles, cut the rest off again so that outputs stay the "
            "same, measure a step before and after on this machine, and print that and the flags "
            "that mend the rest. Where activations compute more than ReLU, measure what they cost, "
            "too. Writes nothing",
        ),
        Flag(
            "json",
            False,
            "print one JSON object, "
            '{"about", "findings": [{"severity", "where", "what", "why", "gain", '
            '"fix", "change"}, ...], "errors", "warnings", "notes", "remarks"}, and with --fix '
            '"fix"; "change" is a flag of `tfaccel train`, or null',
        ),
    ),
    examples=(
        "tfaccel lint --config=configs/mnist.py --config.data.root=/mnist",
        "tfaccel lint --config=configs/digits.py --fix",
    ),
)
def lint(values: flags.FlagValues, _: str) -> int:
    """Judges model, data and step of the config that is named; returns 1 if one is wrong."""
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


@command(
    summary="say what bounds a run, step or loader, and find loader settings that suit it better",
    takes=OF_CONFIG,
    about="""
        Measures three rates, in images/s over all replicas: of the step, on one batch that stays on
        the device; of the loader, whose batches nothing trains on; and of the run, which does both
        as `tfaccel train` does. Says which of the two bounds the run, by how much, what is lost
        between them, and what to do. Keeps nothing of what is trained. About half a minute, and
        what the step takes to compile.

        In a script or a notebook: tfaccel.profile(model, loader).""",
    flags=(
        Flag(
            "seconds",
            5.0,
            "seconds for which each rate is measured, after the first steps, which are dropped",
        ),
        Flag(
            "trace",
            None,
            "write TensorFlow's own profile of about ten steady steps too: each operation on the "
            "host and the devices. TensorBoard shows it with the package xprof",
            shown="FOLDER",
        ),
        Flag(
            "search",
            False,
            "then try other settings of the loader: where it runs (dali_gpu, dali_cpu, tf_data, "
            "memory, cache, those that give these images the same pixels), threads, batches made "
            "ahead, the hardware decoder's share. One at a time, from the present ones, each in a "
            "process of its own. One that seems faster is measured three times, in turn with the "
            "one before, and kept if its slowest run beats the other's fastest (or its first by "
            "half as much again); in the end the best is compared with the start again",
        ),
        Flag(
            "minutes",
            None,
            "minutes for the search: it begins no run that would not end in time",
            shown="10",
            kind=float,
        ),
        Flag(
            "memory-mib",
            None,
            "reject settings with which more is taken of a GPU, by all processes (on the CPU: of "
            "this machine, by the run itself)",
            shown="N",
            kind=float,
        ),
        Flag(
            "out",
            None,
            "write the best, if it is another, as a new config file that builds on --config",
            shown="FILE.py",
        ),
        Flag(
            "json",
            False,
            "print one JSON object, "
            '{"setup", "images_per_second", "verdict", "memory_mib", "trace"}, '
            'and with --search "search"',
        ),
    ),
    examples=(
        "tfaccel profile --config=configs/digits.py --trace=/tmp/trace",
        "tfaccel profile --config=configs/digits.py --search --out=tuned.py",
    ),
)
def profile(values: flags.FlagValues, file: str) -> int:
    """Measures what bounds the config that is named, and searches for settings if asked to."""
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
    from tfaccel.diagnostics.profile.command import report

    return report(config, options)


@command(
    summary="measure the same job plain, and with XLA, mixed precision, DALI and more GPUs",
    takes=OF_CONFIG,
    about="""
        Trains some steps of the same job (data, batch, seed, recipe) plain: tf.data, float32
        without TF32, no XLA, one GPU. Then XLA, TF32, mixed_float16, mixed_bfloat16, DALI, images
        in memory and more GPUs (the batch divided over them) are added to the best so far, one at a
        time; the loaders come first if the plain one waits for its batches most of the time. Each
        is a process of its own, timed in turn with the best so far, and kept if the middle half of
        its stretches is above the other's and its losses agree with the plain one's; what was
        nearly as fast is tried once more if the best has changed since, and what was not half as
        fast in its first stretch has no other. In the end the best is measured against the plain
        one again. Pure float16 is shown as the ceiling and never chosen. One that fails is a row
        that says why.

        Prints the table, and the command that trains as the best does; exit code 1 if nothing ran,
        or if --minutes was too short for a second way to train: it then says how many minutes would
        do. Ctrl-C and SIGTERM end it with the report of what was measured before, in --out.

        In a notebook: tfaccel.compare(config, minutes=10), for what a config's get_config()
        returns.""",
    flags=(
        Flag(
            "steps", 50.0, "steps of a stretch that is timed; one of about a second or more is good"
        ),
        Flag("repeats", 5.0, "stretches of each way to train, 3 or more"),
        Flag(
            "minutes",
            60.0,
            "minutes in all: nothing begins that would not end in time, and what is left out is "
            "said. A closer estimate is told once the plain one has run. One on a GPU takes a "
            "minute or so, half of it compilation: nothing compiled before is used",
        ),
        Flag("grid", False, "measure every combination instead"),
        Flag(
            "out",
            None,
            "a new folder for report.html (one file, with pictures), report.md, results.json, "
            "speed.png, losses.png, and what each process printed",
            shown="FOLDER",
        ),
        Flag("json", False, "print results.json instead"),
    ),
    examples=("tfaccel compare --config=configs/digits.py --minutes=6 --out=report",),
)
def compare(values: flags.FlagValues, file: str) -> int:
    """Measures the config in every way that this machine has, and returns 1 if none of them ran."""
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
